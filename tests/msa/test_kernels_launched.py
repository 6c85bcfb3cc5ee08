"""Forward and combine in the simulator, against the float32 reference within the tolerances of the specification."""

import time

import numpy as np
import pytest
import torch
from reference import make_case
from simulated import PARTIALS, SEEDS, TOPK, WALKING, G, attention, check

CANARY = 1.5


def neighbours(lens_q=(256, 128), lens_k=(600, 700), **options):
    """All tokens select the blocks up to their diagonal, so that groups of them share most."""
    last = np.concatenate([(np.arange(q) + k - q) // 128 for q, k in zip(lens_q, lens_k, strict=True)])
    q2k = np.maximum(last[None, :, None] - np.arange(4), -1).repeat(2, axis=0).astype(np.int32)
    return make_case(lens_q=lens_q, lens_k=lens_k, topk=4, q2k=q2k, causal=True, **options)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("partial, temperature", [("float32", None), ("bfloat16", 0.7)])
@pytest.mark.parametrize("g", G)
@pytest.mark.parametrize("arch", WALKING)
def test_a_walk_matches_the_reference(arch, g, partial, temperature, seed):
    case = neighbours(qhead_per_kv=g, layout="paged")
    check(case, arch, walks=True, partial=partial, temperature=temperature, seed=seed)


def test_a_walk_leaves_nothing_to_combine(arch):
    """Without a schedule, and so without a plan, the same call goes through partial results."""
    case = neighbours([128], [600], qhead_per_kv=4)
    planned = check(case, arch, walks=True).launches[-1].statistics
    unplanned = check(case, arch, call={"schedule": None}).launches[-1].statistics
    assert (planned.thread_instructions < unplanned.thread_instructions / 4) == (arch in WALKING)


@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("topk", TOPK)
def test_every_topk_matches_the_reference(arch, topk, partial):
    case = make_case(lens_q=[20, 9], lens_k=[topk * 200, 100], qhead_per_kv=2, topk=topk, causal=True)
    assert check(case, arch, partial=partial).launches[-1].entry["options"] == {"partial": partial, "topk": topk}


@pytest.mark.parametrize("csr", [False, True], ids=["host CSR", "simulated CSR"])
@pytest.mark.parametrize("g", [1, 8])
def test_a_call_without_schedule_gives_the_same_bits(arch, g, csr):
    case = make_case(lens_q=[50, 0, 30], lens_k=[600, 90, 200], qhead_per_kv=g, topk=8, layout="paged", trim=True)
    given = check(case, arch, temperature=0.7, csr=csr, walks=False)
    made = attention(case, arch, temperature=0.7, csr=csr, call={"schedule": None})
    assert all(torch.equal(a, b) for a, b in zip(given[:3], made[:3], strict=True))
    assert ("csr_split" in [launch.operation for launch in made.launches]) == csr


def test_a_temperature_of_one_gives_lse_itself(arch):
    case = make_case(lens_q=[20], lens_k=[300], qhead_per_kv=2, topk=4)
    got = check(case, arch, temperature=1.0)
    assert got.lse_temperature is got.lse
    assert not got.launches[0].entry["options"]["temperature"]


def in_a_larger_array(shape, dtype, order):
    """(array of canaries, view of its middle in a shape): strides have gaps, and dimensions lie in another order."""
    larger = torch.full([shape[dim] + 16 for dim in order], CANARY, dtype=dtype)
    view = larger.permute(*(order.index(dim) for dim in range(len(order))))
    return larger, view[tuple(slice(8, 8 + n) for n in shape)]


def is_canary(larger, view):
    """Whether every element outside of the view is as it was."""
    before = torch.full_like(larger, CANARY)
    inside = before.as_strided(view.shape, view.stride(), view.storage_offset())
    inside.copy_(view)
    return torch.equal(larger, before)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=["token-major", "head-major"])
@pytest.mark.parametrize("walk", [False, True], ids=["csr", "walk"])
@pytest.mark.parametrize("g", [4, 8])
def test_q_out_and_lse_may_have_strides(arch, g, walk, order):
    case = (
        neighbours([64, 0], [300, 90], qhead_per_kv=g) if walk else make_case(lens_q=[37], lens_k=[300], qhead_per_kv=g)
    )
    _, q = in_a_larger_array(case.q.shape, case.q.dtype, order)
    case.q = q.copy_(case.q)
    larger_out, out = in_a_larger_array(case.q.shape, torch.bfloat16, order)
    larger_lse, lse = in_a_larger_array(case.q.shape[:2], torch.float32, order[:2])
    got = check(case, arch, walks=walk, call={"out": out, "lse": lse})
    assert got.out is out and got.lse is lse
    assert is_canary(larger_out, out) and is_canary(larger_lse, lse)


def test_the_speed_line_is_met(capsys, arch):
    """256 queries, 1,024 keys, one KV head, G 4, topk 4: forward and combine with all checks in under 20 s."""
    case = make_case(lens_q=[256], lens_k=[1024], head_kv=1, qhead_per_kv=4, topk=4)
    start = time.perf_counter()
    statistics = [launch.statistics for launch in attention(case, arch).launches]
    seconds = time.perf_counter() - start
    simulated_seconds = sum(s.seconds for s in statistics)
    rate = sum(s.thread_instructions for s in statistics) / simulated_seconds
    with capsys.disabled():
        print(
            f"\nptxsim {arch}: forward, combine in {simulated_seconds:.2f} s, {rate / 1e6:.0f} M instructions a second"
        )
    assert len(statistics) == 2 and seconds < 20
