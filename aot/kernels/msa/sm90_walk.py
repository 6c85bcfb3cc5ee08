"""The other traversal of the Hopper forward: where neighbouring tokens share most of their blocks, walk their union.

A work item is a KV head and a group of 128 query rows, 64 a consumer warpgroup. K and V of every block that one of the
group's tokens selects stream past both; a token's rows see a block only if its membership bit is set. The softmax is
online, O stays in registers, and the finished rows go to the output: no partials, and combine has nothing to do.
Rings and barriers are those of sm90_prefill.py. O lives through the loop beside S and P, so the third consumer
warpgroup gives its registers away: 232 for each of the other two, 24 for a producer (with G 1: 224 and 40).
Budget of a step of a tile: the tile's of sm90_prefill.py without Q and O; a rescaling of O (64 multiplications a
thread) is skipped where no maximum of the warp moved, and so is setting O aside (into the registers that S has left)
for rows that see nothing of the block: they must not take part, whatever bytes stand there.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from aot.kernels import items, softmax
from aot.kernels.items import phase_of, release, stage_of
from aot.kernels.mask import BLK_KV, mask_columns
from aot.kernels.memory import vector
from aot.kernels.msa import partials, walk, work
from aot.kernels.msa.params import OUT
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.msa.walk import FIRST, LAST, PARTIAL
from aot.kernels.sm90_mma import TILE_ROWS, WARPGROUP, as_operand, copy, multiply, products, rows_of_thread

ROWS = 128  # query rows of a group
CONSUMERS = ROWS // TILE_ROWS
IDLE_REGISTERS = 24


class WalkRoles(walk.Walk):
    """The warp roles of PrefillSm90 when it walks; ``self`` is the kernel."""

    @cute.jit
    def walk_consume(self, thread, s, b, p):
        """A consumer warpgroup: its 64 rows of a group against every block of the group."""
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        first_row = thread // 32 * 16 + lane // 4  # a thread holds this row of a tile and the one 8 further on

        mma = products(s.operands, self.qk, self.pv)
        out = cute.make_rmem_tensor(mma.pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32)
        out.fill(0.0)
        # Of the two rows: maximum, sum of exponentials, the same sum at the temperature.
        state = cute.make_rmem_tensor((2, 3), Float32)
        state.fill(0.0)

        q_index = consumer
        kv_index = Int32(0)
        flags = items.wait(s, b.k_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            phase = phase_of(kv_index)
            group, head, key_limit, causal_shift = items.words(s, stage)
            q_stage, q_phase = self.ring_of_queries(q_index)
            if flags & FIRST != 0:
                out.fill(0.0)
                state.fill(0.0)
                state[0, 0] = -Float32.inf
                state[1, 0] = -Float32.inf
                cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
            member = consumer * self.tokens + first_row // self.g, consumer * self.tokens + (first_row + 8) // self.g
            visible = tuple(
                self.walk_visible(s, stage, i, group * self.walk_tokens + i, key_limit, causal_shift) for i in member
            )
            scores = cute.make_rmem_tensor(mma.qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32)
            multiply(mma.qk, scores, mma.q[None, None, None, q_stage], mma.k[None, None, None, stage])
            if flags & LAST != 0:
                self.release_queries(b.q_empty + q_stage, thread, consumer)

            weights = cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_ROWS, BLK_KV)), self.pv)
            self.walk_softmax(scores, weights, out, state, visible, lane, p)
            cute.arch.mbarrier_wait(b.v_full + stage, phase)
            # A row that sees nothing of the block keeps its O: its weights are 0, but 0 * NaN is not.
            apart = not cute.arch.vote_all_sync(visible[0] > 0 and visible[1] > 0)
            kept = cute.make_rmem_tensor(out.layout, Float32)
            if apart:
                for i in cutlass.range_constexpr(cute.size(out)):
                    kept[i] = copy(out[i])
            multiply(mma.pv, out, weights, mma.v[None, None, None, stage], accumulate=True)
            if apart:
                for half in cutlass.range_constexpr(2):
                    if visible[half] <= 0:
                        rows_of_thread(out)[half, None].store(rows_of_thread(kept)[half, None].load())
            release(b.kv_empty + stage, lane)
            if flags & LAST != 0:
                for half in cutlass.range_constexpr(2):
                    token = group * self.walk_tokens + member[half]
                    group_head = (first_row + 8 * half) % self.g
                    if token < p.total_q:
                        if flags & PARTIAL != 0:
                            self.walk_store_partial(out, state, half, token, head, group_head, lane, p)
                        else:
                            self.walk_store(out, state, half, token, head * self.g + group_head, lane, p)
                q_index += CONSUMERS
            kv_index += 1
            flags = items.wait(s, b.k_full, kv_index)

    @cute.jit
    def walk_softmax(self, accumulator, weights, out, state, visible, lane, p):
        """One step of the online softmax of a thread's two rows."""
        scale_log2 = softmax.scale_log2(p)
        scores = rows_of_thread(accumulator)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        block_maxima = softmax.row_maxima(scores)
        maxima = cute.arch.fmax(state[0, 0], block_maxima[0]), cute.arch.fmax(state[1, 0], block_maxima[1])
        references = softmax.finite(maxima[0]), softmax.finite(maxima[1])
        if not cute.arch.vote_all_sync(maxima[0] == state[0, 0] and maxima[1] == state[1, 0]):
            rows = rows_of_thread(out)
            for half in cutlass.range_constexpr(2):
                moved = state[half, 0] - references[half]
                shrink = cute.math.exp2(moved * scale_log2, fastmath=True)
                rows[half, None].store(rows[half, None].load() * shrink)
                state[half, 1] = state[half, 1] * shrink
                if const_expr(self.temperature):
                    shrink = cute.math.exp2(moved * (scale_log2 / p.lse_temperature_scale), fastmath=True)
                    state[half, 2] = state[half, 2] * shrink
                state[half, 0] = maxima[half]
        if const_expr(self.temperature):
            sums = softmax.row_sums_exp2(scores, references, scale_log2 / p.lse_temperature_scale, keep=False)
            state[0, 2] = state[0, 2] + sums[0]
            state[1, 2] = state[1, 2] + sums[1]
        sums = softmax.row_sums_exp2(scores, references, scale_log2, keep=True)
        state[0, 1] = state[0, 1] + sums[0]
        state[1, 1] = state[1, 1] + sums[1]
        as_operand(accumulator, weights)

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
