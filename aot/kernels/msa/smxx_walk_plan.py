"""The walk plan: for each KV head and group of neighbouring query tokens, which blocks the group walks together.

A group is the tokens of as many query rows as the forward walks together, whatever sequences they belong to; an element
of the union of what they select is a CSR row, that is a sequence and a block, with a bit for each token of the group
that selects it. What the arrays hold stands at Schedule in sparse_aot/msa/_schedule.pyx.
The rule, in eighths of what an entry costs in CSR order: a walked block costs ``walk_cost`` for each token of the
group, whether it selects the block or not. A group walks nothing, or its whole union, or the blocks that cost less so
than in CSR order, whichever is cheapest; what walks and leaves something to CSR order pays ``walk_gain`` a token more.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.work import (
    ANY_LEFT,
    ANY_UNFINISHED,
    ANY_WALKS,
    MAX_WALK_ROWS,
    WALK_CAP,
    WALK_FINAL,
    WALKED,
)
from aot.kernels.sorting import WARP, fill, head_and_tile

THREADS = 128
SLOTS_LOG2 = 8
SLOTS = 1 << SLOTS_LOG2
NO_ROW = -1
LOADS = 4  # a thread has under way
MAX_WORDS = MAX_WALK_ROWS // 32
COLUMNS = 2  # of an element before the words of its tokens: sequence, block
NOT_WALKED = 0x7FFFFFFF  # in the place of a row


class WalkPlan(Kernel):
    """walk_blocks and walk_counts, what they make of walk_flags, and the mark WALKED in the values of what is walked.
    Runs after CsrKeys, while keys and values are unsorted.

    One CTA a group. Its keys go into a hash set in shared memory, which stops to grow past 128 rows: each thread then
    has at most one insertion under way, so the table never overflows; such a group walks nothing. Bits are set in the
    row's slot of the table. A thread a row then weighs it, and those that are walked are ranked by counting the smaller
    ones, so that neither the order of atomics nor the hash shows. Flags are read before they are set: thousands of
    atomics at one address would take longer than all else."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (SLOTS * (1 + MAX_WORDS) + WALK_CAP * 2 + 4) * 4
        self.work_per_cta = 1  # work = head_kv * groups
        self.params = {
            "keys": Ptr(Int32),
            "values": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "walk_flags": Ptr(Int32),
            "size": Int32,
            "topk": Int32,
            "total_rows": Int32,
            "groups": Int32,
            "tokens_per_group": Int32,
            "walk_cost": Int32,
            "walk_gain": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        thread, _, _ = cute.arch.thread_idx()
        head, group = head_and_tile(p.groups)
        words = (p.tokens_per_group + 31) // 32
        smem = cutlass.memory.SmemAllocator()
        table = smem.allocate_array(Int32, SLOTS)  # the row in each slot
        members = smem.allocate_array(Int32, SLOTS * MAX_WORDS)  # its tokens
        rows = smem.allocate_array(Int32, WALK_CAP)  # in order of insertion
        slots = smem.allocate_array(Int32, WALK_CAP)  # where they are
        count = smem.allocate_array(Int32, 1)
        selected = smem.allocate_array(Int32, 1)  # the cost of CSR order for all
        mixed = smem.allocate_array(Int32, 1)  # the cost of the better way for each row
        walked = smem.allocate_array(Int32, 1)  # rows
        fill(table, SLOTS, NO_ROW, THREADS)
        fill(members, SLOTS * words, 0, THREADS)
        if thread == 0:
            count[0] = Int32(0)
            selected[0] = Int32(0)
            mixed[0] = p.walk_gain * p.tokens_per_group
            walked[0] = Int32(0)
        cute.arch.sync_threads()

        first = group * p.tokens_per_group * p.topk
        ids = cutlass.min(p.size - first, p.tokens_per_group * p.topk)
        keys = at(p.keys, head, p.size) + first
        topk_log2 = cute.arch.popc(Uint32(p.topk - 1)).to(Int32)
        loaded = cute.make_rmem_tensor(LOADS, Int32)
        for start in range(0, ids, LOADS * THREADS):
            for k in cutlass.range_constexpr(LOADS):
                i = start + k * THREADS + thread
                loaded[k] = Int32(NO_ROW)
                if i < ids:
                    loaded[k] = keys[i]
            for k in cutlass.range_constexpr(LOADS):
                row = loaded[k]
                if row >= 0 and row < p.total_rows:
                    slot = self.insert(row, table, rows, slots, count)
                    if slot < SLOTS:
                        token = (start + k * THREADS + thread) >> topk_log2
                        cute.arch.atomic_or(members + (slot * words + token // 32), Int32(1) << (token % 32))
        cute.arch.sync_threads()

        found = count[0]
        fits = found <= WALK_CAP
        cost = p.walk_cost * p.tokens_per_group
        row = Int32(NOT_WALKED)
        slot = Int32(0)
        own = Int32(0)
        if fits and thread < found:
            row = rows[thread]
            slot = slots[thread]
            for word in cutlass.range(words, unroll=1):
                own += 8 * cute.arch.popc(Uint32(members[slot * words + word])).to(Int32)
        warp_selected = cute.arch.warp_redux_sync(own, "add")
        warp_mixed = cute.arch.warp_redux_sync(cutlass.min(own, cost), "add")
        if thread % WARP == 0:
            cute.arch.atomic_add(selected, warp_selected)
            cute.arch.atomic_add(mixed, warp_mixed)
        cute.arch.sync_threads()

        whole = fits and found * cost < selected[0] and found * cost <= mixed[0]
        some = fits and mixed[0] < selected[0]
        walks = thread < found and (whole or (some and own > cost))
        if not walks:
            row = Int32(NOT_WALKED)
        ballot = cute.arch.vote_ballot_sync(walks)
        if thread % WARP == 0 and ballot != 0:
            cute.arch.atomic_add(walked, cute.arch.popc(Uint32(ballot)).to(Int32))
        if thread < WALK_CAP:
            rows[thread] = row
        cute.arch.sync_threads()

        kept = walked[0]
        columns = words + COLUMNS
        place = Int64(head) * p.groups + group
        if walks:
            rank = Int32(0)
            for i in cutlass.range(found, unroll=8):
                rank += (rows[i] < row).to(Int32)
            element = p.walk_blocks + (place * WALK_CAP + rank) * columns
            element[0] = p.row_sequence[row]
            element[1] = p.row_block[row]
            for word in cutlass.range(words, unroll=1):
                element[COLUMNS + word] = members[slot * words + word]
        left = kept < found
        if thread == 0:
            total = kept
            if kept > 0 and not left:
                total = kept | WALK_FINAL
            (p.walk_counts + place)[0] = total
            self.set_flag(p, ANY_WALKS, kept > 0)
            self.set_flag(p, ANY_LEFT, left)
            self.set_flag(p, ANY_UNFINISHED, kept == 0 or left)
        if kept > 0:
            cute.arch.sync_threads()  # the members have been read: a slot's first word says from now on if it is walked
            if thread < found:
                members[slots[thread]] = (rows[thread] != NOT_WALKED).to(Int32)
            cute.arch.sync_threads()
            values = at(p.values, head, p.size) + first
            for i in range(thread, ids, THREADS):
                row = keys[i]
                if row >= 0 and row < p.total_rows:
                    if members[self.find(row, table)] != 0:
                        values[i] = values[i] | WALKED

    @cute.jit
    def set_flag(self, p, number: cutlass.Constexpr[int], holds):
        """One thread: set a flag that holds, once for all groups."""
        if holds:
            flag = p.walk_flags + number
            if cute.arch.load(flag, Int32, sem="relaxed", scope="gpu") == 0:
                cute.arch.atomic_or(flag, Int32(1))

    @cute.jit
    def find(self, row: Int32, table: cute.Pointer):
        """The slot of a row that is in the table."""
        slot = self.slot_of(row)
        while table[slot] != row:
            slot = (slot + 1) % SLOTS
        return slot

    def slot_of(self, row: Int32) -> Int32:
        """Where the search for a row starts."""
        return (Uint32(row) * Uint32(0x9E3779B1) >> Uint32(32 - SLOTS_LOG2)).to(Int32)

    @cute.jit
    def insert(self, row: Int32, table: cute.Pointer, rows: cute.Pointer, slots: cute.Pointer, count: cute.Pointer):
        """The slot of a row, which may be new; SLOTS where there are too many rows."""
        slot = self.slot_of(row)
        probes = Int32(0)
        held = Int32(NO_ROW)
        while held != row and probes < SLOTS:
            held = cute.arch.load(table + slot, Int32, sem="relaxed", scope="cta")
            if held == NO_ROW:
                if cute.arch.load(count, Int32, sem="relaxed", scope="cta") > WALK_CAP:
                    probes = Int32(SLOTS)
                else:
                    held = cute.arch.atomic_cas(table + slot, cmp=Int32(NO_ROW), val=row)
                    if held == NO_ROW:
                        place = cute.arch.atomic_add(count, Int32(1))
                        if place < WALK_CAP:
                            rows[place] = row
                            slots[place] = slot
                        held = row
            if held != row:
                slot = (slot + 1) % SLOTS
                probes += 1
        if held != row:
            slot = Int32(SLOTS)
        return slot
