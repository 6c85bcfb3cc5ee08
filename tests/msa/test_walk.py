"""Where neighbouring tokens share their blocks the forward walks the blocks' union: the same results, no partials.

On an architecture whose forward does not walk, the same calls go through the CSR.
"""

import numpy as np
import torch
from guarded import Guarded
from places import PARTIALS, SEEDS, TOPK, WALKING, G, asks_to_walk, assert_close, attend, axes, build
from reference import BLOCK, assert_lse_close, make_case, neighbours_q2k

LENS = [900, 0, 33, 1, 1900], [1500, 90, 70, 0, 2200]


def shared_case(place, topk=4, seed=0, simulated_lens=([64, 0, 33], [300, 90, 160]), **options):
    lens_q, lens_k = place.choose(sim=simulated_lens, cuda=LENS)
    q2k = neighbours_q2k(np.random.default_rng(seed), lens_q, lens_k, 2, topk)
    options = {"causal": True} | options
    return make_case(lens_q=lens_q, lens_k=lens_k, topk=topk, q2k=q2k, seed=seed, device=place.device, **options)


def plan_of(case):
    """What ``build`` returns, which asks the forward to walk."""
    plan = build(case)
    assert asks_to_walk(plan[2].walk_totals, case.qhead_per_kv)
    return plan


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


def test_a_walk_and_the_csr_agree_and_both_repeat_bitwise(place):
    case = shared_case(place, place.choose(sim=4, cuda=16), qhead_per_kv=place.choose(sim=4, cuda=16))
    plan = plan_of(case)
    for schedule in (plan[2], None):  # a schedule made from the CSR has no walk plan
        first, again = (attend(case, (*plan[:2], schedule), partial_dtype="float32") for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        if schedule is not None:
            walked = first
    assert (walked[0] - first[0]).abs().max() < 0.02
    assert_lse_close(walked[1], first[1])


def test_random_selections_are_not_walked(place):
    tokens, topk = place.choose(sim=(32, 4), cuda=(512, 16))
    case = make_case(lens_q=[tokens], lens_k=[64 * BLOCK], qhead_per_kv=16, topk=topk, device=place.device)
    plan = build(case)
    assert not asks_to_walk(plan[2].walk_totals, 16)
    assert_close(attend(case, plan), case.reference())


def test_a_schedule_for_another_group_size_is_not_walked(place):
    """Its plan asks for it, and is of other groups."""
    case = shared_case(place, qhead_per_kv=4, causal=False)
    plan = build(case, qhead_per_kv=16)
    assert asks_to_walk(plan[2].walk_totals, 16)
    assert_close(attend(case, plan), case.reference())


def test_a_walk_writes_only_its_output(place):
    case = shared_case(place, place.choose(sim=4, cuda=8), qhead_per_kv=8)
    out = Guarded(case.q.shape, torch.bfloat16, place.device)
    lse = Guarded(case.q.shape[:2], torch.float32, place.device)
    assert_close(attend(case, plan_of(case), out=out.tensor, lse=lse.tensor), case.reference())
    out.assert_intact()
    lse.assert_intact()
