"""The other traversal of the Blackwell forward: where neighbouring tokens share most of their blocks, walk their union.

A work item is a KV head and a group of 256 query rows, two tiles of 128, slots 0 and 1. K and V of every block that one
of the group's tokens selects stream past both; a token's rows see a block only if its membership bit is set. The
softmax is online, O stays in tensor memory, and the finished rows go to the output, or one partial result for each.
Roles are those of sm100_prefill.py, with as many registers: warp 0 claims groups and loads K and V, warp 1 issues the
products, warps 2 and 3 load the queries of slots 0 and 1, a softmax warpgroup for each of these, an epilogue warpgroup.
Shared memory: K and V of two blocks each, and three Q tiles, the last where the other traversal stages its rows.
Tensor memory: S (128 columns) of one tile at a time, P of both (2 x 64), O of both (2 x 128). The tensor cores take
turns, S0 of block j, O0 of block j - 1, S1 of j, O1 of j - 1: a softmax has the time of four products, a step, and S is
free again once it is in registers. A row's reference is its maximum when that last passed the one before by more than
2^8; only then is its O rescaled, by the thread that has it, which else never reads O.
Cycles of a step: tensor 2048; exp 1536 (32768, a quarter of them by polynomial, 16 a cycle); shared memory 2048 (Q and
K for S 2 x 512, V 2 x 256, K and V in 512); tensor memory 384 (S out, P in); issue slots: docs/msa.md.
A row that sees nothing of a block does not take part in O's product, whatever bytes stand there: its lane is disabled.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.experimental import primitives

from aot.kernels import items, softmax
from aot.kernels.items import KV_STAGES, phase_of, release, stage_of
from aot.kernels.mask import BLK_KV, mask_row
from aot.kernels.memory import vector
from aot.kernels.msa import partials, walk, work
from aot.kernels.msa.params import OUT
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.msa.walk import FIRST, LAST, PARTIAL
from aot.kernels.sm100_mma import columns_of, issue, load_columns, tensor_memory

ROWS = 256  # query rows of a group
TILE_ROWS = 128
SLOTS = ROWS // TILE_ROWS
WARPS = 4  # of a warpgroup
Q_STAGES = SLOTS + 1
S_COLUMN = 0
P_COLUMN = BLK_KV
O_COLUMN = 256
PART = 32  # columns of a row that move between tensor memory and registers at a time
POLYNOMIAL_SHARE = 4  # every fourth pair of exponentials
FAR = 8.0  # in powers of two: how far a maximum may pass its row's reference


class Barriers(NamedTuple):
    """One a slot (s, p, o), a stage of the ring of Q tiles (q) or of blocks (item, k, v, kv); of ``v_tail`` one.

    ``o_full`` is of every block's product, ``o_last`` of a group's last with what softmax leaves beside it;
    ``kv_empty`` is of an item's words and K."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    s_full: cute.Pointer
    s_empty: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    o_last: cute.Pointer
    o_empty: cute.Pointer
    item_full: cute.Pointer
    k_full: cute.Pointer
    v_full: cute.Pointer
    kv_empty: cute.Pointer
    v_empty: cute.Pointer
    v_tail: cute.Pointer


BARRIERS = 2 * Q_STAGES + 6 * SLOTS + 5 * KV_STAGES + 1


class WalkRoles(walk.Walk):
    """The warp roles of PrefillSm100 when it walks; ``self`` is the kernel."""

    def allocate_walk_barriers(self, smem) -> Barriers:
        return Barriers(
            q_full=smem.allocate_array(Int64, Q_STAGES),
            q_empty=smem.allocate_array(Int64, Q_STAGES),
            s_full=smem.allocate_array(Int64, SLOTS),
            s_empty=smem.allocate_array(Int64, SLOTS),
            p_full=smem.allocate_array(Int64, SLOTS),
            o_full=smem.allocate_array(Int64, SLOTS),
            o_last=smem.allocate_array(Int64, SLOTS),
            o_empty=smem.allocate_array(Int64, SLOTS),
            item_full=smem.allocate_array(Int64, KV_STAGES),
            k_full=smem.allocate_array(Int64, KV_STAGES),
            v_full=smem.allocate_array(Int64, KV_STAGES),
            kv_empty=smem.allocate_array(Int64, KV_STAGES),
            v_empty=smem.allocate_array(Int64, KV_STAGES),
            v_tail=smem.allocate_array(Int64, 1),
        )

    @cute.jit
    def init_walk_barriers(self, b, readers: cutlass.Constexpr[int]):
        """One thread; ``readers``: the warps that read an item's words."""
        for stage in cutlass.range_constexpr(Q_STAGES):
            cute.arch.mbarrier_init(b.q_full + stage, min(self.tokens, 32))  # the lanes that fetch
            cute.arch.mbarrier_init(b.q_empty + stage, 1)
        for slot in cutlass.range_constexpr(SLOTS):
            cute.arch.mbarrier_init(b.s_full + slot, 1)
            cute.arch.mbarrier_init(b.s_empty + slot, WARPS)
            cute.arch.mbarrier_init(b.p_full + slot, WARPS)
            cute.arch.mbarrier_init(b.o_full + slot, 1 + 1)  # the product, and the warp that reads ``unseen``
            cute.arch.mbarrier_init(b.o_last + slot, 1 + WARPS)
            cute.arch.mbarrier_init(b.o_empty + slot, WARPS)
        for stage in cutlass.range_constexpr(KV_STAGES):
            cute.arch.mbarrier_init(b.item_full + stage, 1)
            cute.arch.mbarrier_init(b.k_full + stage, 1)
            cute.arch.mbarrier_init(b.v_full + stage, 1)
            cute.arch.mbarrier_init(b.kv_empty + stage, readers + 1)  # and the products
            cute.arch.mbarrier_init(b.v_empty + stage, 1)
        cute.arch.mbarrier_init(b.v_tail, 1)

    def tile_place(self, s, q_stage: Int32) -> cute.Pointer:
        """Where a stage of the ring of Q tiles starts in shared memory."""
        return s.q + cute.assume(q_stage * (TILE_ROWS * HEAD_DIM), divby=TILE_ROWS * HEAD_DIM)

    def ring_of_queries(self, q_index: Int32):
        """(stage, phase) of a tile of the CTA's stream."""
        return q_index % Q_STAGES, q_index // Q_STAGES % 2

    @cute.jit
    def walk_multiply(self, base, s, b):
        """One warp: for each block S = Q K^T of both tiles, and after each of these O += P V of the block before."""
        lane = cute.arch.lane_idx()
        q_index = Int32(0)
        kv_index = Int32(0)
        before = Int32(0)  # flags of the block before
        flags = items.wait(s, b.k_full, kv_index)
        while flags >= 0 or kv_index > 0:
            stage = stage_of(kv_index)
            if flags >= 0:
                release(b.kv_empty + stage, lane)
            for slot in cutlass.range(SLOTS, unroll=1):
                if flags >= 0:
                    q_stage, q_phase = self.ring_of_queries(q_index + slot)
                    if flags & FIRST != 0:
                        cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
                    # The other tile's S, which was there last, is in registers.
                    cute.arch.mbarrier_wait(b.s_empty + (slot ^ 1), (kv_index + slot + 1) & 1)
                    self.walk_score(base, s, b, slot, stage, q_stage, flags)
                if kv_index > 0:
                    self.walk_accumulate(base, s, b, slot, kv_index - 1, before)
            if flags >= 0:
                if flags & LAST != 0:
                    q_index += SLOTS
                kv_index += 1
                before = flags
                flags = items.wait(s, b.k_full, kv_index)
            else:
                kv_index = Int32(0)

    @cute.jit
    def walk_score(self, base, s, b, slot, stage, q_stage, flags):
        """One warp: S = Q K^T of the tile in a stage of the ring."""
        operands, shape = self.score_operands(s, q_stage, stage)
        target = primitives.make_tmem_ptr(base + S_COLUMN, Float32)
        primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
        with cute.arch.elect_one():
            issue(target, operands, shape)
            primitives.tcgen05_commit(b.s_full + slot)
            if flags & LAST != 0:
                primitives.tcgen05_commit(b.q_empty + q_stage)
            if slot == SLOTS - 1:
                primitives.tcgen05_commit(b.kv_empty + stage)

    @cute.jit
    def walk_accumulate(self, base, s, b, slot, kv_index, flags):
        """One warp: O += P V of a tile, but of no row that sees nothing of the block."""
        stage = stage_of(kv_index)
        cute.arch.mbarrier_wait(b.v_full + stage, phase_of(kv_index))
        cute.arch.mbarrier_wait(b.p_full + slot, kv_index & 1)
        kept = cute.make_rmem_tensor(WARPS, Int32)
        for i in cutlass.range_constexpr(WARPS):
            kept[i] = s.unseen[i, slot]
        release(b.o_full + slot, cute.arch.lane_idx())  # a commit says nothing of what was read
        some_kept = (kept[0] | kept[1] | kept[2] | kept[3]) != 0
        target = primitives.make_tmem_ptr(base + O_COLUMN + slot * HEAD_DIM, Float32)
        weights = base + P_COLUMN + slot * self.p_columns
        accumulate = flags & FIRST == 0
        primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
        with cute.arch.elect_one():
            if some_kept:
                operands, shape = self.accumulate_operands(s, weights, stage)
                issue(target, operands, shape, accumulate, kept.load())
            else:
                operands, shape = self.accumulate_operands(s, weights, stage)
                issue(target, operands, shape, accumulate)
            primitives.tcgen05_commit(b.o_full + slot)
            if flags & LAST != 0:
                primitives.tcgen05_commit(b.o_last + slot)
            if slot == SLOTS - 1:
                primitives.tcgen05_commit(b.v_empty + stage)

    @cute.jit
    def walk_softmax(self, thread, base, s, b, p):
        """A softmax warpgroup: the online softmax of the tiles of a slot; a thread has a row."""
        scale_log2 = softmax.scale_log2(p)
        slot = cute.arch.make_warp_uniform(thread >> 7)
        row = thread & (TILE_ROWS - 1)
        warp = cute.arch.make_warp_uniform(row >> 5)
        lane = cute.arch.lane_idx()
        member = slot * self.tokens + (row >> (self.g.bit_length() - 1))
        reference = Float32(0.0)  # of the row's exponentials
        total = Float32(0.0)  # of them: 0 until the row has seen a key
        total_temperature = Float32(0.0)  # the same at the temperature
        groups = Int32(0)
        kv_index = Int32(0)
        flags = items.wait(s, b.item_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            group, head, key_limit, causal_shift = items.words(s, stage)
            token = group * self.walk_tokens + member
            visible = self.walk_visible(s, stage, member, token, key_limit, causal_shift)
            release(b.kv_empty + stage, lane)
            if flags & FIRST != 0:
                reference = Float32(0.0)
                total = Float32(0.0)
                total_temperature = Float32(0.0)

            scores = cute.make_rmem_tensor(BLK_KV, Float32)
            cute.arch.mbarrier_wait(b.s_full + slot, kv_index & 1)
            primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
            parts = tuple(load_columns(base, warp, S_COLUMN + column, PART) for column in range(0, BLK_KV, PART))
            primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
            primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
            release(b.s_empty + slot, lane)
            for part in cutlass.range_constexpr(BLK_KV // PART):
                for i in cutlass.range_constexpr(PART):
                    scores[part * PART + i] = parts[part][i]
            mask_row(scores, visible)

            maximum = softmax.row_maximum(scores, nan=True)
            moved = (maximum - reference) * scale_log2
            far = total != 0.0 and not moved <= FAR  # a NaN is far, and stays
            shrink = Float32(1.0)
            if far:
                shrink = cute.math.exp2(-moved, fastmath=True)
            if const_expr(self.temperature):
                scale = scale_log2 / p.lse_temperature_scale
                if far:
                    total_temperature *= cute.math.exp2((reference - maximum) * scale, fastmath=True)
            if far or total == 0.0:
                reference = softmax.finite(maximum)
            if const_expr(self.temperature):
                total_temperature += softmax.row_sum_exp2(
                    scores, reference, scale_log2 / p.lse_temperature_scale, keep=False
                )
            total *= shrink

            # The block before is in O, and P is free.
            cute.arch.mbarrier_wait(b.o_full + slot, (kv_index & 1) ^ 1)
            if flags & FIRST != 0:
                cute.arch.mbarrier_wait(b.o_empty + slot, (groups & 1) ^ 1)
            primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
            unseen = cute.arch.vote_ballot_sync(visible <= 0)
            if lane == 0:
                s.unseen[warp, slot] = unseen
            if flags & FIRST != 0:
                if unseen != 0:
                    self.walk_clear(base, warp, slot)
            elif cute.arch.vote_any_sync(far):
                self.walk_rescale(base, warp, slot, shrink)
            shifted = reference
            for part in cutlass.range_constexpr(BLK_KV // PART):
                values = cute.make_tensor(scores.iterator + part * PART, cute.make_layout(PART))
                added = softmax.row_sum_exp2(values, shifted, scale_log2, keep=True, share=POLYNOMIAL_SHARE)
                total += added
                # Each part waits for the sum of the one before: mixed, they would run out of registers.
                shifted = added * 0.0 + reference
                place = P_COLUMN + slot * self.p_columns + part * columns_of(PART, self.pv)
                primitives.tcgen05_st("32x32b", tensor_memory(base, warp, place, Int32), values.load().to(self.pv))
            primitives.tcgen05_wait(primitives.Tcgen05Wait.STORE)
            primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
            release(b.p_full + slot, lane)
            if flags & LAST != 0:
                s.sums[row, slot] = total
                release(b.o_last + slot, lane)
                if token < p.total_q:
                    self.walk_store_lse(flags, token, head, row & (self.g - 1), reference, total, total_temperature, p)
                groups += 1
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_clear(self, base, warp, slot):
        """One warp: O is 0 in its rows."""
        zeros = cute.make_rmem_tensor(PART, Float32)
        zeros.fill(0.0)
        for column in cutlass.range_constexpr(0, HEAD_DIM, PART):
            place = O_COLUMN + slot * HEAD_DIM + column
            primitives.tcgen05_st("32x32b", tensor_memory(base, warp, place, Float32), zeros.load())

    @cute.jit
    def walk_rescale(self, base, warp, slot, factor):
        """One warp: multiply its rows of O, each by the factor of its thread, in steps that leave the scores be."""
        for column in cutlass.range(0, HEAD_DIM, PART // 2, unroll=1):
            place = O_COLUMN + slot * HEAD_DIM + column
            values = load_columns(base, warp, place, PART // 2)
            primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
            scaled = cute.make_rmem_tensor(PART // 2, Float32)
            for i in cutlass.range_constexpr(PART // 2):
                scaled[i] = values[i] * factor
            primitives.tcgen05_st("32x32b", tensor_memory(base, warp, place, Float32), scaled.load())

    @cute.jit
    def walk_store_lse(self, flags, token, head, group_head, reference, total, total_temperature, p):
        """Write a row's logsumexp, for good or beside its partial result."""
        scale_log2 = softmax.scale_log2(p)
        lse = softmax.log_sum_exp(reference * scale_log2, total)
        index = self.walk_partial(token, head, group_head, p)
        offset = Int64(token) * p.lse_stride_token + (head * self.g + group_head) * p.lse_stride_head
        if flags & PARTIAL != 0:
            vector(p.partial_lse)[index] = lse
        elif p.lse.toint() != 0:
            vector(p.lse)[offset] = lse
        if const_expr(self.temperature):
            scale = scale_log2 / p.lse_temperature_scale
            lse = softmax.log_sum_exp(reference * scale, total_temperature)
            if flags & PARTIAL != 0:
                vector(p.partial_lse_temperature)[index] = lse
            else:
                vector(p.lse_temperature)[offset] = lse

    def walk_partial(self, token, head, group_head, p) -> Int64:
        """The row of partial_out that a walk leaves of a token: after the partial results of its head."""
        entry = Int64(head) * p.head_partials + (work.entries_of_head(p) + token)
        return partials.row_index(entry, group_head, self.g)

    @cute.jit
    def walk_epilogue(self, row, base, s, b, p):
        """The epilogue warpgroup: normalise the O of both tiles of a group and write it; a thread has a row."""
        warp = cute.arch.make_warp_uniform(row >> 5)
        lane = cute.arch.lane_idx()
        group_head = row & (self.g - 1)
        groups = Int32(0)
        kv_index = Int32(0)
        flags = items.wait(s, b.item_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            group, head = s.item[1, stage], s.item[2, stage]
            release(b.kv_empty + stage, lane)
            if flags & LAST != 0:
                for slot in cutlass.range(SLOTS, unroll=1):
                    token = group * self.walk_tokens + slot * self.tokens + (row >> (self.g.bit_length() - 1))
                    cute.arch.mbarrier_wait(b.o_last + slot, groups & 1)
                    inverse = softmax.reciprocal(s.sums[row, slot])
                    primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
                    column = O_COLUMN + slot * HEAD_DIM
                    exists = token < p.total_q
                    if flags & PARTIAL != 0:
                        index = self.walk_partial(token, head, group_head, p)
                        self.walk_store_partial(base, warp, column, inverse, exists, index, p)
                    else:
                        start = Int64(token) * p.out_stride_token + (head * self.g + group_head) * p.out_stride_head
                        self.walk_store(base, warp, column, inverse, exists, start, p)
                    primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
                    release(b.o_empty + slot, lane)
                groups += 1
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_store(self, base, warp, column, inverse, exists, start, p):
        """One warp: write its rows of O from a column on, each to where it starts in ``out``."""
        elements = partials.chunk_elements(OUT)
        for first in cutlass.range(0, HEAD_DIM, PART, unroll=1):
            values = load_columns(base, warp, column + first, PART)
            primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
            for i in cutlass.range_constexpr(0, PART, elements):
                chunk = cute.make_rmem_tensor(elements, OUT)
                for j in cutlass.range_constexpr(elements):
                    chunk[j] = (values[i + j] * inverse).to(OUT)
                target = p.out + cute.assume(start + (first + i), divby=elements)
                if exists:
                    cute.autovec_copy(chunk, cute.make_tensor(target, cute.make_layout(elements)))

    @cute.jit
    def walk_store_partial(self, base, warp, column, inverse, exists, index, p):
        """One warp: write its rows of O from a column on as partial results, each to its row of ``partial_out``."""
        elements = partials.chunk_elements(self.partial)
        columns = 4 * elements  # that fill four chunks
        for group in cutlass.range(HEAD_DIM // columns, unroll=1):
            values = load_columns(base, warp, column + group * columns, columns)
            primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
            for i in cutlass.range_constexpr(4):
                chunk = partials.chunk(p.partial_out, index, 4 * group + i)
                packed = cute.make_rmem_tensor(elements, self.partial)
                for j in cutlass.range_constexpr(elements):
                    packed[j] = (values[8 * (j // 2) + 2 * i + j % 2] * inverse).to(self.partial)
                if exists:
                    cute.autovec_copy(packed, chunk)
