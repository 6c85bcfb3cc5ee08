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

import cutlass
import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import BFloat16, Float32, GridConstant, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup
from cutlass.experimental import primitives
from cutlass.utils import hopper_helpers

from aot.kernel import Kernel, TensorMap
from aot.kernels import loading, partials, sm90_walk, softmax, work
from aot.kernels.forward import forward_params
from aot.kernels.loading import ATOM_ROWS, BLOCK_BYTES, HALVES, KV_STAGES, SWIZZLE_COLUMNS
from aot.kernels.mask import BLK_KV, mask_columns, visible_keys
from aot.kernels.partials import HEAD_DIM
from aot.kernels.sm90_mma import CONSUMERS, TILE_ROWS, as_operand, multiply, products, rows_of_thread

Q_STAGES = 2 * CONSUMERS  # two for each consumer
WARPGROUP = 128
PRODUCER_REGISTERS = 56
CONSUMER_REGISTERS = 152


@cute.jit
def first_tile(consumer: Int32, tile_base: Int32) -> Int32:
    """The first tile of an item that is a consumer's, ``tile_base`` being the number of tiles before the item."""
    return (consumer + CONSUMERS - tile_base % CONSUMERS) % CONSUMERS


class ForwardSm90(sm90_walk.WalkRoles, Kernel):
    def __init__(self, g: int, partial: str, temperature: bool):
        self.g = g
        self.partial = partials.PARTIAL_DTYPES[partial]
        self.temperature = temperature
        self.tokens = TILE_ROWS // g
        self.walk_tokens = work.WALK_ROWS // g
        self.walk_words = (self.walk_tokens + 31) // 32
        self.threads = WARPGROUP * (1 + CONSUMERS)
        self.min_blocks_per_mp = 1
        self.walks = True
        # bfloat16 partials of a tile take the place of its Q; float32 ones are twice as large and go out of registers.
        self.staged = self.partial is BFloat16
        kv_map = TensorMap(BFloat16, (SWIZZLE_COLUMNS, BLK_KV, HALVES, 1, 1))
        q_map = TensorMap(BFloat16, (SWIZZLE_COLUMNS, ATOM_ROWS, HALVES, max(g // ATOM_ROWS, 1), 1))
        self.params = forward_params(q_map, kv_map, kv_map, self.partial)
        self.item_words = max(loading.ITEM_WORDS, sm90_walk.FIXED_WORDS + self.walk_words)
        words = KV_STAGES * self.item_words + Q_STAGES * self.tokens
        barriers = 2 * Q_STAGES + 4 * KV_STAGES + 1
        self.smem_bytes = 2 * KV_STAGES * BLOCK_BYTES + Q_STAGES * TILE_ROWS * HEAD_DIM * 2 + 8 * barriers + 4 * words

    @cute.kernel
    def kernel(
        self,
        q_map: GridConstant[cuda.TensorMap],
        k_map: GridConstant[cuda.TensorMap],
        v_map: GridConstant[cuda.TensorMap],
        q: cute.Pointer,
        k2q_row_ptr: cute.Pointer,
        qsplit_indices: cute.Pointer,
        scheduler_metadata: cute.Pointer,
        work_count: cute.Pointer,
        work_counter: cute.Pointer,
        cu_seqlens_q: cute.Pointer,
        cu_seqlens_k: cute.Pointer,
        seqused_k: cute.Pointer,
        page_table: cute.Pointer,
        walk_blocks: cute.Pointer,
        walk_counts: cute.Pointer,
        walk_totals: cute.Pointer,
        partial_out: cute.Pointer,
        partial_lse: cute.Pointer,
        partial_lse_temperature: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        lse_temperature: cute.Pointer,
        q_stride_token: Int64,
        q_stride_head: Int64,
        out_stride_token: Int64,
        out_stride_head: Int64,
        lse_stride_token: Int64,
        lse_stride_head: Int64,
        page_table_stride: Int64,
        max_pages: Int32,
        kv_extent: Int32,
        batch: Int32,
        total_q: Int32,
        head_kv: Int32,
        total_rows: Int32,
        topk: Int32,
        work_capacity: Int32,
        causal: Int32,
        softmax_scale: Float32,
        lse_temperature_scale: Float32,
    ):
        k_major = hopper_helpers.get_smem_layout_atom(cutlass.tensor_utils.LayoutEnum.ROW_MAJOR, BFloat16, HEAD_DIM)
        mn_major = hopper_helpers.get_smem_layout_atom(cutlass.tensor_utils.LayoutEnum.COL_MAJOR, BFloat16, HEAD_DIM)
        k_atom = warpgroup.make_smem_layout_atom(k_major, BFloat16)
        v_atom = warpgroup.make_smem_layout_atom(mn_major, BFloat16)
        q_layout = cute.tile_to_shape(k_atom, (TILE_ROWS, HEAD_DIM, Q_STAGES), order=(1, 0, 2))
        k_layout = cute.tile_to_shape(k_atom, (BLK_KV, HEAD_DIM, KV_STAGES), order=(0, 1, 2))
        v_layout = cute.tile_to_shape(v_atom, (HEAD_DIM, BLK_KV, KV_STAGES), order=(1, 0, 2))

        smem = cutlass.memory.SmemAllocator()
        k_pointer = smem.allocate_array(BFloat16, cute.cosize(k_layout), byte_alignment=1024)
        v_pointer = smem.allocate_array(BFloat16, cute.cosize(v_layout), byte_alignment=1024)
        q_pointer = smem.allocate_array(BFloat16, cute.cosize(q_layout), byte_alignment=1024)
        q_full = smem.allocate_array(Int64, Q_STAGES)
        q_empty = smem.allocate_array(Int64, Q_STAGES)
        item_full = smem.allocate_array(Int64, KV_STAGES)
        k_full = smem.allocate_array(Int64, KV_STAGES)
        v_full = smem.allocate_array(Int64, KV_STAGES)
        kv_empty = smem.allocate_array(Int64, KV_STAGES)
        v_tail = smem.allocate_array(Int64, 1)
        s_item = smem.allocate_tensor(Int32, cute.make_layout((self.item_words, KV_STAGES)), byte_alignment=4)
        s_entries = smem.allocate_tensor(Int32, cute.make_layout((self.tokens, Q_STAGES)), byte_alignment=4)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        walks = work.walks(walk_totals, self.walk_tokens)
        if warp == 0:
            consumers = Int32(sm90_walk.CONSUMERS) if walks else Int32(CONSUMERS)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(Q_STAGES):
                    cute.arch.mbarrier_init(q_full + stage, min(self.tokens, 32))  # the lanes that write entries
                    cute.arch.mbarrier_init(q_empty + stage, 1 if self.staged else WARPGROUP // 32)
                for stage in cutlass.range_constexpr(KV_STAGES):
                    cute.arch.mbarrier_init(item_full + stage, 1)
                    cute.arch.mbarrier_init(k_full + stage, 1)
                    cute.arch.mbarrier_init(v_full + stage, 1)
                    cute.arch.mbarrier_init(kv_empty + stage, consumers * (1 + WARPGROUP // 32))
                cute.arch.mbarrier_init(v_tail, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # combine may take the multiprocessors as they become free

        maps = (k_map, v_map)
        queries = (q_map, q, q_stride_token, q_stride_head)
        kv_barriers = (item_full, k_full, v_full, kv_empty, v_tail)
        q_barriers = (q_full, q_empty, item_full, kv_empty)
        sequences = (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_table_stride, max_pages, kv_extent)
        plan = (walk_blocks, walk_counts)
        walk_sizes = (batch, total_q, head_kv, causal)
        schedule = (scheduler_metadata, work_count, work_counter, k2q_row_ptr)
        sizes = (batch, total_q * topk, head_kv, total_rows, work_capacity, causal)
        blocks = (k_pointer, v_pointer, s_item)
        tiles = (q_pointer, s_item, s_entries)
        barriers = (q_full, q_empty, k_full, v_full, kv_empty)
        scales = (softmax_scale * partials.LOG2_E, lse_temperature_scale)
        strides = ((out_stride_token, out_stride_head), (lse_stride_token, lse_stride_head))
        output = (out, lse, lse_temperature, *strides)
        partial = (partial_out, partial_lse, partial_lse_temperature)
        operands = tuple(
            cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
            for pointer, layout in ((q_pointer, q_layout), (k_pointer, k_layout), (v_pointer, v_layout))
        )
        if walks:
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(sm90_walk.PRODUCER_REGISTERS)
                if warp == 0:
                    self.walk_load_blocks(maps, blocks, kv_barriers, plan, work_counter, sequences, walk_sizes)
                elif warp <= sm90_walk.CONSUMERS:
                    self.walk_load_queries(warp - 1, queries, tiles, q_barriers, total_q)
            elif warp < (1 + sm90_walk.CONSUMERS) * (WARPGROUP // 32):
                cute.arch.setmaxregister_increase(sm90_walk.CONSUMER_REGISTERS)
                self.walk_consume(thread - WARPGROUP, operands, s_item, barriers, output, total_q, *scales)
            else:
                cute.arch.setmaxregister_decrease(sm90_walk.IDLE_REGISTERS)
        else:
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == 0:
                    loading.load_blocks(maps, blocks, kv_barriers, schedule, sequences, sizes)
                else:
                    self.load_queries(warp - 1, queries, tiles, q_barriers, qsplit_indices, total_q, total_q * topk)
            else:
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                self.consume(thread - WARPGROUP, operands, tiles, barriers, partial, total_q * topk, *scales)

    def tile_place(self, s_q: cute.Pointer, q_stage: Int32) -> cute.Pointer:
        """Where a stage of the ring of Q tiles starts in shared memory."""
        return s_q + cute.assume(q_stage * (TILE_ROWS * HEAD_DIM), divby=TILE_ROWS * HEAD_DIM)

    def ring_of_queries(self, q_index: Int32):
        """(stage, phase) of a tile of the CTA's stream."""
        return q_index % Q_STAGES, q_index // Q_STAGES % 2

    @cute.jit
    def load_queries(self, consumer, q, shared, barriers, qsplit_indices, total_q, entries):
        """Warps 1 to 3: gather every third tile of the CTA's stream of tiles."""
        s_q, s_item, s_entries = shared
        q_full, q_empty, item_full, kv_empty = barriers
        lane = cute.arch.lane_idx()
        tile_base = Int32(0)
        kv_index = Int32(0)
        cute.arch.mbarrier_wait(item_full, 0)
        count = s_item[0, 0]
        while count >= 0:
            stage = kv_index % KV_STAGES
            first, head = s_item[1, stage], s_item[2, stage]
            words = work.vector(qsplit_indices + (Int64(head) * entries + first))
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                place = self.tile_place(s_q, q_stage)
                mine = loading.entries_of_tile(words, tile, count, self.tokens)
                cute.arch.mbarrier_wait(q_empty + q_stage, 1 - q_phase)
                loading.keep_entries(s_entries, q_stage, mine, self.tokens)
                loading.fetch_queries(q, mine, place, head, total_q, q_full + q_stage, TILE_ROWS, self.g)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(kv_empty + stage)
            tile_base += tiles
            kv_index += 1
            cute.arch.mbarrier_wait(item_full + kv_index % KV_STAGES, kv_index // KV_STAGES % 2)
            count = s_item[0, kv_index % KV_STAGES]

    @cute.jit
    def consume(self, thread, shared, work_shared, barriers, partial, entries, scale_log2, lse_temperature_scale):
        """A consumer warpgroup: every third tile of the CTA's stream of tiles."""
        q_pointer, s_item, s_entries = work_shared
        q_full, q_empty, k_full, v_full, kv_empty = barriers
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        first_row = thread // 32 * 16 + lane // 4  # a thread holds this row of a tile and the one 8 further on

        qk, pv, fragment_q, fragment_k, fragment_v = products(*shared)

        tile_base = Int32(0)  # the CTA's tiles before this item
        kv_index = Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        count = s_item[0, 0]
        while count >= 0:
            stage = kv_index % KV_STAGES
            phase = kv_index // KV_STAGES % 2
            first, head, key_limit, causal_shift = loading.words_of_item(s_item, stage)
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                scores = cute.make_rmem_tensor(qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32)
                cute.arch.mbarrier_wait(q_full + q_stage, q_phase)
                visible = tuple(
                    visible_keys(s_entries[row // self.g, q_stage] & partials.TOKEN_MASK, key_limit, causal_shift)
                    for row in (first_row, first_row + 8)
                )
                multiply(qk, scores, fragment_q[None, None, None, q_stage], fragment_k[None, None, None, stage])
                if const_expr(self.staged):
                    if thread == 0 and q_index >= CONSUMERS:  # the previous tile's partials have left their place
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(q_empty + (q_index + CONSUMERS) % Q_STAGES)
                else:
                    self.release_queries(q_empty + q_stage, thread, consumer)

                weights = cute.make_rmem_tensor(pv.partition_shape_A((TILE_ROWS, BLK_KV)), BFloat16)
                statistics = self.softmax(scores, weights, visible, lane, scale_log2, lse_temperature_scale)

                out = cute.make_rmem_tensor(pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32)
                cute.arch.mbarrier_wait(v_full + stage, phase)
                multiply(pv, out, weights, fragment_v[None, None, None, stage])
                softmax.clear_blind(rows_of_thread(out), visible)
                entry = Int64(head) * entries + (first + tile * self.tokens)
                tokens = min(count - tile * self.tokens, self.tokens)
                place = self.tile_place(q_pointer, q_stage)
                self.store(out, statistics, thread, consumer, entry, tokens, place, partial)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(kv_empty + stage)
            tile_base += tiles
            kv_index += 1
            cute.arch.mbarrier_wait(k_full + kv_index % KV_STAGES, kv_index // KV_STAGES % 2)
            count = s_item[0, kv_index % KV_STAGES]
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
            cute.arch.sync_warp()
            if thread % 32 == 0:
                cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def softmax(self, accumulator, weights, visible, lane, scale_log2, lse_temperature_scale):
        """Write exp(score - row maximum) to ``weights`` as bf16; for both rows (1 / row sum, lse, temperature lse)."""
        scores = rows_of_thread(accumulator)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        first, second = softmax.row_maxima(scores)
        maxima = softmax.finite(first), softmax.finite(second)
        lse_temperature = (Float32(0.0), Float32(0.0))
        if const_expr(self.temperature):
            scale = scale_log2 / lse_temperature_scale
            sums = softmax.row_sums_exp2(scores, maxima, scale, keep=False)
            lse_temperature = (
                partials.log_sum_exp(maxima[0] * scale, sums[0]),
                partials.log_sum_exp(maxima[1] * scale, sums[1]),
            )
        sums = softmax.row_sums_exp2(scores, maxima, scale_log2, keep=True)
        as_operand(accumulator, weights)
        return (
            (softmax.reciprocal(sums[0]), partials.log_sum_exp(maxima[0] * scale_log2, sums[0]), lse_temperature[0]),
            (softmax.reciprocal(sums[1]), partials.log_sum_exp(maxima[1] * scale_log2, sums[1]), lse_temperature[1]),
        )

    @cute.jit
    def store(self, out, statistics, thread, consumer, entry, tokens, place, partial):
        """Normalise a tile and write its rows, of which the first ``tokens * G`` exist, from entry ``entry`` on."""
        partial_out, partial_lse, partial_lse_temperature = partial
        lane = thread % 32
        elements = partials.chunk_elements(self.partial)
        groups = HEAD_DIM // (4 * elements)
        columns = cute.make_layout((elements, groups, 2), stride=(1, elements, HEAD_DIM // 4))
        packed = cute.make_rmem_tensor(columns, self.partial)
        source = rows_of_thread(out)
        for half in cutlass.range_constexpr(2):
            values = cute.make_tensor(packed.iterator + half * (HEAD_DIM // 4), cute.make_layout(HEAD_DIM // 4))
            values.store((source[half, None].load() * statistics[half][0]).to(self.partial))
        tile = partial_out + cute.assume(entry * (self.g * HEAD_DIM), divby=HEAD_DIM)
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
                work.vector(partial_lse)[index] = statistics[half][1]
                if const_expr(self.temperature):
                    work.vector(partial_lse_temperature)[index] = statistics[half][2]
        if const_expr(self.staged):
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
            if thread == 0:
                size = tokens * (self.g * HEAD_DIM * self.partial.width // 8)
                primitives.cp_async_bulk_global_shared_cta(tile, place, size)
                cute.arch.cp_async_bulk_commit_group()
