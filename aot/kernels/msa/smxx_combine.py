"""Combine: merge the partial outputs of a row's splits, out = sum_s w_s * partial_s, w_s = exp(lse_s - lse).

A row is one (query token, query head) and has a warp. A lane first weighs one split, then loads 16-byte chunks: with
bfloat16 partials half the warp covers a row and each half takes half of the splits, with float32 the warp covers it.
Only splits below the token's count are read; a row without any gives out 0 and lse -inf.
Budget: topk * 256 bytes a row in and 256 out (bfloat16) for 3 * topk flops an element: pure memory.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from aot.kernel import Kernel, Ptr
from aot.kernels import merge
from aot.kernels.memory import vector
from aot.kernels.msa import partials, work
from aot.kernels.msa.params import OUT
from aot.kernels.storage import DTYPES

ROWS_PER_WARP = 4  # one after the other: fewer CTAs to start where there is nothing to combine


class Combine(Kernel):
    def __init__(self, partial: str, topk: int, walks: bool):
        self.dtype = DTYPES[partial]
        self.topk = topk
        self.walks = walks  # whether a prefill of the architecture can: it then leaves nothing to combine
        self.threads = 256
        self.work_per_cta = ROWS_PER_WARP * (self.threads // 32)
        self.lanes = partials.HEAD_DIM // partials.chunk_elements(self.dtype)  # of a row
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
        }
        if walks:
            self.params |= {"walk_totals": Ptr(Int64, 8)}

    @cute.kernel
    def kernel(self, p):
        cute.arch.griddepcontrol_wait()
        if const_expr(self.walks):
            if not work.walks(p.walk_totals, work.WALK_ROWS // p.qhead_per_kv):  # else the output is already there
                self.merge_rows(p)
        else:
            self.merge_rows(p)

    @cute.jit
    def merge_rows(self, p):
        """One warp: its rows of the output."""
        cta, _, _ = cute.arch.block_idx()
        for i in cutlass.range(ROWS_PER_WARP, unroll=1):
            row = (Int64(cta) * ROWS_PER_WARP + i) * (self.threads // 32) + cute.arch.warp_idx()
            self.merge(row, p)

    @cute.jit
    def merge(self, row, p):
        """One warp: a row of the output."""
        lane = cute.arch.lane_idx()
        pair = Uint32(row >> cute.arch.popc(p.qhead_per_kv - 1))  # (token, KV head); qhead_per_kv is a power of two
        group_head = Int32(row) & (p.qhead_per_kv - 1)
        token = pair // Uint32(p.head_kv)
        kv_head = Int32(pair - token * Uint32(p.head_kv))
        if token < Uint32(p.total_q):
            count = min(vector(p.split_counts)[Int64(pair)], self.topk)
            acc = cute.make_rmem_tensor(partials.chunk_elements(self.dtype), Float32)
            acc.fill(0.0)
            total_lse = -Float32.inf
            total_lse_temperature = -Float32.inf
            if count > 0:
                slot = lane % self.topk
                entries = p.total_q * self.topk
                first = Int64(kv_head) * entries
                number = vector(p.split_entries)[first + token * self.topk + (slot if slot < count else 0)]
                number = min(max(number, 0), entries - 1)
                row = partials.row_index(first + number, group_head, p.qhead_per_kv)
                exists = slot < count
                weight, total_lse = merge.weigh(vector(p.partial_lse)[row], exists, self.topk)
                if p.lse_temperature.toint() != 0:
                    lse = vector(p.partial_lse_temperature)[row]
                    _, total_lse_temperature = merge.weigh(lse, exists, self.topk)

                def chunk_of(entry):
                    row = partials.row_index(entry, group_head, p.qhead_per_kv)
                    return partials.chunk(p.partial_out, row, lane % self.lanes)

                merge.accumulate(acc, first, number, weight, chunk_of, self.dtype, self.lanes, self.topk)

            head = kv_head * p.qhead_per_kv + group_head
            start = Int64(token) * p.out_stride_token + head * p.out_stride_head
            self.store(acc, start, lane, p)
            if lane == 0:
                offset = Int64(token) * p.lse_stride_token + head * p.lse_stride_head
                if p.lse.toint() != 0:
                    vector(p.lse)[offset] = total_lse
                if p.lse_temperature.toint() != 0:
                    vector(p.lse_temperature)[offset] = total_lse_temperature

    @cute.jit
    def store(self, acc, start: Int64, lane, p):
        """Write the row; where two lanes hold a chunk, each writes half of it."""
        pairs = cute.size(acc) // 2
        for i in cutlass.range_constexpr(pairs):
            if lane // self.lanes == i * 32 // self.lanes // pairs:
                values = cute.make_rmem_tensor(2, OUT)
                values[0] = acc[2 * i].to(OUT)
                values[1] = acc[2 * i + 1].to(OUT)
                column = partials.chunk_column(self.dtype, lane % self.lanes, i)
                target = p.out + cute.assume(start + column, divby=2)
                cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(2)))
