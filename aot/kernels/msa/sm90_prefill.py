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
from aot.kernels.mask import BLK_KV, mask_columns
from aot.kernels.memory import vector
from aot.kernels.msa import loading, partials, sm90_walk, walk, work
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
        self.walk_tokens = sm90_walk.ROWS // g
        self.walk_words = (self.walk_tokens + 31) // 32
        self.threads = WARPGROUP * (1 + CONSUMERS)
        # Gathering 64 tokens a tile takes the producers more registers than they need for fewer.
        self.walk_producer_registers, self.walk_consumer_registers = (40, 224) if g == 1 else (24, 232)
        self.min_blocks_per_mp = 1
        self.params |= self.walk_params()
        # bfloat16 partials of a tile take the place of its Q; float32 ones are twice as large and go out of registers.
        self.staged = self.partial.width == self.q.dtype.width
        self.partial_bytes = HEAD_DIM * self.partial.width // 8  # of a row
        self.item_words = max(loading.MARKS_WORD + 32, walk.FIXED_WORDS + self.walk_words)
        words = KV_STAGES * self.item_words + Q_STAGES * self.tokens
        barriers = 2 * (2 * Q_STAGES + 4 * KV_STAGES + 1)
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
        b, walk_b = self.allocate_barriers(smem), self.allocate_barriers(smem)
        item = smem.allocate_tensor(Int32, cute.make_layout((self.item_words, KV_STAGES)), byte_alignment=4)
        entries = smem.allocate_tensor(Int32, cute.make_layout((self.tokens, Q_STAGES)), byte_alignment=4)
        operands = Operands(
            *(
                cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)
                for pointer, layout in ((q, q_layout), (k, k_layout), (v, v_layout))
            )
        )
        s = Shared(k=k, v=v, q=q, operands=operands, item=item, entries=entries)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        walks = work.flag(p, work.ANY_WALKS, without_plan=False)
        left = work.flag(p, work.ANY_LEFT, without_plan=True)
        if warp == 0:
            with cute.arch.elect_one():
                self.init_barriers(b, CONSUMERS)
                self.init_barriers(walk_b, sm90_walk.CONSUMERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # combine may take the multiprocessors as they become free

        if walks:
            if warp < WARPGROUP // 32:
                cute.arch.setmaxregister_decrease(self.walk_producer_registers)
                if warp == 0:
                    self.walk_load_blocks(maps, s, walk_b, p)
                elif warp <= sm90_walk.CONSUMERS:
                    self.walk_load_queries(warp - 1, maps, s, walk_b, p, sm90_walk.CONSUMERS, TILE_ROWS)
            elif warp < (1 + sm90_walk.CONSUMERS) * (WARPGROUP // 32):
                cute.arch.setmaxregister_increase(self.walk_consumer_registers)
                self.walk_consume(thread - WARPGROUP, s, walk_b, p)
            else:
                cute.arch.setmaxregister_decrease(sm90_walk.IDLE_REGISTERS)
            # Shared memory changes hands, and so do registers: nobody takes any before all have what the walk takes.
            cute.arch.sync_threads()
        if left:
            if warp < WARPGROUP // 32:
                if walks:
                    cute.arch.setmaxregister_increase(PRODUCER_REGISTERS)
                else:
                    cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
                if warp == 0:
                    loading.load_blocks(maps, s, b, p, self.kv, walks=True)
                else:
                    self.load_queries(warp - 1, maps, s, b, p)
            else:
                if walks and warp < (1 + sm90_walk.CONSUMERS) * (WARPGROUP // 32):
                    cute.arch.setmaxregister_decrease(CONSUMER_REGISTERS)
                else:
                    cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
                self.consume(thread - WARPGROUP, s, b, p)

    def allocate_barriers(self, smem) -> Barriers:
        """Those of one traversal, in shared memory."""
        return Barriers(
            q_full=smem.allocate_array(Int64, Q_STAGES),
            q_empty=smem.allocate_array(Int64, Q_STAGES),
            item_full=smem.allocate_array(Int64, KV_STAGES),
            k_full=smem.allocate_array(Int64, KV_STAGES),
            v_full=smem.allocate_array(Int64, KV_STAGES),
            kv_empty=smem.allocate_array(Int64, KV_STAGES),
            v_tail=smem.allocate_array(Int64, 1),
        )

    @cute.jit
    def init_barriers(self, b, consumers: cutlass.Constexpr[int]):
        """One thread: make the barriers of a traversal with so many consumer warpgroups."""
        for stage in cutlass.range_constexpr(Q_STAGES):
            cute.arch.mbarrier_init(b.q_full + stage, min(self.tokens, 32))  # the lanes that write entries
            cute.arch.mbarrier_init(b.q_empty + stage, 1 if self.staged else WARPGROUP // 32)
        for stage in cutlass.range_constexpr(KV_STAGES):
            cute.arch.mbarrier_init(b.item_full + stage, 1)
            cute.arch.mbarrier_init(b.k_full + stage, 1)
            cute.arch.mbarrier_init(b.v_full + stage, 1)
            cute.arch.mbarrier_init(b.kv_empty + stage, consumers * (1 + WARPGROUP // 32))
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
        lane = cute.arch.lane_idx()
        tile_base = Int32(0)
        kv_index = Int32(0)
        count = items.wait(s, b.item_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            first, head, key_limit, causal_shift = items.words(s, stage)
            words = work.entries_of_item(p, head, first)
            _, marks = loading.marks_of_item(s, stage, count)
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                place = self.tile_place(s, q_stage)
                places = loading.places_of_tile(marks, tile, count, self.tokens)
                mine = loading.words_of_tile(words, places)
                packed = loading.packed_entries(mine, places, key_limit, causal_shift)
                cute.arch.mbarrier_wait(b.q_empty + q_stage, 1 - q_phase)
                loading.keep_entries(s.entries, q_stage, packed, self.tokens)
                loading.fetch_queries(maps, p, mine, place, head, b.q_full + q_stage, self.q, TILE_ROWS, self.g)
            release(b.kv_empty + stage, lane)
            tile_base += tiles
            kv_index += 1
            count = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def consume(self, thread, s, b, p):
        """A consumer warpgroup: every third tile of the CTA's stream of tiles."""
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
            first, head = s.item[1, stage], s.item[2, stage]
            whole = count == s.item[loading.ENTRIES_WORD, stage]
            entry = Int64(head) * p.head_partials + first  # where the item's partial results start
            tiles = (count + self.tokens - 1) // self.tokens
            for tile in cutlass.range(first_tile(consumer, tile_base), tiles, CONSUMERS):
                q_index = tile_base + tile
                q_stage, q_phase = self.ring_of_queries(q_index)
                scores = cute.make_rmem_tensor(mma.qk.partition_shape_C((TILE_ROWS, BLK_KV)), Float32)
                cute.arch.mbarrier_wait(b.q_full + q_stage, q_phase)
                words = tuple(s.entries[row // self.g, q_stage] for row in (first_row, first_row + 8))
                visible = tuple(word & loading.VISIBLE_MASK for word in words)
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
                tokens = min(count - tile * self.tokens, self.tokens)
                places = tuple(word >> loading.VISIBLE_BITS for word in words)
                self.store(out, statistics, thread, consumer, entry, places, tokens, whole, s, q_stage, p)
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
    def store(self, out, statistics, thread, consumer, entry, places, tokens, whole, s, q_stage, p):
        """Normalise a tile and write its rows, of which those of the first ``tokens`` tokens exist.

        A row's partial result has its place ``places`` entries after ``entry``, that of its item. Of a ``whole`` item
        these lie one after the other."""
        lane = thread % 32
        place = self.tile_place(s, q_stage)
        for half in cutlass.range_constexpr(2):
            row = thread // 32 * 16 + lane // 4 + 8 * half
            index = partials.row_index(entry + places[half], row % self.g, self.g)
            exists = row < tokens * self.g
            if const_expr(self.staged):
                staged = place + cute.assume(row * HEAD_DIM, divby=HEAD_DIM)
                self.store_row(out, statistics[half].inverse, half, index, staged, lane)
            else:
                target = p.partial_out + cute.assume(index * HEAD_DIM, divby=HEAD_DIM)
                if exists:
                    self.store_row(out, statistics[half].inverse, half, index, target, lane)
            if exists and lane % 4 == 0:
                vector(p.partial_lse)[index] = statistics[half].lse
                if const_expr(self.temperature):
                    vector(p.partial_lse_temperature)[index] = statistics[half].lse_temperature
        if const_expr(self.staged):
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + consumer, number_of_threads=WARPGROUP)
            if thread == 0:
                run = tokens if whole else Int32(1)  # tokens of a copy
                size = run * (self.g * self.partial_bytes)
                for token in cutlass.range(0, tokens, run, unroll=1):
                    start = entry + (s.entries[token, q_stage] >> loading.VISIBLE_BITS)
                    primitives.cp_async_bulk_global_shared_cta(
                        p.partial_out + cute.assume(start * (self.g * HEAD_DIM), divby=HEAD_DIM),
                        place + cute.assume(token * (self.g * HEAD_DIM), divby=HEAD_DIM),
                        size,
                    )
                cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_row(self, out, inverse, half: cutlass.Constexpr[int], index, target, lane):
        """Write a row of a thread's accumulator, times ``inverse``, in the order of partials.py; the row is number
        ``index`` of partial_out."""
        elements = partials.chunk_elements(self.partial)
        rows = rows_of_thread(out)
        for group in cutlass.range_constexpr(HEAD_DIM // (4 * elements)):
            values = cute.make_rmem_tensor(elements, self.partial)
            for i in cutlass.range_constexpr(elements):
                column = (i % 2, group * (elements // 2) + i // 2)
                values[i] = (rows[half, column] * inverse).to(self.partial)
            chunk = partials.place(index, 4 * group + lane % 4)
            place = target + cute.assume(chunk * elements, divby=elements)
            cute.autovec_copy(values, cute.make_tensor(place, cute.make_layout(elements)))
