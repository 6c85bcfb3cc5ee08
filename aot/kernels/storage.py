"""Storage: how rows of values lie in shared memory, where the products read both K-major and MN-major operands.

A row is cut into lines of 128 bytes; a line of every row lies before the next line of all: [line][row][columns], in the
128-byte swizzle, whose atoms are eight rows of a line. Everything follows from the dtype's width and the row's length.
"""

from dataclasses import dataclass

from cutlass import BFloat16, Float32

from aot.kernel import TensorMap
from aot.kernels.mask import BLK_KV

DTYPES = {"float32": Float32, "bfloat16": BFloat16}

LINE_BYTES = 128
ATOM_ROWS = 8
ATOM_BYTES = ATOM_ROWS * LINE_BYTES
CHUNK_BYTES = 16  # that the swizzle moves as one
STEP_BYTES = 32  # of an operand's K that one instruction of the tensor cores takes


@dataclass(frozen=True)
class Storage:
    """Rows of ``row`` values of ``dtype``."""

    dtype: type
    row: int

    @property
    def columns(self) -> int:
        """Values of a line."""
        return LINE_BYTES * 8 // self.dtype.width

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.row // self.columns

    @property
    def row_bytes(self) -> int:
        return self.row * self.dtype.width // 8

    @property
    def chunk(self) -> int:
        """Values of a chunk."""
        return CHUNK_BYTES * 8 // self.dtype.width

    @property
    def step(self) -> int:
        """Values of an operand's K that one instruction of the tensor cores takes."""
        return STEP_BYTES * 8 // self.dtype.width

    @property
    def block(self) -> int:
        """Values of a block of keys."""
        return BLK_KV * self.row

    @property
    def block_bytes(self) -> int:
        return BLK_KV * self.row_bytes

    def map(self, rows: int, groups: int = 1) -> TensorMap:
        """The tensor map whose box is ``groups`` times ``rows`` rows of a tensor (columns, row, line, group, page)."""
        return TensorMap(self.dtype, (self.columns, rows, self.lines, groups, 1))
