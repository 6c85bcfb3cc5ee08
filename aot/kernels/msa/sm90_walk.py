"""The other traversal of the Hopper forward: where neighbouring tokens share most of their blocks, walk their union.

A work item is a KV head and a group of 128 query rows, 64 a consumer warpgroup. K and V of every block that one of the
group's tokens selects stream past both; a token's rows see a block only if its membership bit is set. The softmax is
online, O stays in registers, and the finished rows go to the output: no partials, and combine has nothing to do.
Roles: warp 0 loads K and V, warps 1 and 2 each a consumer's queries. Two consumer warpgroups issue the scores of the
next block together with P V of this one, and take turns at it: the tensor cores have work under either's softmax. The
third, the guard, looks through a V that rows of the group do not see: they must not take part, whatever stands there.
Shared memory: that of sm90_prefill.py with barriers of its own, for K's place is free a step before V's.
Registers: 232 a consumer thread (S 64, P 32 and O 64 at once), 24 a producer or guard thread (with G 1: 224, 40, 24).
Budget of a step of both tiles in cycles: tensor 2048; exp 1024; shared memory 1800 (K, V and Q read, K and V in), and
256 for the guard's look. A rescaling of O (64 multiplications a thread) is put off until a score exceeds its row's
reference by SLACK.
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
from aot.kernels.msa import loading, work
from aot.kernels.msa.params import OUT
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.sm90_mma import (
    TILE_ROWS,
    WARPGROUP,
    Products,
    as_operand,
    copy,
    issue,
    multiply,
    products,
    rows_of_thread,
)

CONSUMERS = work.WALK_ROWS // TILE_ROWS
GUARD_REGISTERS = 24
FIRST, LAST = 1, 2  # of a group's blocks
FIXED_WORDS = 5  # of an item in shared memory: flags (-1: the end), group, KV head, key_limit, causal_shift
NOWHERE = -BLK_KV  # a row before the first: reads as zero
TURN, GUARD, MEETING = 4, 6, 7  # named barriers: of the consumers' turns (5, too), of the guard, of both
SLACK = 8.0  # what a row's scores may exceed its reference by, in the log2 domain


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


class Rows(NamedTuple):
    """What a consumer thread holds of its two rows."""

    out: cute.Tensor  # O, relative to the reference
    scores: cute.Tensor  # S of a block, and its exponentials
    weights: cute.Tensor  # P of the block before, until that has been multiplied
    state: cute.Tensor  # [2, 3]: reference; thread's part of the sum of exponentials, and of that at the temperature
    shrink: cute.Tensor  # [2]: what O is to be multiplied by
    blind: cute.Tensor  # [1]: a bit for each row that sees nothing of the block that ``weights`` are of


class Step(NamedTuple):
    """Where a consumer stands: a block's number and flags, its group and head, and the number of its tile of Q."""

    kv_index: Int32
    flags: Int32
    group: Int32
    head: Int32
    q_index: Int32


@cute.jit
def not_finite(units: cute.Tensor, thread: Int32) -> Boolean:
    """A warpgroup: whether one of the thread's words of bfloat16 in shared memory is not finite.

    Two values a word: to an exponent of ones, and no other, 0x0080 more carries into the place of the sign."""
    unit = cute.make_rmem_tensor(4, Int32)
    found = Int32(0)
    for i in cutlass.range(cute.size(units, mode=[1]) // WARPGROUP, unroll=2):
        cute.autovec_copy(units[None, i * WARPGROUP + thread], unit)
        for j in cutlass.range_constexpr(4):
            found = found | (unit[j] & 0x7F807F80) + 0x00800080
    return found & Int32(-0x7FFF8000) != 0


@cute.jit
def clear(units: cute.Tensor, thread: Int32):
    """A warpgroup: overwrite shared memory that products read."""
    zeros = cute.make_rmem_tensor(4, Int32)
    zeros.fill(0)
    for i in cutlass.range(cute.size(units, mode=[1]) // WARPGROUP, unroll=1):
        cute.autovec_copy(zeros, units[None, i * WARPGROUP + thread])
    cute.arch.fence_view_async_shared()


class WalkRoles:
    """The warp roles of PrefillSm90 when it walks; ``self`` is the kernel."""

    def walk_params(self) -> dict[str, Any]:
        """What a walk reads beyond what the other traversal does: its plan, and where the output goes."""
        params = {
            "walk_blocks": Ptr(Int32),
            "walk_counts": Ptr(Int32),
            "walk_totals": Ptr(Int64, 8),
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
        """One thread: make the barriers of the walk."""
        warps = WARPGROUP // 32
        for stage in cutlass.range_constexpr(q_stages):
            cute.arch.mbarrier_init(b.q_full + stage, min(self.tokens, 32))  # the lanes that fetch
            cute.arch.mbarrier_init(b.q_empty + stage, 1 if self.staged else warps)
        for stage in cutlass.range_constexpr(KV_STAGES):
            cute.arch.mbarrier_init(b.item_full + stage, 1)
            cute.arch.mbarrier_init(b.k_full + stage, 1)
            cute.arch.mbarrier_init(b.k_empty + stage, CONSUMERS * (1 + warps) + warps)
            cute.arch.mbarrier_init(b.v_full + stage, 1)
            cute.arch.mbarrier_init(b.v_empty + stage, CONSUMERS * warps)
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
            claimed = items.claim(p)
            count = min(vector(p.walk_counts)[item], work.WALK_CAP)
            steps = max(count, 1)  # a group that sees nothing takes a step, too: it writes zeros
            for step in cutlass.range(steps, unroll=1):
                block = vector(p.walk_blocks + (Int64(item) * work.WALK_CAP + step) * (2 + self.walk_words))
                sequence, number = block[0], block[1]
                exists = count > 0 and sequence >= 0 and sequence < p.batch and number >= 0
                key_limit, causal_shift, row, page = Int32(0), Int32(0), Int32(NOWHERE), Int32(-1)
                if exists:
                    key_limit, causal_shift, row, page = pages.locate(p, sequence, number)
                flags = (FIRST if step == 0 else 0) + (LAST if step == steps - 1 else 0)
                head = item // groups
                words = (Int32(flags), item - head * groups, head, key_limit, causal_shift)
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
        """The third warpgroup: keep a block's V from harming rows that see nothing of it. Their weights are 0, but 0
        times what is not finite is not."""
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = thread & 31
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
            cute.arch.mbarrier_wait(b.v_full + stage, phase_of(kv_index))
            blind = cute.arch.vote_any_sync(blind)
            found, harm = Boolean(False), Boolean(False)
            units = self.walk_units(s, stage)
            if blind:
                found = cute.arch.vote_any_sync(not_finite(units, thread))
            if lane == 0:
                s.harm[warp, stage] = Int32(1) if found else Int32(0)
            if blind:
                cute.arch.barrier(barrier_id=GUARD, number_of_threads=WARPGROUP)
                harm = self.walk_harm(s, stage)
            release(b.harm_full + stage, lane)
            if harm:
                self.walk_meet()
                clear(units, thread)
                self.walk_meet()
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_consume(self, thread, s, b, p):
        """A consumer warpgroup: its 64 rows of a group against every block of the group.

        A block's weights are multiplied with its V while the softmax of the next block runs, whose scores were issued
        before; and the consumers take turns at issuing, so that one's products run under the other's softmax."""
        consumer = cute.arch.make_warp_uniform(thread >> 7)
        thread = thread & (WARPGROUP - 1)
        mma = products(s.operands, self.qk, self.pv)
        r = Rows(
            out=cute.make_rmem_tensor(mma.pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32),
            scores=cute.make_rmem_tensor(mma.qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32),
            weights=cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_ROWS, BLK_KV)), self.pv),
            state=cute.make_rmem_tensor((2, 3), Float32),
            shrink=cute.make_rmem_tensor(2, Float32),
            blind=cute.make_rmem_tensor(1, Int32),
        )
        r.out.fill(0.0)
        self.walk_restart(r)
        slack = self.walk_slack(p)

        flags = items.wait(s, b.k_full, Int32(0))
        if flags >= 0:
            if consumer == 1:
                self.walk_yield(consumer)  # the first turn is the other's
            group, head, key_limit, causal_shift = items.words(s, 0)
            visible = self.walk_visible_rows(s, 0, group, key_limit, causal_shift, thread, consumer)
            now = Step(Int32(0), flags, group, head, consumer)
            cute.arch.mbarrier_wait(b.q_full + consumer, 0)
            multiply(mma.qk, r.scores, mma.q[None, None, None, consumer], mma.k[None, None, None, 0])
            self.walk_release_keys(b, now, thread, consumer)
            self.walk_softmax(r, visible, slack, thread & 31, p)
            self.walk_weigh(r, visible)

            next_flags = items.wait(s, b.k_full, Int32(1))
            while next_flags >= 0:
                now, next_flags = self.walk_step(r, mma, now, next_flags, slack, thread, consumer, s, b, p)
            if consumer == 0:
                self.walk_await_turn(consumer)  # nobody takes it

            accumulate = self.walk_await_values(r, mma, now, s, b)
            v = mma.v[None, None, None, stage_of(now.kv_index)]
            multiply(mma.pv, r.out, r.weights, v, accumulate)
            self.walk_finish(r.out, r.state, now, thread, consumer, p)

    @cute.jit
    def walk_step(self, r: Rows, mma: Products, now: Step, next_flags, slack, thread, consumer, s, b, p):
        """From a block to the next: P V of this one, S and softmax of that one. Where the consumer stands then, and the
        flags of the block after."""
        kv_index = now.kv_index + 1
        stage = stage_of(kv_index)
        q_index = now.q_index + (CONSUMERS if now.flags & LAST != 0 else 0)
        q_stage, q_phase = self.ring_of_queries(q_index)
        group, head, key_limit, causal_shift = items.words(s, stage)
        visible = self.walk_visible_rows(s, stage, group, key_limit, causal_shift, thread, consumer)
        after = Step(kv_index, next_flags, group, head, q_index)
        if next_flags & FIRST != 0:
            cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
        q, k = mma.q[None, None, None, q_stage], mma.k[None, None, None, stage]
        v = mma.v[None, None, None, stage_of(now.kv_index)]
        accumulate = self.walk_await_values(r, mma, now, s, b)
        self.walk_await_turn(consumer)
        issue(mma.qk, r.scores, q, k)
        issue(mma.pv, r.out, r.weights, v, accumulate)
        self.walk_yield(consumer)
        warpgroup.wait_group(1)
        self.walk_release_keys(b, after, thread, consumer)
        state = cute.make_rmem_tensor_like(r.state)
        state.store(r.state.load())
        if now.flags & LAST != 0:
            self.walk_restart(r)
        moved = self.walk_softmax(r, visible, slack, thread & 31, p)
        # The assembler moves the wait for P V up to the next branch, past the exponentials if these come after it.
        later_flags = items.wait(s, b.k_full, kv_index + 1)
        warpgroup.wait_group(0)
        release(b.v_empty + stage_of(now.kv_index), thread & 31)
        if now.flags & LAST != 0:
            self.walk_finish(r.out, state, now, thread, consumer, p)
        elif moved:
            for half in cutlass.range_constexpr(2):
                row = rows_of_thread(r.out)[half, None]
                row.store(row.load() * r.shrink[half])
        self.walk_weigh(r, visible)
        return after, later_flags

    @cute.jit
    def walk_await_values(self, r: Rows, mma: Products, now: Step, s, b) -> Boolean:
        """Until a block's V is there and the guard has looked at it.

        If it can do harm, its product is done here, and O, set aside where S will be, put back into the rows that see
        nothing of the block. The guard clears the block then: the usual product adds nothing."""
        stage, phase = stage_of(now.kv_index), phase_of(now.kv_index)
        cute.arch.mbarrier_wait(b.v_full + stage, phase)
        cute.arch.mbarrier_wait(b.harm_full + stage, phase)
        accumulate = now.flags & FIRST == 0
        if self.walk_harm(s, stage):
            if not accumulate:
                r.out.fill(0.0)
            accumulate = Boolean(True)
            for i in cutlass.range_constexpr(cute.size(r.out)):
                r.scores[i] = copy(r.out[i])
            multiply(mma.pv, r.out, r.weights, mma.v[None, None, None, stage], accumulate=True)
            for half in cutlass.range_constexpr(2):
                if r.blind[0] & 1 << half != 0:
                    rows_of_thread(r.out)[half, None].store(rows_of_thread(r.scores)[half, None].load())
            self.walk_meet()
            self.walk_meet()
        return accumulate

    @cute.jit
    def walk_harm(self, s, stage) -> Boolean:
        """Whether a warp of the guard has found what can do harm in a block."""
        found = cute.make_rmem_tensor(WARPGROUP // 32, Int32)
        cute.autovec_copy(s.harm[None, stage], found)
        return found[0] | found[1] | found[2] | found[3] != 0

    def walk_units(self, s, stage) -> cute.Tensor:
        """A block's V as words, (4, units of 16 bytes)."""
        block = s.v + cute.assume(stage * self.kv.block, divby=self.kv.block)
        return cute.make_tensor(cute.recast_ptr(block, dtype=Int32), cute.make_layout((4, self.kv.block_bytes // 16)))

    def walk_meet(self):
        """Guard and consumers: before the guard clears a block, and after."""
        cute.arch.barrier(barrier_id=MEETING, number_of_threads=(1 + CONSUMERS) * WARPGROUP)

    def walk_await_turn(self, consumer):
        """Until the other consumer has issued its products."""
        cute.arch.barrier(barrier_id=TURN + consumer, number_of_threads=CONSUMERS * WARPGROUP)

    def walk_yield(self, consumer):
        """The turn is the other consumer's."""
        cute.arch.barrier_arrive(barrier_id=TURN + 1 - consumer, number_of_threads=CONSUMERS * WARPGROUP)

    @cute.jit
    def walk_release_keys(self, b, now: Step, thread, consumer):
        """A block's scores are there: K may go, and after a group's last block Q."""
        release(b.k_empty + stage_of(now.kv_index), thread & 31)
        if now.flags & LAST != 0:
            q_stage, _ = self.ring_of_queries(now.q_index)
            self.release_queries(b.q_empty + q_stage, thread, consumer)

    def walk_members(self, thread, consumer):
        """Of the thread's two rows: which of the group's tokens they are of, and which of the KV head's heads."""
        first_row = (thread >> 5) * 16 + ((thread & 31) >> 2)
        return tuple((consumer * self.tokens + row // self.g, row % self.g) for row in (first_row, first_row + 8))

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
    def walk_restart(self, r: Rows):
        """Nothing has been seen yet."""
        r.state.fill(0.0)
        r.state[0, 0] = -Float32.inf
        r.state[1, 0] = -Float32.inf

    def walk_slack(self, p) -> Float32:
        """By how much a score may exceed its row's reference: exponentials up to 2^SLACK do no harm, and few of the
        later blocks move the reference then."""
        scale_log2 = softmax.scale_log2(p)
        if const_expr(self.temperature):
            scale_log2 = cute.arch.fmax(scale_log2, scale_log2 / p.lse_temperature_scale)
        return cute.arch.fmax(cute.arch.fmin(SLACK / scale_log2, Float32(1e30)), Float32(0.0))

    @cute.jit
    def walk_softmax(self, r: Rows, visible, slack, lane, p) -> Boolean:
        """One step of the online softmax of a thread's two rows but for O: whether O is to shrink in some row of the
        warp, whose reference moves."""
        scale_log2 = softmax.scale_log2(p)
        scores = rows_of_thread(r.scores)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        maxima = softmax.row_maxima(scores)
        rises = maxima[0] > r.state[0, 0] + slack, maxima[1] > r.state[1, 0] + slack
        moved = cute.arch.vote_any_sync(rises[0] or rises[1])
        if moved:
            for half in cutlass.range_constexpr(2):
                reference = maxima[half] if rises[half] else r.state[half, 0]
                change = r.state[half, 0] - softmax.finite(reference)
                r.shrink[half] = cute.math.exp2(change * scale_log2, fastmath=True)
                r.state[half, 0] = reference
                r.state[half, 1] = r.state[half, 1] * r.shrink[half]
                if const_expr(self.temperature):
                    shrink = cute.math.exp2(change * (scale_log2 / p.lse_temperature_scale), fastmath=True)
                    r.state[half, 2] = r.state[half, 2] * shrink
        references = softmax.finite(r.state[0, 0]), softmax.finite(r.state[1, 0])
        if const_expr(self.temperature):
            warpgroup.wait_group(0)  # the exponentials of two scales want the registers of the weights before
            scale = scale_log2 / p.lse_temperature_scale
            sums = softmax.part_sums_exp2(scores, references, scale, keep=False)
            r.state[0, 2] = r.state[0, 2] + sums[0]
            r.state[1, 2] = r.state[1, 2] + sums[1]
        sums = softmax.part_sums_exp2(scores, references, scale_log2, keep=True)
        r.state[0, 1] = r.state[0, 1] + sums[0]
        r.state[1, 1] = r.state[1, 1] + sums[1]
        return moved

    @cute.jit
    def walk_weigh(self, r: Rows, visible):
        """The exponentials of a block's scores become its weights."""
        as_operand(r.scores, r.weights)
        r.blind[0] = (Int32(1) if visible[0] <= 0 else Int32(0)) | (Int32(2) if visible[1] <= 0 else Int32(0))

    @cute.jit
    def walk_finish(self, out, state, now: Step, thread, consumer, p):
        """Write the rows of a group."""
        for half in cutlass.range_constexpr(2):
            state[half, 1] = softmax.quad_sum(state[half, 1])
            if const_expr(self.temperature):
                state[half, 2] = softmax.quad_sum(state[half, 2])
        members = self.walk_members(thread, consumer)
        for half in cutlass.range_constexpr(2):
            member, group_head = members[half]
            token = now.group * self.walk_tokens + member
            if token < p.total_q:
                self.walk_store(out, state, half, token, now.head * self.g + group_head, thread & 31, p)

    @cute.jit
    def walk_store(self, out, state, half: cutlass.Constexpr[int], token, head, lane, p):
        """Normalise one of the thread's rows and write it."""
        scale_log2 = softmax.scale_log2(p)
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
            reference = softmax.finite(state[half, 0])
            offset = Int64(token) * p.lse_stride_token + head * p.lse_stride_head
            if p.lse.toint() != 0:
                vector(p.lse)[offset] = softmax.log_sum_exp(reference * scale_log2, state[half, 1])
            if const_expr(self.temperature):
                scale = scale_log2 / p.lse_temperature_scale
                vector(p.lse_temperature)[offset] = softmax.log_sum_exp(reference * scale, state[half, 2])
