"""What most tokens of a group share is walked, the rest goes in the CSR's order: the same results.

On an architecture whose forward does not walk, the same calls go through the CSR.
"""

import numpy as np
import pytest
import torch
from guarded import Guarded
from places import PARTIALS, SEEDS, TOPK, WALKING, G, assert_close, attend, axes, build
from reference import BLOCK, assert_lse_close, make_case, neighbours_q2k, random_q2k

LENS = [900, 0, 33, 1, 1900], [1500, 90, 70, 0, 2200]


def shared_case(place, topk=4, seed=0, simulated_lens=([64, 0, 33], [300, 90, 160]), **options):
    lens_q, lens_k = place.choose(sim=simulated_lens, cuda=LENS)
    q2k = neighbours_q2k(np.random.default_rng(seed), lens_q, lens_k, 2, topk)
    options = {"causal": True} | options
    return make_case(lens_q=lens_q, lens_k=lens_k, topk=topk, q2k=q2k, seed=seed, device=place.device, **options)


def flags_of(plan):
    """Whether any group walks, any entry is left, any group does not finish; None without a walk plan."""
    return None if plan[2].walk_flags is None else plan[2].walk_flags.tolist()


def plan_of(case, traversal="walk"):
    """What ``build`` returns; where there is a walk plan, it walks everything, or with ``mixed`` some."""
    plan = build(case, traversal)
    assert flags_of(plan) in (None, [1, 0, 0] if traversal == "walk" else [1, 1, 1])
    return plan


def mixed_case(place, topk=8, seed=0, simulated_lens=([40, 0, 9], [1500, 90, 700]), **options):
    """Of a token's blocks before its diagonal, the nearer one is the likelier its neighbours share it."""
    lens_q, lens_k = place.choose(sim=simulated_lens, cuda=LENS)
    rng = np.random.default_rng(seed)
    own = random_q2k(rng, lens_q, lens_k, 2, topk)
    last = np.concatenate([np.arange(q) + k - q for q, k in zip(lens_q, lens_k, strict=True)]) // BLOCK
    shared = last[None, :, None] - np.arange(topk)
    q2k = np.where((rng.random(own.shape) < np.linspace(1.2, 0, topk)) & (shared >= 0), shared, own)
    q2k = rng.permuted(q2k, axis=-1).astype(np.int32)
    options = {"causal": True} | options
    return make_case(lens_q=lens_q, lens_k=lens_k, topk=topk, q2k=q2k, seed=seed, device=place.device, **options)


@axes(
    sim={"g": G, "topk": [4], "causal": [True], "layout": ["paged"], "partial": PARTIALS, "seed": SEEDS},
    cuda={"g": G, "topk": TOPK, "causal": [True, False], "layout": ["flat", "paged", "interleaved"]},
    archs=WALKING,
)
def test_a_walk_matches_the_reference(place, g, topk, causal, layout, partial, seed):
    partial = partial or ("bfloat16" if topk > 8 else "float32")
    temperature = 0.7 if place.arch and partial == "bfloat16" else None  # every G with and without one
    trim = place.arch is None and layout != "flat"
    case = shared_case(
        place, topk, g + topk, ([128, 128], [600, 400]), qhead_per_kv=g, causal=causal, layout=layout, trim=trim
    )
    with place.opened(seed=seed):
        results = attend(case, plan_of(case), temperature, partial_dtype=partial)
    assert_close(results, case.reference(lse_temperature_scale=temperature or 1.0))


@axes(sim={"g": [16]}, cuda={"g": [1, 16]}, archs=WALKING)
def test_a_walk_gives_the_temperature_lse(place, g):
    case = shared_case(place, place.choose(sim=4, cuda=8), qhead_per_kv=g)
    assert_close(attend(case, plan_of(case), 1.7), case.reference(lse_temperature_scale=1.7))


@axes(
    sim={"g": G, "layout": ["paged"], "partial": PARTIALS, "seed": SEEDS},
    cuda={"g": G, "layout": ["flat", "interleaved"], "partial": PARTIALS},
    archs=WALKING,
)
def test_a_mixture_matches_the_reference(place, g, layout, partial, seed):
    temperature = 0.7 if partial == "bfloat16" else None
    tokens = 100 if g == 1 else 40
    lens = [tokens, 0, 9], [1500, 90, 700]
    case = mixed_case(place, 32 if g == 8 else 8, g, lens, qhead_per_kv=g, layout=layout)
    with place.opened(seed=seed, csr=seed == 1 or None):
        results = attend(case, plan_of(case, "mixed"), temperature, partial_dtype=partial)
    assert_close(results, case.reference(lse_temperature_scale=temperature or 1.0))


@axes(sim={"traversal": ["walk", "mixed"]}, cuda={"traversal": ["walk", "mixed"]})
def test_every_traversal_agrees_with_the_csr_and_repeats_bitwise(place, traversal):
    make = shared_case if traversal == "walk" else mixed_case
    case = make(place, place.choose(sim=4, cuda=16), qhead_per_kv=place.choose(sim=4, cuda=16))
    plan = plan_of(case, traversal)
    for schedule in (plan[2], None):  # a schedule made from the CSR has no walk plan
        first, again = (attend(case, (*plan[:2], schedule), partial_dtype="float32") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        if schedule is not None:
            walked = first
    assert (walked[0] - first[0]).abs().max() < 0.02
    assert_lse_close(walked[1], first[1])


def test_random_selections_are_not_walked(place):
    tokens, topk = place.choose(sim=(32, 4), cuda=(512, 16))
    q2k = np.random.default_rng(0).permuted(np.tile(np.arange(64), (2, tokens, 1)), axis=2)[..., :topk]
    case = make_case(
        lens_q=[tokens], lens_k=[64 * BLOCK], qhead_per_kv=16, topk=topk, q2k=q2k.astype(np.int32), device=place.device
    )
    plan = build(case)
    assert flags_of(plan) in (None, [0, 1, 1])
    assert_close(attend(case, plan), case.reference())


@pytest.mark.parametrize("traversal", ["walk", "mixed"])
def test_a_schedule_for_another_group_size_is_not_walked(place, traversal):
    """Its plan asks for it, and is of other groups."""
    case = mixed_case(place, qhead_per_kv=4, causal=False)
    plan = build(case, traversal, qhead_per_kv=16)
    assert flags_of(plan) in (None, [1, 0, 0], [1, 1, 1])
    assert_close(attend(case, plan), case.reference())


def test_a_walk_writes_only_its_output(place):
    case = mixed_case(place, qhead_per_kv=8)
    out = Guarded(case.q.shape, torch.bfloat16, place.device)
    lse = Guarded(case.q.shape[:2], torch.float32, place.device)
    for traversal in place.traversals:
        assert_close(attend(case, build(case, traversal), out=out.tensor, lse=lse.tensor), case.reference())
        out.assert_intact()
        lse.assert_intact()
