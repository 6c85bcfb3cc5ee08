"""Forward for Blackwell: partial attention of gathered query tokens against one block of 128 keys.

Tile: 128 rows = 128 / G query tokens x G heads of one KV head, against a block's 128 keys, D 128; two tiles in flight.
Roles: warp 0 claims work items and loads K and V; warp 1 issues all products; warps 2 and 3 gather the queries of even
and odd tiles; a softmax warpgroup for each of these, a row a thread; an epilogue warpgroup takes O to partial_out.
Shared memory: K and V of two work items (2 x 64 KB), two Q tiles (2 x 32 KB), rows on their way out (32 KB).
Tensor memory: S of two tiles (2 x 128 columns), P of two (2 x 64), O (128): the next S but one waits for no P, and O
is read long before the next P is there. Cycles of a tile: tensor 1024; exp 1024 (16384 at 16 a cycle; temperature
doubles it); tensor memory 320 (S and O out, P in, a column a cycle); shared memory 1536 (Q and K for S 512, V 256, Q in
256, O in and out 512); device memory 1120 (O at 8 TB/s; L2 serves Q). Shared memory binds; with float32, device memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.experimental import primitives

from aot.kernel import TensorMaps
from aot.kernels import items, softmax
from aot.kernels.items import KV_STAGES, phase_of, release, stage_of
from aot.kernels.mask import BLK_KV, mask_row
from aot.kernels.memory import vector
from aot.kernels.msa import loading, partials, sm100_walk, work
from aot.kernels.msa.params import Prefill
from aot.kernels.msa.partials import HEAD_DIM
from aot.kernels.sm100_mma import TENSOR_COLUMNS, advance, columns_of, issue, load_columns, operand, tensor_memory
from aot.kernels.storage import ATOM_BYTES, ATOM_ROWS, LINE_BYTES, STEP_BYTES

TILE_ROWS = 128
SLOTS = 2  # tiles in flight: even and odd ones of the CTA's stream of tiles
WARPGROUP = 128
WARPS = WARPGROUP // 32
READERS = 1 + SLOTS + (SLOTS + 1) * WARPS  # warps that read an item's words: products, gather, softmax, epilogue
ITEM_WORDS = 64  # room for what loading.py and walk.py have of an item, and its place is a shift
MMA_WARP = 1
GATHER_WARP = 2  # and the one after it
STAGING_BYTES = 32 * 1024  # rows on their way to partial_out: a quarter for each warp
S_COLUMN = 0  # two of BLK_KV columns
P_COLUMN = SLOTS * BLK_KV  # two of self.p_columns; O comes after them
SOFTMAX_REGISTERS = 192
PART = 32  # columns of a row that move between tensor memory and registers at a time


def first_tile(slot: Int32, tile_base: Int32) -> Int32:
    """The first tile of an item that has this slot, ``tile_base`` being the number of tiles before the item."""
    return (slot + tile_base) & 1


class Shared(NamedTuple):
    """Shared memory: blocks of K and V, tiles of Q, rows on their way out; words of items, entries and row sums."""

    k: cute.Pointer
    v: cute.Pointer
    q: cute.Pointer
    staging: cute.Pointer
    item: cute.Tensor  # [ITEM_WORDS, KV_STAGES]
    entries: cute.Tensor  # [tokens, SLOTS]
    sums: cute.Tensor  # [TILE_ROWS, SLOTS]
    unseen: cute.Tensor  # [WARPS, SLOTS], of a walk: the rows that see nothing of the block, a bit each


class Barriers(NamedTuple):
    """One a slot (q, s, p, o) or a stage (item, k, v, kv); of ``v_tail`` there is one."""

    q_full: cute.Pointer
    q_empty: cute.Pointer
    s_full: cute.Pointer
    s_empty: cute.Pointer
    p_full: cute.Pointer
    o_full: cute.Pointer
    o_empty: cute.Pointer
    item_full: cute.Pointer
    k_full: cute.Pointer
    v_full: cute.Pointer
    kv_empty: cute.Pointer
    v_tail: cute.Pointer


class PrefillSm100(sm100_walk.WalkRoles, Prefill):
    def __init__(self, g: int, **options: Any):
        super().__init__(g=g, **options)
        self.tokens = TILE_ROWS // g
        self.walk_tokens = sm100_walk.ROWS // g
        self.walk_words = (self.walk_tokens + 31) // 32
        self.params |= self.walk_params()
        self.threads = 4 * WARPGROUP
        self.min_blocks_per_mp = 1
        # Where tiles start at a multiple of eight rows, a thread's 16 places for bfloat16 never change: the compiler
        # keeps them in registers, which producers that need no cp.async can spare.
        keeps_places = g >= ATOM_ROWS and self.partial.width == 16
        self.producer_registers, self.epilogue_registers = (24, 104) if keeps_places else (40, 88)
        self.p_columns = columns_of(BLK_KV, self.pv)
        self.o_column = P_COLUMN + SLOTS * self.p_columns
        self.q_bytes = TILE_ROWS * self.q.row_bytes
        barriers = 7 * SLOTS + 4 * KV_STAGES + 1 + sm100_walk.BARRIERS
        words = KV_STAGES * ITEM_WORDS + SLOTS * (self.tokens + TILE_ROWS + WARPS) + 1
        blocks = 2 * KV_STAGES * self.kv.block_bytes
        self.smem_bytes = blocks + SLOTS * self.q_bytes + STAGING_BYTES + 8 * barriers + 4 * words

    @cute.kernel
    def kernel(self, maps: TensorMaps, p):
        maps = self.named(maps)
        smem = cutlass.memory.SmemAllocator()
        k = smem.allocate_array(self.kv.dtype, KV_STAGES * self.kv.block, byte_alignment=1024)
        v = smem.allocate_array(self.kv.dtype, KV_STAGES * self.kv.block, byte_alignment=1024)
        q = smem.allocate_array(self.q.dtype, SLOTS * TILE_ROWS * HEAD_DIM, byte_alignment=1024)
        # Rows on their way out; when the kernel walks, a third Q tile.
        staging = smem.allocate_array(self.partial, STAGING_BYTES * 8 // self.partial.width, byte_alignment=1024)
        b = Barriers(
            q_full=smem.allocate_array(Int64, SLOTS),
            q_empty=smem.allocate_array(Int64, SLOTS),
            s_full=smem.allocate_array(Int64, SLOTS),
            s_empty=smem.allocate_array(Int64, SLOTS),
            p_full=smem.allocate_array(Int64, SLOTS),
            o_full=smem.allocate_array(Int64, SLOTS),
            o_empty=smem.allocate_array(Int64, SLOTS),
            item_full=smem.allocate_array(Int64, KV_STAGES),
            k_full=smem.allocate_array(Int64, KV_STAGES),
            v_full=smem.allocate_array(Int64, KV_STAGES),
            kv_empty=smem.allocate_array(Int64, KV_STAGES),
            v_tail=smem.allocate_array(Int64, 1),
        )
        walk_b = self.allocate_walk_barriers(smem)
        item = smem.allocate_tensor(Int32, cute.make_layout((ITEM_WORDS, KV_STAGES)), byte_alignment=4)
        entries = smem.allocate_tensor(Int32, cute.make_layout((self.tokens, SLOTS)), byte_alignment=4)
        sums = smem.allocate_tensor(Float32, cute.make_layout((TILE_ROWS, SLOTS)), byte_alignment=4)
        unseen = smem.allocate_tensor(Int32, cute.make_layout((WARPS, SLOTS)), byte_alignment=4)
        s = Shared(k=k, v=v, q=q, staging=staging, item=item, entries=entries, sums=sums, unseen=unseen)
        s_base = smem.allocate_array(Int32, 1)

        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        walks = work.flag(p, work.ANY_WALKS, without_plan=False)
        if warp == 0:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(b.q_full + slot, min(self.tokens, 32))  # the lanes that write entries
                    cute.arch.mbarrier_init(b.q_empty + slot, 1 + WARPS)
                    cute.arch.mbarrier_init(b.s_full + slot, 1)
                    cute.arch.mbarrier_init(b.s_empty + slot, WARPS)
                    cute.arch.mbarrier_init(b.p_full + slot, WARPS)
                    cute.arch.mbarrier_init(b.o_full + slot, 1)
                    cute.arch.mbarrier_init(b.o_empty + slot, WARPS)
                for stage in cutlass.range_constexpr(KV_STAGES):
                    cute.arch.mbarrier_init(b.item_full + stage, 1)
                    cute.arch.mbarrier_init(b.k_full + stage, 1)
                    cute.arch.mbarrier_init(b.v_full + stage, 1)
                    cute.arch.mbarrier_init(b.kv_empty + stage, READERS + 1)  # and the products
                cute.arch.mbarrier_init(b.v_tail, 1)
                self.init_walk_barriers(walk_b, READERS)
        cute.arch.mbarrier_init_fence()
        if warp == MMA_WARP:
            primitives.tcgen05_alloc(s_base, TENSOR_COLUMNS)
            primitives.tcgen05_relinquish_alloc_permit()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()  # combine may take the multiprocessors as they become free

        if warp < WARPS:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            base = vector(s_base)[0]
            if walks:
                if warp == 0:
                    self.walk_load_blocks(maps, s, walk_b, p, walk_b.v_empty)
                elif warp == MMA_WARP:
                    self.walk_multiply(base, s, walk_b)
                else:
                    self.walk_load_queries(warp - GATHER_WARP, maps, s, walk_b, p, SLOTS, TILE_ROWS)
                self.change_hands()
            if work.flag(p, work.ANY_LEFT, without_plan=True):
                if warp == 0:
                    loading.load_blocks(maps, s, b, p, self.kv, walks=True)
                elif warp == MMA_WARP:
                    self.multiply(base, s, b)
                else:
                    self.load_queries(warp - GATHER_WARP, maps, s, b, p)
        elif warp < (1 + SLOTS) * WARPS:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            base = vector(s_base)[0]
            if walks:
                self.walk_softmax(thread - WARPGROUP, base, s, walk_b, p)
                self.change_hands()
            if work.flag(p, work.ANY_LEFT, without_plan=True):
                self.softmax(thread - WARPGROUP, base, s, b, p)
        else:
            cute.arch.setmaxregister_decrease(self.epilogue_registers)
            base = vector(s_base)[0]
            if walks:
                self.walk_epilogue(thread - (1 + SLOTS) * WARPGROUP, base, s, walk_b, p)
                self.change_hands()
            if work.flag(p, work.ANY_LEFT, without_plan=True):
                self.epilogue(thread - (1 + SLOTS) * WARPGROUP, base, s, b, p)
        cute.arch.sync_threads()
        if cute.arch.warp_idx() == MMA_WARP:  # anew: kept from the start it would cost a register
            primitives.tcgen05_dealloc(primitives.make_tmem_ptr(vector(s_base)[0], Int32), TENSOR_COLUMNS)

    def change_hands(self):
        """All warps, between the traversals: shared and tensor memory are the other's."""
        primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
        cute.arch.sync_threads()
        primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)

    @cute.jit
    def load_queries(self, slot, maps, s, b, p):
        """Two warps: each gathers the tiles of a slot."""
        lane = cute.arch.lane_idx()
        place = s.q + cute.assume(slot * (TILE_ROWS * HEAD_DIM), divby=TILE_ROWS * HEAD_DIM)
        tile_base = Int32(0)
        kv_index = Int32(0)
        count = items.wait(s, b.item_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            first, head, key_limit, causal_shift = items.words(s, stage)
            _, marks = loading.marks_of_item(s, stage, count)
            release(b.kv_empty + stage, lane)
            words = work.entries_of_item(p, head, first)
            tiles = self.tiles(count)
            for tile in cutlass.range(first_tile(slot, tile_base), tiles, SLOTS):
                places = loading.places_of_tile(marks, tile, count, self.tokens)
                mine = loading.words_of_tile(words, places)
                packed = loading.packed_entries(mine, places, key_limit, causal_shift)
                cute.arch.mbarrier_wait(b.q_empty + slot, phase_of(tile_base + tile) ^ 1)
                loading.keep_entries(s.entries, slot, packed, self.tokens)
                loading.fetch_queries(maps, p, mine, place, head, b.q_full + slot, self.q, TILE_ROWS, self.g)
            tile_base += tiles
            kv_index += 1
            count = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def multiply(self, base, s, b):
        """One warp: S = Q K^T of a tile as soon as its place is free, O = P V two tiles behind."""
        s_tile, s_items, s_left = Int32(0), Int32(0), Int32(0)  # next tile; items begun; tiles left of the last one
        o_tile, o_items, o_left = Int32(0), Int32(0), Int32(0)  # next tile; items finished; tiles left of the next one
        count = Int32(0)
        lane = cute.arch.lane_idx()
        while count >= 0 or o_tile < s_tile:
            # The next item's K and V come where those of the item before last were.
            full = s_tile - o_tile > SLOTS or (s_left == 0 and s_items - o_items == KV_STAGES)
            if count >= 0 and not full:
                if s_left == 0:
                    stage = stage_of(s_items)
                    cute.arch.mbarrier_wait(b.k_full + stage, phase_of(s_items))
                    count = s.item[0, stage]
                    s_left = self.tiles(count)
                    s_items += 1
                if count >= 0:
                    slot, phase = stage_of(s_tile), phase_of(s_tile)
                    cute.arch.mbarrier_wait(b.q_full + slot, phase)
                    cute.arch.mbarrier_wait(b.s_empty + slot, phase ^ 1)
                    self.score(base, s, b, slot, stage_of(s_items - 1))
                    s_tile += 1
                    s_left -= 1
            else:
                stage, slot = stage_of(o_items), stage_of(o_tile)
                if o_left == 0:
                    o_left = self.tiles(s.item[0, stage])
                    release(b.kv_empty + stage, lane)
                cute.arch.mbarrier_wait(b.v_full + stage, phase_of(o_items))
                cute.arch.mbarrier_wait(b.p_full + slot, phase_of(o_tile))
                if o_tile > 0:  # the previous tile's output has been read
                    cute.arch.mbarrier_wait(b.o_empty + (slot ^ 1), phase_of(o_tile - 1))
                self.accumulate(base, s, b, slot, stage)
                o_tile += 1
                o_left -= 1
                if o_left == 0:
                    with cute.arch.elect_one():
                        primitives.tcgen05_commit(b.kv_empty + stage)
                    o_items += 1

    def tiles(self, count: Int32) -> Int32:
        """Tiles of an item of ``count`` entries."""
        return (count + self.tokens - 1) // self.tokens

    @cute.jit
    def score(self, base, s, b, slot, stage):
        """One warp: S = Q K^T of the tile in ``slot``."""
        operands, shape = self.score_operands(s, slot, stage)
        target = primitives.make_tmem_ptr(base + (S_COLUMN + slot * BLK_KV), Float32)
        primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
        with cute.arch.elect_one():
            issue(target, operands, shape)
            primitives.tcgen05_commit(b.s_full + slot)
            primitives.tcgen05_commit(b.q_empty + slot)

    def score_operands(self, s, q_stage, stage):
        """(operands of each step, shape) of S = Q K^T; both operands are K-major."""
        q = operand(s.q.toint() + q_stage * self.q_bytes, 16, self.q.lines * ATOM_BYTES)
        k = operand(s.k.toint() + stage * self.kv.block_bytes, 16, ATOM_BYTES)
        shape = primitives.Tcgen05InstrDesc.build(
            c_dtype=Float32, a_dtype=self.qk, b_dtype=self.qk, m_dim=TILE_ROWS, n_dim=BLK_KV
        )
        steps = (divmod(start, LINE_BYTES) for start in range(0, self.q.row_bytes, STEP_BYTES))
        operands = (
            (advance(q, line * ATOM_BYTES + start), advance(k, line * (BLK_KV * LINE_BYTES) + start))
            for line, start in steps
        )
        return operands, shape

    def accumulate_operands(self, s, weights, stage):
        """(operands of each step, shape) of O = P V, P being at ``weights`` in tensor memory; V is MN-major."""
        v = operand(s.v.toint() + stage * self.kv.block_bytes, BLK_KV * LINE_BYTES, ATOM_BYTES)
        shape = primitives.Tcgen05InstrDesc.build(
            c_dtype=Float32, a_dtype=self.pv, b_dtype=self.pv, b_major=1, m_dim=TILE_ROWS, n_dim=HEAD_DIM
        )
        operands = (
            (
                primitives.make_tmem_ptr(weights + columns_of(first, self.pv), Int32),
                advance(v, first * LINE_BYTES),
            )
            for first in range(0, BLK_KV, self.kv.step)
        )
        return operands, shape

    @cute.jit
    def accumulate(self, base, s, b, slot, stage):
        """One warp: O = P V of the tile in ``slot``."""
        operands, shape = self.accumulate_operands(s, base + (P_COLUMN + slot * self.p_columns), stage)
        target = primitives.make_tmem_ptr(base + self.o_column, Float32)
        primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
        with cute.arch.elect_one():
            issue(target, operands, shape)
            primitives.tcgen05_commit(b.o_full + slot)

    @cute.jit
    def softmax(self, thread, base, s, b, p):
        """A softmax warpgroup: P, row sums and logsumexp of the tiles of a slot; a thread has a row."""
        scale_log2 = softmax.scale_log2(p)
        slot = cute.arch.make_warp_uniform(thread >> 7)
        row = thread & (WARPGROUP - 1)
        warp = cute.arch.make_warp_uniform(row >> 5)
        lane = cute.arch.lane_idx()
        tile_base = Int32(0)
        kv_index = Int32(0)
        count = items.wait(s, b.item_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            first, head = s.item[1, stage], s.item[2, stage]
            release(b.kv_empty + stage, lane)
            entry = Int64(head) * p.head_partials + first  # where the item's partial results start
            tiles = self.tiles(count)
            for tile in cutlass.range(first_tile(slot, tile_base), tiles, SLOTS):
                phase = phase_of(tile_base + tile)
                cute.arch.mbarrier_wait(b.q_full + slot, phase)
                word = s.entries[row >> (self.g.bit_length() - 1), slot]
                release(b.q_empty + slot, lane)
                visible = word & loading.VISIBLE_MASK

                scores = cute.make_rmem_tensor(BLK_KV, Float32)
                cute.arch.mbarrier_wait(b.s_full + slot, phase)
                primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
                parts = tuple(
                    load_columns(base, warp, S_COLUMN + slot * BLK_KV + column, PART)
                    for column in range(0, BLK_KV, PART)
                )
                primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
                primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
                release(b.s_empty + slot, lane)
                for part in cutlass.range_constexpr(BLK_KV // PART):
                    for i in cutlass.range_constexpr(PART):
                        scores[part * PART + i] = parts[part][i]
                mask_row(scores, visible)
                maximum = softmax.finite(softmax.row_maximum(scores))
                lse_temperature = Float32(0.0)
                if const_expr(self.temperature):
                    scale = scale_log2 / p.lse_temperature_scale
                    total = softmax.row_sum_exp2(scores, maximum, scale, keep=False)
                    lse_temperature = softmax.log_sum_exp(maximum * scale, total)

                # The weights and sums of the slot's last tile have been used.
                cute.arch.mbarrier_wait(b.o_empty + slot, phase ^ 1)
                primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
                total = Float32(0.0)
                for part in cutlass.range_constexpr(BLK_KV // PART):
                    values = cute.make_tensor(scores.iterator + part * PART, cute.make_layout(PART))
                    total += softmax.row_sum_exp2(values, maximum, scale_log2, keep=True)
                    place = P_COLUMN + slot * self.p_columns + part * columns_of(PART, self.pv)
                    weights = values.load().to(self.pv)
                    primitives.tcgen05_st("32x32b", tensor_memory(base, warp, place, Int32), weights)
                s.sums[row, slot] = total
                primitives.tcgen05_wait(primitives.Tcgen05Wait.STORE)
                primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
                release(b.p_full + slot, lane)

                if row < min(count - tile * self.tokens, self.tokens) * self.g:
                    index = partials.row_index(entry + (word >> loading.VISIBLE_BITS), row & (self.g - 1), self.g)
                    vector(p.partial_lse)[index] = softmax.log_sum_exp(maximum * scale_log2, total)
                    if const_expr(self.temperature):
                        vector(p.partial_lse_temperature)[index] = lse_temperature
            tile_base += tiles
            kv_index += 1
            count = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def epilogue(self, row, base, s, b, p):
        """The epilogue warpgroup: normalise every tile's O and write it; a thread has a row, a warp copies its own."""
        lane = cute.arch.lane_idx()
        o_tile = Int32(0)
        kv_index = Int32(0)
        count = items.wait(s, b.item_full, kv_index)
        while count >= 0:
            stage = stage_of(kv_index)
            first, head = s.item[1, stage], s.item[2, stage]
            whole, marks = loading.marks_of_item(s, stage, count)
            release(b.kv_empty + stage, lane)
            entry = Int64(head) * p.head_partials + first
            for tile in cutlass.range(self.tiles(count), unroll=1):
                place = tile * self.tokens + (row >> (self.g.bit_length() - 1))
                if not whole:
                    place = work.place_left(marks, place)
                slot, phase = stage_of(o_tile), phase_of(o_tile)
                cute.arch.mbarrier_wait(b.p_full + slot, phase)
                inverse = softmax.reciprocal(s.sums[row, slot])
                cute.arch.mbarrier_wait(b.o_full + slot, phase)
                primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
                rows = min(count - tile * self.tokens, self.tokens) * self.g
                self.store_rows(row, base, inverse, b.o_empty + slot, s, p, entry, place, rows, whole)
                o_tile += 1
            kv_index += 1
            count = items.wait(s, b.item_full, kv_index)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_rows(self, row, base, inverse, o_empty, s, p, entry, place_of_row, rows, whole):
        """Write a warp's rows, of which the tile has ``rows``, as many at a time as fit.

        A row's partial result has its place ``place_of_row`` entries after ``entry``, that of its item. Of a ``whole``
        item these lie one after the other: one lane copies them all, else a lane those of a token."""
        warp = cute.arch.make_warp_uniform(row >> 5)
        lane = cute.arch.lane_idx()
        elements = partials.chunk_elements(self.partial)
        columns = 4 * elements  # that fill four chunks
        batch = STAGING_BYTES * 8 // self.partial.width // HEAD_DIM // WARPS  # rows
        index = partials.row_index(entry + place_of_row, row & (self.g - 1), self.g)
        run = Int32(batch) if whole else Int32(self.g)  # rows of a copy
        place = s.staging + cute.assume(warp * (batch * HEAD_DIM), divby=HEAD_DIM)
        first_chunk = lane % batch * HEAD_DIM + partials.place(index, 0) * elements  # places are this one's xor
        values = cute.make_rmem_tensor(columns, Float32)
        pairs = cute.make_tensor(values.iterator, cute.make_layout((2, 4, elements // 2), stride=(1, 2, 8)))
        chunk = cute.make_rmem_tensor(elements, self.partial)
        for start in cutlass.range_constexpr(0, 32, batch):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # what was here before has left
            cute.arch.sync_warp()
            following = load_columns(base, warp, self.o_column, columns)
            for group in cutlass.range_constexpr(HEAD_DIM // columns):
                part = following
                primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)
                if const_expr((group + 1) * columns < HEAD_DIM):
                    following = load_columns(base, warp, self.o_column + (group + 1) * columns, columns)
                elif const_expr(start + batch == 32):
                    primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)
                    release(o_empty, lane)
                for column in cutlass.range_constexpr(columns):
                    values[column] = part[column]
                for i in cutlass.range_constexpr(4):
                    chunk.store((pairs[None, i, None].load() * inverse).to(self.partial))
                    target = place + cute.assume(first_chunk ^ (group * columns + i * elements), divby=elements)
                    if const_expr(batch == 32) or lane // batch * batch == start:
                        cute.autovec_copy(chunk, cute.make_tensor(target, cute.make_layout(elements)))
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            mine = lane * run  # of the batch, the first row of the lane's copy
            first = cute.arch.shuffle_sync(place_of_row, start + mine)
            count = min(rows - (warp * 32 + start) - mine, run)
            if mine < batch and count > 0:
                primitives.cp_async_bulk_global_shared_cta(
                    p.partial_out + cute.assume((entry + first) * (self.g * HEAD_DIM), divby=HEAD_DIM),
                    place + cute.assume(mine * HEAD_DIM, divby=HEAD_DIM),
                    count * (HEAD_DIM * self.partial.width // 8),
                )
                cute.arch.cp_async_bulk_commit_group()
