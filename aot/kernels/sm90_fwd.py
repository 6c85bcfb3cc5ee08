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
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.experimental import primitives
from cutlass.utils import hopper_helpers

from aot.kernel import Kernel, Ptr, TensorMap
from aot.kernels import partials, softmax, work
from aot.kernels.mask import BLK_KV, mask_columns, visible_keys
from aot.kernels.partials import HEAD_DIM

TILE_ROWS = 64
CONSUMERS = 3
KV_STAGES = 2
Q_STAGES = 2 * CONSUMERS  # two for each consumer
ATOM_ROWS = 8  # a swizzled atom is 8 rows of 128 bytes
SWIZZLE_COLUMNS = 64  # bf16 elements in such a row
HALVES = HEAD_DIM // SWIZZLE_COLUMNS
WARPGROUP = 128
PRODUCER_REGISTERS = 56
CONSUMER_REGISTERS = 152
ITEM_WORDS = 8  # of a work item in shared memory: count, first entry, KV head, key_limit, causal_shift


@cute.jit
def rows_of_thread(accumulator: cute.Tensor) -> cute.Tensor:
    """A thread's part of a 64 x 128 accumulator as (2 rows, (2 neighbouring columns, 16 groups of 8 columns))."""
    return cute.make_tensor(accumulator.iterator, cute.make_layout((2, (2, 16)), stride=(2, (1, 4))))


@cute.jit
def reciprocal(x: Float32) -> Float32:
    """1 / x, or 0 for the sum of a row that sees nothing."""
    return cute.arch.rcp_approx(x) if x > 0.0 else Float32(0.0)


def tile_place(s_q: cute.Pointer, q_stage: Int32) -> cute.Pointer:
    """Where a stage of the ring of Q tiles starts in shared memory."""
    return s_q + cute.assume(q_stage * (TILE_ROWS * HEAD_DIM), divby=TILE_ROWS * HEAD_DIM)


@cute.jit
def first_tile(consumer: Int32, tile_base: Int32) -> Int32:
    """The first tile of an item that is a consumer's, ``tile_base`` being the number of tiles before the item."""
    return (consumer + CONSUMERS - tile_base % CONSUMERS) % CONSUMERS


class ForwardSm90(Kernel):
    def __init__(self, g: int, partial: str, temperature: bool):
        self.g = g
        self.partial = partials.PARTIAL_DTYPES[partial]
        self.temperature = temperature
        self.tokens = TILE_ROWS // g
        self.threads = WARPGROUP * (1 + CONSUMERS)
        self.min_blocks_per_mp = 1
        # The tensor copy engine fetches a token's heads where they fill whole atoms; smaller groups would take so many
        # copies that issuing them is the limit, and go through cp.async.
        self.whole_atoms = g >= ATOM_ROWS
        # bfloat16 partials of a tile take the place of its Q; float32 ones are twice as large and go out of registers.
        self.staged = self.partial is BFloat16
        kv_map = TensorMap(BFloat16, (SWIZZLE_COLUMNS, BLK_KV, HALVES, 1, 1))
        self.params = {
            "q_map": TensorMap(BFloat16, (SWIZZLE_COLUMNS, ATOM_ROWS, HALVES, max(g // ATOM_ROWS, 1), 1)),
            "k_map": kv_map,
            "v_map": kv_map,
            "q": Ptr(BFloat16, 16),
            "k2q_row_ptr": Ptr(Int32),
            "qsplit_indices": Ptr(Int32),
            "scheduler_metadata": Ptr(Int32),
            "work_count": Ptr(Int32),
            "work_counter": Ptr(Int32),
            "cu_seqlens_q": Ptr(Int32),
            "cu_seqlens_k": Ptr(Int32),
            "seqused_k": Ptr(Int32),
            "page_table": Ptr(Int32),
            "partial_out": Ptr(self.partial, 16),
            "partial_lse": Ptr(Float32),
            "partial_lse_temperature": Ptr(Float32),
            "q_stride_token": Int64,
            "q_stride_head": Int64,
            "page_table_stride": Int64,
            "max_pages": Int32,
            "batch": Int32,
            "total_q": Int32,
            "head_kv": Int32,
            "total_rows": Int32,
            "topk": Int32,
            "work_capacity": Int32,
            "causal": Int32,
            "softmax_scale": Float32,
            "lse_temperature_scale": Float32,
        }
        kv_bytes = BLK_KV * HEAD_DIM * 2
        words = KV_STAGES * ITEM_WORDS + Q_STAGES * self.tokens
        barriers = 2 * Q_STAGES + 4 * KV_STAGES + 1
        self.smem_bytes = 2 * KV_STAGES * kv_bytes + Q_STAGES * TILE_ROWS * HEAD_DIM * 2 + 8 * barriers + 4 * words

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
        partial_out: cute.Pointer,
        partial_lse: cute.Pointer,
        partial_lse_temperature: cute.Pointer,
        q_stride_token: Int64,
        q_stride_head: Int64,
        page_table_stride: Int64,
        max_pages: Int32,
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
        s_item = smem.allocate_tensor(Int32, cute.make_layout((ITEM_WORDS, KV_STAGES)), byte_alignment=4)
        s_entries = smem.allocate_tensor(Int32, cute.make_layout((self.tokens, Q_STAGES)), byte_alignment=4)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(Q_STAGES):
                    cute.arch.mbarrier_init(q_full + stage, min(self.tokens, 32))  # the lanes that write entries
                    cute.arch.mbarrier_init(q_empty + stage, 1 if self.staged else WARPGROUP // 32)
                for stage in cutlass.range_constexpr(KV_STAGES):
                    cute.arch.mbarrier_init(item_full + stage, 1)
                    cute.arch.mbarrier_init(k_full + stage, 1)
                    cute.arch.mbarrier_init(v_full + stage, 1)
                    cute.arch.mbarrier_init(kv_empty + stage, CONSUMERS * (1 + WARPGROUP // 32))
                cute.arch.mbarrier_init(v_tail, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # combine may take the multiprocessors as they become free

        if warp < WARPGROUP // 32:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.load_blocks(
                    (k_map, v_map),
                    (k_pointer, v_pointer, s_item),
                    (item_full, k_full, v_full, kv_empty, v_tail),
                    (scheduler_metadata, work_count, work_counter, k2q_row_ptr),
                    (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_table_stride, max_pages),
                    (batch, total_q * topk, head_kv, total_rows, work_capacity, causal),
                )
            else:
                self.load_queries(
                    warp - 1,
                    (q_map, q, q_stride_token, q_stride_head),
                    (q_pointer, s_item, s_entries),
                    (q_full, q_empty, item_full, kv_empty),
                    qsplit_indices,
                    total_q,
                    total_q * topk,
                )
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(
                thread - WARPGROUP,
                tuple(
                    cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
                    for pointer, layout in ((q_pointer, q_layout), (k_pointer, k_layout), (v_pointer, v_layout))
                ),
                (q_pointer, s_item, s_entries),
                (q_full, q_empty, k_full, v_full, kv_empty),
                (partial_out, partial_lse, partial_lse_temperature),
                total_q * topk,
                softmax_scale * partials.LOG2_E,
                lse_temperature_scale,
            )

    @cute.jit
    def load_blocks(self, maps, shared, barriers, schedule, sequences, sizes):
        """Warp 0: claim work items and load their K and V."""
        k_map, v_map = maps
        s_k, s_v, s_item = shared
        item_full, k_full, v_full, kv_empty, v_tail = barriers
        scheduler_metadata, work_count, work_counter, k2q_row_ptr = schedule
        cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, page_table_stride, max_pages = sequences
        batch, entries, head_kv, total_rows, work_capacity, causal = sizes
        lane = cute.arch.lane_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()

        items = min(work.vector(work_count)[0], work_capacity)
        kv_index = Int32(0)
        tails = Int32(0)
        item = cta
        while item < items:
            claimed = Int32(0)
            if lane == 0:
                claimed = cute.arch.atomic_add(work_counter, Int32(1))
            count, head, first, sequence, block = work.decode(
                item, scheduler_metadata, k2q_row_ptr, head_kv, total_rows, entries, batch
            )
            if count > 0:
                key_limit, causal_shift = work.bounds(sequence, block, causal, cu_seqlens_q, cu_seqlens_k, seqused_k)
                # Flat: a range of tokens of the only page. Paged: one page. What does not exist reads as zero.
                row, page = work.vector(cu_seqlens_k)[sequence] + block * BLK_KV, Int32(0)
                if page_table.toint() != 0:
                    row, page = Int32(0), Int32(-1)
                    if block < max_pages:
                        page = work.vector(page_table)[sequence * page_table_stride + block]
                stage = kv_index % KV_STAGES
                cute.arch.mbarrier_wait(kv_empty + stage, (kv_index // KV_STAGES + 1) % 2)
                if lane == 0:
                    s_item[0, stage] = count
                    s_item[1, stage] = first
                    s_item[2, stage] = head
                    s_item[3, stage] = key_limit
                    s_item[4, stage] = causal_shift
                    cute.arch.mbarrier_arrive(item_full + stage)
                    self.load_block(k_map, s_k, stage, k_full + stage, row, head, page)
                if key_limit >= BLK_KV:
                    if lane == 0:
                        self.load_block(v_map, s_v, stage, v_full + stage, row, head, page)
                else:
                    if lane == 0:
                        self.load_block(v_map, s_v, stage, v_tail, row, head, page)
                    cute.arch.mbarrier_wait(v_tail, tails % 2)
                    tails += 1
                    self.zero_tail(s_v, stage, key_limit, lane)
                    if lane == 0:
                        cute.arch.mbarrier_arrive(v_full + stage)
                kv_index += 1
            item = ctas + cute.arch.shuffle_sync(claimed, 0)

        stage = kv_index % KV_STAGES
        cute.arch.mbarrier_wait(kv_empty + stage, (kv_index // KV_STAGES + 1) % 2)
        if lane == 0:
            s_item[0, stage] = -1  # the end
            cute.arch.mbarrier_arrive(item_full + stage)
            cute.arch.mbarrier_arrive(k_full + stage)

    @cute.jit
    def load_block(self, tensor_map, s_block, stage, full, row, head, page):
        """One thread: fetch a block's K or V into a stage."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.params["k_map"].bytes)
        target = s_block + stage * (BLK_KV * HEAD_DIM)
        primitives.cp_async_bulk_tensor_shared_cta_global(target, tensor_map.get_ptr(), (0, row, 0, head, page), full)

    @cute.jit
    def zero_tail(self, s_v, stage, key_limit, lane):
        """One warp: clear the values past the sequence's end; their weight is 0, but 0 * NaN is not."""
        block = cute.recast_ptr(s_v + stage * (BLK_KV * HEAD_DIM), dtype=Int32)
        words = cute.make_tensor(block, cute.make_layout((SWIZZLE_COLUMNS // 2, BLK_KV, HALVES)))
        for key in cutlass.range(max(key_limit, 0), BLK_KV, unroll=1):
            for half in cutlass.range_constexpr(HALVES):
                words[lane, key, half] = 0
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def load_queries(self, consumer, q, shared, barriers, qsplit_indices, total_q, entries):
        """Warps 1 to 3: gather every third tile of the CTA's stream of tiles."""
        q_map, q, stride_token, stride_head = q
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
                q_stage = q_index % Q_STAGES
                place = tile_place(s_q, q_stage)
                mine = cute.make_rmem_tensor((self.tokens + 31) // 32, Int32)
                for i in cutlass.range_constexpr(cute.size(mine)):  # a tile's missing tokens repeat its last
                    mine[i] = words[Int64(min(tile * self.tokens + lane % self.tokens + 32 * i, count - 1))]
                cute.arch.mbarrier_wait(q_empty + q_stage, (q_index // Q_STAGES + 1) % 2)
                for i in cutlass.range_constexpr(cute.size(mine)):
                    if lane + 32 * i < self.tokens:
                        s_entries[lane + 32 * i, q_stage] = mine[i]
                if const_expr(self.whole_atoms):
                    if lane == 0:
                        cute.arch.mbarrier_expect_tx(q_full + q_stage, TILE_ROWS * HEAD_DIM * 2)
                    cute.arch.sync_warp()
                    if lane < self.tokens:
                        coordinates = (0, 0, 0, head * (self.g // ATOM_ROWS), mine[0] & partials.TOKEN_MASK)
                        target = place + lane * (self.g * HEAD_DIM)
                        primitives.cp_async_bulk_tensor_shared_cta_global(
                            target, q_map.get_ptr(), coordinates, q_full + q_stage
                        )
                else:
                    self.gather((q, stride_token, stride_head), mine, place, head, total_q, lane)
                    cute.arch.cp_async_commit_group()
                    cute.arch.cp_async_wait_group(0)
                    cute.arch.fence_view_async_shared()
                if lane < self.tokens:
                    cute.arch.mbarrier_arrive(q_full + q_stage)
            if lane == 0:
                cute.arch.mbarrier_arrive(kv_empty + stage)
            tile_base += tiles
            kv_index += 1
            cute.arch.mbarrier_wait(item_full + kv_index % KV_STAGES, kv_index // KV_STAGES % 2)
            count = s_item[0, kv_index % KV_STAGES]

    @cute.jit
    def gather(self, q, mine, place, head, total_q, lane):
        """One warp: copy a tile's rows, two at a time, to the swizzled atoms that wgmma reads.

        ``mine`` holds the tile's entries, entry i in lane i % 32.
        """
        q, stride_token, stride_head = q
        atom = cute.make_copy_atom(
            cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
        )
        vector = cute.make_layout(8)
        odd, chunk = lane // 16, lane % 16
        column = place + cute.assume(
            chunk // 8 * (ATOM_ROWS * SWIZZLE_COLUMNS) + odd * SWIZZLE_COLUMNS, divby=SWIZZLE_COLUMNS
        )
        source = q
        for row in cutlass.range_constexpr(0, TILE_ROWS, 2):
            if const_expr(row % self.g == 0):  # the next token
                slot = row // self.g + (odd if self.g == 1 else 0)
                word = cute.arch.shuffle_sync(mine[row // self.g // 32], slot % 32)
                token = min(word & partials.TOKEN_MASK, total_q - 1)
                group_head = head * self.g + (odd if self.g > 1 else 0)
                start = Int64(token) * stride_token + group_head * stride_head + chunk * 8
                source = q + cute.assume(start, divby=8)
            skipped = row % self.g * stride_head
            swizzled = ((chunk ^ odd) % 8 ^ row % 8) * 8
            target = column + cute.assume(
                row // 8 * (ATOM_ROWS * HEAD_DIM) + row % ATOM_ROWS * SWIZZLE_COLUMNS + swizzled, divby=8
            )
            cute.copy(
                atom,
                cute.make_tensor(source + cute.assume(skipped, divby=8), vector),
                cute.make_tensor(target, vector),
            )

    @cute.jit
    def consume(self, thread, shared, work_shared, barriers, partial, entries, scale_log2, lse_temperature_scale):
        """A consumer warpgroup: every third tile of the CTA's stream of tiles."""
        s_q, s_k, s_v = shared
        q_pointer, s_item, s_entries = work_shared
        q_full, q_empty, k_full, v_full, kv_empty = barriers
        consumer = cute.arch.make_warp_uniform(thread // WARPGROUP)
        thread = thread % WARPGROUP
        lane = cute.arch.lane_idx()
        first_row = thread // 32 * 16 + lane // 4  # a thread holds this row of a tile and the one 8 further on

        qk = self.tiled_mma(warpgroup.OperandMajorMode.K, warpgroup.OperandSource.SMEM)
        pv = self.tiled_mma(warpgroup.OperandMajorMode.MN, warpgroup.OperandSource.RMEM)
        fragment_q = qk.make_fragment_A(qk.get_slice(0).partition_A(s_q))
        fragment_k = qk.make_fragment_B(qk.get_slice(0).partition_B(s_k))
        fragment_v = pv.make_fragment_B(pv.get_slice(0).partition_B(s_v))

        tile_base = Int32(0)  # the CTA's tiles before this item
        kv_index = Int32(0)
        cute.arch.mbarrier_wait(k_full, 0)
        count = s_item[0, 0]
        while count >= 0:
            stage = kv_index % KV_STAGES
            phase = kv_index // KV_STAGES % 2
            first, head, key_limit, causal_shift = (
                s_item[1, stage],
                s_item[2, stage],
                s_item[3, stage],
                s_item[4, stage],
            )
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage = q_index % Q_STAGES
                scores = cute.make_rmem_tensor(qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32)
                cute.arch.mbarrier_wait(q_full + q_stage, q_index // Q_STAGES % 2)
                visible = tuple(
                    visible_keys(s_entries[row // self.g, q_stage] & partials.TOKEN_MASK, key_limit, causal_shift)
                    for row in (first_row, first_row + 8)
                )
                self.multiply(qk, scores, fragment_q[None, None, None, q_stage], fragment_k[None, None, None, stage])
                if const_expr(self.staged):
                    if thread == 0 and q_index >= CONSUMERS:  # the previous tile's partials have left their place
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        cute.arch.mbarrier_arrive(q_empty + (q_index + CONSUMERS) % Q_STAGES)
                else:
                    if lane == 0:
                        cute.arch.mbarrier_arrive(q_empty + q_stage)

                weights = cute.make_rmem_tensor(pv.partition_shape_A((TILE_ROWS, BLK_KV)), BFloat16)
                statistics = self.softmax(scores, weights, visible, lane, scale_log2, lse_temperature_scale)

                out = cute.make_rmem_tensor(pv.partition_shape_C((TILE_ROWS, HEAD_DIM)), Float32)
                cute.arch.mbarrier_wait(v_full + stage, phase)
                self.multiply(pv, out, weights, fragment_v[None, None, None, stage])
                entry = Int64(head) * entries + (first + tile * self.tokens)
                tokens = min(count - tile * self.tokens, self.tokens)
                place = tile_place(q_pointer, q_stage)
                self.store(out, statistics, thread, consumer, entry, tokens, place, partial)
            if lane == 0:
                cute.arch.mbarrier_arrive(kv_empty + stage)
            tile_base += tiles
            kv_index += 1
            cute.arch.mbarrier_wait(k_full + kv_index % KV_STAGES, kv_index // KV_STAGES % 2)
            count = s_item[0, kv_index % KV_STAGES]
        if const_expr(self.staged):
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    def tiled_mma(self, b_major, a_source) -> cute.TiledMma:
        """64 x 128 x 16 of bf16 with float32 accumulators."""
        k = warpgroup.OperandMajorMode.K
        return hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, k, b_major, Float32, (1, 1, 1), tiler_mn=(TILE_ROWS, 128), a_source=a_source
        )

    @cute.jit
    def multiply(self, mma: cute.TiledMma, accumulator: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
        """accumulator = a @ b^T, and wait for it."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
            atom.set(warpgroup.Field.ACCUMULATE, k > 0)
            cute.gemm(atom, accumulator, a[None, None, k], b[None, None, k], accumulator)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    @cute.jit
    def softmax(self, accumulator, weights, visible, lane, scale_log2, lse_temperature_scale):
        """Write exp(score - row maximum) to ``weights`` as bf16; for both rows (1 / row sum, lse, temperature lse)."""
        scores = rows_of_thread(accumulator)
        if not cute.arch.vote_all_sync(visible[0] >= BLK_KV and visible[1] >= BLK_KV):
            mask_columns(scores, visible, lane % 4 * 2)
        maxima = softmax.row_maxima(scores)
        lse_temperature = (Float32(0.0), Float32(0.0))
        if const_expr(self.temperature):
            scale = scale_log2 / lse_temperature_scale
            sums = softmax.row_sums_exp2(scores, maxima, scale, keep=False)
            lse_temperature = (
                partials.log_sum_exp(maxima[0] * scale, sums[0]),
                partials.log_sum_exp(maxima[1] * scale, sums[1]),
            )
        sums = softmax.row_sums_exp2(scores, maxima, scale_log2, keep=True)
        cute.make_tensor(weights.iterator, accumulator.layout).store(accumulator.load().to(BFloat16))
        return (
            (reciprocal(sums[0]), partials.log_sum_exp(maxima[0] * scale_log2, sums[0]), lse_temperature[0]),
            (reciprocal(sums[1]), partials.log_sum_exp(maxima[1] * scale_log2, sums[1]), lse_temperature[1]),
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
