"""Products of Blackwell's tensor cores: operands in shared memory and in tensor memory, and how products are issued."""

from collections.abc import Iterable

from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64
from cutlass.experimental import primitives

TENSOR_COLUMNS = 512  # of tensor memory


def columns_of(values: int, dtype: type) -> int:
    """Columns of tensor memory, of 32 bits, that so many values of a row fill."""
    return values * dtype.width // 32


def tensor_memory(base: Int32, warp: Int32, column: int | Int32, dtype: type):
    """The columns from ``column`` on of the 32 lanes that a warp of a warpgroup reaches."""
    return primitives.make_tmem_ptr(base + (warp << 21) + column, dtype)


def load_columns(base: Int32, warp: Int32, column: int | Int32, width: int):
    """One warp: start loading ``width`` columns of its 32 rows of tensor memory; the values are there after a wait."""
    return primitives.tcgen05_ld("32x32b", tensor_memory(base, warp, column, Float32), num=width)


def operand(address: Int32, leading: int, stride: int) -> primitives.Tcgen05SmemDesc:
    """An operand in shared memory, in the 128-byte swizzle; ``leading`` and ``stride`` are offsets in bytes."""
    return primitives.Tcgen05SmemDesc.build(address, leading, stride, layout=primitives.Tcgen05SmemSwizzle.SWIZZLE_128B)


def advance(desc: primitives.Tcgen05SmemDesc, offset: int) -> primitives.Tcgen05SmemDesc:
    """The descriptor ``offset`` bytes further.

    The sum is one of low words and the high word stays a constant: sums of 64 bits the assembler derives from common
    bases, and two bases that live equally long (Q's and K's) get their registers in an order that differs by chance.
    """
    low = Uint32(desc) + Uint32(offset >> 4)
    high = Uint64(desc) >> 32 << 32
    return primitives.Tcgen05SmemDesc(Int64(high | Uint64(low)))


def issue(
    target, operands: Iterable, shape: primitives.Tcgen05InstrDesc, accumulate: bool | Boolean = False, kept=None
) -> None:
    """One thread: issue target = sum of A @ B over the (A, B) of ``operands``, 16-bit values, each made in its turn.

    ``accumulate``: the sum is added to the target. ``kept``, int32 [4]: the target's rows that stay as they are, one
    bit each."""
    for step, (a, b) in enumerate(operands):
        primitives.tcgen05_mma(
            primitives.Tcgen05MMAKind.F16,
            primitives.CTAGroup.CTA_1,
            target,
            a,
            b,
            shape,
            accumulate if step == 0 else True,
            write_disable_mask=kept,
        )
