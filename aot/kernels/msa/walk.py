"""What the walks of all architectures share: parameters, the loading of blocks and queries, and what a token sees.

A walk's item in shared memory is a block of a group: flags (-1: the end), group, KV head, key_limit, causal_shift and,
from FIXED_WORDS on, a bit for each of the group's tokens that selected the block.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from aot.kernel import Ptr
from aot.kernels import items, pages
from aot.kernels.items import release, stage_of
from aot.kernels.mask import BLK_KV, visible_keys
from aot.kernels.memory import vector
from aot.kernels.msa import loading, work
from aot.kernels.msa.params import OUT

FIRST, LAST = 1, 2  # of a group's blocks
PARTIAL = 4  # the group's rows leave partial results: not all of it is walked
FIXED_WORDS = 5
NOWHERE = -BLK_KV  # a row before the first: reads as zero


class Walk:
    """``self`` is the kernel, whose groups have ``walk_tokens`` tokens in ``walk_words`` words."""

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
    def walk_load_blocks(self, maps, s, b, p, v_empty=None):
        """One warp: claim groups and load the K and V of their blocks, one after the other; ``v_empty`` as in
        loading.fetch."""
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
                tails = loading.fetch(maps, s, b, kv_index, tails, words, row, page, self.kv, v_empty=v_empty)
                kv_index += 1
            item = cute.arch.shuffle_sync(claimed, 0)
        items.finish(s, b, kv_index)

    @cute.jit
    def walk_load_queries(self, tile, maps, s, b, p, tiles: cutlass.Constexpr[int], rows: cutlass.Constexpr[int]):
        """One warp: fetch a tile of every group, which has ``tiles`` of ``rows`` rows."""
        lane = cute.arch.lane_idx()
        q_index = tile
        kv_index = Int32(0)
        flags = items.wait(s, b.item_full, kv_index)
        while flags >= 0:
            stage = stage_of(kv_index)
            group, head = s.item[1, stage], s.item[2, stage]
            release(b.kv_empty + stage, lane)
            if flags & FIRST != 0:
                mine = cute.make_rmem_tensor((self.tokens + 31) // 32, Int32)
                for i in cutlass.range_constexpr(cute.size(mine)):
                    token = group * self.walk_tokens + tile * self.tokens + lane % self.tokens + 32 * i
                    mine[i] = min(token, p.total_q - 1)
                q_stage, phase = self.ring_of_queries(q_index)
                cute.arch.mbarrier_wait(b.q_empty + q_stage, 1 - phase)
                place = self.tile_place(s, q_stage)
                loading.fetch_queries(maps, p, mine, place, head, b.q_full + q_stage, self.q, rows, self.g)
                q_index += tiles
            kv_index += 1
            flags = items.wait(s, b.item_full, kv_index)

    @cute.jit
    def walk_visible(self, s, stage, member, token, key_limit, causal_shift) -> Int32:
        """How many keys of the block the group's token number ``member`` sees: none unless it selected the block."""
        word = s.item[FIXED_WORDS + (member >> 5), stage]
        visible = visible_keys(token, key_limit, causal_shift)
        return visible if (word >> (member & 31)) & 1 != 0 else Int32(0)
