"""Work items: what the schedule says, checked against the sizes that the launch knows.

An item is up to ``target_q_per_cta`` entries of one CSR row: query tokens that attend to one block of one KV head.
Whatever stands in the schedule or the CSR, a decoded item names only entries, rows and sequences that exist.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from aot.kernels.memory import vector
from aot.kernels.sorting import place_of_one

METADATA_COLUMNS = 6  # KV head, CSR row, first entry within the row, number of entries, sequence, block
ITEM_ENTRIES = 1024  # the most of an item: a warp has a bit for each
LOADS = 4  # a lane has under way
# The walk plan, what the groups of tokens walk: see Schedule in sparse_aot/msa/_schedule.pyx.
MAX_WALK_ROWS = 256  # query rows of a group: R of the architecture, T = R / G tokens
WALK_CAP = 128  # blocks of a group
WALK_FINAL = 1 << 30  # in walk_counts: nothing of the group is left to CSR order, so its rows are finished here
WALKED = 1 << 30  # in split_entries, and in the values while they are sorted: the entry is walked
ANY_WALKS, ANY_LEFT, ANY_UNFINISHED = range(3)  # of walk_flags


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
    exists = exists and sequence >= 0 and sequence < p.batch and block >= 0 and first >= 0
    exists = exists and count > 0 and count <= ITEM_ENTRIES
    if exists:
        first += vector(p.row_ptr)[Int64(head) * (p.total_rows + 1) + csr_row]
        exists = first >= 0 and first <= entries and count <= entries - first
    if not exists:
        count = Int32(0)
    return count, head, first, sequence, block


@cute.jit
def flag(p, number: cutlass.Constexpr[int], without_plan: cutlass.Constexpr[bool]) -> Boolean:
    """One of the walk plan's flags, or ``without_plan`` where there is none."""
    result = Boolean(without_plan)
    if p.walk_flags.toint() != 0:
        result = p.walk_flags[number] != 0
    return result


def entries_of_item(p, head: Int32, first: Int32) -> cute.Tensor:
    """Of a head's entries from ``first`` on: the token in the low 24 bits; negative: it is walked."""
    return vector(p.entry_words + (Int64(head) * entries_of_head(p) + first))


@cute.jit
def marks_left(words: cute.Tensor, count: Int32) -> Int32:
    """One warp: a bit for each of an item's ``count`` entries that no group walks; lane i has those from 32 i on."""
    lane = cute.arch.lane_idx()
    marks = Int32(0)
    loaded = cute.make_rmem_tensor(LOADS, Int32)
    for start in range(0, count, 32 * LOADS):
        for i in cutlass.range_constexpr(LOADS):
            index = start + 32 * i + lane
            loaded[i] = Int32(-1)
            if index < count:
                loaded[i] = words[Int64(index)]
        for i in cutlass.range_constexpr(LOADS):
            votes = cute.arch.vote_ballot_sync(loaded[i] >= 0)
            if lane == (start >> 5) + i:
                marks = votes
    return marks


def ones_of(marks: Int32) -> Int32:
    """How many entries of the lane's 32 are left."""
    return cute.arch.popc(Uint32(marks)).to(Int32)


@cute.jit
def place_left(marks, rank: Int32) -> Int32:
    """All lanes: where entry number ``rank`` of those that are left stands in its item.

    ``marks``: of ``marks_left``, and the number of ones in them up to the lane, its own included."""
    bits, up_to = marks
    lane = Int32(0)
    for step in cutlass.range_constexpr(5):
        if cute.arch.shuffle_sync(up_to, lane + ((16 >> step) - 1)) <= rank:
            lane += 16 >> step
    own = Uint32(cute.arch.shuffle_sync(bits, lane))
    before = cute.arch.shuffle_sync(up_to, lane) - cute.arch.popc(own).to(Int32)
    return lane * 32 + place_of_one(own, rank - before)
