"""Forward for Hopper: partial attention of gathered query tokens against one block of 128 keys.

Tile: 64 rows = 64 / G query tokens x G heads of one KV head, against a block's 128 keys, D 128.
Roles: warp 0 claims work items and loads their K and V; three consumer warpgroups each take every third tile: S = Q K^T
(wgmma from shared memory), softmax in registers, O = P V (P from registers), and a bulk copy of O from where Q was;
warps 1 to 3 each gather the query tokens for one consumer.
Shared memory: K and V of two work items (2 x 64 KB: the next block arrives under this one), six Q tiles (6 x 16 KB).
Registers: 152 a consumer thread (S 64, then P 32 and O 64), 56 a producer thread.
Budget of a tile in cycles: tensor 1024; exp 512 (8192 at 16 a cycle); shared memory 1000 (128 KB at 128 bytes: K and V
for every 64 rows, Q in and out, O in and out); L2 32 KB, of which half is written. Three tiles in flight hide the
softmax and the epilogue of one under the products of the others; tensor cores and shared memory bind together.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives
from cutlass.utils import hopper_helpers

from aot.kernel import TensorMaps
from aot.kernels import items, softmax
from aot.kernels.items import KV_STAGES, phase_of, release, stage_of
from aot.kernels.mask import BLK_KV, mask_columns, visible_keys
from aot.kernels.memory import vector
from aot.kernels.msa import loading, partials, sm90_walk, work
from aot.kernels.msa.params import Prefill
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.sm90_mma import (
    CONSUMERS,
    TILE_ROWS,
    WARPGROUP,
    Operands,
    as_operand,
    multiply,
    products,
    rows_of_thread,
)

Q_STAGES = 2 * CONSUMERS  # two for each consumer
PRODUCER_REGISTERS = 56
CONSUMER_REGISTERS = 152


@cute.jit
def first_tile(consumer: Int32, tile_base: Int32) -> Int32:
    """The first tile of an item that is a consumer's, ``tile_base`` being the number of tiles before the item."""
    return (consumer + CONSUMERS - tile_base % CONSUMERS) % CONSUMERS


class Shared(NamedTuple):
    """Shared memory: blocks of K and V, tiles of Q, and all three as operands; words of items and entries."""

    k: cute.Pointer
    v: cute.Pointer
    q: cute.Pointer
    operands: Operands
    item: cute.Tensor  # [item_words, KV_STAGES]
    entries: cute.Tensor  # [tokens, Q_STAGES]
    harm: cute.Tensor  # [warps, KV_STAGES]: what the warps of a walk's guard have found


class Barriers(NamedTuple):
    """One a stage of the ring of Q tiles (q) or of blocks (item, k, v, kv); of ``v_tail`` there is one."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    item_full: cute.Pointer
    k_full: cute.Pointer
    v_full: cute.Pointer
    kv_empty: cute.Pointer
    v_tail: cute.Pointer


class Statistics(NamedTuple):
    """Of a finished row: 1 / sum of its weights, logsumexp, logsumexp at the temperature."""

    inverse: Float32
    lse: Float32
    lse_temperature: Float32


class PrefillSm90(sm90_walk.WalkRoles, Prefill):
    def __init__(self, g: int, **options: Any):
        super().__init__(g=g, **options)
        self.tokens = TILE_ROWS // g
        self.walk_tokens = work.WALK_ROWS // g
        self.walk_words = (self.walk_tokens + 31) // 32
        self.threads = WARPGROUP * (1 + CONSUMERS)
        # Gathering 64 tokens a tile takes the producers more registers than they need for fewer.
        self.walk_producer_registers, self.walk_consumer_registers = (40, 224) if g == 1 else (24, 232)
        self.min_blocks_per_mp = 1
        self.params |= self.walk_params()
        # bfloat16 partials of a tile take the place of its Q; float32 ones are twice as large and go out of registers.
        self.staged = self.partial.width == self.q.dtype.width
        self.item_words = max(loading.ITEM_WORDS, sm90_walk.FIXED_WORDS + self.walk_words)
        words = KV_STAGES * (self.item_words + WARPGROUP // 32) + Q_STAGES * self.tokens
        barriers = 2 * (2 * Q_STAGES + 1) + (4 + 6) * KV_STAGES
        tiles = 2 * KV_STAGES * self.kv.block_bytes + Q_STAGES * TILE_ROWS * self.q.row_bytes
        self.smem_bytes = tiles + 8 * barriers + 4 * words

    @cute.kernel
    def kernel(self, maps: TensorMaps, p):
        maps = self.named(maps)
        k_major = hopper_helpers.get_smem_layout_atom(cutlass.tensor_utils.LayoutEnum.ROW_MAJOR, self.qk, HEAD_DIM)
        mn_major = hopper_helpers.get_smem_layout_atom(cutlass.tensor_utils.LayoutEnum.COL_MAJOR, self.pv, HEAD_DIM)
        k_atom = warpgroup.make_smem_layout_atom(k_major, self.qk)
        v_atom = warpgroup.make_smem_layout_atom(mn_major, self.pv)
        q_layout = cute.tile_to_shape(k_atom, (TILE_ROWS, HEAD_DIM, Q_STAGES), order=(1, 0, 2))
        k_layout = cute.tile_to_shape(k_atom, (BLK_KV, HEAD_DIM, KV_STAGES), order=(0, 1, 2))
        v_layout = cute.tile_to_shape(v_atom, (HEAD_DIM, BLK_KV, KV_STAGES), order=(1, 0, 2))

        smem = cutlass.memory.SmemAllocator()
        k = smem.allocate_array(self.kv.dtype, cute.cosize(k_layout), byte_alignment=1024)
        v = smem.allocate_array(self.kv.dtype, cute.cosize(v_layout), byte_alignment=1024)
        q = smem.allocate_array(self.q.dtype, cute.cosize(q_layout), byte_alignment=1024)
        b = self.allocate(smem, Barriers)
        walk_b = self.allocate(smem, sm90_walk.Barriers)
        item = smem.allocate_tensor(Int32, cute.make_layout((self.item_words, KV_STAGES)), byte_alignment=4)
        entries = smem.allocate_tensor(Int32, cute.make_layout((self.tokens, Q_STAGES)), byte_alignment=4)
        harm = smem.allocate_tensor(Int32, cute.make_layout((WARPGROUP // 32, KV_STAGES)), byte_alignment=16)
        operands = Operands(
            *(
                cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
                for pointer, layout in ((q, q_layout), (k, k_layout), (v, v_layout))
            )
        )
        s = Shared(k=k, v=v, q=q, operands=operands, item=item, entries=entries, harm=harm)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        walks = work.walks(p.walk_totals, self.walk_tokens)
        if warp == 0:
            with cute.arch.elect_one():
                self.init_barriers(b)
                self.init_walk_barriers(walk_b, Q_STAGES)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # combine may take the multiprocessors as they become free

        if walks:
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(self.walk_producer_registers)
                if warp == 0:
                    self.walk_load_blocks(maps, s, walk_b, p)
                elif warp <= sm90_walk.CONSUMERS:
                    self.walk_load_queries(warp - 1, maps, s, walk_b, p)
            elif warp < (1 + sm90_walk.CONSUMERS) * (WARPGROUP // 32):
                cute.arch.setmaxregister_increase(self.walk_consumer_registers)
                self.walk_consume(thread - WARPGROUP, s, walk_b, p)
            else:
                cute.arch.setmaxregister_decrease(sm90_walk.GUARD_REGISTERS)
                self.walk_guard(thread - (1 + sm90_walk.CONSUMERS) * WARPGROUP, s, walk_b, p)
        else:
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == 0:
                    loading.load_blocks(maps, s, b, p, self.kv)
                else:
                    self.load_queries(warp - 1, maps, s, b, p)
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                self.consume(thread - WARPGROUP, s, b, p)

    def allocate(self, smem, barriers: type) -> Any:
        """The barriers of a traversal, in shared memory."""
        sizes = {"q_full": Q_STAGES, "q_empty": Q_STAGES, "v_tail": 1}
        return barriers(*(smem.allocate_array(Int64, sizes.get(name, KV_STAGES)) for name in barriers._fields))

    @cute.jit
    def init_barriers(self, b):
        """One thread: make the barriers of the CSR's order."""
        for stage in cutlass.range_constexpr(Q_STAGES):
            cute.arch.mbarrier_init(b.q_full + stage, min(self.tokens, 32))  # the lanes that write entries
            cute.arch.mbarrier_init(b.q_empty + stage, 1 if self.staged else WARPGROUP // 32)
        for stage in cutlass.range_constexpr(KV_STAGES):
            cute.arch.mbarrier_init(b.item_full + stage, 1)
            cute.arch.mbarrier_init(b.k_full + stage, 1)
            cute.arch.mbarrier_init(b.v_full + stage, 1)
            cute.arch.mbarrier_init(b.kv_empty + stage, CONSUMERS * (1 + WARPGROUP // 32))
        cute.arch.mbarrier_init(b.v_tail, 1)

    def tile_place(self, s: Shared, q_stage: Int32) -> cute.Pointer:
        """Where a stage of the ring of Q tiles starts in shared memory."""
        return s.q + cute.assume(q_stage * (TILE_ROWS * HEAD_DIM), divby=TILE_ROWS * HEAD_DIM)

    def ring_of_queries(self, q_index: Int32):
        """(stage, phase) of a tile of the CTA's stream."""
        return q_index % Q_STAGES, q_index // Q_STAGES % 2

    @cute.jit
    def load_queries(self, consumer, maps, s, b, p):
        """Warps 1 to 3: gather every third tile of the CTA's stream of tiles."""
        entries = work.entries_of_head(p)
        lane = cute.arch.lane_idx()
        tile_base = Int32(0)
        kv_index = Int32(0)
        count = items.wait(s, b.item_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            first, head = s.item[1, stage], s.item[2, stage]
            words = vector(p.qsplit_indices + (Int64(head) * entries + first))
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                place = self.tile_place(s, q_stage)
                mine = loading.entries_of_tile(words, tile, count, self.tokens)
                cute.arch.mbarrier_wait(b.q_empty + q_stage, 1 - q_phase)
                loading.keep_entries(s.entries, q_stage, mine, self.tokens)
                loading.fetch_queries(maps, p, mine, place, head, b.q_full + q_stage, self.q, TILE_ROWS, self.g)
            release(b.kv_empty + stage, lane)
            tile_base += tiles
            kv_index += 1
            count = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def consume(self, thread, s, b, p):
        """A consumer warpgroup: every third tile of the CTA's stream of tiles."""
        entries = work.entries_of_head(p)
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        first_row = thread // 32 * 16 + lane // 4  # a thread holds this row of a tile and the one 8 further on

        mma = products(s.operands, self.qk, self.pv)

        tile_base = Int32(0)  # the CTA's tiles before this item
        kv_index = Int32(0)
        count = items.wait(s, b.k_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            phase = phase_of(kv_index)
            first, head, key_limit, causal_shift = items.words(s, stage)
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                scores = cute.make_rmem_tensor(mma.qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32)
                cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
                visible = tuple(
                    visible_keys(s.entries[row // self.g, q_stage] & partials.TOKEN_MASK, key_limit, causal_shift)
                    for row in (first_row, first_row + 8)
                )
                multiply(mma.qk, scores, mma.q[None, None, None, q_stage], mma.k[None, None, None, stage])
                if const_expr(self.staged):
                    if thread == 0 and q_index >= CONSUMERS:  # the previous tile's partials have left their place
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(b.q_empty + (q_index + CONSUMERS) % Q_STAGES)
                else:
                    self.release_queries(b.q_empty + q_stage, thread, consumer)

                weights = cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_ROWS, BLK_KV)), self.pv)
                statistics = self.softmax(scores, weights, visible, lane, p)

                out = cute.make_rmem_tensor(mma.pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32)
                cute.arch.mbarrier_wait(b.v_full + stage, phase)
                multiply(mma.pv, out, weights, mma.v[None, None, None, stage])
                entry = Int64(head) * entries + (first + tile * self.tokens)
                tokens = min(count - tile * self.tokens, self.tokens)
                place = self.tile_place(s, q_stage)
                self.store(out, statistics, thread, consumer, entry, tokens, place, p)
            release(b.kv_empty + stage, lane)
            tile_base += tiles
            kv_index += 1
            count = items.wait(s, b.k_full, kv_index)
        if const_expr(self.staged):
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def release_queries(self, empty, thread, consumer):
        """A consumer warpgroup: its tile's queries have been read; as many arrive as the barrier counts."""
        if const_expr(self.staged):
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
            if thread == 0:
                cute.arch.mbarrier_arrive(empty)
        else:
            release(empty, thread % 32)

    @cute.jit
    def softmax(self, accumulator, weights, visible, lane, p):
        """Write exp(score - row maximum) to ``weights``; the Statistics of both rows."""
        scale_log2 = softmax.scale_log2(p)
        scores = rows_of_thread(accumulator)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        first, second = softmax.row_maxima(scores)
        maxima = softmax.finite(first), softmax.finite(second)
        lse_temperature = (Float32(0.0), Float32(0.0))
        if const_expr(self.temperature):
            scale = scale_log2 / p.lse_temperature_scale
            sums = softmax.row_sums_exp2(scores, maxima, scale, keep=False)
            lse_temperature = (
                softmax.log_sum_exp(maxima[0] * scale, sums[0]),
                softmax.log_sum_exp(maxima[1] * scale, sums[1]),
            )
        sums = softmax.row_sums_exp2(scores, maxima, scale_log2, keep=True)
        as_operand(accumulator, weights)
        return tuple(
            Statistics(
                softmax.reciprocal(sums[row]),
                softmax.log_sum_exp(maxima[row] * scale_log2, sums[row]),
                lse_temperature[row],
            )
            for row in range(2)
        )

    @cute.jit
    def store(self, out, statistics, thread, consumer, entry, tokens, place, p):
        """Normalise a tile and write its rows, of which the first ``tokens * G`` exist, from entry ``entry`` on."""
        lane = thread % 32
        elements = partials.chunk_elements(self.partial)
        groups = HEAD_DIM // (4 * elements)
        columns = cute.make_layout((elements, groups, 2), stride=(1, elements, HEAD_DIM // 4))
        packed = cute.make_rmem_tensor(columns, self.partial)
        source = rows_of_thread(out)
        for half in cutlass.range_constexpr(2):
            values = cute.make_tensor(packed.iterator + half * (HEAD_DIM // 4), cute.make_layout(HEAD_DIM // 4))
            values.store((source[half, None].load() * statistics[half].inverse).to(self.partial))
        tile = p.partial_out + cute.assume(entry * (self.g * HEAD_DIM), divby=HEAD_DIM)
        for half in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + lane // 4 + 8 * half
            index = partials.row_index(entry, row, self.g)
            exists = row < tokens * self.g
            for group in cutlass.range_constexpr(groups):
                chunk = partials.place(index, 4 * group + lane % 4)
                offset = cute.assume(row * HEAD_DIM + chunk * elements, divby=elements)
                if const_expr(self.staged):
                    target = cute.make_tensor(place + offset, cute.make_layout(elements))
                    cute.autovec_copy(packed[None, group, half], target)
                else:
                    if exists:
                        target = cute.make_tensor(tile + offset, cute.make_layout(elements))
                        cute.autovec_copy(packed[None, group, half], target)
            if exists and lane % 4 == 0:
                vector(p.partial_lse)[index] = statistics[half].lse
                if const_expr(self.temperature):
                    vector(p.partial_lse_temperature)[index] = statistics[half].lse_temperature
        if const_expr(self.staged):
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
            if thread == 0:
                size = tokens * (self.g * HEAD_DIM * self.partial.width // 8)
                primitives.cp_async_bulk_global_shared_cta(tile, place, size)
                cute.arch.cp_async_bulk_commit_group()
