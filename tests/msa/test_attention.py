"""The pipeline against the reference: over layouts, topk, G, masks and partial dtypes, and across every edge of a tile.

A place in the simulator takes a few points of the large matrices, and every configuration of its kernels among them.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch
from guarded import Guarded
from places import PARTIALS, SEEDS, TOPK, G, assert_close, attend, axes, build, check, run
from reference import LAYOUTS, make_case, offsets, ragged

CAUSAL = (False, True)
OTHER_LAYOUTS = [layout for layout in LAYOUTS if layout != "paged"]


def small_case(place, g=4, layout="flat", causal=True, **options):
    """Three sequences, one without queries: partial tiles and blocks, rows that see nothing, -1 anywhere, the diagonal,
    several items a CTA."""
    shape = {"lens_q": [37, 0, 70], "lens_k": [300, 90, 513], "topk": 4}
    return make_case(**shape | options, qhead_per_kv=g, layout=layout, causal=causal, device=place.device)


@lru_cache(maxsize=2)  # the axes that change nothing of it are the last ones
def ragged_case(place, layout, topk, g, causal):
    """(a case, the reference's results)"""
    seed = topk * 100 + g * 2 + causal
    if place.arch is None:
        lens_q, lens_k = ragged(np.random.default_rng(seed), 10, 90, 3000)
        trim = bool(seed // 2 % 2)
    else:
        lens_q, lens_k = ([37, 0, 70], [300, 90, 513]) if topk == 4 else ([20, 9], [topk * 200, 100])
        trim = layout == "paged"
    case = make_case(
        lens_q=lens_q, lens_k=lens_k, qhead_per_kv=g, topk=topk, layout=layout, causal=causal, trim=trim, seed=seed,
        device=place.device,
    )  # fmt: skip
    return case, case.reference(lse_temperature_scale=0.7)


# Numbers ------------------------------------------------------------------------------------------------------------


@axes(
    sim=[
        {"layout": ["paged"], "topk": [4], "g": G, "causal": [True], "partial": PARTIALS, "seed": SEEDS},
        {"layout": OTHER_LAYOUTS, "topk": [4], "g": [2, 16], "causal": CAUSAL, "partial": ["bfloat16"]},
        {"layout": ["flat"], "topk": TOPK[1:], "g": [2], "causal": [True], "partial": PARTIALS},
    ],
    cuda={"layout": LAYOUTS, "topk": TOPK, "g": G, "causal": CAUSAL, "partial": PARTIALS},
)
def test_a_ragged_batch_with_poisoned_keys_matches_the_reference(place, layout, topk, g, causal, partial, seed):
    case, want = ragged_case(place, layout, topk, g, causal)
    with place.opened(seed=seed):
        assert_close(run(case, partial_dtype=partial), want)


@axes(
    sim={"layout": ["paged"], "topk": [4], "g": G, "temperature": [0.7], "partial": PARTIALS, "seed": SEEDS},
    cuda={"layout": ["packed"], "topk": [8], "g": G, "temperature": [0.7, 2.5], "partial": PARTIALS},
)
def test_a_temperature_lse_matches_the_reference(place, layout, topk, g, temperature, partial, seed):
    if place.arch is None:
        lens_q, lens_k = ragged(np.random.default_rng(4), 6, 60, 1500)
        case = small_case(place, g, layout, lens_q=lens_q, lens_k=lens_k, topk=topk, seed=4)
        want = case.reference(lse_temperature_scale=temperature)
    else:
        case, want = ragged_case(place, layout, topk, g, causal=True)
    with place.opened(seed=seed):
        assert_close(run(case, temperature=temperature, partial_dtype=partial), want)


@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("g", [2, 16])
def test_at_a_temperature_of_one_both_lse_are_one_tensor(place, g, partial):
    case = small_case(place, g, lens_q=[20], lens_k=[300])
    _, lse, lse_temperature = check(case, temperature=1.0, partial_dtype=partial)
    assert lse_temperature.data_ptr() == lse.data_ptr()


@axes(
    sim={"head_kv": [1, 3, 8], "partial": ["bfloat16"]},
    cuda={"head_kv": [1, 3, 8], "partial": PARTIALS},
)
def test_any_number_of_kv_heads_matches_the_reference(place, head_kv, partial):
    lens_q, lens_k = place.choose(sim=([7, 3], [300, 140]), cuda=([70, 300], [900, 1111]))
    shape = {"lens_q": lens_q, "lens_k": lens_k, "topk": place.choose(sim=4, cuda=8)}
    check(small_case(place, 8, "interleaved", **shape, head_kv=head_kv, seed=head_kv), partial_dtype=partial)


@pytest.mark.parametrize("softmax_scale", [0.02, 1.0])
def test_the_softmax_scale_is_applied_to_out_and_lse(place, softmax_scale):
    lens_q, lens_k, topk = place.choose(sim=([20], [500], 4), cuda=([150], [1200], 8))
    case = small_case(place, lens_q=lens_q, lens_k=lens_k, topk=topk, causal=False, seed=6)
    assert_close(run(case, softmax_scale=softmax_scale), case.reference(softmax_scale=softmax_scale))


def test_scores_far_apart_keep_their_softmax(place):
    """Maxima of +-100 and more: every exponential but the largest underflows."""
    case = small_case(place, 8, lens_q=[60], lens_k=[256], head_kv=1, causal=False)
    case.q *= 16
    check(case, partial_dtype="float32")
    case.q = torch.zeros_like(case.q)  # and none does
    check(case, partial_dtype="float32")


@axes(
    sim={"g": [1, 8], "csr": [False, True]},
    cuda={"g": [1, 4, 8, 16]},
)
def test_attention_without_a_schedule_gives_the_same_bits(place, g, csr):
    if place.arch is None:
        lens_q, lens_k = ragged(np.random.default_rng(8), 7, 80, 1500)
        case = small_case(place, g, lens_q=lens_q, lens_k=lens_k, topk=16, causal=False, seed=8)
    else:
        shape = {"lens_q": [50, 0, 30], "lens_k": [600, 90, 200], "topk": 8}
        case = small_case(place, g, "paged", **shape, causal=False, trim=True)
    with place.opened(csr=csr):
        plan = build(case, "csr")
        with_schedule = attend(case, plan, temperature=0.7)
        without = attend(case, plan, temperature=0.7, schedule=None)
    assert_close(with_schedule, case.reference(lse_temperature_scale=0.7))
    assert all(torch.equal(a, b) for a, b in zip(with_schedule, without, strict=True))


@axes(sim={"layout": ["paged"]}, cuda={"layout": LAYOUTS})
def test_repeated_runs_are_bitwise_equal(place, layout):
    """In the simulator, under every kind of interleaving."""
    lens_q, lens_k = place.choose(sim=([40, 9], [300, 200]), cuda=ragged(np.random.default_rng(12), 9, 400, 4000))
    case = small_case(place, 8, layout, lens_q=lens_q, lens_k=lens_k, topk=place.choose(sim=4, cuda=16), seed=12)
    first = run(case, partial_dtype="bfloat16")
    for _ in range(3) if place.arch is None else place.seeds():
        again = run(case, partial_dtype="bfloat16")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# Edges --------------------------------------------------------------------------------------------------------------


@axes(sim={"g": [1, 16], "ctas": [1, 2, 64]}, cuda={"g": [1, 16]})
def test_items_of_a_single_tile_follow_one_another(place, g, ctas):
    """An item's K and V come where those of the item before last were: with a tile each, products may not run ahead."""
    case = small_case(place, g, lens_q=[3, 1, 2, 5], lens_k=[400, 1, 128, 129])
    with place.opened(multiprocessors=ctas):
        for _ in place.seeds():
            check(case, partial_dtype="bfloat16")


@pytest.mark.parametrize("partial", PARTIALS)
def test_items_of_many_tiles_follow_one_another(place, partial):
    """Two blocks, both selected by all of 90 tokens of 16 heads: items of odd and even numbers of tiles."""
    q2k = np.tile(np.array([1, -1, 0, -1], np.int32), (1, 90, 1))
    case = small_case(place, 16, lens_q=[90], lens_k=[200], head_kv=1, q2k=q2k, causal=False)
    with place.opened(multiprocessors=1):
        for _ in place.seeds():
            for traversal in place.traversals:
                check(case, traversal, partial_dtype=partial)


@pytest.mark.parametrize("partial", PARTIALS)
def test_a_tile_writes_its_own_rows_only(place, partial):
    """With the items in reverse, what a tile wrote too much would replace rows that are there already."""

    def reverse(row_ptr, q_indices, schedule):
        count = int(schedule.work_count[0])
        schedule.scheduler_metadata[:count] = schedule.scheduler_metadata[:count].flip(0)

    with place.opened(multiprocessors=1):
        check(small_case(place, 8), change=reverse, partial_dtype=partial, temperature=0.7)


def test_a_diagonal_that_hides_whole_rows_of_a_tile_is_right(place):
    """More queries than keys: the first queries see nothing, and the diagonal crosses the only block."""
    case = small_case(place, lens_q=[150], lens_k=[70], head_kv=1)
    check(case, partial_dtype="float32", temperature=1.3)


def test_a_first_slot_that_sees_nothing_does_not_hide_later_keys(place):
    # The block with the lowest number is the one whose keys all lie past seqused_k or beyond the diagonal.
    lens_q, lens_k = [4, 3], [640, 640]
    q2k = np.full((1, 7, 4), -1, np.int32)
    q2k[0, :4] = [-1, 4, -1, 0]
    q2k[0, 4:] = [4, -1, 3, -1]
    case = small_case(place, lens_q=lens_q, lens_k=lens_k, head_kv=1, q2k=q2k, poison=False)
    case.seqused_k = torch.tensor([512, 386], dtype=torch.int32, device=place.device)
    check(case)
    case.seqused_k = torch.tensor([3, 2], dtype=torch.int32, device=place.device)  # fewer keys than queries
    check(case)


@pytest.mark.parametrize("topk", [4, 8])
def test_rows_that_select_nothing_give_zero_and_minus_infinity(place, topk):
    q2k = np.full((2, 40, topk), -1, np.int32)
    case = small_case(place, lens_q=[40], lens_k=[500], topk=topk, q2k=q2k, causal=False)
    out, lse, lse_temperature = check(case, partial_dtype="bfloat16", temperature=0.7)
    assert not out.any() and (lse == -torch.inf).all() and (lse_temperature == -torch.inf).all()


def test_neighbouring_tokens_keep_their_own_selection(place):
    # Token i selects block i only: merged or shared rows would mix values that differ by block.
    blocks = place.choose(sim=10, cuda=40)
    q2k = np.full((2, blocks, 4), -1, np.int32)
    q2k[0, :, 2] = np.arange(blocks)
    q2k[1, :, 1] = np.arange(blocks)[::-1]
    case = small_case(place, lens_q=[blocks], lens_k=[blocks * 128], q2k=q2k, causal=False, poison=False)
    case.v[:] = (torch.arange(blocks * 128, device=place.device) // 128)[:, None, None].to(torch.bfloat16)
    out = run(case)[0].view(blocks, 2, -1).float()
    want = torch.arange(blocks, device=place.device).float()
    assert (out[:, 0] == want[:, None]).all() and (out[:, 1] == want.flip(0)[:, None]).all()


def test_tokens_and_page_table_rows_past_the_batch_are_padding(place):
    # A captured graph's padding: more query rows than cu_seqlens_q covers, sequences of length 0, pages of -1.
    case = small_case(place, layout="paged", lens_q=[30, 20, 0, 0], lens_k=[400, 300, 0, 0], seed=14)
    live, padding = 50, 14
    case.q = torch.cat([case.q, torch.full_like(case.q[:padding], torch.nan)])
    case.q2k = torch.cat([case.q2k, torch.zeros_like(case.q2k[:, :padding])], dim=1)
    case.page_table[2:] = -1
    out, lse = check(case, tokens=torch.arange(live, device=place.device))
    assert not out[live:].any() and (lse[live:] == -torch.inf).all()


def test_stale_length_hints_are_refused_or_harmless(place):
    lens_q, lens_k, topk = place.choose(sim=([20, 15], [400, 300], 4), cuda=([200, 150], [2000, 1500], 8))
    case = small_case(place, lens_q=lens_q, lens_k=lens_k, topk=topk, seed=15)
    want = case.reference()
    for hint in (1, 128, max(lens_k) - 1, 1 << 20):
        hints = {"max_seqlen_k": hint, "max_seqlen_q": hint}
        try:
            results = attend(case, build(case, **hints), **hints)
        except ValueError as error:
            assert "max_seqlen" in str(error)
            continue
        assert_close(results, want)


@pytest.mark.parametrize("layout", ["flat", "paged"])
@pytest.mark.parametrize("lens_q, lens_k", [([0], [0]), ([0, 0], [300, 0])], ids=str)
def test_no_queries_give_empty_results(place, lens_q, lens_k, layout):
    case = small_case(place, layout=layout, lens_q=lens_q, lens_k=lens_k, causal=False, poison=False)
    row_ptr, q_indices, schedule = build(case)
    assert not row_ptr.any() and q_indices.shape == (2, 0) and int(schedule.work_count) == 0
    out, lse = attend(case, (row_ptr, q_indices, schedule))
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


def test_a_batch_with_only_empty_sequences_gives_empty_rows(place):
    case = small_case(place, lens_q=[5, 0, 7], lens_k=[0, 0, 0], causal=False, seed=17)
    assert case.total_rows == 0 and offsets([0, 0, 0])[-1] == 0
    out, lse = run(case)
    assert out.shape == case.q.shape and not out.any() and (lse == -torch.inf).all()


# Buffers ------------------------------------------------------------------------------------------------------------


def test_without_lse_only_out_is_returned(place):
    case = small_case(place, lens_q=[50], lens_k=[700], causal=False, seed=9)
    want = run(case)[0]
    out = run(case, return_softmax_lse=False)
    assert isinstance(out, torch.Tensor) and torch.equal(out, want)


def test_q_may_be_a_strided_view(place):
    case = small_case(place, lens_q=[100], lens_k=[900], causal=False, seed=16)
    wide = torch.randn(100, 12, 256, device=place.device).bfloat16()
    case.q = wide[:, 2:10, 128:]
    check(case)


@axes(
    sim={"g": [1, 16], "partial": ["bfloat16"]},
    cuda={"g": [1, 2, 16], "partial": PARTIALS},
)
def test_buffers_for_out_and_lse_are_filled_and_nothing_beside_them(place, g, partial):
    lens_q, lens_k = place.choose(sim=([37, 3], [300, 140]), cuda=ragged(np.random.default_rng(1), 8, 200, 2500))
    case = small_case(place, g, lens_q=lens_q, lens_k=lens_k, topk=place.choose(sim=4, cuda=8), seed=1)
    out = Guarded(case.q.shape, torch.bfloat16, place.device)
    lse = Guarded(case.q.shape[:2], torch.float32, place.device)
    results = check(case, out=out.tensor, lse=lse.tensor, partial_dtype=partial)
    assert results[0] is out.tensor and results[1] is lse.tensor
    out.assert_intact()
    lse.assert_intact()


STRIDES = {  # margins of out and lse in their larger arrays, and the order of dimensions in memory
    "token-major": ((8, 8), (8, 8), (8, 8)), "head-major": ((8, 8), (8, 8), (8, 8)), "odd": ((64, 64), (0, 3)),
}  # fmt: skip


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("g", [4, 8])
def test_q_out_and_lse_may_have_strides(place, g, strides):
    order = (1, 0, 2) if strides == "head-major" else (0, 1, 2)
    for traversal in place.traversals:
        case = small_case(place, g, lens_q=[19, 0], lens_k=[300, 90])
        q, out = (Guarded(case.q.shape, torch.bfloat16, place.device, STRIDES[strides], order) for _ in range(2))
        lse = Guarded(case.q.shape[:2], torch.float32, place.device, STRIDES[strides][:2], order[:2])
        case.q = q.tensor.copy_(case.q)
        results = check(case, traversal, out=out.tensor, lse=lse.tensor)
        assert results[0] is out.tensor and results[1] is lse.tensor
        for buffer in (q, out, lse):
            buffer.assert_intact()
