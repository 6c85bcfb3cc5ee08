"""Runs kernels that others wrote, the CuTe DSL examples of NVIDIA/cutlass, and compares with a float32 reference.

    python tools/ptxsim/validate.py --cutlass DIR [--only GLOB] [--seeds N]

DIR is a checkout of NVIDIA/cutlass beside the project; nothing of it is kept. The examples are compiled with the DSL,
which needs no GPU, and their PTX runs at small sizes with every check. What their host code would pass, tensor maps and
shapes, is made here.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass.cute.runtime import make_fake_compact_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import ptxsim

EXAMPLES = "examples/python/CuTeDSL"
UINT8, BFLOAT16 = 0, 9  # CUtensorMapDataType
SWIZZLE_64, SWIZZLE_128 = 2, 3  # CUtensorMapSwizzle
SHARED_BYTES = 226 * 1024
TOLERANCE = 1 / 128  # of the largest value: results are rounded to bfloat16


@dataclass
class Run:
    """A kernel ready to launch: its result and what that must be."""

    module: ptxsim.Module
    launch: dict[str, Any]
    result: torch.Tensor
    reference: torch.Tensor


def example(cutlass_dir: Path, path: str) -> ModuleType:
    """Import an example by its path below the examples' folder."""
    root = cutlass_dir / EXAMPLES
    for folder in (root, root / "cute"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled(arch: str, kernel: Any, *args: Any) -> ptxsim.Module:
    """The PTX of a host function of the DSL, loaded into the simulator."""
    with tempfile.TemporaryDirectory() as directory:
        cute.compile(kernel, *args, options=f"--gpu-arch {arch} --opt-level 2 --keep-ptx --dump-dir {directory}")
        (ptx,) = Path(directory).glob("*.ptx")
        return ptxsim.load(ptx)


def fake(dtype: type, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=32)


def map_of(
    tensor: torch.Tensor, extents: list[int], strides: list[int], box: list[int], swizzle: int = SWIZZLE_128
) -> bytes:
    """A tensor map; strides in elements, of dimensions 1 and up."""
    size = tensor.element_size()
    data_type = UINT8 if size == 1 else BFLOAT16
    return ptxsim.encode_tiled(data_type, tensor.data_ptr(), extents, [s * size for s in strides], box, swizzle=swizzle)


def gemm_maps(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, c_rows: int, b_rows: int) -> list[bytes]:
    """A [m, k] and C [m, n] row by row; B [k, n] with n innermost, or float8 [n, k]."""
    (m, k), n = a.shape, c.shape[1]
    line = 128 // a.element_size()
    maps = [map_of(a, [k, m], [k], [line, 128])]
    maps.append(map_of(b, [n, k], [n], [64, 64]) if b.shape[0] == k else map_of(b, [k, n], [k], [line, b_rows]))
    return [*maps, map_of(c, [n, m], [n], [32, c_rows], SWIZZLE_64)]


def gemm_inputs(float8: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, c and a @ b for m = n = 256, k = 512."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float8_e4m3fn if float8 else torch.bfloat16
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((256, 512), (512, 256)))
    reference = a.float() @ b.float()
    return a, b.T.contiguous() if float8 else b, torch.zeros(256, 256, dtype=torch.bfloat16), reference


def sm90_gemm(cutlass_dir: Path) -> Run:
    module = example(cutlass_dir, "cute/hopper/kernel/dense_gemm/dense_gemm.py")
    kernel = module.HopperWgmmaGemmKernel(cutlass.Float32, (128, 128), (1, 1))
    operands = (
        fake(cutlass.BFloat16, (256, 512, 1), (1, 0, 2)),
        fake(cutlass.BFloat16, (256, 512, 1), (0, 1, 2)),
        fake(cutlass.BFloat16, (256, 256, 1), (1, 0, 2)),
    )
    ptx = compiled("sm_90a", kernel, *operands, driver.CUstream(0))
    a, b, c, reference = gemm_inputs()
    params = [*gemm_maps(a, b, c, c_rows=64, b_rows=128), bytes(1)]
    return Run(ptx, {"grid": (2, 2), "block": 128, "params": params, "memory": [a, b, c]}, c, reference)


def sm100_gemm(cutlass_dir: Path, ctas: int = 1, float8: bool = False) -> Run:
    module = example(cutlass_dir, "cute/blackwell/kernel/dense_gemm/dense_gemm.py")
    kernel = module.DenseGemmKernel(cutlass.Float32, ctas == 2, (128 * ctas, 128), (ctas, 1), True)
    dtype = cutlass.Float8E4M3FN if float8 else cutlass.BFloat16
    operands = (
        fake(dtype, (256, 512, 1), (1, 0, 2)),
        fake(dtype, (256, 512, 1), (1, 0, 2) if float8 else (0, 1, 2)),
        fake(cutlass.BFloat16, (256, 256, 1), (1, 0, 2)),
    )
    ptx = compiled("sm_100a", kernel, *operands, driver.CUstream(0))
    a, b, c, reference = gemm_inputs(float8)
    tiled_mma = bytes(32 * ctas)
    params = [tiled_mma, *gemm_maps(a, b, c, c_rows=128, b_rows=128 // ctas)]
    launch = {"grid": (2, 2), "block": 128, "cluster": (ctas, 1), "params": params, "memory": [a, b, c]}
    return Run(ptx, launch, c, reference)


def sm100_attention(cutlass_dir: Path, causal: bool) -> Run:
    module = example(cutlass_dir, "cute/blackwell/kernel/attention/fmha/fmha.py")
    masks = module.fmha_utils.MaskEnum
    mask = masks.WINDOW_MASK if causal else masks.RESIDUAL_MASK
    kernel = module.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (128, 128), 128, False, mask, False, False
    )
    batch, length, head_kv, group, dim = 1, 256, 2, 2, 128
    shape_q, shape_k = (batch, length, head_kv, group, dim), (batch, length, head_kv, 1, dim)
    fake_q, fake_k = (fake(cutlass.BFloat16, shape, (4, 3, 2, 1, 0)) for shape in (shape_q, shape_k))
    sizes = tuple(cutlass.Int32(n) for n in (batch, length, length, length, head_kv * group, head_kv, dim, dim))
    one, right = cutlass.Float32(1), cutlass.Int32(0) if causal else None
    ptx = compiled(
        "sm_100a", kernel, fake_q, fake_k, fake_k, fake_q, sizes,
        None, None, None, None, one, one, one, None, None, right,
        None, None, driver.CUstream(0), False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in (shape_q, shape_k, shape_k))
    out = torch.zeros_like(q)
    scale = 1 / math.sqrt(dim)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.float(), k.float()[:, :, :, 0]) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -math.inf)
    reference = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v.float()[:, :, :, 0])

    row = head_kv * group * dim

    def grouped(x: torch.Tensor) -> bytes:
        strides = [row, dim, group * dim, length * row]
        return map_of(x, [dim, length, group, head_kv, batch], strides, [64, 128, 1, 1, 1])

    def ungrouped(x: torch.Tensor) -> bytes:
        strides = [head_kv * dim, dim, length * head_kv * dim]
        return map_of(x, [dim, length, head_kv, batch], strides, [64, 128, 1, 1])

    shape = np.array([length, group, head_kv, batch], np.int32).tobytes()
    given = [bytes(32), bytes(32), grouped(q), shape, ungrouped(k), shape, ungrouped(v), shape, grouped(out), shape]
    given += [bytes(40), *(np.float32(x).tobytes() for x in (scale * math.log2(math.e), scale, 1.0))]
    (layout,) = ptx.kernels.values()
    params = [*given, *(bytes(size) for _, size in layout[len(given) :])]  # the window and the tile scheduler: zeros
    launch = {"grid": (1, head_kv * group, batch), "block": 512, "params": params, "memory": [q, k, v, out]}
    return Run(ptx, launch, out, reference)


VALIDATIONS: dict[str, Callable[[Path], Run]] = {
    "sm90-gemm-bf16": sm90_gemm,
    "sm100-gemm-bf16": sm100_gemm,
    "sm100-gemm-bf16-2cta": lambda directory: sm100_gemm(directory, ctas=2),
    "sm100-gemm-fp8": lambda directory: sm100_gemm(directory, float8=True),
    "sm100-attention-bf16": lambda directory: sm100_attention(directory, causal=False),
    "sm100-attention-bf16-causal": lambda directory: sm100_attention(directory, causal=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cutlass", type=Path, required=True, metavar="DIR", help="checkout of NVIDIA/cutlass")
    parser.add_argument("--only", default="*", metavar="GLOB", help=", ".join(VALIDATIONS))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    failures = 0
    for name, make in VALIDATIONS.items():
        if not fnmatch.fnmatch(name, arguments.only):
            continue
        run = make(arguments.cutlass)
        limit = TOLERANCE * run.reference.abs().max().item()
        for seed in range(arguments.seeds):
            run.result.zero_()
            start = time.perf_counter()
            statistics = run.module.launch(smem=SHARED_BYTES, seed=seed, **run.launch)
            error = (run.result.float() - run.reference).abs().max().item()
            failures += error > limit
            print(
                f"{'FAIL' if error > limit else 'ok  '} {name:30} seed {seed}: error {error:.2g} (limit {limit:.2g}),"
                f" {statistics.thread_instructions / 1e6:.1f} M instructions in {time.perf_counter() - start:.2f} s"
            )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
