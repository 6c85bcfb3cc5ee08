"""Global memory by index, where a product may pass 2^31."""

import cutlass.cute as cute
from cutlass import Int32, Int64


@cute.jit
def vector(pointer: cute.Pointer) -> cute.Tensor:
    """A pointer as a vector, to be indexed with 64 bits where it can be long."""
    return cute.make_tensor(pointer, cute.make_layout(1 << 30, stride=1))


@cute.jit
def at(pointer: cute.Pointer, row: Int32, row_size: Int32):
    """Start of a row of a matrix."""
    return pointer + Int64(row) * Int64(row_size)
