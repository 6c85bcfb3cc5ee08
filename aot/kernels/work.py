"""Work items: what the schedule says, checked against the sizes that the launch knows.

An item is up to ``target_q_per_cta`` entries of one CSR row: query tokens that attend to one block of one KV head.
Whatever stands in the schedule or the CSR, a decoded item names only entries, rows and sequences that exist.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from aot.kernels.mask import BLK_KV

METADATA_COLUMNS = 6  # KV head, CSR row, first entry within the row, number of entries, sequence, block
# The walk plan: the union of the blocks that a group of query tokens selects, see Schedule in sparse_aot/_schedule.pyx.
WALK_ROWS = 128  # query rows of a group: T = 128 / G tokens
WALK_CAP = 128  # blocks of a union
WALK_TOO_MANY = 1 << 40  # what a group with more than that adds to the first of walk_totals
NO_DIAGONAL = 1 << 29  # as causal_shift: every token is before the diagonal


@cute.jit
def vector(pointer: cute.Pointer) -> cute.Tensor:
    """A pointer as a vector, to be indexed with 64 bits where it can be long."""
    return cute.make_tensor(pointer, cute.make_layout(1 << 30, stride=1))


def entries_of_head(p) -> Int32:
    """What the CSR of one KV head has room for: so many entries lie between those of two heads."""
    return p.total_q * p.topk


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
def decode(p, index: Int32, entries: Int32):
    """Item ``index`` as (count, KV head, first entry within the head's CSR, sequence, block).

    An item that does not check out has count 0.
    """
    row = vector(p.scheduler_metadata + Int64(index) * METADATA_COLUMNS)
    head, csr_row, first, count, sequence, block = (row[column] for column in range(METADATA_COLUMNS))
    exists = head >= 0 and head < p.head_kv and csr_row >= 0 and csr_row < p.total_rows
    exists = exists and sequence >= 0 and sequence < p.batch and block >= 0 and first >= 0 and count > 0
    if exists:
        first += vector(p.k2q_row_ptr)[Int64(head) * (p.total_rows + 1) + csr_row]
        exists = first >= 0 and first <= entries and count <= entries - first
    if not exists:
        count = Int32(0)
    return count, head, first, sequence, block


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
def walks(walk_totals: cute.Pointer, tokens_per_group: Int32) -> Boolean:
    """Whether the forward walks the unions of the groups' blocks, and so leaves nothing to combine.

    ``walk_totals``, int64 [2], may be null, which is a no: blocks in all unions and selections that count. The rule: a
    walk multiplies at most 1.4 times the query rows that were selected, and no group has more than WALK_CAP blocks.
    ``walks`` of sparse_aot/_csr_host.pyx is the same for the host.
    """
    result = Boolean(False)
    if walk_totals.toint() != 0:
        blocks = walk_totals[0]
        selected = walk_totals[1]
        result = blocks >= 0 and blocks < WALK_TOO_MANY and selected > 0
        result = result and blocks * Int64(tokens_per_group) * 5 <= selected * 7
    return result
