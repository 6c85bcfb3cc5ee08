"""Runs every forward configuration at a small size and keeps the results: ``python tools/record.py FILE.npz``.

``tests/data/h200.npz`` is what an H200 gave. The GPU suite must get the same bits from it, and the simulator the same
numbers up to the order of float32 sums and the hardware's approximate exponential. Needs torch and a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aot.configs.msa import HEADS_PER_KV, PARTIAL_DTYPES  # noqa: E402
from sparse_aot import build_k2q_csr, sparse_atten_func  # noqa: E402
from sparse_aot.msa._csr_host import walk_rule  # noqa: E402

RECORD = ROOT / "tests" / "data" / "h200.npz"
TEMPERATURE = 0.7
TOPK = 4

Results = dict[str, np.ndarray]


def cases() -> Iterator[tuple[str, dict]]:
    """The name of each case, and what ``results`` takes.

    Where queries select scattered blocks, the forward is to take these block by block and writes partial results. Where
    they select the same blocks, it is to walk the union and writes none, so their dtype changes nothing.
    """
    for g in HEADS_PER_KV:
        for partial in PARTIAL_DTYPES:
            yield f"g{g}-scattered-{partial}", {"g": g, "scattered": True, "partial_dtypes": (partial,)}
        yield f"g{g}-shared", {"g": g, "scattered": False, "partial_dtypes": PARTIAL_DTYPES}


def results(g: int, scattered: bool, partial_dtypes: tuple[str, ...], device: str = "cuda") -> Results:
    """``out`` (the bits of bfloat16), ``lse`` and ``lse_temperature`` of one case: causal, one KV head.

    AssertionError where they depend on the dtype of partials, or on whether the temperature lse is asked for.
    """
    draw = np.random.RandomState(g)  # its numbers are the same in every version of NumPy
    cu_seqlens_q, cu_seqlens_k = ((0, 4, 11), (0, 300, 900)) if scattered else ((0, 128 // g), (0, 300))
    total_q, total_k = cu_seqlens_q[-1], cu_seqlens_k[-1]
    q2k = draw.randint(-1, 6, (1, total_q, TOPK)) if scattered else np.tile([0, -1, 2, 1], (1, total_q, 1))

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape).astype(np.float32)).to(device, torch.bfloat16)

    def int32(values: np.ndarray | tuple) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(device)

    q, k, v = normal(total_q, g, 128), normal(total_k, 1, 128), normal(total_k, 1, 128)
    cu_q, cu_k = int32(cu_seqlens_q), int32(cu_seqlens_k)
    before = walk_rule(9, 0, 0) if scattered else walk_rule(0, 0, 0)  # walk nothing, or everything
    try:
        row_ptr, q_indices, schedule = build_k2q_csr(
            int32(q2k), cu_q, cu_k, total_k=total_k, qhead_per_kv=g, return_schedule=True
        )
    finally:
        walk_rule(*before)

    def attend(partial: str, temperature: float) -> list[torch.Tensor]:
        arrays = sparse_atten_func(
            *(q, k, v, row_ptr, q_indices, TOPK),
            causal=True,
            partial_dtype=partial,
            return_temperature_lse=True,
            lse_temperature_scale=temperature,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_seqlen_q=total_q,
            max_seqlen_k=total_k,
            schedule=schedule,
        )
        return [array.cpu() for array in arrays]

    out, lse, lse_temperature = attend(partial_dtypes[0], TEMPERATURE)
    for partial in partial_dtypes:
        plain = attend(partial, 1.0)  # lse_temperature is lse
        full = attend(partial, TEMPERATURE)
        assert all(map(torch.equal, [*plain[:2], *full], [out, lse, out, lse, lse_temperature]))
    return {"out": out.view(torch.uint16).numpy(), "lse": lse.numpy(), "lse_temperature": lse_temperature.numpy()}


def record(file: Path) -> None:
    """Write the results of all cases, as ``<case>/<result>``."""
    arrays = {f"{name}/{key}": array for name, case in cases() for key, array in results(**case).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)
    print(f"{file}: {len(arrays)} arrays")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
