"""Where the forward puts the partial result of one CSR entry and head, and how combine finds it.

``partial_out`` is [Hkv * entries, G, 128] and ``partial_lse`` float32 [Hkv * entries, G], entries = total_q * topk, in
the order of the CSR: a tile of the forward is one contiguous run, which one bulk copy writes. ``split_entries`` of the
schedule, int32 [Hkv, total_q, topk], is the way back: the entry of its head in which a token's split stands.

A row's 128 columns are stored in the order in which a warpgroup's accumulator holds them: 16-byte chunk ``4 * u + c``
is what the lane with ``lane % 4 == c`` has in the groups of eight columns ``pairs * u .. pairs * (u + 1) - 1``, two
columns from each. The chunks of a row change places with its number, so that neither two rows written by four lanes
each (wgmma's accumulator) nor eight rows written by a lane each (tensor memory's) share a bank of shared memory.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64

from aot.kernels.storage import CHUNK_BYTES

HEAD_DIM = 128
TOKEN_BITS = 24
TOKEN_MASK = (1 << TOKEN_BITS) - 1


def chunk_elements(dtype: type) -> int:
    """Elements of one 16-byte chunk."""
    return CHUNK_BYTES * 8 // dtype.width


def row_index(entry: Int64, group_head: Int32, g: Int32 | int) -> Int64:
    """The row of an entry (counted over all KV heads) and head of the group."""
    return entry * g + group_head


def place(row: Int64, index: Int32) -> Int32:
    """Where in a row chunk ``index`` lies."""
    number = Int32(row & 7)
    return index ^ ((number & 1) * 4 + (number >> 1))


def chunk(partial: cute.Pointer, row: Int64, index: Int32) -> cute.Tensor:
    """The 16-byte chunk ``index`` of a row of ``partial_out``."""
    elements = chunk_elements(partial.dtype)
    offset = cute.assume(row * HEAD_DIM + place(row, index) * elements, divby=elements)
    return cute.make_tensor(partial + offset, cute.make_layout(elements))


def chunk_column(dtype: type, index: Int32, pair: int) -> Int32:
    """The column of the first of the two elements that make pair number ``pair`` of chunk ``index``."""
    pairs = chunk_elements(dtype) // 2
    return 8 * (pairs * (index // 4) + pair) + 2 * (index % 4)
