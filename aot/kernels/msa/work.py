"""Work items: what the schedule says, checked against the sizes that the launch knows.

An item is up to ``target_q_per_cta`` entries of one CSR row: query tokens that attend to one block of one KV head.
Whatever stands in the schedule or the CSR, a decoded item names only entries, rows and sequences that exist.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from aot.kernels.memory import vector
from aot.kernels.sorting import place_of_one, warp_inclusive_scan

METADATA_COLUMNS = 6  # KV head, CSR row, first entry within the row, number of entries, sequence, block
ITEM_ENTRIES = 1024  # the most of an item: a warp has a bit for each
# The walk plan, what the groups of tokens walk: see Schedule in sparse_aot/msa/_schedule.pyx.
WALK_ROWS = 128  # query rows of a group: T = 128 / G tokens
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
def count_left(words: cute.Tensor, count: Int32) -> Int32:
    """One warp: how many of an item's entries no group walks."""
    left = Int32(0)
    for start in range(0, count, 32):
        left += cute.arch.popc(Uint32(votes_left(words, start, count))).to(Int32)
    return left


@cute.jit
def votes_left(words: cute.Tensor, start: Int32, count: Int32) -> Int32:
    """One warp: a bit for each entry from ``start`` on that no group walks."""
    index = start + cute.arch.lane_idx()
    word = Int32(-1)
    if index < count:
        word = words[Int64(index)]
    return cute.arch.vote_ballot_sync(word >= 0)


@cute.jit
def marks_left(words: cute.Tensor, count: Int32):
    """One warp: (bits, up to) of an item: lane i has ``votes_left`` from entry 32 i on, and how many there are up to
    their end."""
    lane = cute.arch.lane_idx()
    bits = Int32(0)
    for start in range(0, count, 32):
        votes = votes_left(words, start, count)
        if lane == start >> 5:
            bits = votes
    return bits, warp_inclusive_scan(cute.arch.popc(Uint32(bits)).to(Int32))


@cute.jit
def place_left(marks, rank: Int32) -> Int32:
    """All lanes: where entry number ``rank`` of those that are left stands in its item; ``marks`` as above."""
    bits, up_to = marks
    lane = Int32(0)
    for step in cutlass.range_constexpr(5):
        if cute.arch.shuffle_sync(up_to, lane + ((16 >> step) - 1)) <= rank:
            lane += 16 >> step
    own = Uint32(cute.arch.shuffle_sync(bits, lane))
    before = cute.arch.shuffle_sync(up_to, lane) - cute.arch.popc(own).to(Int32)
    return lane * 32 + place_of_one(own, rank - before)
