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
from aot.kernels.sorting import WARP, at, block_exclusive_scan, count_and_rank, fill, head_and_tile, lower_bound

ROWS = 256
THREADS = 1024
WARPS = THREADS // WARP
MAX_BUCKETS = 256


@cute.jit
def load_rows(
    row_ptr: cute.Pointer,
    rows: cute.Pointer,
    warp_sums: cute.Pointer,
    first_row: Int32,
    size: Int32,
    total_rows: Int32,
    target_log2: Int32,
    capacity: Int32,
):
    """Number of items of the tile. ``rows``: shared, three arrays of ROWS: items before the row's end, start, end."""
    thread, _, _ = cute.arch.thread_idx()
    row = first_row + thread
    start = Int32(0)
    end = Int32(0)
    if thread < ROWS and row < total_rows:
        start = cutlass.min(cutlass.max(row_ptr[row], 0), size)
        end = cutlass.min(cutlass.max(row_ptr[row + 1], start), size)
    items = (end - start + (Int32(1) << target_log2) - 1) >> target_log2
    before, total = block_exclusive_scan(items, warp_sums, WARPS)
    if thread < ROWS:
        rows[thread] = before + items
        rows[ROWS + thread] = start
        rows[2 * ROWS + thread] = end
    cute.arch.sync_threads()
    return cutlass.min(total, capacity)


@cute.jit
def find_item(rows: cute.Pointer, item: Int32, target_log2: Int32):
    """(row within the tile, first entry within the row, number of entries, first entry) of an item of the tile."""
    row = lower_bound(rows, Int32(ROWS - 1), item + 1)
    before = Int32(0)
    if row > 0:
        before = rows[row - 1]
    first = (item - before) << target_log2
    start = rows[ROWS + row]
    count = cutlass.min(rows[2 * ROWS + row] - start - first, Int32(1) << target_log2)
    return row, first, count, start + first


@cute.jit
def bucket_of(token: Int32, bucket_shift: Int32, buckets: Int32):
    """Bucket of an item's first token; a token from a caller's CSR can be any number."""
    return cutlass.min(cutlass.max(token, 0) >> bucket_shift, buckets - 1)


class ScheduleCount(Kernel):
    """Items a bucket for each tile: counts [head_kv, tiles, buckets]."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (3 * ROWS + WARPS + MAX_BUCKETS) * 4
        self.work_per_cta = 1  # work = head_kv * tiles, tiles = ceil(total_rows / 256)
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
            "capacity": Int32,
        }

    @cute.kernel
    def kernel(
        self,
        row_ptr: cute.Pointer,
        q_indices: cute.Pointer,
        counts: cute.Pointer,
        size: Int32,
        total_rows: Int32,
        tiles: Int32,
        target_log2: Int32,
        bucket_shift: Int32,
        buckets: Int32,
        capacity: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(tiles)
        smem = cutlass.memory.SmemAllocator()
        rows = smem.allocate_array(Int32, 3 * ROWS)
        warp_sums = smem.allocate_array(Int32, WARPS)
        histogram = smem.allocate_array(Int32, MAX_BUCKETS)
        fill(histogram, buckets, 0, THREADS)
        row_ptr = at(row_ptr, head, total_rows + 1)
        q_indices = at(q_indices, head, size)
        items = load_rows(row_ptr, rows, warp_sums, tile * ROWS, size, total_rows, target_log2, capacity)

        for item in range(thread, items, THREADS):
            _, _, _, entry = find_item(rows, item, target_log2)
            cute.arch.atomic_add(histogram + bucket_of(q_indices[entry], bucket_shift, buckets), Int32(1))
        cute.arch.sync_threads()
        counts = at(at(counts, head, tiles * buckets), tile, buckets)
        for bucket in range(thread, buckets, THREADS):
            counts[bucket] = histogram[bucket]


class ScheduleFill(Kernel):
    """scheduler_metadata [capacity, 6] and work_count [1]; rows past work_count are 0, which is an empty item.

    Shared memory: 32 KiB of counters (one a warp and bucket), 4 KiB for the tile's rows and the buckets' places."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = (3 * ROWS + WARPS + MAX_BUCKETS + WARPS * MAX_BUCKETS) * 4
        self.work_per_cta = 1  # work = head_kv * tiles, tiles = ceil(total_rows / 256)
        self.params = {
            "row_ptr": Ptr(Int32),
            "q_indices": Ptr(Int32),
            "row_sequence": Ptr(Int32),
            "row_block": Ptr(Int32),
            "counts": Ptr(Int32),
            "totals": Ptr(Int32),
            "scheduler_metadata": Ptr(Int32),
            "work_count": Ptr(Int32),
            "size": Int32,
            "total_rows": Int32,
            "head_kv": Int32,
            "tiles": Int32,
            "target_log2": Int32,
            "bucket_shift": Int32,
            "buckets": Int32,
            "bits": Int32,
            "capacity": Int32,
        }

    @cute.kernel
    def kernel(
        self,
        row_ptr: cute.Pointer,
        q_indices: cute.Pointer,
        row_sequence: cute.Pointer,
        row_block: cute.Pointer,
        counts: cute.Pointer,
        totals: cute.Pointer,
        scheduler_metadata: cute.Pointer,
        work_count: cute.Pointer,
        size: Int32,
        total_rows: Int32,
        head_kv: Int32,
        tiles: Int32,
        target_log2: Int32,
        bucket_shift: Int32,
        buckets: Int32,
        bits: Int32,
        capacity: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = thread // WARP
        head, tile = head_and_tile(tiles)
        smem = cutlass.memory.SmemAllocator()
        rows = smem.allocate_array(Int32, 3 * ROWS)
        warp_sums = smem.allocate_array(Int32, WARPS)
        next_place = smem.allocate_array(Int32, MAX_BUCKETS)
        counters = smem.allocate_array(Int32, WARPS * MAX_BUCKETS)
        row_ptr = at(row_ptr, head, total_rows + 1)
        q_indices = at(q_indices, head, size)
        items = load_rows(row_ptr, rows, warp_sums, tile * ROWS, size, total_rows, target_log2, capacity)

        # Where each bucket of this tile starts: the buckets of all heads before it, then the tiles before this one.
        counts = at(at(counts, head, tiles * buckets), tile, buckets)
        work = Int32(0)
        for first in range(0, head_kv * buckets, THREADS):
            index = first + thread
            count = Int32(0)
            if index < head_kv * buckets:
                count = totals[index]
            before, count_sum = block_exclusive_scan(count, warp_sums, WARPS)
            bucket = index - head * buckets
            if bucket >= 0 and bucket < buckets:
                next_place[bucket] = work + before + counts[bucket]
            work += count_sum
        work = cutlass.min(cutlass.max(work, 0), capacity)

        own = counters + warp * buckets
        for first in range(0, items, THREADS):
            fill(counters, buckets * WARPS, 0, THREADS)
            cute.arch.sync_threads()
            item = first + thread
            bucket = buckets - 1  # past the end: after every item of the last bucket, in the last round
            row = Int32(0)
            first_in_row = Int32(0)
            count = Int32(0)
            if item < items:
                row, first_in_row, count, entry = find_item(rows, item, target_log2)
                bucket = bucket_of(q_indices[entry], bucket_shift, buckets)
            rank = count_and_rank(bucket, bits, own)
            cute.arch.sync_threads()
            for b in range(thread, buckets, THREADS):
                place = next_place[b]
                for w in cutlass.range(WARPS, unroll=8):
                    counted = counters[w * buckets + b]
                    counters[w * buckets + b] = place
                    place += counted
                next_place[b] = place
            cute.arch.sync_threads()
            place = own[bucket] + rank
            if item < items and place >= 0 and place < capacity:
                row += tile * ROWS
                self.write(scheduler_metadata, place, head, row, first_in_row, count, row_sequence[row], row_block[row])
            cute.arch.sync_threads()

        part = (capacity + head_kv * tiles - 1) // (head_kv * tiles)
        end = cutlass.min((cta + 1) * part, capacity)
        for place in range(cutlass.max(cta * part, work) + thread, end, THREADS):
            self.write(scheduler_metadata, place, 0, 0, 0, 0, 0, 0)
        if cta == 0 and thread == 0:
            work_count[0] = work

    @cute.jit
    def write(self, scheduler_metadata: cute.Pointer, place: Int32, head, row, first, count, sequence, block):
        """One work item."""
        item = at(scheduler_metadata, place, Int32(6))
        item[0] = Int32(head)
        item[1] = Int32(row)
        item[2] = Int32(first)
        item[3] = Int32(count)
        item[4] = Int32(sequence)
        item[5] = Int32(block)
