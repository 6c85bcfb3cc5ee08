"""What the producer warps of a forward do: claim work items, fetch K and V, gather query rows.

K and V of a work item are one block each as storage.py has it, [line][128 keys][columns]; queries are groups of eight
rows, [row / 8][line][8][columns].
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.experimental import primitives

from aot.kernels import items, pages
from aot.kernels.items import phase_of, stage_of
from aot.kernels.mask import BLK_KV
from aot.kernels.memory import vector
from aot.kernels.msa import partials, work
from aot.kernels.storage import ATOM_ROWS, CHUNK_BYTES, LINE_BYTES, Storage

# Of a work item in shared memory: count, first entry, KV head, key_limit, causal_shift and three unused ones, so that
# an item's place is a shift: with five words one configuration spills.
ITEM_WORDS = 8
LINE_CHUNKS = LINE_BYTES // CHUNK_BYTES


@cute.jit
def load_blocks(maps, s, b, p, kv: cutlass.Constexpr[Storage]):
    """One warp: claim work items and load their K and V; a count of -1 ends the stream."""
    end = min(vector(p.work_count)[0], p.work_capacity)
    kv_index = Int32(0)
    tails = Int32(0)
    item, _, _ = cute.arch.block_idx()
    while item < end:
        claimed = items.claim(p)
        count, head, first, sequence, block = work.decode(p, item)
        if count > 0:
            key_limit, causal_shift, row, page = pages.locate(p, sequence, block)
            words = (count, first, head, key_limit, causal_shift)
            publish(maps, s, b, b.kv_empty, kv_index, words, row, page, kv)
            tails = load_values(maps, s, b, kv_index, tails, words, row, page, kv)
            kv_index += 1
        item = cute.arch.shuffle_sync(claimed, 0)
    items.finish(s, b, b.kv_empty, kv_index)


@cute.jit
def publish(maps, s, b, empty, kv_index, words, row, page, kv: cutlass.Constexpr[Storage]):
    """One warp: publish an item's words and load its K into the next stage, once that is ``empty``."""
    _, _, head, *_ = words
    lane = cute.arch.lane_idx()
    stage = stage_of(kv_index)
    cute.arch.mbarrier_wait(empty + stage, phase_of(kv_index) ^ 1)
    if lane == 0:
        for i in cutlass.range_constexpr(len(words)):
            s.item[i, stage] = words[i]
        cute.arch.mbarrier_arrive(b.item_full + stage)
        load_block(maps.k, s.k, stage, b.k_full + stage, row, head, page, kv)


@cute.jit
def load_values(maps, s, b, kv_index, tails, words, row, page, kv: cutlass.Constexpr[Storage]) -> Int32:
    """One warp: load an item's V into its stage, which is empty; the new number of ``tails``."""
    _, _, head, key_limit, *_ = words
    lane = cute.arch.lane_idx()
    stage = stage_of(kv_index)
    if key_limit >= BLK_KV:
        if lane == 0:
            load_block(maps.v, s.v, stage, b.v_full + stage, row, head, page, kv)
    else:
        if lane == 0:
            load_block(maps.v, s.v, stage, b.v_tail, row, head, page, kv)
        cute.arch.mbarrier_wait(b.v_tail, tails & 1)
        tails += 1
        zero_tail(s.v, stage, key_limit, lane, kv)
        if lane == 0:
            cute.arch.mbarrier_arrive(b.v_full + stage)
    return tails


@cute.jit
def load_block(tensor_map, s_block, stage, full, row, head, page, kv: cutlass.Constexpr[Storage]):
    """One thread: fetch a block's K or V into a stage."""
    cute.arch.mbarrier_arrive_and_expect_tx(full, kv.block_bytes)
    target = s_block + stage * kv.block
    primitives.cp_async_bulk_tensor_shared_cta_global(target, tensor_map, (0, row, 0, head, page), full)


@cute.jit
def zero_tail(s_v, stage, key_limit, lane, kv: cutlass.Constexpr[Storage]):
    """One warp: clear the values past the sequence's end; their weight is 0, but 0 * NaN is not."""
    block = cute.recast_ptr(s_v + stage * kv.block, dtype=Int32)
    words = cute.make_tensor(block, cute.make_layout((LINE_BYTES // 4, BLK_KV, kv.lines)))
    for key in cutlass.range(max(key_limit, 0), BLK_KV, unroll=1):
        for line in cutlass.range_constexpr(kv.lines):
            words[lane, key, line] = 0
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()


@cute.jit
def fetch_queries(
    maps,
    p,
    mine,
    place,
    head,
    full,
    q: cutlass.Constexpr[Storage],
    rows: cutlass.Constexpr[int],
    g: cutlass.Constexpr[int],
):
    """One warp: fetch a tile of ``rows`` and arrive on ``full``, once for each token but at most 32 times.

    ``mine`` holds the tile's entries, entry i in lane i % 32. The tensor copy engine fetches a token's heads where they
    fill whole atoms; smaller groups would take so many copies that issuing them is the limit, and go through cp.async.
    """
    lane = cute.arch.lane_idx()
    tokens = rows // g
    if const_expr(g >= ATOM_ROWS):
        if lane == 0:
            cute.arch.mbarrier_expect_tx(full, rows * q.row_bytes)
        cute.arch.sync_warp()
        if lane < tokens:
            coordinates = (0, 0, 0, head * (g // ATOM_ROWS), mine[0] & partials.TOKEN_MASK)
            target = place + lane * (g * q.row)
            primitives.cp_async_bulk_tensor_shared_cta_global(target, maps.q, coordinates, full)
    else:
        gather(p, mine, place, head, lane, q, rows, g)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        if const_expr(tokens < 32):
            cute.arch.sync_warp()  # lanes wait for their own copies alone, and not all of them arrive
    if lane < tokens:
        cute.arch.mbarrier_arrive(full)


@cute.jit
def gather(
    p,
    mine,
    place,
    head,
    lane,
    q: cutlass.Constexpr[Storage],
    rows: cutlass.Constexpr[int],
    g: cutlass.Constexpr[int],
):
    """One warp: start copying the ``rows`` of a tile, two at a time, to where the products read them.

    ``mine`` holds the tile's entries, entry i in lane i % 32.
    """
    atom = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), q.dtype, num_bits_per_copy=8 * CHUNK_BYTES
    )
    piece = cute.make_layout(q.chunk)
    odd, chunk = lane // (q.row // q.chunk), lane % (q.row // q.chunk)
    column = place + cute.assume(chunk // LINE_CHUNKS * (ATOM_ROWS * q.columns) + odd * q.columns, divby=q.columns)
    source = p.q
    for i in cutlass.range_constexpr(cute.size(mine)):
        for group in cutlass.range(min(rows, 32 * g) // ATOM_ROWS, unroll=1):
            for row in cutlass.range_constexpr(0, ATOM_ROWS, 2):
                if const_expr(row % g == 0):  # the next token
                    slot = group * (ATOM_ROWS // g) + row // g + (odd if g == 1 else 0)
                    word = cute.arch.shuffle_sync(mine[i], slot)
                    token = min(word & partials.TOKEN_MASK, p.total_q - 1)
                    group_head = head * g + (odd if g > 1 else 0)
                    start = Int64(token) * p.q_stride_token + group_head * p.q_stride_head + chunk * q.chunk
                    source = p.q + cute.assume(start, divby=q.chunk)
                skipped = row % g * p.q_stride_head
                swizzled = ((chunk ^ odd) % LINE_CHUNKS ^ row) * q.chunk
                target = column + cute.assume(
                    (i * 4 * g + group) * (ATOM_ROWS * q.row) + row * q.columns + swizzled, divby=q.chunk
                )
                cute.copy(
                    atom,
                    cute.make_tensor(source + cute.assume(skipped, divby=q.chunk), piece),
                    cute.make_tensor(target, piece),
                )


@cute.jit
def entries_of_tile(words: cute.Tensor, tile: Int32, count: Int32, tokens: cutlass.Constexpr[int]):
    """One warp: a lane's entries of a tile of an item's ``count``; a tile's missing tokens repeat its last."""
    lane = cute.arch.lane_idx()
    mine = cute.make_rmem_tensor((tokens + 31) // 32, Int32)
    for i in cutlass.range_constexpr(cute.size(mine)):
        mine[i] = words[Int64(min(tile * tokens + lane % tokens + 32 * i, count - 1))]
    return mine


@cute.jit
def keep_entries(s_entries: cute.Tensor, stage: Int32, mine: cute.Tensor, tokens: cutlass.Constexpr[int]):
    """One warp: leave a tile's entries in shared memory."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(cute.size(mine)):
        if lane + 32 * i < tokens:
            s_entries[lane + 32 * i, stage] = mine[i]
