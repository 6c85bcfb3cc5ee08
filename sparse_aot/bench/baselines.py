"""What ours is compared with. Benchmark only: a per-query gather kernel, and dense attention through cuDNN."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_aot.bench.cases import DIM, Inputs, Shape

LOG2E = tl.constexpr(1.4426950408889634)


@triton.autotune(
    [triton.Config({}, num_warps=warps, num_stages=stages) for warps, stages in ((2, 2), (4, 2), (4, 3), (8, 2))],
    key=["head_kv", "TOPK", "GROUP", "PAGED", "CAUSAL"],
)
@triton.jit
def _gather_kernel(
    q, k, v, q2k, cu_q, cu_k, seqused_k, page_table, sequence_of, out, lse, scale,
    total_q, head_kv, k_block_stride, k_head_stride, k_token_stride, page_table_stride,
    TOPK: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program a (token, KV head): its query heads, padded to 16 rows, over its blocks with an online softmax."""
    token, head = (tl.program_id(0) // head_kv).to(tl.int64), tl.program_id(0) % head_kv
    row, key, dim = tl.arange(0, 16), tl.arange(0, 128), tl.arange(0, 128)
    sequence = tl.load(sequence_of + token)
    first_q, last_q = tl.load(cu_q + sequence), tl.load(cu_q + sequence + 1)
    first_k, capacity = tl.load(cu_k + sequence), tl.load(cu_k + sequence + 1) - tl.load(cu_k + sequence)
    len_k = tl.load(seqused_k + sequence)
    visible_keys = len_k
    if CAUSAL:
        visible_keys = tl.minimum(len_k, (token - first_q).to(tl.int32) + 1 + len_k - (last_q - first_q))

    q_row = (token * head_kv + head) * GROUP + row
    real = row < GROUP
    queries = tl.load(q + q_row[:, None] * 128 + dim[None, :], mask=real[:, None], other=0.0)
    top = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    accumulator = tl.zeros([16, 128], tl.float32)
    for slot in range(TOPK):
        block = tl.load(q2k + (head.to(tl.int64) * total_q + token) * TOPK + slot)
        exists = (block >= 0) & (block * 128 < capacity)
        block = tl.where(exists, block, 0)
        if PAGED:
            page = tl.load(page_table + sequence * page_table_stride + block, mask=exists, other=0)
            base = page.to(tl.int64) * k_block_stride + head * k_head_stride
        else:
            base = (first_k + block * 128).to(tl.int64) * k_token_stride + head * k_head_stride
        seen = exists & (block * 128 + key < visible_keys)
        offsets = base + key[:, None] * k_token_stride + dim[None, :]
        keys = tl.load(k + offsets, mask=seen[:, None], other=0.0)
        values = tl.load(v + offsets, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * (scale * LOG2E)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(scores - safe_top[:, None])
        rescale = tl.exp2(top - safe_top)
        total = total * rescale + tl.sum(p, 1)
        accumulator = tl.dot(p.to(tl.bfloat16), values, accumulator * rescale[:, None])
        top = new_top
    accumulator = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + q_row[:, None] * 128 + dim[None, :], accumulator.to(tl.bfloat16), mask=real[:, None])
    tl.store(lse + q_row, (top + tl.log2(total)) / LOG2E, mask=real)


class Gather:
    """The gather kernel on ``inputs``; a call fills ``out`` bf16 [total_q, Hq, 128] and ``lse`` f32 [total_q, Hq]."""

    def __init__(self, shape: Shape, inputs: Inputs):
        k = inputs.k
        page_stride = k.stride(0) if shape.paged else 0
        token_stride, head_stride = (k.stride(2), k.stride(1)) if shape.paged else k.stride()[:2]
        self.out = torch.empty_like(inputs.q)
        self.lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device="cuda")
        lengths = inputs.cu_seqlens_k.diff() if inputs.seqused_k is None else inputs.seqused_k
        table = inputs.cu_seqlens_k if inputs.page_table is None else inputs.page_table  # not read when flat
        sequence_of = torch.arange(shape.total_q, dtype=torch.int32, device="cuda") // shape.sq
        self.grid = (shape.total_q * shape.head_kv,)
        self.arguments = (
            inputs.q, k, inputs.v, inputs.q2k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, lengths, table, sequence_of,
            self.out, self.lse, DIM**-0.5, shape.total_q, shape.head_kv, page_stride, head_stride, token_stride,
            table.stride(0),
        )  # fmt: skip
        self.constants = {
            "TOPK": shape.topk,
            "GROUP": shape.qhead_per_kv,
            "PAGED": shape.paged,
            "CAUSAL": shape.causal,
        }

    def __call__(self) -> None:
        _gather_kernel[self.grid](*self.arguments, **self.constants)


class Dense:
    """Dense attention of ``sq`` queries and keys through cuDNN, every query head with K and V of its own."""

    def __init__(self, shape: Shape):
        size = (shape.batch, shape.heads, shape.sq, DIM)
        self.q, self.k, self.v = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        self.causal = shape.causal

    @staticmethod
    def flop(shape: Shape) -> int:
        return 4 * shape.batch * shape.heads * shape.sq**2 * DIM // (2 if shape.causal else 1)

    def __call__(self) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal)
