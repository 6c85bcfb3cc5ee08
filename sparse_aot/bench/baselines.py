"""What ours is compared with. Benchmark only: a per-query gather kernel, and dense attention through cuDNN."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparse_aot.bench.cases import DIM, Inputs, Shape, sequence_of_tokens

LOG2E = tl.constexpr(1.4426950408889634)
CONFIGS = [  # keys of a step, warps, stages: which is fastest depends on the device and the sizes of the call
    *((128, 2, 2), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3)),
    *((64, 2, 2), (64, 2, 3), (64, 4, 2), (64, 4, 3), (64, 4, 4)),
    *((32, 1, 4), (32, 2, 4), (32, 2, 6)),
]


@triton.autotune(
    [triton.Config({"KEYS": keys}, num_warps=warps, num_stages=stages) for keys, warps, stages in CONFIGS],
    key=["total_q", "k_token_stride", "page_table_stride", "TOPK", "GROUP", "PAGED", "CAUSAL"],
)
@triton.jit(do_not_specialize=["total_q", "page_table_stride"])  # compiled once for all sizes
def _gather_kernel(
    q, k, v, q2k, cu_q, cu_k, seqused_k, page_table, sequence_of, out, lse, scale,
    total_q, k_block_stride, k_head_stride, k_token_stride, page_table_stride,
    TOPK: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One program a (token, KV head): its query heads, padded to 16 rows, over its blocks with an online softmax.

    The tokens of a head run together, so that the L2 has to hold the keys of one head only. ``q2k`` has -1 at the end
    of a row only, and no block that does not exist.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, key, dim = tl.arange(0, 16), tl.arange(0, KEYS), tl.arange(0, 128)
    sequence = tl.load(sequence_of + token)
    first_q, last_q = tl.load(cu_q + sequence), tl.load(cu_q + sequence + 1)
    first_k, len_k = tl.load(cu_k + sequence), tl.load(seqused_k + sequence)
    visible_keys = len_k
    if CAUSAL:
        visible_keys = tl.minimum(len_k, (token - first_q).to(tl.int32) + 1 + len_k - (last_q - first_q))

    q_row = (token * tl.num_programs(1) + head) * GROUP + row
    real = row < GROUP
    queries = tl.load(q + q_row[:, None] * 128 + dim[None, :], mask=real[:, None], other=0.0)
    top = tl.full([16], -float("inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    accumulator = tl.zeros([16, 128], tl.float32)
    selected = q2k + (head * total_q + token) * TOPK
    slot = tl.arange(0, TOPK)
    blocks = tl.load(selected + slot)
    steps = tl.sum((blocks >= 0).to(tl.int32), 0) * (128 // KEYS)
    if PAGED:
        pages = tl.load(page_table + sequence * page_table_stride + blocks, mask=blocks >= 0, other=0)
    for step in range(steps):
        now = slot == step // (128 // KEYS)
        block = tl.sum(tl.where(now, blocks, 0), 0)
        key_of_block = step % (128 // KEYS) * KEYS + key
        visible = block * 128 + key_of_block < visible_keys
        if PAGED:  # all of a page can be read
            page = tl.sum(tl.where(now, pages, 0), 0)
            base = page.to(tl.int64) * k_block_stride + head * k_head_stride
        else:
            key_of_block = tl.minimum(key_of_block, len_k - 1 - block * 128)
            base = (first_k + block * 128).to(tl.int64) * k_token_stride + head * k_head_stride
        offsets = base + key_of_block[:, None] * k_token_stride + dim[None, :]
        keys, values = tl.load(k + offsets), tl.load(v + offsets)
        scores = tl.where(visible[None, :], tl.dot(queries, tl.trans(keys)), -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * (scale * LOG2E))
        safe_top = tl.where(new_top == -float("inf"), 0.0, new_top)
        p = tl.exp2(scores * (scale * LOG2E) - safe_top[:, None])
        rescale = tl.exp2(top - safe_top)
        total = total * rescale + tl.sum(p, 1)
        accumulator = tl.dot(p.to(values.dtype), values, accumulator * rescale[:, None])
        top = new_top
    accumulator = accumulator / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + q_row[:, None] * 128 + dim[None, :], accumulator.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(lse + q_row, (top + tl.log2(total)) / LOG2E, mask=real)


class Gather:
    """The gather kernel on ``inputs``; a call fills ``out`` bf16 [total_q, Hq, 128] and ``lse`` f32 [total_q, Hq]."""

    def __init__(self, shape: Shape, inputs: Inputs):
        k = inputs.k
        page_stride = k.stride(0) if shape.paged else 0
        token_stride, head_stride = (k.stride(2), k.stride(1)) if shape.paged else k.stride()[:2]
        self.out = torch.empty_like(inputs.q)
        self.lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=k.device)
        lengths = inputs.cu_seqlens_k.diff() if inputs.seqused_k is None else inputs.seqused_k
        table = inputs.cu_seqlens_k if inputs.page_table is None else inputs.page_table  # not read when flat
        self.grid = (shape.total_q, shape.head_kv)
        self.arguments = (
            inputs.q, k, inputs.v, inputs.q2k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, lengths, table,
            sequence_of_tokens(shape, k.device), self.out, self.lse, DIM**-0.5, shape.total_q, page_stride, head_stride,
            token_stride, table.stride(0),
        )  # fmt: skip
        self.constants = {
            "TOPK": shape.topk,
            "GROUP": shape.qhead_per_kv,
            "PAGED": shape.paged is not None,
            "CAUSAL": shape.causal,
        }

    def __call__(self) -> None:
        _gather_kernel[self.grid](*self.arguments, **self.constants)

    @property
    def config(self) -> str:
        """Of the latest call: the fastest of CONFIGS for its sizes, which are tried in the first one."""
        best = _gather_kernel.best_config
        return f"{best.kwargs['KEYS']} keys a step, {best.num_warps} warps, {best.num_stages} stages"


class Dense:
    """Dense attention of as many queries as keys through cuDNN, every query head with K and V of its own."""

    def __init__(self, shape: Shape):
        size = (shape.batch, shape.heads, shape.max_q, DIM)
        self.q, self.k, self.v = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
        self.causal = shape.causal

    @staticmethod
    def flop(shape: Shape) -> int:
        return 4 * shape.batch * shape.heads * shape.max_q**2 * DIM // (2 if shape.causal else 1)

    def __call__(self) -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.causal)
