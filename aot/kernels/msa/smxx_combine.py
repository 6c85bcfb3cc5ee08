"""Combine: merge the partial outputs of a row's splits, out = sum_s w_s * partial_s, w_s = exp(lse_s - lse).

A row is one (query token, query head). A team of lanes has it, a 16-byte chunk of the row each: half a warp with
bfloat16 partials, a warp with float32. Its splits are the slots of ``split_entries`` that the forward did not walk and,
where it walked others, the one partial result that the walk left of all of them; they are packed before anything is
loaded, so that a row costs what it has. A row without any gives out 0 and lse -inf. Rows of a group that the walk
finished are left alone.
One CTA a multiprocessor; a warp takes units of four rows in turn.
Budget: topk * 256 bytes a row in and 256 out (bfloat16) for 3 * topk flops an element: pure memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr

from aot.kernel import Kernel, Ptr
from aot.kernels import merge
from aot.kernels.memory import vector
from aot.kernels.msa import partials, work
from aot.kernels.msa.params import OUT
from aot.kernels.sorting import place_of_one
from aot.kernels.storage import DTYPES

UNIT_ROWS = 4


class Combine(Kernel):
    def __init__(self, partial: str, topk: int, walk_rows: int):
        self.dtype = DTYPES[partial]
        self.topk = topk
        self.walk_rows = walk_rows  # of a group that the forward walks
        self.threads = 1024
        self.lanes = partials.HEAD_DIM // partials.chunk_elements(self.dtype)  # of a team
        self.teams = 32 // self.lanes
        self.slots = -(-topk // self.lanes)  # of a lane
        self.pdl = True
        self.params = {
            "partial_out": Ptr(self.dtype, 16),
            "partial_lse": Ptr(Float32),
            "partial_lse_temperature": Ptr(Float32),
            "split_counts": Ptr(Int32),
            "split_entries": Ptr(Int32),
            "out": Ptr(OUT),
            "lse": Ptr(Float32),
            "lse_temperature": Ptr(Float32),
            "out_stride_token": Int64,
            "out_stride_head": Int64,
            "lse_stride_token": Int64,
            "lse_stride_head": Int64,
            "total_q": Int32,
            "head_kv": Int32,
            "qhead_per_kv": Int32,
            "head_partials": Int32,
            "walk_counts": Ptr(Int32),
            "walk_flags": Ptr(Int32),
            "groups": Int32,
        }

    @cute.kernel
    def kernel(self, p):
        cute.arch.griddepcontrol_wait()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        rows = Int64(p.total_q) * p.head_kv * p.qhead_per_kv
        if not work.flag(p, work.ANY_UNFINISHED, without_plan=True):
            rows = Int64(0)
        warps = self.threads // 32
        first = (Int64(cta) * warps + (thread >> 5)) * UNIT_ROWS
        while first < rows:
            self.merge_unit(first, p)
            first += Int64(ctas) * (warps * UNIT_ROWS)

    @cute.jit
    def merge_unit(self, first: Int64, p):
        """One warp: four rows of the output, which have the splits of one token and KV head, or of some."""
        lane = cute.arch.lane_idx()
        splits = cute.make_rmem_tensor(self.slots, Int32)
        splits.fill(0)
        count = Int32(0)
        token, kv_head = Uint32(0), Int32(0)
        skipped = Boolean(False)
        for step in cutlass.range_constexpr(UNIT_ROWS // self.teams):
            row = first + (step * self.teams + lane // self.lanes)
            group_head = Int32(row) & (p.qhead_per_kv - 1)
            if step == 0 or p.qhead_per_kv < UNIT_ROWS:
                pair = Uint32(row >> cute.arch.popc(p.qhead_per_kv - 1))  # (token, KV head); G is a power of two
                token = pair // Uint32(p.head_kv)
                kv_head = Int32(pair - token * Uint32(p.head_kv))
                count, skipped = self.list_splits(splits, pair, token, kv_head, p)
            if not cute.arch.vote_all_sync(skipped):
                self.merge_row(splits, count, token, kv_head, group_head, skipped, p)

    @cute.jit
    def list_splits(self, splits, pair, token, kv_head, p):
        """The splits of a team's row, as numbers of partial results of its KV head, packed as merge.py has them: how
        many, and whether the row is none of combine's: past the end, or finished by the walk."""
        place = cute.arch.lane_idx() % self.lanes
        skipped = token >= Uint32(p.total_q)
        planned = p.walk_counts.toint() != 0
        if planned and not skipped:
            group = (token >> (self.walk_rows.bit_length() - 1 - cute.arch.popc(p.qhead_per_kv - 1))).to(Int32)
            skipped = vector(p.walk_counts)[Int64(kv_head) * p.groups + group] & work.WALK_FINAL != 0
        listed = Int32(0)
        if not skipped:
            listed = min(vector(p.split_counts)[Int64(pair)], self.topk)
        entries = p.total_q * self.topk
        numbers = cute.make_rmem_tensor(self.slots, Int32)
        left, walked = Uint32(0), Uint32(0)  # slots of the team's row, a bit each
        for i in cutlass.range_constexpr(self.slots):
            slot = i * self.lanes + place
            exists = slot < listed
            number = Int32(0)
            if exists:
                number = vector(p.split_entries)[Int64(kv_head) * entries + Int64(token) * self.topk + slot]
            apart = planned and number & work.WALKED != 0
            number = number & ~work.WALKED
            numbers[i] = entries + token.to(Int32) if apart else min(max(number, 0), entries - 1)
            left = left | self.team_ballot(exists and not apart) << Uint32(i * self.lanes)
            walked = walked | self.team_ballot(exists and apart) << Uint32(i * self.lanes)
        left = left | (walked & (~walked + Uint32(1)))  # what the walk left stands for all that it walked
        for i in cutlass.range_constexpr(self.slots):
            splits[i] = merge.held(numbers, place_of_one(left, i * self.lanes + place), self.lanes)
        return cute.arch.popc(left).to(Int32), skipped

    def team_ballot(self, holds) -> Uint32:
        """Of which lanes of the team it holds."""
        ballot = Uint32(cute.arch.vote_ballot_sync(holds))
        if const_expr(self.teams == 1):
            return ballot
        return (ballot >> Uint32(cute.arch.lane_idx() // self.lanes * self.lanes)) & Uint32((1 << self.lanes) - 1)

    @cute.jit
    def merge_row(self, splits, count, token, kv_head, group_head, skipped, p):
        """One warp: a row of the output for each team, unless it is ``skipped``."""
        place = cute.arch.lane_idx() % self.lanes
        first = Int64(kv_head) * p.head_partials
        base = partials.row_index(first, group_head, p.qhead_per_kv)

        def chunk_of(split):
            return partials.chunk(p.partial_out, base + Int64(split) * p.qhead_per_kv, place)

        weights = cute.make_rmem_tensor(self.slots, Float32)
        self.load_lse(weights, p.partial_lse, splits, count, first, group_head, p)
        total_lse = merge.weigh(weights, self.lanes)
        acc = cute.make_rmem_tensor(partials.chunk_elements(self.dtype), Float32)
        acc.fill(0.0)
        most = cute.arch.warp_redux_sync(count, "max")
        merge.accumulate(acc, splits, weights, most, chunk_of, self.dtype, self.lanes)

        head = kv_head * p.qhead_per_kv + group_head
        if not skipped:
            self.store(acc, Int64(token) * p.out_stride_token + head * p.out_stride_head, place, p)
        offset = Int64(token) * p.lse_stride_token + head * p.lse_stride_head
        if p.lse.toint() != 0 and place == 0 and not skipped:
            vector(p.lse)[offset] = total_lse
        if p.lse_temperature.toint() != 0:
            self.load_lse(weights, p.partial_lse_temperature, splits, count, first, group_head, p)
            total_lse = merge.weigh(weights, self.lanes)
            if place == 0 and not skipped:
                vector(p.lse_temperature)[offset] = total_lse

    @cute.jit
    def load_lse(self, values, partial_lse, splits, count, first, group_head, p):
        """The logsumexp of each split that a lane holds; -inf past the last."""
        for i in cutlass.range_constexpr(self.slots):
            values[i] = -Float32.inf
            if i * self.lanes + cute.arch.lane_idx() % self.lanes < count:
                values[i] = vector(partial_lse)[partials.row_index(first + splits[i], group_head, p.qhead_per_kv)]

    @cute.jit
    def store(self, acc, start: Int64, place, p):
        """Write a lane's chunk of a row."""
        for i in cutlass.range_constexpr(cute.size(acc) // 2):
            values = cute.make_rmem_tensor(2, OUT)
            values[0] = acc[2 * i].to(OUT)
            values[1] = acc[2 * i + 1].to(OUT)
            target = p.out + cute.assume(start + partials.chunk_column(self.dtype, place, i), divby=2)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(2)))
