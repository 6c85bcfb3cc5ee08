"""Products of a consumer warpgroup on Hopper: 64 x 128 wgmma of 16-bit values with float32 accumulators."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.utils import hopper_helpers

CONSUMERS = 3  # warpgroups
WARPGROUP = 128  # threads
TILE_ROWS = 64
COLUMNS = 128


def tiled_mma(dtype: type, b_major: cute.nvgpu.OperandMajorMode, a_source: warpgroup.OperandSource) -> cute.TiledMma:
    """A is K-major."""
    a_major = cute.nvgpu.OperandMajorMode.K
    return hopper_helpers.make_trivial_tiled_mma(
        dtype, dtype, a_major, b_major, Float32, (1, 1, 1), tiler_mn=(TILE_ROWS, COLUMNS), a_source=a_source
    )


class Operands(NamedTuple):
    """Q, K and V in shared memory, all stages of each."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor


class Products(NamedTuple):
    """The two products of a consumer warpgroup, and the fragments of their operands for every stage."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    q: Any
    k: Any
    v: Any


def products(operands: Operands, qk_dtype: type, pv_dtype: type) -> Products:
    """Q K^T and P V of a consumer warpgroup in their dtypes, P in registers."""
    qk = tiled_mma(qk_dtype, cute.nvgpu.OperandMajorMode.K, warpgroup.OperandSource.SMEM)
    pv = tiled_mma(pv_dtype, cute.nvgpu.OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
    return Products(
        qk,
        pv,
        q=qk.make_fragment_A(qk.get_slice(0).partition_A(operands.q)),
        k=qk.make_fragment_B(qk.get_slice(0).partition_B(operands.k)),
        v=pv.make_fragment_B(pv.get_slice(0).partition_B(operands.v)),
    )


def copy(x: Float32) -> Float32:
    """``x`` in a register of its own, where this is executed and nowhere else: a plain assignment under a condition
    becomes a select outside of it, which costs as much where the condition does not hold."""
    return Float32(llvm.inline_asm(Float32.mlir_type, [x.ir_value()], "mov.b32 $0, $1;", "=f,f", has_side_effects=True))


@cute.jit
def multiply(mma: cute.TiledMma, accumulator, a, b, accumulate: Boolean | bool = False):
    """accumulator (+)= a @ b^T, and wait for it."""
    issue(mma, accumulator, a, b, accumulate)
    warpgroup.wait_group(0)


@cute.jit
def issue(mma: cute.TiledMma, accumulator, a, b, accumulate: Boolean | bool = False):
    """Start accumulator (+)= a @ b^T: nobody may touch its registers and operands before it has been waited for."""
    warpgroup.fence()
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, accumulate if k == 0 else True)
        cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
    warpgroup.commit_group()


@cute.jit
def rows_of_thread(accumulator: cute.Tensor) -> cute.Tensor:
    """A thread's part of an accumulator as (2 rows, (2 neighbouring columns, 16 groups of 8 columns)): rows
    ``first_row`` of its warp and the one 8 further on, columns ``8 * group + lane % 4 * 2`` and the next."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, 16)), stride=(2, (1, 4))))


@cute.jit
def as_operand(accumulator: cute.Tensor, weights: cute.Tensor):
    """Round an accumulator to ``weights``, the A operand of a product: both hold the same elements in order."""
    cute.make_tensor(weights.iterator, accumulator.layout).store(accumulator.load().to(weights.element_type))
