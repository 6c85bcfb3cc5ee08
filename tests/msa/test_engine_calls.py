"""Calls as inference engines make them, on their buffers: all are taken as they are, without a copy of an input."""

import numpy as np
import pytest
import torch
from places import axes
from reference import BLOCK, DIM, assert_lse_close, assert_out_close, offsets, random_q2k, sparse_attention

from sparse_aot import build_k2q_csr, sparse_atten_func

TOPK, HEAD_KV, G = 16, 2, 4
LENS_Q, LENS_K = [20, 7, 1], [300, 129, 2300]


class Batch:
    """A prefill batch as an engine holds it: token-major selections, pages in any order, lengths on the side."""

    def __init__(self, place, first=0, padding=0):
        """``first``: decode tokens in front of it in the buffers; ``padding``: rows of no request behind it."""
        self.device = place.device
        self.generator = torch.Generator(place.device).manual_seed(3)
        rng = np.random.default_rng(3)
        self.cu_seqlens_q, self.cu_seqlens_k = self.int32(offsets(LENS_Q)), self.int32(offsets(LENS_K))
        self.total_q, self.total_k = sum(LENS_Q), sum(LENS_K)
        self.blocks = [-(-length // BLOCK) for length in LENS_K]
        self.q = self.normal(first + self.total_q + padding, HEAD_KV * G, DIM)
        self.topk_buffer = self.int32(np.zeros((len(self.q), HEAD_KV, TOPK)))
        selection = torch.from_numpy(random_q2k(rng, LENS_Q, LENS_K, HEAD_KV, TOPK))
        self.topk_buffer[first : first + self.total_q] = selection.transpose(0, 1)
        self.num_pages = sum(self.blocks) + 2
        self.page_table = self.int32(np.full((len(LENS_K), max(self.blocks) + 3), -1))
        pages = iter(rng.permutation(self.num_pages).tolist())
        for row, count in enumerate(self.blocks):
            self.page_table[row, :count] = torch.tensor([next(pages) for _ in range(count)])

    def normal(self, *shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(generator=self.generator)

    def int32(self, values):
        return torch.tensor(np.asarray(values, np.int32), device=self.device)

    def reference(self, q, k, v, q2k, **options):
        return sparse_attention(
            q, k, v, q2k, cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k, causal=True, **options
        )


def test_vllm_minimax_m3_prefill(place):
    """Behind decode tokens, with padding: views of topk and out buffers, K and V as halves of one row, topK=."""
    first, padding = 5, 3
    batch = Batch(place, first, padding)
    topk, q = batch.topk_buffer, batch.q
    out = torch.full_like(q, 7.0)
    kv_cache = batch.normal(batch.num_pages, HEAD_KV, BLOCK, 2 * DIM)
    prefill_topk = topk[first:].transpose(0, 1)
    k_cache, v_cache = kv_cache.split(DIM, dim=-1)
    seq_lens = batch.int32(LENS_K)
    k2q_row_ptr, k2q_q_indices, schedule = build_k2q_csr(
        prefill_topk,
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        BLOCK,
        total_k=0,
        max_seqlen_k=max(LENS_K),
        max_seqlen_q=max(LENS_Q),
        total_rows=sum(batch.blocks),
        qhead_per_kv=G,
        return_schedule=True,
    )
    sparse_atten_func(
        q[first:],
        k_cache,
        v_cache,
        k2q_row_ptr,
        k2q_q_indices,
        topK=TOPK,
        blk_kv=BLOCK,
        causal=True,
        softmax_scale=0.07,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        max_seqlen_q=max(LENS_Q),
        max_seqlen_k=max(LENS_K),
        page_table=batch.page_table,
        seqused_k=seq_lens,
        schedule=schedule,
        out=out[first:],
    )
    want = batch.reference(
        q[first:], k_cache, v_cache, prefill_topk, page_table=batch.page_table, seqused_k=seq_lens, softmax_scale=0.07
    )
    assert_out_close(out[first:], want)
    assert (out[:first] == 7).all() and not out[-padding:].any()


def test_vllm_context_parallel_group(place):
    """Per group of ranks: a schedule and an lse of its own."""
    batch = Batch(place)
    q2k = batch.topk_buffer.transpose(0, 1)
    k, v = batch.normal(batch.num_pages, HEAD_KV, BLOCK, 2 * DIM).split(DIM, dim=-1)
    group_out = torch.empty_like(batch.q)
    k2q_row_ptr, k2q_q_indices, schedule = build_k2q_csr(
        q2k, batch.cu_seqlens_q, batch.cu_seqlens_k, BLOCK, total_k=0, max_seqlen_k=max(LENS_K),
        max_seqlen_q=max(LENS_Q), total_rows=sum(batch.blocks), qhead_per_kv=batch.q.shape[1] // HEAD_KV,
        return_schedule=True,
    )  # fmt: skip
    returned, lse = sparse_atten_func(
        batch.q, k, v, k2q_row_ptr, k2q_q_indices, topK=TOPK, blk_kv=BLOCK, causal=True, softmax_scale=DIM**-0.5,
        cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k, max_seqlen_q=max(LENS_Q),
        max_seqlen_k=max(LENS_K), page_table=batch.page_table, seqused_k=batch.int32(LENS_K), schedule=schedule,
        return_softmax_lse=True, out=group_out,
    )  # fmt: skip
    want = batch.reference(batch.q, k, v, q2k, page_table=batch.page_table, seqused_k=batch.int32(LENS_K))
    assert returned is group_out
    assert_out_close(group_out, want)
    assert_lse_close(lse, want.lse)


def test_sglang_minimax_prefill(place):
    """K and V are slots of one token each, [slots, Hkv, 128], seen as pages; the page table is padded."""
    batch = Batch(place)
    k_buffer, v_buffer = (batch.normal(batch.num_pages * BLOCK, HEAD_KV, DIM) for _ in "kv")
    k_paged, v_paged = (
        buffer.view(batch.num_pages, BLOCK, HEAD_KV, DIM).transpose(1, 2) for buffer in (k_buffer, v_buffer)
    )
    topk_idx = batch.topk_buffer.transpose(0, 1).contiguous()
    row_ptr, q_ind, sched = build_k2q_csr(
        topk_idx, batch.cu_seqlens_q, batch.cu_seqlens_k, total_k=batch.total_k, blk_kv=BLOCK,
        max_seqlen_k=batch.total_k, max_seqlen_q=max(LENS_Q), total_rows=sum(batch.blocks), qhead_per_kv=G,
        return_schedule=True,
    )  # fmt: skip
    out = sparse_atten_func(
        batch.q, k_paged, v_paged, row_ptr, q_ind, TOPK, cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k, max_seqlen_q=max(LENS_Q), max_seqlen_k=batch.total_k, blk_kv=BLOCK,
        causal=True, softmax_scale=DIM**-0.5, return_softmax_lse=False, page_table=batch.page_table,
        seqused_k=batch.int32(LENS_K), schedule=sched,
    )  # fmt: skip
    options = {"page_table": batch.page_table, "seqused_k": batch.int32(LENS_K)}
    assert_out_close(out, batch.reference(batch.q, k_paged, v_paged, topk_idx, **options))


@pytest.mark.filterwarnings("error:schedule")
def test_transformers_minimax_attention(place):
    """Flat keys, no schedule and no number of rows; the selection of one head for all."""
    batch = Batch(place)
    k, v = (batch.normal(batch.total_k, HEAD_KV, DIM) for _ in "kv")
    q2k = batch.topk_buffer[:, 0].unsqueeze(0).expand(HEAD_KV, -1, -1)
    k2q_row_ptr, k2q_q_indices = build_k2q_csr(
        q2k, batch.cu_seqlens_q, batch.cu_seqlens_k, BLOCK, total_k=batch.total_k, max_seqlen_k=max(LENS_K),
        max_seqlen_q=max(LENS_Q), qhead_per_kv=G,
    )  # fmt: skip
    out = sparse_atten_func(
        batch.q, k, v, k2q_row_ptr, k2q_q_indices, TOPK, cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k, max_seqlen_q=max(LENS_Q), max_seqlen_k=max(LENS_K), blk_kv=BLOCK,
        causal=True, softmax_scale=DIM**-0.5,
    )  # fmt: skip
    assert_out_close(out, batch.reference(batch.q, k, v, q2k))


def test_everything_by_name(place):
    """As benchmarks of the public API call it: all arguments by name, no lengths."""
    batch = Batch(place)
    k, v = (batch.normal(batch.total_k, HEAD_KV, DIM) for _ in "kv")
    q2k = batch.topk_buffer.transpose(0, 1)
    k2q_row_ptr, k2q_q_indices = build_k2q_csr(
        q2k_indices=q2k, cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k, total_k=batch.total_k,
        qhead_per_kv=G,
    )  # fmt: skip
    out = sparse_atten_func(
        q=batch.q, k=k, v=v, k2q_row_ptr=k2q_row_ptr, k2q_q_indices=k2q_q_indices, topK=TOPK,
        cu_seqlens_q=batch.cu_seqlens_q, cu_seqlens_k=batch.cu_seqlens_k, causal=True,
    )  # fmt: skip
    assert_out_close(out, batch.reference(batch.q, k, v, q2k))


@axes(sim={"csr": [False, True]}, cuda={})
def test_a_selection_of_any_strides_is_read_in_place(place, csr):
    batch = Batch(place)
    want = build_k2q_csr(
        batch.topk_buffer.transpose(0, 1).contiguous(), batch.cu_seqlens_q, batch.cu_seqlens_k, total_k=batch.total_k
    )
    wide = batch.int32(np.full((batch.total_q, 2 * HEAD_KV, TOPK + 3), 5))
    wide[:, ::2, :TOPK] = batch.topk_buffer
    with place.opened(csr=csr):
        for q2k in (batch.topk_buffer.transpose(0, 1), wide[:, ::2, :TOPK].transpose(0, 1)):
            got = build_k2q_csr(q2k, batch.cu_seqlens_q, batch.cu_seqlens_k, total_k=0, total_rows=sum(batch.blocks))
            assert all(torch.equal(array, expected) for array, expected in zip(got, want, strict=True))
