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
from cutlass.cute.runtime import make_fake_compact_tensor, make_ptr

sys.path.insert(0, str(Path(__file__).resolve().parent))
import ptxsim

EXAMPLES = "examples/python/CuTeDSL"
UINT8, UINT16, BFLOAT16, FP4, FP4_PADDED, FP6_PADDED = 0, 1, 9, 13, 14, 15  # CUtensorMapDataType
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


@dataclass(frozen=True)
class Narrow:
    """An operand type of the block-scaled GEMM."""

    type: type  # the DSL's
    bits: int
    mantissa: int
    bias: int
    map_type: int = UINT8
    padded_map_type: int = UINT8  # where A and B have different types, or six bits

    def random(self, rows: int, columns: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 values, bytes) of random finite elements, packed with the first one lowest."""
        code = torch.randint(0, 1 << self.bits, (rows, columns), generator=generator)
        if self.bits == 8:
            code = torch.where(code & 0x7F >= 0x78, code ^ 0x40, code)  # no NaN or Inf
        exponent = code >> self.mantissa & (1 << self.bits - 1 - self.mantissa) - 1
        significand = (code & (1 << self.mantissa) - 1) + (exponent > 0) * (1 << self.mantissa)
        value = significand * 2.0 ** (exponent.clamp(min=1) - self.bias - self.mantissa)
        value = torch.where(code >> self.bits - 1 == 1, -value, value).float()
        bits = (code[..., None] >> torch.arange(self.bits) & 1).reshape(rows, -1, 8)
        return value, (bits << torch.arange(8)).sum(-1).to(torch.uint8)


E4M3 = Narrow(cutlass.Float8E4M3FN, 8, 3, 7)
E3M2 = Narrow(cutlass.Float6E3M2FN, 6, 2, 3, padded_map_type=FP6_PADDED)
E2M1 = Narrow(cutlass.Float4E2M1FN, 4, 1, 1, FP4, FP4_PADDED)


def scale_factors(rows: int, count: int, ue8m0: bool, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """(float32 values [rows, count], bytes as the example lays them out: 128 rows x 4 factors take 512 bytes)."""
    if ue8m0:
        code = torch.randint(124, 131, (rows, count), generator=generator, dtype=torch.uint8)
        value = torch.exp2(code.float() - 127)
    else:
        code = (torch.rand((rows, count), generator=generator) + 0.25).to(torch.float8_e4m3fn)
        code, value = code.view(torch.uint8), code.float()
    return value, code.reshape(rows // 128, 4, 32, count // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def sm100_block_scaled(
    cutlass_dir: Path, a_type: Narrow, b_type: Narrow, block: int, ctas: int = 1, k_major: bool = True
) -> Run:
    """A [m, k] and B [n, k] with a scale factor for `block` elements of k: ue4m3 for 16 of them, ue8m0 for 32."""
    module = example(cutlass_dir, "cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py")
    kernel = module.Sm100BlockScaledPersistentDenseGemmKernel(block, (128 * ctas, 128), (ctas, 1))
    m, n, k = 256, 256, 1024
    scale_type = cutlass.Float8E4M3FN if block == 16 else cutlass.Float8E8M0FNU
    pointers = [
        make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=32)
        for dtype in (a_type.type, b_type.type, scale_type, scale_type, cutlass.BFloat16)
    ]
    major = module.OperandMajorMode.K if k_major else module.OperandMajorMode.MN
    majors = (major, major, module.utils.LayoutEnum.ROW_MAJOR)
    ptx = compiled("sm_100a", kernel, *pointers, majors, (cutlass.Int32(0),) * 4, 1, driver.CUstream(0), lambda x: x)

    generator = torch.Generator().manual_seed(0)
    c = torch.zeros(m, n, dtype=torch.bfloat16)
    packed = a_type == b_type and a_type.bits != 6  # else every element gets a byte in shared memory
    tile_k = 256 if packed and a_type.bits == 4 else 128
    groups = k // block // 4
    maps, memory, scaled = [], [c], []
    for dtype, rows, box in ((a_type, m, 128), (b_type, n, 128 // ctas)):
        extents, box = ([k, rows, 1], [tile_k, box, 1]) if k_major else ([rows, k, 1], [box, tile_k, 1])
        value, raw = dtype.random(extents[1], extents[0], generator)
        data_type = dtype.map_type if packed else dtype.padded_map_type
        strides = [raw.shape[1], raw.nbytes]
        maps.append(ptxsim.encode_tiled(data_type, raw.data_ptr(), extents, strides, box, swizzle=SWIZZLE_128))
        value = value if k_major else value.T
        scale, raw_scale = scale_factors(rows, k // block, block == 32, generator)
        scaled.append(value * scale.repeat_interleave(block, dim=1))
        memory += [raw, raw_scale]
    in_tile = tile_k // block // 4
    for rows, raw, parts in ((m, memory[2], 1), (n, memory[4], ctas)):  # B's are multicast, a part by each CTA
        sizes = (
            [(groups, 512, in_tile // parts), (rows // 128, 512 * groups, 1)]
            if in_tile > 1
            else [(rows // 128, 512 * groups, 1), (groups, 512, 1)]
        )
        extents = [256, *(size for size, _, _ in sizes), 1]
        strides = [*(stride for _, stride, _ in sizes), raw.nbytes]
        box = [256 if in_tile > 1 else 256 // parts, *(part for _, _, part in sizes), 1]
        maps.append(ptxsim.encode_tiled(UINT16, raw.data_ptr(), extents, strides, box))
    maps.append(
        ptxsim.encode_tiled(BFLOAT16, c.data_ptr(), [n, m, 1], [n * 2, c.nbytes], [32, 128, 1], swizzle=SWIZZLE_64)
    )

    def shape(*extents: int) -> bytes:
        return np.array(extents, np.int32).tobytes()

    def divisor(d: int) -> bytes:
        """How the tile scheduler divides by d: d, a multiplier and two shifts."""
        log = (d - 1).bit_length()
        multiplier = (1 << 32) * ((1 << log) - d) // d + 1
        return np.array([d, multiplier], np.uint32).tobytes() + bytes([min(log, 1), max(log - 1, 0), 0, 0])

    tiles = (m // 128 // ctas, n // 128, 1)
    shapes = [shape(m, k, 1), shape(n, k, 1), shape(m, k, 1), shape(n, k, 1), shape(m, n, 1)]
    given = [bytes(12), bytes(12), *(part for pair in zip(maps, shapes, strict=True) for part in pair)]
    given += [*(np.int32(t).tobytes() for t in tiles), divisor(tiles[0]), divisor(tiles[1])]
    (layout,) = ptx.kernels.values()
    params = [*given, *(bytes(size) for _, size in layout[len(given) :])]  # of other orders of the tiles: zeros
    launch = {"grid": (ctas, 1, 2 // ctas), "block": 192, "cluster": (ctas, 1), "params": params, "memory": memory}
    return Run(ptx, launch, c, scaled[0] @ scaled[1].T)


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
    "sm100-gemm-nvfp4": lambda directory: sm100_block_scaled(directory, E2M1, E2M1, 16),
    "sm100-gemm-nvfp4-2cta": lambda directory: sm100_block_scaled(directory, E2M1, E2M1, 16, ctas=2),
    "sm100-gemm-mxfp8": lambda directory: sm100_block_scaled(directory, E4M3, E4M3, 32),
    "sm100-gemm-mxfp8-2cta": lambda directory: sm100_block_scaled(directory, E4M3, E4M3, 32, ctas=2),
    "sm100-gemm-mxfp8-mxfp4": lambda directory: sm100_block_scaled(directory, E4M3, E2M1, 32),
    "sm100-gemm-mxfp8-mxfp4-mn": lambda directory: sm100_block_scaled(directory, E4M3, E2M1, 32, k_major=False),
    "sm100-gemm-mxfp6-mxfp4": lambda directory: sm100_block_scaled(directory, E3M2, E2M1, 32),
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
