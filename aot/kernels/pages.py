"""Where the keys of a sequence's block lie, and how many of them there are: in a flat KV cache or in a paged one."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

from aot.kernels.mask import BLK_KV, NO_DIAGONAL
from aot.kernels.memory import vector


@cute.jit
def key_length(p, sequence: Int32, paged: Boolean) -> Int32:
    """Keys of a sequence: ``seqused_k`` where given (flat, its own at most), else what ``cu_seqlens_k`` says."""
    cu = vector(p.cu_seqlens_k)
    length = cu[sequence + 1] - cu[sequence]
    if p.seqused_k.toint() != 0:
        used = vector(p.seqused_k)[sequence]
        length = used if paged else min(used, length)
    return max(length, 0)


@cute.jit
def bounds(p, sequence: Int32, block: Int32, paged: Boolean):
    """(key_limit, causal_shift) of a block, as ``mask.visible_keys`` takes them."""
    len_k = key_length(p, sequence, paged)
    key_limit = len_k - block * BLK_KV
    causal_shift = Int32(NO_DIAGONAL)
    if p.causal != 0:
        # Token t is query t - start_q and sees keys up to t - start_q + len_k - len_q: start_q cancels.
        causal_shift = key_limit + 1 - vector(p.cu_seqlens_q)[sequence + 1]
    return key_limit, causal_shift


@cute.jit
def locate(p, sequence: Int32, block: Int32):
    """(key_limit, causal_shift, row, page) of a block: its bounds, and where the tensor maps find it.

    Flat, a block is a range of tokens of the only page, and ``kv_extent`` is the number of tokens; paged, it is one of
    ``kv_extent`` pages. A block that does not exist, or the part of it that does not, is past the limit.
    """
    paged = p.page_table.toint() != 0
    key_limit, causal_shift = bounds(p, sequence, block, paged)
    row, page = vector(p.cu_seqlens_k)[sequence] + block * BLK_KV, Int32(0)
    existing = p.kv_extent - row if row >= 0 else Int32(0)
    if paged:
        row, page = Int32(0), Int32(-1)
        if block < p.max_pages:
            page = vector(p.page_table)[sequence * p.page_table_stride + block]
        existing = Int32(BLK_KV) if page >= 0 and page < p.kv_extent else Int32(0)
    return min(key_limit, existing), causal_shift, row, page
