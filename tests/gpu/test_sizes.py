"""Extreme sizes: very many sequences, very long ones, more than 2^31 elements."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from places import check, run  # noqa: E402
from reference import Case, assert_lse_close, assert_out_close, make_case, offsets, ragged  # noqa: E402


def device_q2k(num_blocks, total_q, head_kv, topk, seed=0):
    """int32 [Hkv, total_q, topk]: random ones of ``num_blocks`` blocks (a number, or int64 [total_q])."""
    generator = torch.Generator("cuda").manual_seed(seed)
    q2k = torch.rand(head_kv, total_q, topk, generator=generator, device="cuda", dtype=torch.float64)
    blocks = num_blocks if isinstance(num_blocks, int) else num_blocks[None, :, None]
    return (q2k * blocks).int()


@pytest.mark.parametrize("layout", ["flat", "paged"])
def test_4096_sequences_match_the_reference(layout):
    lens_q, lens_k = ragged(np.random.default_rng(1), 4096, 6, 400)
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, qhead_per_kv=2, layout=layout, causal=True, trim=True, seed=1, device="cuda"
    )
    check(case, partial_dtype="bfloat16")


@pytest.mark.parametrize("qhead_per_kv", [1, 16])
def test_more_than_65535_tokens_match_the_reference(qhead_per_kv):
    total_q, len_k = 70_001, 66_000
    q2k = device_q2k(-(-len_k // 128), total_q, 1, 4).cpu().numpy()
    case = make_case(
        lens_q=[total_q], lens_k=[len_k], head_kv=1, qhead_per_kv=qhead_per_kv, q2k=q2k, poison=False, device="cuda"
    )
    check(case, tokens=torch.randint(total_q, (2000,), device="cuda"), partial_dtype="bfloat16")
    check(case, tokens=torch.arange(total_q - 500, total_q, device="cuda"))


@pytest.mark.parametrize("layout", ["flat", "interleaved"])
def test_a_sequence_of_a_million_keys_matches_the_reference(layout):
    lens_q, lens_k = [3000, 50], [1 << 20, 300]
    blocks = torch.tensor(np.repeat(-(-np.array(lens_k) // 128), lens_q), device="cuda")
    q2k = device_q2k(blocks, sum(lens_q), 1, 16)
    q2k[:, 100:200, 3] = (1 << 20) // 128 - 1
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, head_kv=1, qhead_per_kv=8, layout=layout, causal=True, q2k=q2k.cpu().numpy(),
        poison=False, device="cuda",
    )  # fmt: skip
    check(case)


def test_tensors_of_more_than_2_31_elements_match_the_reference():
    # Every big tensor passes 2^31 elements: q, out, the partials, and K and V as views of one cache. About 40 GB.
    if torch.cuda.mem_get_info()[0] < 60 << 30:
        pytest.skip("needs 60 GB of free device memory")
    head_kv, qhead_per_kv, topk, batch = 4, 16, 4, 8
    total_q, pages = (1 << 18) + 136, (1 << 15) + 24
    assert total_q * head_kv * qhead_per_kv * 128 > 1 << 31 and pages * head_kv * 128 * 128 > 1 << 31
    lens_q, lens_k = np.full(batch, total_q // batch), np.full(batch, pages // batch * 128)
    cache = torch.empty(pages, 2, head_kv, 128, 128, dtype=torch.bfloat16, device="cuda").normal_()
    k, v = cache.unbind(1)
    case = Case(
        q=torch.empty(total_q, head_kv * qhead_per_kv, 128, dtype=torch.bfloat16, device="cuda").normal_(),
        k=k,
        v=v,
        q2k=device_q2k(pages // batch, total_q, head_kv, topk),
        cu_seqlens_q=torch.from_numpy(offsets(lens_q)).cuda(),
        cu_seqlens_k=torch.from_numpy(offsets(lens_k)).cuda(),
        page_table=torch.arange(pages - 1, -1, -1, dtype=torch.int32, device="cuda").view(batch, -1),
        seqused_k=None,
        causal=False,
        total_rows=pages,
        total_k=pages * 128,
        max_seqlen_q=int(lens_q[0]),
        max_seqlen_k=int(lens_k[0]),
    )
    out, lse = run(case, partial_dtype="bfloat16")
    some = torch.randint(total_q, (3000,), device="cuda")
    ends = torch.cat([torch.arange(300), torch.arange(total_q - 300, total_q)]).cuda()
    for tokens in (some, ends):
        want = case.reference(tokens)
        assert_out_close(out[tokens], want)
        assert_lse_close(lse[tokens], want.lse)
    del out, lse, cache, k, v, case
    torch.cuda.empty_cache()


def test_a_flat_cache_of_more_than_2_31_elements_matches_the_reference():
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free device memory")
    head_kv, total_q, batch = 4, 2048, 8
    len_k = ((1 << 22) + 4096) // batch
    total_k = len_k * batch
    assert total_k * head_kv * 128 > 1 << 31
    k, v = (torch.empty(total_k, head_kv, 128, dtype=torch.bfloat16, device="cuda").normal_() for _ in "kv")
    case = Case(
        q=torch.empty(total_q, head_kv, 128, dtype=torch.bfloat16, device="cuda").normal_(),
        k=k,
        v=v,
        q2k=device_q2k(-(-len_k // 128), total_q, head_kv, 8),
        cu_seqlens_q=torch.from_numpy(offsets([total_q // batch] * batch)).cuda(),
        cu_seqlens_k=torch.from_numpy(offsets([len_k] * batch)).cuda(),
        page_table=None,
        seqused_k=None,
        causal=True,
        total_rows=-(-len_k // 128) * batch,
        total_k=total_k,
        max_seqlen_q=total_q // batch,
        max_seqlen_k=len_k,
    )
    check(case)
    torch.cuda.empty_cache()
