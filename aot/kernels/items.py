"""The stream of work items within a CTA: one warp publishes an item's words, the warps that work on it read them.

Items go through the stages of the blocks' ring: number i of the CTA's stream has stage i % 2, and its words are
``s.item[:, stage]``, the first of which is negative at the stream's end.
"""

import cutlass.cute as cute
from cutlass import Int32

KV_STAGES = 2


def stage_of(index: Int32) -> Int32:
    """Where number ``index`` of a stream has its place in a ring of two."""
    return index & 1


def phase_of(index: Int32) -> Int32:
    """The parity of how many had that place before: what a barrier's wait takes."""
    return index >> 1 & 1


@cute.jit
def claim(p) -> Int32:
    """The next unclaimed work item, known to lane 0 only; every CTA starts with the item of its own number."""
    ctas, _, _ = cute.arch.grid_dim()
    claimed = Int32(0)
    if cute.arch.lane_idx() == 0:
        claimed = ctas + cute.arch.atomic_add(p.work_counter, Int32(1))
    return claimed


@cute.jit
def wait(s, full: cute.Pointer, index: Int32) -> Int32:
    """The first word of item ``index``, once its barrier of ``full`` says that it is there."""
    cute.arch.mbarrier_wait(full + stage_of(index), phase_of(index))
    return s.item[0, stage_of(index)]


@cute.jit
def release(barrier: cute.Pointer, lane: Int32):
    """One warp: arrive once all its lanes are here."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)


def words(s, stage: Int32):
    """An item's words but the first: (first entry, KV head, key_limit, causal_shift); of a walk, its group first."""
    return tuple(s.item[i, stage] for i in range(1, 5))


@cute.jit
def finish(s, b, empty: cute.Pointer, index: Int32):
    """One warp: publish the end of the stream; ``empty``: of the places of items."""
    stage = stage_of(index)
    cute.arch.mbarrier_wait(empty + stage, phase_of(index) ^ 1)
    if cute.arch.lane_idx() == 0:
        s.item[0, stage] = -1
        cute.arch.mbarrier_arrive(b.item_full + stage)
        cute.arch.mbarrier_arrive(b.k_full + stage)
