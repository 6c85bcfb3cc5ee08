"""Work items of the forward: at most ``2^target_log2`` consecutive entries of a CSR row each.

Items are ordered by (KV head, bucket of the first query token, row, first entry): CTAs that run at the same time then
read the same stretch of Q, which stays in L2. It is one radix pass by bucket over items that exist only as row lengths:
ScheduleCount counts the buckets of each tile of 256 rows, RadixScan (smxx_sort.py) scans the tiles, ScheduleFill ranks
the items and writes them. A CTA of 1024 threads takes a tile, 1024 items at a time, however unequal the rows are.
``row_ptr`` may come from the caller: starts and ends are clamped to the entries that exist, items to ``capacity``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.work import METADATA_COLUMNS, WALK_FLAGS
from aot.kernels.sorting import WARP, block_exclusive_scan, count_and_rank, fill, head_and_tile, lower_bound
from aot.kernels.turn import take_turn

ROWS = 256
THREADS = 1024
WARPS = THREADS // WARP
MAX_BUCKETS = 256


@cute.jit
def load_rows(p, row_ptr: cute.Pointer, tile: Int32, rows: cute.Pointer, warp_sums: cute.Pointer):
    """Number of items of the tile. ``rows``: shared, three arrays of ROWS: items before the row's end, start, end."""
    thread, _, _ = cute.arch.thread_idx()
    row = tile * ROWS + thread
    start = Int32(0)
    end = Int32(0)
    if thread < ROWS and row < p.total_rows:
        start = cutlass.min(cutlass.max(row_ptr[row], 0), p.size)
        end = cutlass.min(cutlass.max(row_ptr[row + 1], start), p.size)
    items = (end - start + (Int32(1) << p.target_log2) - 1) >> p.target_log2
    before, total = block_exclusive_scan(items, warp_sums, WARPS)
    if thread < ROWS:
        rows[thread] = before + items
        rows[ROWS + thread] = start
        rows[2 * ROWS + thread] = end
    cute.arch.sync_threads()
    return cutlass.min(total, p.work_capacity)


@cute.jit
def find_item(p, rows: cute.Pointer, item: Int32):
    """(row within the tile, first entry within the row, number of entries, first entry) of an item of the tile."""
    row = lower_bound(rows, Int32(ROWS - 1), item + 1)
    before = Int32(0)
    if row > 0:
        before = rows[row - 1]
    first = (item - before) << p.target_log2
    start = rows[ROWS + row]
    count = cutlass.min(rows[2 * ROWS + row] - start - first, Int32(1) << p.target_log2)
    return row, first, count, start + first


@cute.jit
def bucket_of(p, token: Int32):
    """Bucket of an item's first token; a token from a caller's CSR can be any number."""
    return cutlass.min(cutlass.max(token, 0) >> p.bucket_shift, p.buckets - 1)


class ScheduleCount(Kernel):
    """Items a bucket for each tile: counts [head_kv, tiles, buckets]."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (3 * ROWS + WARPS + MAX_BUCKETS) * 4
        self.work_per_cta = 1  # work = head_kv * tiles, tiles = ceil(total_rows / 256)
        self.pdl = True
        self.params = {
            "row_ptr": Ptr(Int32),
            "q_indices": Ptr(Int32),
            "counts": Ptr(Int32),
            "size": Int32,
            "total_rows": Int32,
            "tiles": Int32,
            "target_log2": Int32,
            "bucket_shift": Int32,
            "buckets": Int32,
            "work_capacity": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        smem = cutlass.memory.SmemAllocator()
        rows = smem.allocate_array(Int32, 3 * ROWS)
        warp_sums = smem.allocate_array(Int32, WARPS)
        histogram = smem.allocate_array(Int32, MAX_BUCKETS)
        fill(histogram, p.buckets, 0, THREADS)
        row_ptr = at(p.row_ptr, head, p.total_rows + 1)
        q_indices = at(p.q_indices, head, p.size)
        items = load_rows(p, row_ptr, tile, rows, warp_sums)

        for item in range(thread, items, THREADS):
            _, _, _, entry = find_item(p, rows, item)
            cute.arch.atomic_add(histogram + bucket_of(p, q_indices[entry]), Int32(1))
        cute.arch.sync_threads()
        counts = at(at(p.counts, head, p.tiles * p.buckets), tile, p.buckets)
        for bucket in range(thread, p.buckets, THREADS):
            counts[bucket] = histogram[bucket]


class ScheduleFill(Kernel):
    """scheduler_metadata [capacity, 6] and work_count [1]; rows past work_count are 0, which is an empty item. Where
    ``head_flags`` [head_kv] is not null, walk_flags: a bit of each head, by its number.

    Shared memory: 32 KiB of counters (one a warp and bucket), 4 KiB for the tile's rows and the buckets' places."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (3 * ROWS + WARPS + MAX_BUCKETS + WARPS * MAX_BUCKETS) * 4
        self.work_per_cta = 1  # work = head_kv * tiles, tiles = ceil(total_rows / 256)
        self.pdl = True
        self.params = {
            "row_ptr": Ptr(Int32),
            "q_indices": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "counts": Ptr(Int32),
            "totals": Ptr(Int32),
            "scheduler_metadata": Ptr(Int32),
            "work_count": Ptr(Int32),
            "head_flags": Ptr(Int32),
            "walk_flags": Ptr(Int32),
            "size": Int32,
            "total_rows": Int32,
            "head_kv": Int32,
            "tiles": Int32,
            "target_log2": Int32,
            "bucket_shift": Int32,
            "buckets": Int32,
            "bits": Int32,
            "work_capacity": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = thread // WARP
        head, tile = head_and_tile(p.tiles)
        smem = cutlass.memory.SmemAllocator()
        rows = smem.allocate_array(Int32, 3 * ROWS)
        warp_sums = smem.allocate_array(Int32, WARPS)
        next_place = smem.allocate_array(Int32, MAX_BUCKETS)
        counters = smem.allocate_array(Int32, WARPS * MAX_BUCKETS)
        row_ptr = at(p.row_ptr, head, p.total_rows + 1)
        q_indices = at(p.q_indices, head, p.size)
        items = load_rows(p, row_ptr, tile, rows, warp_sums)

        # Where each bucket of this tile starts: the buckets of all heads before it, then the tiles before this one.
        counts = at(at(p.counts, head, p.tiles * p.buckets), tile, p.buckets)
        work = Int32(0)
        for first in range(0, p.head_kv * p.buckets, THREADS):
            index = first + thread
            count = Int32(0)
            if index < p.head_kv * p.buckets:
                count = p.totals[index]
            before, count_sum = block_exclusive_scan(count, warp_sums, WARPS)
            bucket = index - head * p.buckets
            if bucket >= 0 and bucket < p.buckets:
                next_place[bucket] = work + before + counts[bucket]
            work += count_sum
        work = cutlass.min(cutlass.max(work, 0), p.work_capacity)

        own = counters + warp * p.buckets
        for first in range(0, items, THREADS):
            fill(counters, p.buckets * WARPS, 0, THREADS)
            cute.arch.sync_threads()
            item = first + thread
            bucket = p.buckets - 1  # past the end: after every item of the last bucket, in the last round
            row = Int32(0)
            first_in_row = Int32(0)
            count = Int32(0)
            if item < items:
                row, first_in_row, count, entry = find_item(p, rows, item)
                bucket = bucket_of(p, q_indices[entry])
            rank = count_and_rank(bucket, p.bits, own)
            cute.arch.sync_threads()
            for b in range(thread, p.buckets, THREADS):
                place = next_place[b]
                for w in cutlass.range(WARPS, unroll=8):
                    counted = counters[w * p.buckets + b]
                    counters[w * p.buckets + b] = place
                    place += counted
                next_place[b] = place
            cute.arch.sync_threads()
            place = own[bucket] + rank
            if item < items and place >= 0 and place < p.work_capacity:
                row += tile * ROWS
                self.write(p, place, (head, row, first_in_row, count, p.row_sequence[row], p.row_block[row]))
            cute.arch.sync_threads()

        part = (p.work_capacity + p.head_kv * p.tiles - 1) // (p.head_kv * p.tiles)
        end = cutlass.min((cta + 1) * part, p.work_capacity)
        for place in range(cutlass.max(cta * part, work) + thread, end, THREADS):
            self.write(p, place, (0,) * METADATA_COLUMNS)
        if cta == 0 and thread == 0:
            p.work_count[0] = work
        if cta == 0 and warp == 0 and p.head_flags.toint() != 0:
            flags = Int32(0)
            for index in range(thread, p.head_kv, WARP):
                flags = flags | p.head_flags[index]
            flags = cute.arch.warp_redux_sync(flags, "or")
            if thread < WALK_FLAGS:
                p.walk_flags[thread] = flags >> thread & 1

    @cute.jit
    def write(self, p, place: Int32, columns):
        """One row of the metadata: a work item."""
        item = at(p.scheduler_metadata, place, Int32(METADATA_COLUMNS))
        for column in cutlass.range_constexpr(METADATA_COLUMNS):
            item[column] = Int32(columns[column])
