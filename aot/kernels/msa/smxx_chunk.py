"""Reverse map of a small selection: what smxx_csr.py and smxx_sort.py do in ten launches, where one will do.

A chunk of a prompt has a few hundred query tokens, and its CSR takes no work worth the name, only the latency of what
makes it. So a cluster of CTAs takes a KV head, each CTA up to 256 consecutive tokens, a thread a token, and the head's
CSR is a matrix of bits in their shared memory: a word is 32 tokens of a row. A row's entries are counted and ranked by
counting bits. The counts of all CTAs, which each reads from the others, give where the rows start.
Results are those of the kernels for any size, and so are ``counts`` and ``totals``, which ScheduleFill
(smxx_schedule.py) takes: the items of each tile of rows and bucket of tokens, of all tiles before and of all.

Shared memory, for 3584 rows: 112 KiB of bits, 28 KiB of their sums, 42 KiB for where rows are, 33 KiB for the blocks of
the tokens, which have a padded row each, as they come and as their entries go.
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.partials import TOKEN_BITS
from aot.kernels.msa.smxx_csr import block_count, sequence_of
from aot.kernels.msa.smxx_schedule import ROWS as TILE_ROWS
from aot.kernels.sorting import WARP, block_exclusive_scan, fill
from aot.kernels.turn import take_turn

THREADS = 512
WARPS = THREADS // WARP
CTAS = 8  # of a cluster
GROUPS = 8  # of 32 tokens, a warp each; of a CTA
# What a call may have: MAX_* of sparse_aot/msa/_csr.pyx.
MAX_TOKENS = CTAS * GROUPS * WARP
MAX_ROWS = 3584
MAX_SEQUENCES = 256
MAX_TILES = MAX_ROWS // TILE_ROWS
MAX_BUCKETS = MAX_TOKENS // 128


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


class ChunkCsr(Kernel):
    """``row_ptr``, ``q_indices``, ``qsplit_indices``, ``split_counts``, ``split_entries``, ``row_sequence`` and
    ``row_block`` as CsrRows has them, ``counts`` and ``totals``.

    Rows ascend with the blocks of a sequence, so a token's blocks are numbered, sorted and cleared of what is named
    twice as rows, in registers; its entries' slots are then their order."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.pitch = topk + 1  # of a token's row in shared memory: a warp's rows begin in different banks
        self.threads = THREADS
        self.cluster = CTAS
        self.min_blocks_per_mp = 1
        self.pdl = True
        words = MAX_ROWS * (GROUPS + 3) + GROUPS * WARP * self.pitch + 3 * MAX_SEQUENCES + 2
        self.smem_bytes = (words + WARPS + MAX_TILES * MAX_BUCKETS) * 4 + MAX_ROWS * GROUPS
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
            "q2k_stride_head": Int64,
            "q2k_stride_token": Int64,
            "total_q": Int32,
            "head_kv": Int32,
            "batch": Int32,
            "total_rows": Int32,
            "target_log2": Int32,
            "bucket_shift": Int32,
            "buckets": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        head = cta // CTAS
        rank = cta % CTAS
        smem = cutlass.memory.SmemAllocator()
        bits = smem.allocate_array(Int32, GROUPS * MAX_ROWS)  # [groups, total_rows]
        row_of = smem.allocate_array(Int32, MAX_ROWS)
        counts = smem.allocate_array(Int32, MAX_ROWS)  # entries of each row, of this CTA
        starts = smem.allocate_array(Int32, MAX_ROWS)  # the first entry of each row, of this CTA
        tokens = smem.allocate_array(Int32, GROUPS * WARP * self.pitch)  # their blocks, later their entries
        items = smem.allocate_array(Int32, MAX_TILES * MAX_BUCKETS)  # [tiles, buckets]
        blocks = smem.allocate_array(Int32, MAX_SEQUENCES)
        bases = smem.allocate_array(Int32, MAX_SEQUENCES)
        most = smem.allocate_array(Int32, 1)  # blocks of a sequence
        cu_seqlens_q = smem.allocate_array(Int32, MAX_SEQUENCES + 1)
        warp_sums = smem.allocate_array(Int32, WARPS)
        below = smem.allocate_array(Uint8, GROUPS * MAX_ROWS)  # bits of the groups below, of this CTA

        groups = ((p.total_q + WARP - 1) // WARP + CTAS - 1) // CTAS
        first_token = (rank * groups + warp) * WARP  # of the warp
        own_tokens = tokens + warp * WARP * self.pitch
        works = warp < groups
        size = p.total_q * self.topk
        tiles = (p.total_rows + TILE_ROWS - 1) // TILE_ROWS

        q2k_indices = p.q2k_indices + Int64(head) * p.q2k_stride_head
        if works:
            self.load_tokens(p, q2k_indices, first_token, own_tokens)
        if thread <= p.batch:
            cu_seqlens_q[thread] = p.cu_seqlens_q[thread]
        fill(bits, groups * p.total_rows, 0, THREADS)
        fill(items, tiles * p.buckets, 0, THREADS)
        self.number_rows(p, cta, blocks, bases, most, row_of, warp_sums)

        rows = cute.make_rmem_tensor(self.topk, Int32)  # of the thread's token, ascending; total_rows: none
        token = first_token + lane
        if works:
            count = self.select_rows(
                p, rows, own_tokens + lane * self.pitch, token, blocks, bases, cu_seqlens_q, row_of
            )
            for i in cutlass.range_constexpr(self.topk):
                if rows[i] < p.total_rows:
                    cute.arch.atomic_or(bits + (warp * p.total_rows + rows[i]), Int32(1) << lane)
            if token < p.total_q:
                at(p.split_counts, token, p.head_kv)[head] = count
        cute.arch.sync_threads()

        for row in range(thread, p.total_rows, THREADS):
            count = Int32(0)
            for group in range(groups):
                below[group * p.total_rows + row] = count.to(Uint8)
                count += cute.arch.popc(Uint32(bits[group * p.total_rows + row])).to(Int32)
            counts[row] = count
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        used = self.find_starts(p, head, rank, groups, counts, starts, bits, below, items, warp_sums)
        cute.arch.cluster_arrive()

        q_indices = at(p.q_indices, head, size)
        qsplit_indices = at(p.qsplit_indices, head, size)
        if works:
            own_bits = bits + warp * p.total_rows
            own_below = below + warp * p.total_rows
            own_entries = own_tokens + lane * self.pitch
            slot = Int32(0)
            for i in cutlass.range_constexpr(self.topk):
                row = rows[i]
                if row < p.total_rows:
                    lower = cute.arch.popc(Uint32(own_bits[row]) & cute.arch.lanemask_lt()).to(Int32)
                    entry = starts[row] + own_below[row].to(Int32) + lower
                    q_indices[entry] = token
                    qsplit_indices[entry] = token | (slot << TOKEN_BITS)
                    own_entries[slot] = entry
                    slot += 1
            for i in range(slot, self.topk):
                own_entries[i] = Int32(-1)
            cute.arch.sync_warp()
            split_entries = at(p.split_entries, head, size) + first_token * self.topk
            for k in cutlass.range_constexpr(self.topk):
                i = k * WARP + lane
                if i < size - first_token * self.topk:
                    split_entries[i] = own_tokens[i // self.topk * self.pitch + i % self.topk]
        for entry in range(used + rank * THREADS + thread, size, CTAS * THREADS):
            q_indices[entry] = Int32(-1)
            qsplit_indices[entry] = Int32(-1)

        cute.arch.cluster_wait()
        if rank == 0:
            self.sum_items(p, head, tiles, items)
        cute.arch.cluster_arrive()  # no CTA ends while another reads from it
        cute.arch.cluster_wait()

    @cute.jit
    def load_tokens(self, p, q2k_indices: cute.Pointer, first_token: Int32, own_tokens: cute.Pointer):
        """One warp: the blocks of its tokens; -1 for tokens that do not exist."""
        lane = cute.arch.lane_idx()
        loaded = cute.make_rmem_tensor(self.topk, Int32)
        for k in cutlass.range_constexpr(self.topk):
            i = k * WARP + lane
            token = first_token + i // self.topk
            loaded[k] = Int32(-1)
            if token < p.total_q:
                place = Int64(token) * p.q2k_stride_token + Int64(i % self.topk)
                loaded[k] = (q2k_indices + place).load()
        for k in cutlass.range_constexpr(self.topk):
            i = k * WARP + lane
            own_tokens[i // self.topk * self.pitch + i % self.topk] = loaded[k]

    @cute.jit
    def number_rows(
        self,
        p,
        cta: Int32,
        blocks: cute.Pointer,
        bases: cute.Pointer,
        most: cute.Pointer,
        row_of: cute.Pointer,
        warp_sums: cute.Pointer,
    ):
        """``blocks`` and ``bases`` of each sequence; ``row_of``, at most total_rows. A thread a block."""
        thread, _, _ = cute.arch.thread_idx()
        count = block_count(p, thread)
        if thread == 0:
            most[0] = Int32(0)
        base, total = block_exclusive_scan(count, warp_sums, WARPS)
        longest = cute.arch.warp_redux_sync(count, "max")
        if cute.arch.lane_idx() == 0 and longest > 0:
            cute.arch.atomic_max(most, longest)
        if thread < p.batch:
            blocks[thread] = count
            bases[thread] = cutlass.min(base, p.total_rows)
        cute.arch.sync_threads()
        for block in range(thread, most[0], THREADS):
            row = Int32(0)
            for sequence in cutlass.range(p.batch, unroll=4):
                row += cutlass.min(blocks[sequence], block)
            for sequence in cutlass.range(p.batch, unroll=4):
                if blocks[sequence] > block:
                    place = bases[sequence] + block
                    if place < p.total_rows:
                        row_of[place] = cutlass.min(row, p.total_rows)
                    if cta == 0 and row < p.total_rows:
                        p.row_sequence[row] = sequence
                        p.row_block[row] = block
                    row += 1
        if cta == 0:
            for row in range(total + thread, p.total_rows, THREADS):
                p.row_sequence[row] = Int32(-1)
                p.row_block[row] = Int32(-1)
        cute.arch.sync_threads()

    @cute.jit
    def select_rows(
        self,
        p,
        rows: cute.Tensor,
        named: cute.Pointer,
        token: Int32,
        blocks: cute.Pointer,
        bases: cute.Pointer,
        cu_seqlens_q: cute.Pointer,
        row_of: cute.Pointer,
    ):
        """The rows of a token's distinct blocks, ascending among ``total_rows`` for the others; how many they are."""
        sequence = sequence_of(cu_seqlens_q, token, p.batch)
        limit = Int32(0)
        base = Int32(0)
        if sequence < p.batch:
            limit = blocks[sequence]
            base = bases[sequence]
        for i in cutlass.range_constexpr(self.topk):
            block = named[i]
            rows[i] = p.total_rows
            if block >= 0 and block < limit and base + block < p.total_rows:
                rows[i] = row_of[base + block]
        for low, high in sorting_network(self.topk):
            smaller = cutlass.min(rows[low], rows[high])
            rows[high] = cutlass.max(rows[low], rows[high])
            rows[low] = smaller
        count = Int32(0)
        previous = p.total_rows
        for i in cutlass.range_constexpr(self.topk):
            row = rows[i]
            if row == previous:
                rows[i] = p.total_rows
            else:
                count += (row < p.total_rows).to(Int32)
            previous = row
        return count

    @cute.jit
    def find_starts(
        self,
        p,
        head: Int32,
        rank: Int32,
        groups: Int32,
        counts: cute.Pointer,
        starts: cute.Pointer,
        bits: cute.Pointer,
        below: cute.Pointer,
        items: cute.Pointer,
        warp_sums: cute.Pointer,
    ):
        """``starts``, ``row_ptr`` and this CTA's ``items``; the number of the head's entries."""
        thread, _, _ = cute.arch.thread_idx()
        row_ptr = at(p.row_ptr, head, p.total_rows + 1)
        used = Int32(0)
        for first in range(0, p.total_rows, THREADS):
            row = first + thread
            total = Int32(0)
            before = Int32(0)
            if row < p.total_rows:
                for other in cutlass.range_constexpr(CTAS):
                    count = cute.arch.map_dsmem_ptr(counts, other)[row]
                    total += count
                    if other < rank:
                        before += count
            start, sum_of_totals = block_exclusive_scan(total, warp_sums, WARPS)
            if row < p.total_rows:
                starts[row] = used + start + before
                if rank == 0:
                    row_ptr[row] = used + start
                tile = row // TILE_ROWS
                for group in range(groups):
                    first_in_row = before + below[group * p.total_rows + row].to(Int32)
                    count = cute.arch.popc(Uint32(bits[group * p.total_rows + row])).to(Int32)
                    begin = self.items_before(p, first_in_row + count) - self.items_before(p, first_in_row)
                    if begin > 0:
                        bucket = ((rank * groups + group) * WARP) >> p.bucket_shift
                        cute.arch.atomic_add(items + (tile * p.buckets + bucket), begin)
            used += sum_of_totals
        if rank == 0 and thread == 0:
            row_ptr[p.total_rows] = used
        cute.arch.sync_threads()
        return used

    def items_before(self, p, entries: Int32) -> Int32:
        """Items that begin in the first ``entries`` of a row."""
        return (entries + (Int32(1) << p.target_log2) - 1) >> p.target_log2

    @cute.jit
    def sum_items(self, p, head: Int32, tiles: Int32, items: cute.Pointer):
        """``counts`` and ``totals``, as ScheduleCount and RadixScan make them. A thread a bucket."""
        thread, _, _ = cute.arch.thread_idx()
        counts = at(p.counts, head, tiles * p.buckets)
        if thread < p.buckets:
            before = Int32(0)
            for tile in range(tiles):
                counts[tile * p.buckets + thread] = before
                for other in cutlass.range_constexpr(CTAS):
                    before += cute.arch.map_dsmem_ptr(items, other)[tile * p.buckets + thread]
            at(p.totals, head, p.buckets)[thread] = before
