"""CSR and walk plan of a small selection: what the kernels for any size do in eight launches and more, in one.

A chunk of a prompt has a few hundred query tokens, and its CSR takes no work worth the name, only the latency of what
makes it. So a cluster of CTAs takes a KV head, each CTA up to 256 neighbouring tokens, a thread a token, and the CSR is
a matrix of bits in their shared memory, a word 32 tokens of a row. A row's entries are counted and ranked by the bits
alone, and so are the members of a walk plan's blocks. The counts of all CTAs, which each reads from the others, give
where rows start.
Results are those of the kernels for any size, and so are ``counts`` and ``totals``, which ScheduleFill
(smxx_schedule.py) takes: the items of each tile of rows and bucket of tokens, of all tiles before and of all.

Shared memory, for 3584 rows: 112 KiB of bits, 28 KiB of their sums, 42 KiB for where rows are, 33 KiB for the blocks of
the tokens, which have a padded row each, as they come and as their entries go.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.partials import TOKEN_BITS
from aot.kernels.msa.smxx_csr import block_count, sequence_of
from aot.kernels.msa.smxx_schedule import ROWS as TILE_ROWS
from aot.kernels.msa.work import ANY_LEFT, ANY_UNFINISHED, ANY_WALKS, WALK_CAP, WALK_FINAL, WALKED
from aot.kernels.sorting import WARP, block_exclusive_scan, fill
from aot.kernels.turn import take_turn

THREADS = 512
WARPS = THREADS // WARP
CTAS = 8  # of a cluster
GROUPS = 8  # of 32 tokens, a warp each; of a CTA
# What a call may have: CHUNK_* of sparse_aot/msa/_csr.pyx.
MAX_TOKENS = CTAS * GROUPS * WARP
MAX_ROWS = 3584
MAX_SEQUENCES = 256
MAX_TILES = MAX_ROWS // TILE_ROWS
MAX_BUCKETS = MAX_TOKENS // 128
MAX_UNIONS = GROUPS * WARP // 8  # groups of the walk plan, of a CTA
NEVER = 0x7FFFFFFF  # more members than a block can have
SEQUENCE_BITS = 8
COLUMNS = 2  # of a walked block before the words of its tokens: sequence, block


def sorting_network(size: int) -> Iterator[tuple[int, int]]:
    """Pairs to compare and exchange, in order, that sort a power of two elements (Batcher's odd-even merge sort)."""
    width = 1
    while width < size:
        step = width
        while step:
            for first in range(step % width, size - step, 2 * step):
                for low in range(first, min(first + step, size - step)):
                    if low // (2 * width) == (low + step) // (2 * width):
                        yield low, low + step
            step //= 2
        width *= 2


def unsigned(count: Uint8) -> Int32:
    """The DSL extends the sign of any byte that it loads."""
    return count.to(Int32) & 0xFF


def row_pitch(p) -> Int32:
    """Of a group's bits: a warp takes them 32 at a time."""
    return (p.total_rows + WARP - 1) // WARP * WARP


class Shared(NamedTuple):
    """Shared memory, an array of int32 each but ``below``."""

    bits: cute.Pointer  # [groups, row_pitch]: a bit for each token of the group that names the row
    below: cute.Pointer  # uint8 [groups, total_rows]: how many bits the groups below have, of this CTA
    row_of: cute.Pointer  # [total_rows], as CsrRows has it, at most total_rows
    names: cute.Pointer  # [total_rows]: block << SEQUENCE_BITS | sequence of each row; later the row's first entry here
    counts: cute.Pointer  # [total_rows]: entries of each row, of this CTA
    tokens: cute.Pointer  # [tokens, pitch]: the blocks of this CTA's tokens, rows that groups name, entries of tokens
    listed: cute.Pointer  # [groups]: how many rows
    items: cute.Pointer  # [tiles, buckets]: items that begin with this CTA's tokens
    thresholds: cute.Pointer  # [unions]: a block is walked where more tokens name it, in eighths
    blocks: cute.Pointer  # [batch]
    bases: cute.Pointer  # [batch]
    cu_seqlens_q: cute.Pointer  # [batch + 1]
    most: cute.Pointer  # [1]: blocks of a sequence
    flags: cute.Pointer  # [1]: bits of this CTA's unions, by their numbers in walk_flags
    warp_sums: cute.Pointer  # [WARPS]


class ChunkCsr(Kernel):
    """``row_ptr``, ``q_indices``, ``qsplit_indices``, ``split_counts``, ``split_entries``, ``row_sequence`` and
    ``row_block`` as CsrRows has them, ``counts`` and ``totals``; where ``walk_blocks`` is not null, ``walk_blocks``,
    ``walk_counts``, ``rest_indices``, and ``head_flags`` [head_kv], of which ScheduleFill makes walk_flags.

    Rows ascend with the blocks of a sequence, so a token's blocks are numbered, sorted and cleared of what is named
    twice as rows, in registers; its entries' slots are then their order."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.pitch = topk + 1  # of a token's row in shared memory: a warp's rows begin in different banks
        self.threads = THREADS
        self.cluster = CTAS
        self.min_blocks_per_mp = 1
        self.pdl = True
        words = MAX_ROWS * (GROUPS + 3) + GROUPS * WARP * self.pitch + MAX_TILES * MAX_BUCKETS + MAX_UNIONS
        words += GROUPS + 3 * MAX_SEQUENCES + 3 + WARPS
        self.smem_bytes = words * 4 + MAX_ROWS * GROUPS
        self.work_per_cta = 1  # work = head_kv * CTAS
        self.params = {
            "q2k_indices": Ptr(Int32),
            "cu_seqlens_q": Ptr(Int32),
            "cu_seqlens_k": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "row_ptr": Ptr(Int32),
            "q_indices": Ptr(Int32),
            "qsplit_indices": Ptr(Int32),
            "split_counts": Ptr(Int32),
            "split_entries": Ptr(Int32),
            "counts": Ptr(Int32),
            "totals": Ptr(Int32),
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "rest_indices": Ptr(Int32),
            "head_flags": Ptr(Int32),
            "q2k_stride_head": Int64,
            "q2k_stride_token": Int64,
            "total_q": Int32,
            "head_kv": Int32,
            "batch": Int32,
            "total_rows": Int32,
            "target_log2": Int32,
            "bucket_shift": Int32,
            "buckets": Int32,
            "groups": Int32,
            "tokens_per_group": Int32,
            "walk_cost": Int32,
            "walk_gain": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        head = cta // CTAS
        rank = cta % CTAS
        smem = cutlass.memory.SmemAllocator()
        s = Shared(
            bits=smem.allocate_array(Int32, GROUPS * MAX_ROWS),
            below=smem.allocate_array(Uint8, GROUPS * MAX_ROWS),
            row_of=smem.allocate_array(Int32, MAX_ROWS),
            names=smem.allocate_array(Int32, MAX_ROWS),
            counts=smem.allocate_array(Int32, MAX_ROWS),
            tokens=smem.allocate_array(Int32, GROUPS * WARP * self.pitch),
            listed=smem.allocate_array(Int32, GROUPS),
            items=smem.allocate_array(Int32, MAX_TILES * MAX_BUCKETS),
            thresholds=smem.allocate_array(Int32, MAX_UNIONS),
            blocks=smem.allocate_array(Int32, MAX_SEQUENCES),
            bases=smem.allocate_array(Int32, MAX_SEQUENCES),
            cu_seqlens_q=smem.allocate_array(Int32, MAX_SEQUENCES + 1),
            most=smem.allocate_array(Int32, 1),
            flags=smem.allocate_array(Int32, 1),
            warp_sums=smem.allocate_array(Int32, WARPS),
        )
        walks = p.walk_blocks.toint() != 0
        groups = ((p.total_q + WARP - 1) // WARP + CTAS - 1) // CTAS
        words = Int32(1)  # of a group of the walk plan, which has no tokens of two CTAs
        if walks:
            words = (p.tokens_per_group + WARP - 1) // WARP
            groups = (groups + words - 1) // words * words
        first_token = (rank * groups + warp) * WARP  # of the warp
        works = warp < groups and first_token < p.total_q
        tiles = (p.total_rows + TILE_ROWS - 1) // TILE_ROWS

        if works:
            self.load_tokens(p, s, head, first_token)
        if thread <= p.batch:
            s.cu_seqlens_q[thread] = p.cu_seqlens_q[thread]
        if thread == 0:
            s.most[0] = Int32(0)
            s.flags[0] = Int32(0)
        fill(s.bits, groups * row_pitch(p), 0, THREADS)
        fill(s.items, tiles * p.buckets, 0, THREADS)
        self.number_rows(p, s)

        rows = cute.make_rmem_tensor(self.topk, Int32)  # of the thread's token, ascending; total_rows: none
        if works:
            self.select_rows(p, s, rows, head, first_token)
        cute.arch.sync_threads()
        self.count_rows(p, s, groups)
        if walks:
            if warp * words < groups:
                self.list_rows(p, s, warp * words, words)
            cute.arch.sync_threads()
            for union in range(warp, groups * WARP // p.tokens_per_group, WARPS):
                self.plan_walk(p, s, head, union, (rank * groups * WARP) // p.tokens_per_group + union)
            cute.arch.sync_threads()  # the lists have been read
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        used = self.find_starts(p, s, head, rank, groups)
        cute.arch.cluster_arrive()
        if works:
            self.write_entries(p, s, rows, head, first_token, walks)
        self.clear_tail(p, head, rank, used, walks)
        cute.arch.cluster_wait()
        if rank == 0:
            self.sum_items(p, s, head, tiles)
            if walks and thread == 0:
                flags = Int32(0)
                for other in cutlass.range_constexpr(CTAS):
                    flags = flags | cute.arch.map_dsmem_ptr(s.flags, other)[0]
                p.head_flags[head] = flags
        cute.arch.cluster_arrive()  # no CTA ends while another reads from it
        cute.arch.cluster_wait()

    @cute.jit
    def load_tokens(self, p, s: Shared, head: Int32, first_token: Int32):
        """One warp: the blocks of its tokens; -1 for tokens that do not exist."""
        lane = cute.arch.lane_idx()
        own = s.tokens + cute.arch.warp_idx() * (WARP * self.pitch)
        q2k_indices = p.q2k_indices + Int64(head) * p.q2k_stride_head
        loaded = cute.make_rmem_tensor(self.topk, Int32)
        for k in cutlass.range_constexpr(self.topk):
            i = k * WARP + lane
            token = first_token + i // self.topk
            loaded[k] = Int32(-1)
            if token < p.total_q:
                loaded[k] = (q2k_indices + (Int64(token) * p.q2k_stride_token + Int64(i % self.topk))).load()
        for k in cutlass.range_constexpr(self.topk):
            i = k * WARP + lane
            own[i // self.topk * self.pitch + i % self.topk] = loaded[k]

    @cute.jit
    def number_rows(self, p, s: Shared):
        """``blocks``, ``bases``, ``row_of``, ``names``; CTA 0: ``row_sequence`` and ``row_block``. A thread a block."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        count = block_count(p, thread)
        base, total = block_exclusive_scan(count, s.warp_sums, WARPS)
        longest = cute.arch.warp_redux_sync(count, "max")
        if thread % WARP == 0 and longest > 0:
            cute.arch.atomic_max(s.most, longest)
        if thread < p.batch:
            s.blocks[thread] = count
            s.bases[thread] = cutlass.min(base, p.total_rows)
        cute.arch.sync_threads()
        for block in range(thread, s.most[0], THREADS):
            row = Int32(0)
            for sequence in cutlass.range(p.batch, unroll=4):
                row += cutlass.min(s.blocks[sequence], block)
            for sequence in cutlass.range(p.batch, unroll=4):
                if s.blocks[sequence] > block:
                    place = s.bases[sequence] + block
                    if place < p.total_rows:
                        s.row_of[place] = cutlass.min(row, p.total_rows)
                    if row < p.total_rows:
                        s.names[row] = block << SEQUENCE_BITS | sequence
                        if cta == 0:
                            p.row_sequence[row] = sequence
                            p.row_block[row] = block
                    row += 1
        if cta == 0:
            for row in range(total + thread, p.total_rows, THREADS):
                p.row_sequence[row] = Int32(-1)
                p.row_block[row] = Int32(-1)
        cute.arch.sync_threads()

    @cute.jit
    def select_rows(self, p, s: Shared, rows: cute.Tensor, head: Int32, first_token: Int32):
        """One warp, a lane a token: the ``rows`` of its distinct blocks, their bits, and ``split_counts``."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        token = first_token + lane
        sequence = sequence_of(s.cu_seqlens_q, token, p.batch)
        limit = Int32(0)
        base = Int32(0)
        if sequence < p.batch:
            limit = s.blocks[sequence]
            base = s.bases[sequence]
        cute.arch.sync_warp()  # the blocks were loaded by other lanes
        own = s.tokens + (warp * WARP + lane) * self.pitch
        for i in cutlass.range_constexpr(self.topk):
            block = own[i]
            rows[i] = p.total_rows
            if block >= 0 and block < limit and base + block < p.total_rows:
                rows[i] = s.row_of[base + block]
        for low, high in sorting_network(self.topk):
            smaller = cutlass.min(rows[low], rows[high])
            rows[high] = cutlass.max(rows[low], rows[high])
            rows[low] = smaller
        count = Int32(0)
        previous = Int32(-1)
        for i in cutlass.range_constexpr(self.topk):
            row = rows[i]
            if row != previous and row < p.total_rows:
                count += 1
                cute.arch.atomic_or(s.bits + (warp * row_pitch(p) + row), Int32(1) << lane)
            else:
                rows[i] = p.total_rows
            previous = row
        if token < p.total_q:
            at(p.split_counts, token, p.head_kv)[head] = count

    @cute.jit
    def count_rows(self, p, s: Shared, groups: Int32):
        """``below`` and ``counts``. A thread a row."""
        thread, _, _ = cute.arch.thread_idx()
        for row in range(thread, p.total_rows, THREADS):
            count = Int32(0)
            for group in range(groups):
                s.below[group * p.total_rows + row] = count.to(Uint8)
                count += cute.arch.popc(Uint32(s.bits[group * row_pitch(p) + row])).to(Int32)
            s.counts[row] = count

    @cute.jit
    def list_rows(self, p, s: Shared, group: Int32, words: Int32):
        """One warp: the rows that any of so many groups of 32 tokens names, ascending, in place of their blocks."""
        lane = cute.arch.lane_idx()
        pitch = row_pitch(p)
        listed = s.tokens + group * (WARP * self.pitch)
        bits = s.bits + group * pitch
        count = Int32(0)
        for first in cutlass.range(0, pitch, WARP, unroll=4):
            named = Int32(0)
            for word in cutlass.range(words, unroll=1):
                named = named | bits[word * pitch + first + lane]
            votes = Uint32(cute.arch.vote_ballot_sync(named != 0))
            if named != 0:
                listed[count + cute.arch.popc(votes & cute.arch.lanemask_lt()).to(Int32)] = first + lane
            count += cute.arch.popc(votes).to(Int32)
        if lane == 0:
            s.listed[group] = count

    @cute.jit
    def plan_walk(self, p, s: Shared, head: Int32, union: Int32, number: Int32):
        """One warp: what a group of tokens walks, as smxx_walk_plan.py says; group ``number`` of the head."""
        lane = cute.arch.lane_idx()
        pitch = row_pitch(p)
        words, group, mask, shift = self.find_group(p, union)
        bits = s.bits + group * pitch
        rows = s.tokens + group * (WARP * self.pitch)
        listed = s.listed[group]
        cost = p.walk_cost * p.tokens_per_group
        found = Int32(0)
        selected = Int32(0)
        mixed = Int32(0)
        for i in range(lane, listed, WARP):
            own = 8 * self.members(bits + rows[i], mask, words, pitch)
            found += (own > 0).to(Int32)
            selected += own
            mixed += cutlass.min(own, cost)
        found = cute.arch.warp_redux_sync(found, "add")
        selected = cute.arch.warp_redux_sync(selected, "add")
        mixed = cute.arch.warp_redux_sync(mixed, "add") + p.walk_gain * p.tokens_per_group

        threshold = Int32(NEVER)
        if found <= WALK_CAP:
            if found * cost < selected and found * cost <= mixed:
                threshold = Int32(0)
            elif mixed < selected:
                threshold = cost
        kept = Int32(0)
        if threshold != NEVER:
            columns = COLUMNS + words
            walk_blocks = p.walk_blocks + (Int64(head) * p.groups + number) * (WALK_CAP * columns)
            for first in range(0, listed, WARP):
                row = Int32(0)
                own = Int32(0)
                if first + lane < listed:
                    row = rows[first + lane]
                    own = 8 * self.members(bits + row, mask, words, pitch)
                votes = Uint32(cute.arch.vote_ballot_sync(own > threshold))
                if own > threshold:
                    below = cute.arch.popc(votes & cute.arch.lanemask_lt()).to(Int32)
                    element = walk_blocks + (kept + below) * columns
                    element[0] = s.names[row] & ((1 << SEQUENCE_BITS) - 1)
                    element[1] = s.names[row] >> SEQUENCE_BITS
                    element[COLUMNS] = (Uint32(bits[row] & mask) >> Uint32(shift)).to(Int32)
                    for word in cutlass.range(1, words, unroll=1):
                        element[COLUMNS + word] = bits[word * pitch + row]
                kept += cute.arch.popc(votes).to(Int32)
        if lane == 0:
            s.thresholds[union] = threshold
            flags = Int32(0)
            total = kept
            if kept > 0:
                flags = flags | 1 << ANY_WALKS
            if kept < found:
                flags = flags | 1 << ANY_LEFT
            if kept == 0 or kept < found:
                flags = flags | 1 << ANY_UNFINISHED
            else:
                total = kept | WALK_FINAL
            if number < p.groups:
                at(p.walk_counts, head, p.groups)[number] = total
                cute.arch.atomic_or(s.flags, flags)

    @cute.jit
    def find_group(self, p, union: Int32):
        """(words, group of 32 tokens that has the first, mask within that, its shift) of a group of the walk plan."""
        first = union * p.tokens_per_group
        words = (p.tokens_per_group + WARP - 1) // WARP
        shift = first & (WARP - 1)
        mask = Int32(-1)
        if p.tokens_per_group < WARP:
            mask = ((Int32(1) << p.tokens_per_group) - 1) << shift
        return words, first >> 5, mask, shift

    @cute.jit
    def members(self, bits: cute.Pointer, mask: Int32, words: Int32, pitch: Int32) -> Int32:
        """How many tokens of a group name a row; ``bits``: of the row."""
        count = cute.arch.popc(Uint32(bits[0] & mask)).to(Int32)
        for word in cutlass.range(1, words, unroll=1):
            count += cute.arch.popc(Uint32(bits[word * pitch])).to(Int32)
        return count

    @cute.jit
    def find_starts(self, p, s: Shared, head: Int32, rank: Int32, groups: Int32) -> Int32:
        """``row_ptr``, ``items``, and in place of ``names`` where each row starts here; how many entries the head has.

        A thread a row."""
        thread, _, _ = cute.arch.thread_idx()
        row_ptr = at(p.row_ptr, head, p.total_rows + 1)
        used = Int32(0)
        for first in range(0, p.total_rows, THREADS):
            row = first + thread
            total = Int32(0)
            before = Int32(0)
            if row < p.total_rows:
                for other in cutlass.range_constexpr(CTAS):
                    count = cute.arch.map_dsmem_ptr(s.counts, other)[row]
                    total += count
                    if other < rank:
                        before += count
            start, sum_of_totals = block_exclusive_scan(total, s.warp_sums, WARPS)
            if row < p.total_rows:
                s.names[row] = used + start + before
                if rank == 0:
                    row_ptr[row] = used + start
                tile = row // TILE_ROWS
                for group in range(groups):
                    first_in_row = before + unsigned(s.below[group * p.total_rows + row])
                    count = cute.arch.popc(Uint32(s.bits[group * row_pitch(p) + row])).to(Int32)
                    begin = self.items_before(p, first_in_row + count) - self.items_before(p, first_in_row)
                    if begin > 0:
                        bucket = ((rank * groups + group) * WARP) >> p.bucket_shift
                        cute.arch.atomic_add(s.items + (tile * p.buckets + bucket), begin)
            used += sum_of_totals
        if rank == 0 and thread == 0:
            row_ptr[p.total_rows] = used
        cute.arch.sync_threads()
        return used

    def items_before(self, p, entries: Int32) -> Int32:
        """Items that begin in the first ``entries`` of a row."""
        return (entries + (Int32(1) << p.target_log2) - 1) >> p.target_log2

    @cute.jit
    def write_entries(self, p, s: Shared, rows: cute.Tensor, head: Int32, first_token: Int32, walks: cutlass.Boolean):
        """One warp, a lane a token: its entries, in the CSR's order and in that of the tokens."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        token = first_token + lane
        size = p.total_q * self.topk
        q_indices = at(p.q_indices, head, size)
        qsplit_indices = at(p.qsplit_indices, head, size)
        rest_indices = at(p.rest_indices, head, size)
        bits = s.bits + warp * row_pitch(p)
        below = s.below + warp * p.total_rows
        entries = s.tokens + warp * (WARP * self.pitch)
        own = entries + lane * self.pitch
        threshold = Int32(NEVER)
        union = Int32(0)
        if walks:
            union = (warp * WARP + lane) // p.tokens_per_group
            threshold = s.thresholds[union]
        words, group, mask, _ = self.find_group(p, union)
        group_bits = s.bits + group * row_pitch(p)
        slot = Int32(0)
        for i in cutlass.range_constexpr(self.topk):
            row = rows[i]
            if row < p.total_rows:
                lower = cute.arch.popc(Uint32(bits[row]) & cute.arch.lanemask_lt()).to(Int32)
                entry = s.names[row] + unsigned(below[row]) + lower
                q_indices[entry] = token
                qsplit_indices[entry] = token | (slot << TOKEN_BITS)
                mark = Int32(0)
                if walks:
                    rest = token
                    if 8 * self.members(group_bits + row, mask, words, row_pitch(p)) > threshold:
                        mark = Int32(WALKED)
                        rest = Int32(-1)
                    rest_indices[entry] = rest
                own[slot] = entry | mark
                slot += 1
        for i in range(slot, self.topk):
            own[i] = Int32(-1)
        cute.arch.sync_warp()
        split_entries = at(p.split_entries, head, size) + first_token * self.topk
        for k in cutlass.range_constexpr(self.topk):
            i = k * WARP + lane
            if i < size - first_token * self.topk:
                split_entries[i] = entries[i // self.topk * self.pitch + i % self.topk]

    @cute.jit
    def clear_tail(self, p, head: Int32, rank: Int32, used: Int32, walks: cutlass.Boolean):
        """-1 where a head has no entries any more."""
        thread, _, _ = cute.arch.thread_idx()
        size = p.total_q * self.topk
        for entry in range(used + rank * THREADS + thread, size, CTAS * THREADS):
            at(p.q_indices, head, size)[entry] = Int32(-1)
            at(p.qsplit_indices, head, size)[entry] = Int32(-1)
            if walks:
                at(p.rest_indices, head, size)[entry] = Int32(-1)

    @cute.jit
    def sum_items(self, p, s: Shared, head: Int32, tiles: Int32):
        """``counts`` and ``totals``, as ScheduleCount and RadixScan make them. A thread a bucket."""
        thread, _, _ = cute.arch.thread_idx()
        counts = at(p.counts, head, tiles * p.buckets)
        if thread < p.buckets:
            before = Int32(0)
            for tile in range(tiles):
                counts[tile * p.buckets + thread] = before
                for other in cutlass.range_constexpr(CTAS):
                    before += cute.arch.map_dsmem_ptr(s.items, other)[tile * p.buckets + thread]
            at(p.totals, head, p.buckets)[thread] = before
