"""Where neighbouring tokens share their blocks the forward walks the blocks' union: the same results, no partials."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline import Guarded, attend, build  # noqa: E402
from reference import BLOCK, assert_lse_close, assert_out_close, make_case  # noqa: E402

LENS_Q, LENS_K = [900, 0, 33, 1, 1900], [1500, 90, 70, 0, 2200]


def neighbours(lens_q, lens_k, head_kv, topk, rng):
    """The blocks up to each token's diagonal, in any order, some of them left out: groups of tokens share most."""
    rows = []
    for len_q, len_k in zip(lens_q, lens_k, strict=True):
        last = np.maximum(np.arange(len_q) + len_k - len_q, 0) // BLOCK
        blocks = last[None, :, None] - np.arange(topk)
        keep = rng.random((head_kv, len_q, topk)) < 0.99
        rows.append(rng.permuted(np.where(keep & (blocks >= 0), blocks, -1), axis=-1))
    return np.concatenate(rows, axis=1).astype(np.int32)


def shared_case(lens_q=LENS_Q, lens_k=LENS_K, head_kv=2, topk=4, seed=0, **options):
    q2k = neighbours(lens_q, lens_k, head_kv, topk, np.random.default_rng(seed))
    return make_case(
        lens_q=lens_q, lens_k=lens_k, head_kv=head_kv, topk=topk, q2k=q2k, seed=seed, device="cuda", **options
    )


def walked(schedule, g):
    from sparse_aot._csr_host import walks

    blocks, selected = (int(x) for x in schedule.walk_totals.cpu())
    return walks(blocks, selected, 128 // g)


def check(case, plan=None, **options):
    plan = plan or build(case)
    out, lse = attend(case, plan, **options)
    want = case.reference()
    assert_out_close(out, want)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("layout", ["flat", "paged", "interleaved"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("topk", [4, 8, 16, 32])
@pytest.mark.parametrize("g", [1, 2, 4, 8, 16])
def test_a_walk_matches_the_reference(g, topk, causal, layout):
    case = shared_case(qhead_per_kv=g, topk=topk, causal=causal, layout=layout, trim=layout != "flat", seed=g + topk)
    plan = build(case)
    assert walked(plan[2], g)
    check(case, plan, partial_dtype="bfloat16" if topk > 8 else "float32")


@pytest.mark.parametrize("g", [1, 16])
def test_a_walk_gives_the_temperature_lse(g):
    case = shared_case(qhead_per_kv=g, topk=8, causal=True)
    plan = build(case)
    assert walked(plan[2], g)
    _, lse, lse_temperature = attend(case, plan, return_temperature_lse=True, lse_temperature_scale=1.7)
    want = case.reference(lse_temperature_scale=1.7)
    assert_lse_close(lse, want.lse)
    assert_lse_close(lse_temperature, want.lse_temperature)


def test_a_walk_and_the_csr_agree_and_both_repeat_bitwise():
    case = shared_case(qhead_per_kv=16, topk=16, causal=True)
    plan = build(case)
    assert walked(plan[2], 16)
    first = attend(case, plan, partial_dtype="float32")
    again = attend(case, plan, partial_dtype="float32")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    by_csr = attend(case, (*plan[:2], None), partial_dtype="float32")  # a schedule made from the CSR has no walk plan
    assert (first[0] - by_csr[0]).abs().max() < 0.02
    assert_lse_close(first[1], by_csr[1])


def test_random_selections_are_not_walked():
    case = make_case(lens_q=[512], lens_k=[64 * BLOCK], head_kv=2, qhead_per_kv=16, topk=16, device="cuda")
    plan = build(case)
    assert not walked(plan[2], 16)
    check(case, plan)


def test_a_schedule_for_another_group_size_is_not_walked():
    case = shared_case(qhead_per_kv=4, topk=4)
    check(case, build(case, qhead_per_kv=16))


def test_a_walk_writes_only_its_output():
    case = shared_case(qhead_per_kv=8, topk=8, causal=True)
    plan = build(case)
    assert walked(plan[2], 8)
    total_q, heads = case.q.shape[:2]
    out, lse = Guarded((total_q, heads, 128), torch.bfloat16), Guarded((total_q, heads), torch.float32)
    check(case, plan, out=out.tensor, lse=lse.tensor)
    out.assert_intact()
    lse.assert_intact()


def test_one_captured_graph_walks_or_not_as_the_selection_of_a_replay_asks():
    case = shared_case(lens_q=[512], lens_k=[64 * BLOCK], qhead_per_kv=16, topk=16, causal=True)
    torch.cuda.synchronize()
    local = case.q2k.clone()
    spread = torch.from_numpy(
        np.stack([[np.random.default_rng(t + 1000 * h).permutation(64)[:16] for t in range(512)] for h in range(2)])
    ).to(local)
    plan = build(case)
    attend(case, plan, partial_dtype="bfloat16")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = build(case)
        out, lse = attend(case, plan, partial_dtype="bfloat16")
    case.k.normal_()
    case.v.normal_()
    for selection, walks in ((local, True), (spread, False), (local, True)):
        case.q2k.copy_(selection)
        graph.replay()
        torch.cuda.synchronize()
        assert walked(plan[2], 16) == walks
        want = case.reference()
        assert_out_close(out, want)
        assert_lse_close(lse, want.lse)
