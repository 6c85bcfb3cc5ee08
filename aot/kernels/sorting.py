"""Pieces of the sorting kernels: scans over a warp and a CTA, ranks within a warp, a search, head and tile of a CTA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

WARP = 32


@cute.jit
def head_and_tile(tiles: Int32):
    """Head and tile of this CTA in a grid of ``heads * tiles`` CTAs, tiles innermost."""
    cta, _, _ = cute.arch.block_idx()
    head = cta // tiles
    return head, cta - head * tiles


@cute.jit
def warp_inclusive_scan(value: Int32):
    """Sum of ``value`` over this lane and the lanes below it."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step)
        if lane >= (1 << step):
            value += below
    return value


@cute.jit
def block_exclusive_scan(value: Int32, warp_sums: cute.Pointer, warps: cutlass.Constexpr):
    """(sum of ``value`` over the threads below, sum over the CTA). ``warp_sums``: shared, ``warps`` int32."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.thread_idx()[0] // WARP
    inclusive = warp_inclusive_scan(value)
    if lane == WARP - 1:
        warp_sums[warp] = inclusive
    cute.arch.sync_threads()
    sums = Int32(0)
    if lane < warps:
        sums = warp_sums[lane]
    sums = warp_inclusive_scan(sums)
    total = cute.arch.shuffle_sync(sums, warps - 1)
    before = cute.arch.shuffle_sync(sums, cutlass.max(warp - 1, 0))
    exclusive = inclusive - value
    if warp > 0:
        exclusive += before
    cute.arch.sync_threads()  # warp_sums may be written again
    return exclusive, total


@cute.jit
def warp_peers(digit: Int32, bits: Int32):
    """Mask of the lanes with the same digit. One ballot a bit: ``match.any`` takes a round per distinct value."""
    peers = Int32(-1)
    for bit in range(bits):
        one = (digit >> bit) & 1
        votes = cute.arch.vote_ballot_sync(one != 0)
        peers = peers & (votes ^ (one - 1))
    return peers


@cute.jit
def count_and_rank(digit: Int32, bits: Int32, counters: cute.Pointer):
    """Rank of this lane's element among the warp's elements of equal digit, those counted before included.

    ``counters``: shared, one int32 a digit, private to the warp. Stable: elements are ranked in lane order."""
    peers = warp_peers(digit, bits)
    below = cute.arch.popc(Uint32(peers) & cute.arch.lanemask_lt()).to(Int32)
    counted = counters[digit]
    cute.arch.sync_warp()
    if below == 0:
        counters[digit] = counted + cute.arch.popc(Uint32(peers)).to(Int32)
    cute.arch.sync_warp()
    return counted + below


@cute.jit
def lower_bound(values: cute.Pointer, size: Int32, value: Int32):
    """Number of elements of the ascending ``values`` that are below ``value``."""
    low = Int32(0)
    high = size
    while low < high:
        middle = (low + high) >> 1
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def fill(array: cute.Pointer, size: Int32, value: Int32, threads: cutlass.Constexpr):
    """Set a shared array, with all threads of the CTA."""
    thread, _, _ = cute.arch.thread_idx()
    for i in range(thread, size, threads):
        array[i] = value


@cute.jit
def place_of_one(bits: Uint32, rank: Int32) -> Int32:
    """Where one number ``rank`` of a word stands, counted from 0 at the low end; 31 where it has no more ones."""
    place = Int32(0)
    for step in cutlass.range_constexpr(5):
        width = 16 >> step
        low = cute.arch.popc(bits & Uint32((1 << width) - 1)).to(Int32)
        if low <= rank:
            rank -= low
            bits = bits >> Uint32(width)
            place += width
    return place
