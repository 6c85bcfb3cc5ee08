"""Work items: what the schedule says, checked against the sizes that the launch knows.

An item is up to ``target_q_per_cta`` entries of one CSR row: query tokens that attend to one block of one KV head.
Whatever stands in the schedule or the CSR, a decoded item names only entries, rows and sequences that exist.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from aot.kernels.memory import vector

METADATA_COLUMNS = 6  # KV head, CSR row, first entry within the row, number of entries, sequence, block
# The walk plan, the union of the blocks that a group of tokens selects: see Schedule in sparse_aot/msa/_schedule.pyx.
WALK_ROWS = 128  # query rows of a group: T = 128 / G tokens
WALK_CAP = 128  # blocks of a union
WALK_TOO_MANY = 1 << 40  # what a group with more than that adds to the first of walk_totals


def entries_of_head(p) -> Int32:
    """What the CSR of one KV head has room for: so many entries lie between those of two heads."""
    return p.total_q * p.topk


@cute.jit
def decode(p, index: Int32):
    """Item ``index`` as (count, KV head, first entry within the head's CSR, sequence, block).

    An item that does not check out has count 0.
    """
    entries = entries_of_head(p)
    row = vector(p.scheduler_metadata + Int64(index) * METADATA_COLUMNS)
    head, csr_row, first, count, sequence, block = (row[column] for column in range(METADATA_COLUMNS))
    exists = head >= 0 and head < p.head_kv and csr_row >= 0 and csr_row < p.total_rows
    exists = exists and sequence >= 0 and sequence < p.batch and block >= 0 and first >= 0 and count > 0
    if exists:
        first += vector(p.row_ptr)[Int64(head) * (p.total_rows + 1) + csr_row]
        exists = first >= 0 and first <= entries and count <= entries - first
    if not exists:
        count = Int32(0)
    return count, head, first, sequence, block


@cute.jit
def walks(walk_totals: cute.Pointer, tokens_per_group: Int32) -> Boolean:
    """Whether the forward walks the unions of the groups' blocks, and so leaves nothing to combine.

    ``walk_totals``, int64 [2], may be null, which is a no: blocks in all unions and selections that count. The rule: a
    walk multiplies at most 1.4 times the query rows that were selected, and no group has more than WALK_CAP blocks.
    ``walks`` of sparse_aot/msa/_csr_host.pyx is the same for the host.
    """
    result = Boolean(False)
    if walk_totals.toint() != 0:
        blocks = walk_totals[0]
        selected = walk_totals[1]
        result = blocks >= 0 and blocks < WALK_TOO_MANY and selected > 0
        result = result and blocks * Int64(tokens_per_group) * 5 <= selected * 7
    return result
