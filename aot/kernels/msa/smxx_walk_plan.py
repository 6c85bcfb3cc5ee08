"""The walk plan: for each KV head and group of neighbouring query tokens, the union of the blocks that they select.

A group is the tokens of 128 query rows, whatever sequences they belong to; an element of its union is a CSR row, that
is a sequence and a block, with a bit for each token of the group that selects it. What the arrays hold stands at
Schedule in sparse_aot/msa/_schedule.pyx, and when the forward uses them at ``walks`` in work.py.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.work import WALK_CAP, WALK_ROWS, WALK_TOO_MANY
from aot.kernels.sorting import WARP, fill, head_and_tile

THREADS = 128
SLOTS_LOG2 = 8
SLOTS = 1 << SLOTS_LOG2
NO_ROW = -1
LOADS = 4  # a thread has under way
MAX_WORDS = -(-WALK_ROWS // 32)
COLUMNS = 2  # of an element before the words of its tokens: sequence, block


class WalkPlan(Kernel):
    """walk_blocks, walk_counts and what they add to walk_totals. Runs after CsrKeys, while its keys are unsorted.

    One CTA a group. Its keys go into a hash set in shared memory, which stops to grow past 128 rows: each thread then
    has at most one insertion under way, so the table never overflows. Bits are set in the row's slot of the table. Rows
    are ranked by counting the smaller ones, so that neither the order of atomics nor the hash shows."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (SLOTS * (1 + MAX_WORDS) + WALK_CAP * (2 + COLUMNS + MAX_WORDS) + 2) * 4
        self.work_per_cta = 1  # work = head_kv * groups
        self.params = {
            "keys": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "walk_totals": Ptr(Int64, align=8),
            "size": Int32,
            "topk": Int32,
            "total_rows": Int32,
            "groups": Int32,
            "tokens_per_group": Int32,
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
        elements = smem.allocate_array(Int32, WALK_CAP * (COLUMNS + MAX_WORDS))  # what goes out
        count = smem.allocate_array(Int32, 1)
        selected = smem.allocate_array(Int32, 1)
        fill(table, SLOTS, NO_ROW, THREADS)
        fill(members, SLOTS * words, 0, THREADS)
        if thread == 0:
            count[0] = Int32(0)
            selected[0] = Int32(0)
        cute.arch.sync_threads()

        first = group * p.tokens_per_group * p.topk
        ids = cutlass.min(p.size - first, p.tokens_per_group * p.topk)
        keys = at(p.keys, head, p.size) + first
        topk_log2 = cute.arch.popc(Uint32(p.topk - 1)).to(Int32)
        loaded = cute.make_rmem_tensor(LOADS, Int32)
        own = Int32(0)
        for start in range(0, ids, LOADS * THREADS):
            for k in cutlass.range_constexpr(LOADS):
                i = start + k * THREADS + thread
                loaded[k] = Int32(NO_ROW)
                if i < ids:
                    loaded[k] = keys[i]
            for k in cutlass.range_constexpr(LOADS):
                row = loaded[k]
                if row >= 0 and row < p.total_rows:
                    own += 1
                    slot = self.insert(row, table, rows, slots, count)
                    if slot < SLOTS:
                        token = (start + k * THREADS + thread) >> topk_log2
                        cute.arch.atomic_or(members + (slot * words + token // 32), Int32(1) << (token % 32))
        own = cute.arch.warp_redux_sync(own, "add")
        if thread % WARP == 0:
            cute.arch.atomic_add(selected, own)
        cute.arch.sync_threads()

        found = cutlass.min(count[0], WALK_CAP + 1)
        listed = found
        if found > WALK_CAP:
            listed = Int32(0)
        columns = words + COLUMNS
        if thread < listed:
            row = rows[thread]
            sequence = p.row_sequence[row]
            block = p.row_block[row]
            rank = Int32(0)
            for i in cutlass.range(listed, unroll=8):
                rank += (rows[i] < row).to(Int32)
            element = elements + rank * columns
            element[0] = sequence
            element[1] = block
            own_members = members + slots[thread] * words
            for word in cutlass.range(words, unroll=1):
                element[COLUMNS + word] = own_members[word]
        cute.arch.sync_threads()

        place = Int64(head) * p.groups + group
        walk_blocks = p.walk_blocks + place * (columns * WALK_CAP)
        for i in range(thread, columns * WALK_CAP, THREADS):
            value = Int32(0)
            if i < listed * columns:
                value = elements[i]
            walk_blocks[i] = value
        if thread == 0:
            (p.walk_counts + place)[0] = found
            blocks = Int64(found)
            if found > WALK_CAP:
                blocks = Int64(WALK_TOO_MANY)
            cute.arch.atomic_add(p.walk_totals, blocks)
            cute.arch.atomic_add(p.walk_totals + 1, Int64(selected[0]))

    @cute.jit
    def insert(self, row: Int32, table: cute.Pointer, rows: cute.Pointer, slots: cute.Pointer, count: cute.Pointer):
        """The slot of a row, which may be new; SLOTS where there are too many rows."""
        slot = (Uint32(row) * Uint32(0x9E3779B1) >> Uint32(32 - SLOTS_LOG2)).to(Int32)
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
