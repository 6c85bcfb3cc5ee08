"""The other traversal of the Hopper forward: a group of neighbouring tokens walks the blocks that most of it shares.

A work item is a KV head and a group of 128 query rows, 64 a consumer warpgroup. K and V of every block that the walk
plan lists for the group stream past both; a token's rows see a block only if its membership bit is set. The softmax is
online, O stays in registers, and the rows go to the output or, where the plan leaves something of the group to the
CSR's order, to one partial result a token.
While a block's weights are multiplied with its V, the next block's scores are computed, and its softmax under that; the
consumers take turns at issuing products. K's place is free one step before V's. O lives through the loop beside S and
P: 232 registers a consumer thread, 24 for a producer (with G < 8: 224 and 40). The third warpgroup, with 24, guards rows
that see nothing of a block from what its V holds.
Budget of a step of a tile: the tile's of sm90_prefill.py without Q and O; a rescaling of O (64 multiplications a
thread) is skipped where no maximum of the warp moved.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from aot.kernel import Ptr
from aot.kernels import items, pages, softmax
from aot.kernels.items import KV_STAGES, phase_of, release, stage_of
from aot.kernels.mask import BLK_KV, mask_columns, visible_keys
from aot.kernels.memory import vector
from aot.kernels.msa import loading, partials, work
from aot.kernels.msa.params import OUT
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.sm90_mma import TILE_ROWS, WARPGROUP, as_operand, issue, multiply, products, rows_of_thread

CONSUMERS = work.WALK_ROWS // TILE_ROWS
GUARD_REGISTERS = 24
FIRST, LAST = 1, 2  # of a group's blocks
PARTIAL = 4  # the group's rows leave partial results: not all of it is walked
HARM_WORDS = HEAD_DIM // 32  # a bit for each column of a V
GUARD = 6  # the named barrier of the guard
TURN = 4  # and 5: the named barriers by which the consumers take turns
FIXED_WORDS = 5  # of an item in shared memory: flags (-1: the end), group, KV head, key_limit, causal_shift
NOWHERE = -BLK_KV  # a row before the first: reads as zero


class Barriers(NamedTuple):
    """One a stage of the ring of Q tiles (q) or of blocks (item, k, v, harm); of ``v_tail`` there is one."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    item_full: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    v_full: cute.Pointer
    v_empty: cute.Pointer
    harm_full: cute.Pointer
    v_tail: cute.Pointer


class Registers(NamedTuple):
    """What a consumer thread holds of its two rows: O, S, P; maximum, sum of exponentials and the same sum at the
    temperature [2, 3]; by what O and the sums shrink, those at the temperature apart [2, 2]; how many keys they see of
    the block that P is of [2]."""

    out: cute.Tensor
    scores: cute.Tensor
    weights: cute.Tensor
    state: cute.Tensor
    shrink: cute.Tensor
    visible: cute.Tensor


@cute.jit
def not_finite(words: cute.Tensor, thread: Int32) -> Int32:
    """A warpgroup: not 0 in some thread if a block of bfloat16 in shared memory has a value that is not finite.

    ``words``: (4, units of 16 bytes). Two values a word: 0x0080 more than an exponent of ones carries into the place of
    the sign."""
    found = Int32(0)
    for i in cutlass.range(cute.size(words, mode=[1]) // WARPGROUP, unroll=4):
        for j in cutlass.range_constexpr(4):
            found = found | ((words[j, i * WARPGROUP + thread] & 0x7F807F80) + 0x00800080)
    return found & Int32(-0x7FFF8000)


@cute.jit
def clear_not_finite(words: cute.Tensor, thread: Int32, columns: cute.Pointer):
    """A warpgroup: clear what is not finite in a block of V, and set the bits of the columns where that was."""
    for i in cutlass.range(cute.size(words, mode=[1]) // WARPGROUP, unroll=1):
        unit = i * WARPGROUP + thread
        key, line = unit >> 3 & (BLK_KV - 1), unit >> 10
        column = line * 64 + ((unit ^ key) & 7) * 8  # the units of 16 bytes of a line are swizzled by the key
        for j in cutlass.range(4, unroll=1):
            for half in cutlass.range_constexpr(2):
                if words[j, unit] >> (16 * half) & 0x7F80 == 0x7F80:
                    words[j, unit] = words[j, unit] & Int32(0xFFFF if half == 1 else -0x10000)
                    bit = column + 2 * j + half
                    cute.arch.atomic_or(columns + (bit >> 5), Int32(1) << (bit & 31))


class WalkRoles:
    """The warp roles of PrefillSm90 when it walks; ``self`` is the kernel."""

    def walk_params(self) -> dict[str, Any]:
        """What a walk reads beyond what the other traversal does: its plan, and where the output goes."""
        params = {
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "walk_flags": Ptr(Int32),
            "out": Ptr(OUT),
            "lse": Ptr(Float32),
            "out_stride_token": Int64,
            "out_stride_head": Int64,
            "lse_stride_token": Int64,
            "lse_stride_head": Int64,
        }
        return params | {"lse_temperature": Ptr(Float32)} if self.temperature else params

    @cute.jit
    def init_walk_barriers(self, b, q_stages: cutlass.Constexpr[int]):
        """One thread: make the walk's barriers."""
        warps = WARPGROUP // 32
        for stage in cutlass.range_constexpr(q_stages):
            cute.arch.mbarrier_init(b.q_full + stage, min(self.tokens, 32))  # the lanes that fetch
            cute.arch.mbarrier_init(b.q_empty + stage, 1 if self.staged else warps)
        for stage in cutlass.range_constexpr(KV_STAGES):
            cute.arch.mbarrier_init(b.item_full + stage, 1)
            cute.arch.mbarrier_init(b.k_full + stage, 1)
            cute.arch.mbarrier_init(b.k_empty + stage, CONSUMERS * (1 + warps) + warps)
            cute.arch.mbarrier_init(b.v_full + stage, 1)
            cute.arch.mbarrier_init(b.v_empty + stage, (CONSUMERS + 1) * warps)
            cute.arch.mbarrier_init(b.harm_full + stage, warps)
        cute.arch.mbarrier_init(b.v_tail, 1)

    @cute.jit
    def walk_load_blocks(self, maps, s, b, p):
        """Warp 0: claim groups and load the K and V of their blocks, one after the other."""
        groups = (p.total_q + self.walk_tokens - 1) // self.walk_tokens
        kv_index = Int32(0)
        tails = Int32(0)
        item, _, _ = cute.arch.block_idx()
        while item < p.head_kv * groups:
            claimed = items.claim(p.work_counter + 1)
            entry = vector(p.walk_counts)[item]
            kind = Int32(0) if entry & work.WALK_FINAL != 0 else Int32(PARTIAL)
            steps = min(entry & ~work.WALK_FINAL, work.WALK_CAP)
            for step in cutlass.range(steps, unroll=1):
                block = vector(p.walk_blocks + (Int64(item) * work.WALK_CAP + step) * (2 + self.walk_words))
                sequence, number = block[0], block[1]
                exists = sequence >= 0 and sequence < p.batch and number >= 0
                key_limit, causal_shift, row, page = Int32(0), Int32(0), Int32(NOWHERE), Int32(-1)
                if exists:
                    key_limit, causal_shift, row, page = pages.locate(p, sequence, number)
                flags = kind + (FIRST if step == 0 else 0) + (LAST if step == steps - 1 else 0)
                head = item // groups
                words = (flags, item - head * groups, head, key_limit, causal_shift)
                words += tuple(block[2 + i] if exists else Int32(0) for i in range(self.walk_words))
                loading.publish(maps, s, b, b.k_empty, kv_index, words, row, page, self.kv)
                cute.arch.mbarrier_wait(b.v_empty + stage_of(kv_index), phase_of(kv_index) ^ 1)
                tails = loading.load_values(maps, s, b, kv_index, tails, words, row, page, self.kv)
                kv_index += 1
            item = cute.arch.shuffle_sync(claimed, 0)
        items.finish(s, b, b.k_empty, kv_index)

    @cute.jit
    def walk_load_queries(self, consumer, maps, s, b, p):
        """Warps 1 and 2: fetch a consumer's tile of every group."""
        lane = cute.arch.lane_idx()
        q_index = consumer
        kv_index = Int32(0)
        flags = items.wait(s, b.item_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            group, head = s.item[1, stage], s.item[2, stage]
            release(b.k_empty + stage, lane)
            if flags & FIRST != 0:
                mine = cute.make_rmem_tensor((self.tokens + 31) // 32, Int32)
                for i in cutlass.range_constexpr(cute.size(mine)):
                    token = group * self.walk_tokens + consumer * self.tokens + lane % self.tokens + 32 * i
                    mine[i] = min(token, p.total_q - 1)
                q_stage, phase = self.ring_of_queries(q_index)
                cute.arch.mbarrier_wait(b.q_empty + q_stage, 1 - phase)
                place = self.tile_place(s, q_stage)
                loading.fetch_queries(maps, p, mine, place, head, b.q_full + q_stage, self.q, TILE_ROWS, self.g)
                q_index += CONSUMERS
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_guard(self, thread, s, b, p):
        """The third warpgroup: keep rows that see nothing of a block from what its V holds. Their weights are 0 there,
        but 0 times what is not finite is not: where there is such a row, this clears it and leaves word of its columns,
        which the rows that do see the block then lose."""
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = cute.arch.lane_idx()
        kv_index = Int32(0)
        flags = items.wait(s, b.item_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            group, _, key_limit, causal_shift = items.words(s, stage)
            blind = Boolean(False)
            for i in cutlass.range((self.walk_tokens + 31) // 32, unroll=1):
                member = 32 * i + lane % self.walk_tokens
                token = group * self.walk_tokens + member
                visible = self.walk_visible(s, stage, member, token, key_limit, causal_shift)
                blind = blind or (visible <= 0 and token < p.total_q)
            release(b.k_empty + stage, lane)
            harm = s.harm.iterator + stage * HARM_WORDS
            cute.arch.mbarrier_wait(b.v_full + stage, phase_of(kv_index))
            if lane == 0:
                harm[warp] = Int32(0)  # the stage is this block's: who read it for the block before has let it go
            if cute.arch.vote_any_sync(blind):
                units = cute.make_layout((4, self.kv.block_bytes // 16))
                words = cute.make_tensor(cute.recast_ptr(s.v + stage * self.kv.block, dtype=Int32), units)
                cute.arch.barrier(barrier_id=GUARD, number_of_threads=WARPGROUP)
                if cute.arch.vote_any_sync(not_finite(words, thread) != 0):
                    clear_not_finite(words, thread, harm)
                    cute.arch.fence_view_async_shared()
            release(b.v_empty + stage, lane)
            release(b.harm_full + stage, lane)
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_consume(self, thread, s, b, p):
        """A consumer warpgroup: its 64 rows of a group against every block of the group.

        While a block's weights are multiplied with its V, the next block's scores are computed and then its softmax;
        the two consumers take turns at issuing products, so that the tensor cores have those of one while the other is
        at its softmax."""
        consumer = cute.arch.make_warp_uniform(thread >> 7)
        thread = thread & (WARPGROUP - 1)
        mma = products(s.operands, self.qk, self.pv)
        r = Registers(
            out=cute.make_rmem_tensor(mma.pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32),
            scores=cute.make_rmem_tensor(mma.qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32),
            weights=cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_ROWS, BLK_KV)), self.pv),
            state=cute.make_rmem_tensor((2, 3), Float32),
            shrink=cute.make_rmem_tensor((2, 2), Float32),
            visible=cute.make_rmem_tensor(2, Int32),
        )
        r.out.fill(0.0)
        self.walk_restart(r)
        q_index = consumer
        kv_index = Int32(0)
        flags = items.wait(s, b.k_full, kv_index)
        if flags >= 0:
            if consumer == 1:
                cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=CONSUMERS * WARPGROUP)
            group, head, key_limit, causal_shift = items.words(s, 0)
            visible = self.walk_visible_rows(s, 0, group, key_limit, causal_shift, thread, consumer)
            cute.arch.mbarrier_wait(b.q_full + q_index, 0)
            multiply(mma.qk, r.scores, mma.q[None, None, None, q_index], mma.k[None, None, None, 0])
            q_index = self.walk_release_keys(s, b, flags, kv_index, q_index, thread, consumer)
            self.walk_softmax(r, visible, thread & 31, p)
            r.visible[0], r.visible[1] = visible
            as_operand(r.scores, r.weights)

            next_flags = items.wait(s, b.k_full, kv_index + 1)
            while next_flags >= 0:
                words = items.words(s, stage_of(kv_index + 1))
                place = flags, next_flags, q_index, kv_index, group, head
                q_index = self.walk_step(r, mma, place, words, thread, consumer, s, b, p)
                kv_index += 1
                flags = next_flags
                group, head = words[0], words[1]
                next_flags = items.wait(s, b.k_full, kv_index + 1)
            if consumer == 0:  # the turn that nobody takes
                cute.arch.barrier(barrier_id=TURN, number_of_threads=CONSUMERS * WARPGROUP)

            self.walk_wait_values(b, kv_index)
            v = mma.v[None, None, None, stage_of(kv_index)]
            multiply(mma.pv, r.out, r.weights, v, accumulate=flags & FIRST == 0)
            self.walk_harm(r, s, kv_index, thread & 31)
            self.walk_finish(r.out, r.state, flags, group, head, thread, consumer, p)

    @cute.jit
    def walk_step(self, r, mma, place, words, thread, consumer, s, b, p):
        """Products of a block's weights and the next block's scores, and the softmax of these; the new ``q_index``.

        ``words``: of the next block."""
        flags, next_flags, q_index, kv_index, group, head = place
        next_group, _, key_limit, causal_shift = words
        stage, next_stage = stage_of(kv_index), stage_of(kv_index + 1)
        visible = self.walk_visible_rows(s, next_stage, next_group, key_limit, causal_shift, thread, consumer)
        q_stage, q_phase = self.ring_of_queries(q_index)
        if next_flags & FIRST != 0:
            cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
        q, k, v = mma.q[None, None, None, q_stage], mma.k[None, None, None, next_stage], mma.v[None, None, None, stage]
        self.walk_wait_values(b, kv_index)
        cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=CONSUMERS * WARPGROUP)
        issue(mma.qk, r.scores, q, k)
        issue(mma.pv, r.out, r.weights, v, accumulate=flags & FIRST == 0)
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=CONSUMERS * WARPGROUP)
        warpgroup.wait_group(1)
        q_index = self.walk_release_keys(s, b, next_flags, kv_index + 1, q_index, thread, consumer)
        final = cute.make_rmem_tensor_like(r.state)
        final.store(r.state.load())
        if flags & LAST != 0:
            self.walk_restart(r)
        moved = self.walk_softmax(r, visible, thread & 31, p)
        warpgroup.wait_group(0)
        self.walk_harm(r, s, kv_index, thread & 31)
        release(b.v_empty + stage, thread & 31)
        r.visible[0], r.visible[1] = visible
        if flags & LAST != 0:
            self.walk_finish(r.out, final, flags, group, head, thread, consumer, p)
        elif moved:
            rows = rows_of_thread(r.out)
            for half in cutlass.range_constexpr(2):
                rows[half, None].store(rows[half, None].load() * r.shrink[half, 0])
        as_operand(r.scores, r.weights)
        return q_index

    @cute.jit
    def walk_restart(self, r):
        """Nothing has been seen yet."""
        r.state.fill(0.0)
        r.state[0, 0] = -Float32.inf
        r.state[1, 0] = -Float32.inf

    @cute.jit
    def walk_release_keys(self, s, b, flags, kv_index, q_index, thread, consumer):
        """A block's scores are there: K may go, and after a group's last block Q; the new ``q_index``."""
        release(b.k_empty + stage_of(kv_index), thread & 31)
        if flags & LAST != 0:
            q_stage, _ = self.ring_of_queries(q_index)
            self.release_queries(b.q_empty + q_stage, thread, consumer)
            q_index += CONSUMERS
        return q_index

    def walk_members(self, thread, consumer):
        """Of the thread's two rows: which of the group's tokens they are of, and which of the KV head's heads."""
        first_row = (thread >> 5) * 16 + ((thread & 31) >> 2)
        rows = first_row, first_row + 8
        return tuple((consumer * self.tokens + (row // self.g), row % self.g) for row in rows)

    @cute.jit
    def walk_visible_rows(self, s, stage, group, key_limit, causal_shift, thread, consumer):
        """How many keys of a block each of the thread's two rows sees."""
        (first, _), (second, _) = self.walk_members(thread, consumer)
        token = group * self.walk_tokens
        return (
            self.walk_visible(s, stage, first, token + first, key_limit, causal_shift),
            self.walk_visible(s, stage, second, token + second, key_limit, causal_shift),
        )

    @cute.jit
    def walk_visible(self, s, stage, member, token, key_limit, causal_shift) -> Int32:
        """How many keys of the block the group's token number ``member`` sees: none unless it selected the block."""
        word = s.item[FIXED_WORDS + (member >> 5), stage]
        visible = visible_keys(token, key_limit, causal_shift)
        return visible if (word >> (member & 31)) & 1 != 0 else Int32(0)

    @cute.jit
    def walk_wait_values(self, b, kv_index):
        """Until a block's V is there and the guard has looked at it."""
        cute.arch.mbarrier_wait(b.v_full + stage_of(kv_index), phase_of(kv_index))
        cute.arch.mbarrier_wait(b.harm_full + stage_of(kv_index), phase_of(kv_index))

    @cute.jit
    def walk_harm(self, r, s, kv_index, lane):
        """The columns that the guard has cleared something of are lost to the rows that see the block."""
        columns = tuple(s.harm[i, stage_of(kv_index)] for i in range(HARM_WORDS))
        if columns[0] | columns[1] | columns[2] | columns[3] != 0:
            rows = rows_of_thread(r.out)
            for group in cutlass.range_constexpr(HEAD_DIM // 8):
                bits = columns[group // 4] >> (8 * (group % 4)) >> (lane % 4 * 2)
                for i in cutlass.range_constexpr(2):
                    for half in cutlass.range_constexpr(2):
                        if bits >> i & 1 != 0 and r.visible[half] > 0:
                            rows[half, (i, group)] = Float32.nan

    @cute.jit
    def walk_softmax(self, r, visible, lane, p) -> Boolean:
        """One step of the online softmax of a thread's two rows, but for O, which is to shrink if a maximum of the warp
        has moved: whether it has."""
        scale_log2 = softmax.scale_log2(p)
        scores = rows_of_thread(r.scores)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        block_maxima = softmax.row_maxima(scores)
        maxima = cute.arch.fmax(r.state[0, 0], block_maxima[0]), cute.arch.fmax(r.state[1, 0], block_maxima[1])
        references = softmax.finite(maxima[0]), softmax.finite(maxima[1])
        moved = not cute.arch.vote_all_sync(maxima[0] == r.state[0, 0] and maxima[1] == r.state[1, 0])
        for half in cutlass.range_constexpr(2):
            change = r.state[half, 0] - references[half]
            r.shrink[half, 0] = cute.math.exp2(change * scale_log2, fastmath=True)
            if const_expr(self.temperature):
                r.shrink[half, 1] = cute.math.exp2(change * (scale_log2 / p.lse_temperature_scale), fastmath=True)
            r.state[half, 0] = maxima[half]
        if const_expr(self.temperature):
            sums = softmax.row_sums_exp2(scores, references, scale_log2 / p.lse_temperature_scale, keep=False)
            r.state[0, 2] = r.state[0, 2] * r.shrink[0, 1] + sums[0]
            r.state[1, 2] = r.state[1, 2] * r.shrink[1, 1] + sums[1]
        sums = softmax.row_sums_exp2(scores, references, scale_log2, keep=True)
        r.state[0, 1] = r.state[0, 1] * r.shrink[0, 0] + sums[0]
        r.state[1, 1] = r.state[1, 1] * r.shrink[1, 0] + sums[1]
        return moved

    @cute.jit
    def walk_finish(self, out, state, flags, group, head, thread, consumer, p):
        """Write the rows of a group: to the output, or as partial results."""
        members = self.walk_members(thread, consumer)
        lane = thread & 31
        for half in cutlass.range_constexpr(2):
            member, group_head = members[half]
            token = group * self.walk_tokens + member
            if token < p.total_q:
                if flags & PARTIAL != 0:
                    self.walk_store_partial(out, state, half, token, head, group_head, lane, p)
                else:
                    self.walk_store(out, state, half, token, head * self.g + group_head, lane, p)

    @cute.jit
    def walk_store(self, out, state, half: cutlass.Constexpr[int], token, head, lane, p):
        """Normalise one of the thread's rows and write it."""
        inverse = softmax.reciprocal(state[half, 1])
        row = rows_of_thread(out)
        start = Int64(token) * p.out_stride_token + head * p.out_stride_head
        for group in cutlass.range_constexpr(HEAD_DIM // 8):
            values = cute.make_rmem_tensor(2, OUT)
            values[0] = (row[half, (0, group)] * inverse).to(OUT)
            values[1] = (row[half, (1, group)] * inverse).to(OUT)
            place = p.out + cute.assume(start + (8 * group + lane % 4 * 2), divby=2)
            cute.autovec_copy(values, cute.make_tensor(place, cute.make_layout(2)))
        if lane % 4 == 0:
            offset = Int64(token) * p.lse_stride_token + head * p.lse_stride_head
            if p.lse.toint() != 0:
                vector(p.lse)[offset] = self.walk_lse(state, half, softmax.scale_log2(p), 1)
            if const_expr(self.temperature):
                scale = softmax.scale_log2(p) / p.lse_temperature_scale
                vector(p.lse_temperature)[offset] = self.walk_lse(state, half, scale, 2)

    @cute.jit
    def walk_store_partial(self, out, state, half: cutlass.Constexpr[int], token, kv_head, group_head, lane, p):
        """Normalise one of the thread's rows and leave it to combine, after the partial results of its head."""
        entry = Int64(kv_head) * p.head_partials + (work.entries_of_head(p) + token)
        index = partials.row_index(entry, group_head, self.g)
        target = p.partial_out + cute.assume(index * HEAD_DIM, divby=HEAD_DIM)
        self.store_row(out, softmax.reciprocal(state[half, 1]), half, index, target, lane)
        if lane % 4 == 0:
            vector(p.partial_lse)[index] = self.walk_lse(state, half, softmax.scale_log2(p), 1)
            if const_expr(self.temperature):
                scale = softmax.scale_log2(p) / p.lse_temperature_scale
                vector(p.partial_lse_temperature)[index] = self.walk_lse(state, half, scale, 2)

    def walk_lse(self, state, half: int, scale_log2: Float32, column: int) -> Float32:
        """The logsumexp of a row at a scale, of which a column of the state holds the sum."""
        return softmax.log_sum_exp(softmax.finite(state[half, 0]) * scale_log2, state[half, column])
