"""One pass of a stable radix sort by ``bits`` bits (at most 11) from bit ``shift`` of a key, for each head on its own.

Three kernels: every tile of 4096 elements counts its digits; a scan over the tiles turns counts into positions within
a digit; every tile ranks its elements and scatters them. The positions depend on the input order alone, so the result
is the same on every run. Arrays are int32 ``[heads, size]``, counts ``[heads, tiles, 2^bits]``, totals
``[heads, 2^bits]``. A pass reads and writes 8 bytes an entry, all else is small: it runs near the memory's speed.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from aot.kernel import Kernel, Ptr
from aot.kernels.memory import at
from aot.kernels.msa.partials import TOKEN_BITS, TOKEN_MASK
from aot.kernels.msa.work import WALKED
from aot.kernels.sorting import WARP, block_exclusive_scan, count_and_rank, fill, head_and_tile
from aot.kernels.turn import take_turn

TILE = 4096
THREADS = 256
MAX_DIGITS = 2048


class RadixCount(Kernel):
    """Digits of each tile. One CTA a tile, counting in shared memory; the order of the additions does not show."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.smem_bytes = MAX_DIGITS * 4
        self.work_per_cta = 1  # work = heads * tiles
        self.pdl = True
        self.params = {
            "keys": Ptr(Int32),
            "counts": Ptr(Int32),
            "size": Int32,
            "tiles": Int32,
            "shift": Int32,
            "bits": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        head, tile = head_and_tile(p.tiles)
        histogram = cutlass.memory.SmemAllocator().allocate_array(Int32, MAX_DIGITS)
        digits = Int32(1) << p.bits
        fill(histogram, digits, 0, THREADS)
        cute.arch.sync_threads()

        keys = at(p.keys, head, p.size)
        for k in cutlass.range(TILE // THREADS, unroll=8):
            i = tile * TILE + k * THREADS + thread
            if i < p.size:
                cute.arch.atomic_add(histogram + ((keys[i] >> p.shift) & (digits - 1)), Int32(1))
        cute.arch.sync_threads()

        counts = at(at(p.counts, head, p.tiles * digits), tile, digits)
        for digit in range(thread, digits, THREADS):
            counts[digit] = histogram[digit]


class RadixScan(Kernel):
    """In place, counts of a digit -> sum over the tiles before; totals = sum over all tiles.

    One CTA a head and 32 digits, a lane each; 32 warps share the tiles: each sums its part, then writes it."""

    def __init__(self) -> None:
        self.threads = 1024
        self.warps = self.threads // WARP
        self.smem_bytes = self.threads * 4
        self.work_per_cta = 1  # work = heads * ceil(digits / 32)
        self.pdl = True
        self.params = {"counts": Ptr(Int32), "totals": Ptr(Int32), "tiles": Int32, "digits": Int32}

    @cute.kernel
    def kernel(self, p):
        take_turn()
        lane = cute.arch.lane_idx()
        warp = cute.arch.thread_idx()[0] // WARP
        head, group = head_and_tile((p.digits + WARP - 1) // WARP)
        sums = cutlass.memory.SmemAllocator().allocate_array(Int32, self.threads)
        digit = group * WARP + lane
        counts = at(p.counts, head, p.tiles * p.digits)
        part = (p.tiles + self.warps - 1) // self.warps
        first = cutlass.min(warp * part, p.tiles)
        last = cutlass.min(first + part, p.tiles)

        own = Int32(0)
        if digit < p.digits:
            for tile in cutlass.range(first, last, unroll=8):
                own += counts[tile * p.digits + digit]
        sums[warp * WARP + lane] = own
        cute.arch.sync_threads()

        before = Int32(0)
        for w in range(warp):
            before += sums[w * WARP + lane]
        if digit < p.digits:
            if warp == self.warps - 1:
                at(p.totals, head, p.digits)[digit] = before + own
            for tile in cutlass.range(first, last, unroll=8):
                count = counts[tile * p.digits + digit]
                counts[tile * p.digits + digit] = before
                before += count


class RadixScatter(Kernel):
    """Move each element to its place. One CTA a tile, a warp 512 consecutive elements, 32 at a time.

    A warp ranks its elements with ballots against its own digit counters; the counters of the 8 warps, scanned, give
    the place within the tile. The tile is put in order in shared memory first: equal digits then go out coalesced.
    Shared memory: 64 KiB of counters, reused for the ordered tile, and 16 KiB of offsets a digit.
    ``indices_out``, where not null, receives the low 24 bits of each value (-1 stays -1): the query tokens of a CSR.
    Values then lose their mark WALKED, and ``rest_out``, where not null, receives -1 for those that had it, else the
    same as ``indices_out``. ``entries_out`` [heads, size / topk, topk], where not null, is the way back: at (token,
    slot) of each value but -1 its place and mark. It is written in the order of the input, where after CsrKeys the
    slots of a token are side by side."""

    def __init__(self) -> None:
        self.threads = THREADS
        self.warps = THREADS // WARP
        self.per_thread = TILE // THREADS
        self.smem_bytes = (self.warps * MAX_DIGITS + 2 * MAX_DIGITS + self.warps) * 4
        self.work_per_cta = 1  # work = heads * tiles
        self.pdl = True
        self.params = {
            "keys_in": Ptr(Int32),
            "values_in": Ptr(Int32),
            "counts": Ptr(Int32),
            "totals": Ptr(Int32),
            "keys_out": Ptr(Int32),
            "values_out": Ptr(Int32),
            "indices_out": Ptr(Int32),
            "entries_out": Ptr(Int32),
            "rest_out": Ptr(Int32),
            "size": Int32,
            "topk": Int32,
            "tiles": Int32,
            "shift": Int32,
            "bits": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        take_turn()
        thread, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = thread // WARP
        head, tile = head_and_tile(p.tiles)
        digits = Int32(1) << p.bits
        smem = cutlass.memory.SmemAllocator()
        counters = smem.allocate_array(Int32, self.warps * MAX_DIGITS, byte_alignment=16)
        tile_start = smem.allocate_array(Int32, MAX_DIGITS)  # first place of a digit within the ordered tile
        to_global = smem.allocate_array(Int32, MAX_DIGITS)  # add to a place within the tile: place within the head
        warp_sums = smem.allocate_array(Int32, self.warps)
        fill(counters, digits * self.warps, 0, THREADS)

        keys_in = at(p.keys_in, head, p.size)
        values_in = at(p.values_in, head, p.size)
        keys = cute.make_rmem_tensor(self.per_thread, Int32)
        values = cute.make_rmem_tensor(self.per_thread, Int32)
        ranks = cute.make_rmem_tensor(self.per_thread, Int32)
        for k in cutlass.range_constexpr(self.per_thread):
            i = tile * TILE + warp * (TILE // self.warps) + k * WARP + lane
            keys[k] = Int32(-1)  # past the end: all bits set, so the last of the last digit
            values[k] = Int32(-1)
            if i < p.size:
                keys[k] = keys_in[i]
                values[k] = values_in[i]
        cute.arch.sync_threads()

        own = counters + warp * digits
        for k in cutlass.range_constexpr(self.per_thread):
            ranks[k] = count_and_rank((keys[k] >> p.shift) & (digits - 1), p.bits, own)
        cute.arch.sync_threads()

        counts = at(at(p.counts, head, p.tiles * digits), tile, digits)
        totals = at(p.totals, head, digits)
        in_tile = Int32(0)
        in_head = Int32(0)
        for first in range(0, digits, THREADS):
            digit = first + thread
            count = Int32(0)
            total = Int32(0)
            before = Int32(0)
            if digit < digits:
                for w in cutlass.range_constexpr(self.warps):
                    counted = counters[w * digits + digit]
                    counters[w * digits + digit] = count
                    count += counted
                total = totals[digit]
                before = counts[digit]
            start, count_sum = block_exclusive_scan(count, warp_sums, self.warps)
            base, total_sum = block_exclusive_scan(total, warp_sums, self.warps)
            if digit < digits:
                tile_start[digit] = in_tile + start
                to_global[digit] = in_head + base + before - in_tile - start
            in_tile += count_sum
            in_head += total_sum
        cute.arch.sync_threads()

        write_entries = p.entries_out.toint() != 0
        entries_out = at(p.entries_out, head, p.size)
        for k in cutlass.range_constexpr(self.per_thread):
            digit = (keys[k] >> p.shift) & (digits - 1)
            ranks[k] += tile_start[digit] + own[digit]
            if write_entries and values[k] >= 0:
                mark = values[k] & WALKED
                slot = (values[k] ^ mark) >> TOKEN_BITS
                entries_out[(values[k] & TOKEN_MASK) * p.topk + slot] = (to_global[digit] + ranks[k]) | mark
        cute.arch.sync_threads()  # the counters have been read: their memory takes the ordered tile
        for k in cutlass.range_constexpr(self.per_thread):
            counters[ranks[k]] = keys[k]
            counters[TILE + ranks[k]] = values[k]
        cute.arch.sync_threads()

        keys_out = at(p.keys_out, head, p.size)
        values_out = at(p.values_out, head, p.size)
        write_indices = p.indices_out.toint() != 0
        indices_out = at(p.indices_out, head, p.size)
        write_rest = p.rest_out.toint() != 0
        rest_out = at(p.rest_out, head, p.size)
        valid = cutlass.min(p.size - tile * TILE, TILE)
        for k in cutlass.range_constexpr(self.per_thread):
            i = k * THREADS + thread
            if i < valid:
                key = counters[i]
                value = counters[TILE + i]
                place = to_global[(key >> p.shift) & (digits - 1)] + i
                keys_out[place] = key
                if write_indices:
                    token = Int32(-1)
                    left = Int32(-1)
                    if value >= 0:
                        token = value & TOKEN_MASK
                        if value & WALKED == 0:
                            left = token
                        value = value & ~WALKED
                    indices_out[place] = token
                    if write_rest:
                        rest_out[place] = left
                values_out[place] = value
