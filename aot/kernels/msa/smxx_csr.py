"""Reverse map of a block selection: from q2k (blocks of each query token) to the CSR (query tokens of each block).

Every (token, selected block) is an entry. Entries are keyed by CSR row and sorted stably (smxx_sort.py), which leaves
the tokens of a row ascending; an entry's value is its qsplit word, token | slot << 24. Dropped entries have key
``total_rows`` and value -1, so that they end up as the tail of -1. The way back is ``split_entries``
[head_kv, total_q, topk]: where in its head the entry of a token's slot stands, -1 past the token's count; WalkPlan adds
its mark (work.WALKED) to the values and so to these.
Launches of build_k2q_csr: CsrRows, CsrKeys, { RadixScan, RadixScatter, RadixCount of the next pass }, CsrRowPtr; with
a schedule, WalkPlan (smxx_walk_plan.py) after CsrKeys.
From a given CSR the slots come back without q2k or sort: memset of split_counts, CsrCollect, CsrSplit.

Rows are numbered block outermost, sequence innermost. ``row_of`` has them in sequence order: block b of sequence s is
at ``sequence_base[s] + b``. No value on the device is trusted: each index is checked against a size the host knows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from aot.kernel import Kernel, Ptr
from aot.kernels.mask import BLK_KV
from aot.kernels.memory import at
from aot.kernels.msa.partials import TOKEN_BITS
from aot.kernels.msa.smxx_sort import MAX_DIGITS, THREADS, TILE
from aot.kernels.sorting import WARP, fill, head_and_tile, lower_bound, warp_inclusive_scan
from aot.kernels.turn import take_turn

NO_BLOCK = 0x7FFFFFFF


@cute.jit
def block_count(p, sequence: Int32):
    """Blocks of a sequence, 0 past the batch; never more than there are rows."""
    count = Int32(0)
    if sequence < p.batch:
        length = p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence]
        count = cutlass.min(cutlass.max((length + BLK_KV - 1) // BLK_KV, 0), p.total_rows)
    return count


@cute.jit
def sequence_of(cu_seqlens_q: cute.Pointer, token: Int32, batch: Int32):
    """Sequence of a query token; ``batch`` for a padding token, which belongs to none."""
    sequence = lower_bound(cu_seqlens_q + 1, batch, token + 1)
    if sequence < batch and token < cu_seqlens_q[sequence]:
        sequence = batch
    return sequence


@cute.jit
def rows_before(p, block: Int32):
    """(rows of the blocks below ``block``, sequences that have ``block``), by a warp."""
    lane = cute.arch.lane_idx()
    before = Int32(0)
    having = Int32(0)
    for first in range(0, p.batch, WARP):
        count = block_count(p, first + lane)
        before += cutlass.min(count, block)
        having += (count > block).to(Int32)
    return cute.arch.warp_redux_sync(before, "add"), cute.arch.warp_redux_sync(having, "add")


class CsrRows(Kernel):
    """Number the rows: ``row_of``, ``sequence_base`` [batch], and back: ``row_sequence``, ``row_block`` [total_rows].

    A warp takes a block number and walks the sequences twice: the first walk finds the block's first row, the second
    ranks the sequences that have it by ballot, O(batch / 32) each: long sequences and large batches are both cheap.
    ``row_sequence`` and ``row_block`` of rows that no sequence has are -1. ``walk_flags`` [3], where not null, become
    0: WalkPlan (smxx_walk_plan.py) sets them."""

    def __init__(self) -> None:
        self.threads = 512
        self.warps = self.threads // WARP
        self.work_per_cta = 0
        self.pdl = True
        self.params = {
            "cu_seqlens_k": Ptr(Int32),
            "row_of": Ptr(Int32),
            "sequence_base": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "walk_flags": Ptr(Int32),
            "batch": Int32,
            "total_rows": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()

        block = cta * self.warps + thread // WARP
        row, having = rows_before(p, block)
        # Warp 0 always takes block 0: it also writes the bases, of empty sequences too.
        while having > 0 or block == 0:
            base = Int32(0)
            for first in range(0, p.batch, WARP):
                sequence = first + lane
                count = block_count(p, sequence)
                own_base = cutlass.min(base + warp_inclusive_scan(count) - count, p.total_rows)
                base = cutlass.min(cute.arch.shuffle_sync(own_base + count, WARP - 1), p.total_rows)
                if block == 0 and sequence < p.batch:
                    p.sequence_base[sequence] = own_base
                votes = cute.arch.vote_ballot_sync(count > block)
                own_row = row + cute.arch.popc(Uint32(votes) & cute.arch.lanemask_lt()).to(Int32)
                row += cute.arch.popc(Uint32(votes)).to(Int32)
                if count > block:
                    if own_base + block < p.total_rows:
                        p.row_of[own_base + block] = own_row
                    if own_row >= 0 and own_row < p.total_rows:
                        p.row_sequence[own_row] = sequence
                        p.row_block[own_row] = block
            block += ctas * self.warps
            row, having = rows_before(p, block)

        if p.walk_flags.toint() != 0 and cta == 0 and thread < 3:
            p.walk_flags[thread] = Int32(0)
        rows, having = rows_before(p, p.total_rows)
        for row in range(rows + cta * self.threads + thread, p.total_rows, ctas * self.threads):
            if row >= 0:
                p.row_sequence[row] = Int32(-1)
                p.row_block[row] = Int32(-1)


class CsrKeys(Kernel):
    """Key and value of every entry, split_counts, and the counts of the first radix pass.

    One CTA a tile of 4096 entries; ``topk`` lanes share a token. A lane drops its block if the sequence does not have
    it or a lower lane names it too (``match.any``); its slot is the number of the token's kept blocks that are smaller.
    Where ``split_entries`` is not null, its slots past the count become -1; the last RadixScatter fills the others.
    """

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.threads = THREADS
        self.smem_bytes = MAX_DIGITS * 4
        self.work_per_cta = 1  # work = head_kv * tiles
        self.pdl = True
        self.params = {
            "q2k_indices": Ptr(Int32),
            "cu_seqlens_q": Ptr(Int32),
            "cu_seqlens_k": Ptr(Int32),
            "row_of": Ptr(Int32),
            "sequence_base": Ptr(Int32),
            "keys": Ptr(Int32),
            "values": Ptr(Int32),
            "split_counts": Ptr(Int32),
            "split_entries": Ptr(Int32),
            "counts": Ptr(Int32),
            "q2k_stride_head": Int64,
            "q2k_stride_token": Int64,
            "total_q": Int32,
            "head_kv": Int32,
            "batch": Int32,
            "total_rows": Int32,
            "tiles": Int32,
            "bits": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        position = thread % self.topk
        group_shift = cute.arch.lane_idx() - position
        group = Uint32((1 << self.topk) - 1) << Uint32(group_shift)
        histogram = cutlass.memory.SmemAllocator().allocate_array(Int32, MAX_DIGITS)
        digits = Int32(1) << p.bits
        fill(histogram, digits, 0, THREADS)
        cute.arch.sync_threads()

        size = p.total_q * self.topk
        keys = at(p.keys, head, size)
        values = at(p.values, head, size)
        write_entries = p.split_entries.toint() != 0
        split_entries = at(p.split_entries, head, size)
        q2k_indices = p.q2k_indices + Int64(head) * p.q2k_stride_head
        for k in cutlass.range(TILE // THREADS, unroll=4):
            i = tile * TILE + k * THREADS + thread
            token = i // self.topk
            block = Int32(NO_BLOCK)
            row = p.total_rows
            if i < size:
                named = (q2k_indices + (Int64(token) * p.q2k_stride_token + Int64(position))).load()
                sequence = sequence_of(p.cu_seqlens_q, token, p.batch)
                if named >= 0 and named < block_count(p, sequence):
                    place = p.sequence_base[sequence] + named
                    if place < p.total_rows:
                        found = p.row_of[place]
                        if found >= 0 and found < p.total_rows:
                            block = named
                            row = found
            same = cute.arch.match_sync(0xFFFFFFFF, block, "any")
            if (same & group & cute.arch.lanemask_lt()) != 0:
                block = Int32(NO_BLOCK)
                row = p.total_rows
            slot = Int32(0)
            for j in cutlass.range_constexpr(self.topk):
                slot += (cute.arch.shuffle_sync(block, group_shift + j) < block).to(Int32)
            kept = Uint32(cute.arch.vote_ballot_sync(block != NO_BLOCK)) & group
            count = cute.arch.popc(kept).to(Int32)
            if i < size:
                value = Int32(-1)
                if block != NO_BLOCK:
                    value = token | (slot << TOKEN_BITS)
                keys[i] = row
                values[i] = value
                if position == 0:
                    at(p.split_counts, token, p.head_kv)[head] = count
                if write_entries and position >= count:
                    split_entries[i] = Int32(-1)
                cute.arch.atomic_add(histogram + (row & (digits - 1)), Int32(1))
        cute.arch.sync_threads()

        counts = at(at(p.counts, head, p.tiles * digits), tile, digits)
        for digit in range(thread, digits, THREADS):
            counts[digit] = histogram[digit]


class CsrRowPtr(Kernel):
    """row_ptr[r] = number of sorted keys below r. A thread a row: a search costs about 20 cached loads."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.work_per_cta = 1  # work = head_kv * tiles, tiles = ceil((total_rows + 1) / 256)
        self.pdl = True
        self.params = {
            "keys": Ptr(Int32),
            "row_ptr": Ptr(Int32),
            "size": Int32,
            "total_rows": Int32,
            "tiles": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        row = tile * THREADS + thread
        if row <= p.total_rows:
            at(p.row_ptr, head, p.total_rows + 1)[row] = lower_bound(at(p.keys, head, p.size), p.size, row)


class CsrCollect(Kernel):
    """List the entries of each token in split_entries, in any order, and how many in split_counts.

    One thread an entry of the CSR, tiles of 4096. split_counts must be zero before. Also sets qsplit_indices to -1."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.work_per_cta = 1  # work = head_kv * tiles
        self.pdl = True
        self.params = {
            "row_ptr": Ptr(Int32),
            "q_indices": Ptr(Int32),
            "qsplit_indices": Ptr(Int32),
            "split_counts": Ptr(Int32),
            "split_entries": Ptr(Int32),
            "total_q": Int32,
            "topk": Int32,
            "head_kv": Int32,
            "total_rows": Int32,
            "tiles": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        size = p.total_q * p.topk
        used = at(p.row_ptr, head, p.total_rows + 1)[p.total_rows]
        q_indices = at(p.q_indices, head, size)
        qsplit_indices = at(p.qsplit_indices, head, size)
        split_entries = at(p.split_entries, head, size)
        for k in cutlass.range(TILE // THREADS, unroll=4):
            i = tile * TILE + k * THREADS + thread
            if i < size:
                qsplit_indices[i] = Int32(-1)
                token = q_indices[i]
                if i < used and token >= 0 and token < p.total_q:
                    place = cute.arch.atomic_add(at(p.split_counts, token, p.head_kv) + head, Int32(1))
                    if place < p.topk:
                        split_entries[token * p.topk + place] = i


class CsrSplit(Kernel):
    """Slot of an entry = number of smaller entries of its token: entries ascend by row, so this is the rank by block.

    ``topk`` lanes share a token, as in CsrKeys. Orders split_entries in place: where a lane writes depends on what all
    lanes of its token have read. Clamps split_counts."""

    def __init__(self, topk: int) -> None:
        self.topk = topk
        self.threads = THREADS
        self.work_per_cta = 1  # work = head_kv * tiles
        self.pdl = True
        self.params = {
            "qsplit_indices": Ptr(Int32),
            "split_counts": Ptr(Int32),
            "split_entries": Ptr(Int32),
            "total_q": Int32,
            "head_kv": Int32,
            "tiles": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        position = thread % self.topk
        group_shift = cute.arch.lane_idx() - position
        size = p.total_q * self.topk
        qsplit_indices = at(p.qsplit_indices, head, size)
        split_entries = at(p.split_entries, head, size)
        for k in cutlass.range(TILE // THREADS, unroll=4):
            i = tile * TILE + k * THREADS + thread
            token = i // self.topk
            count = Int32(0)
            entry = Int32(NO_BLOCK)
            if i < size:
                count = at(p.split_counts, token, p.head_kv)[head]
                if position < count:
                    entry = split_entries[i]
            slot = Int32(0)
            for j in cutlass.range_constexpr(self.topk):
                slot += (cute.arch.shuffle_sync(entry, group_shift + j) < entry).to(Int32)
            cute.arch.sync_warp()  # a shuffle orders no memory
            if entry < size:
                qsplit_indices[entry] = token | (slot << TOKEN_BITS)
                split_entries[token * self.topk + slot] = entry
            elif i < size:
                split_entries[i] = Int32(-1)
            if position == 0 and count > self.topk:
                at(p.split_counts, token, p.head_kv)[head] = Int32(self.topk)
