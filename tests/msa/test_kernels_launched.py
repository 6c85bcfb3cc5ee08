"""Which kernels a call launches, and what they execute: what only the simulator tells."""

import time

import pytest
from places import PARTIALS, TOPK, WALKING, check, run
from reference import make_case
from simulated import simulation


def case_of(lens_q, lens_k, g=4, **options):
    return make_case(lens_q=lens_q, lens_k=lens_k, qhead_per_kv=g, **options)


def test_a_walk_leaves_nothing_to_combine(arch):
    case = case_of([64], [300])
    with simulation(arch) as walked:
        check(case, "walk")
    with simulation(arch) as by_csr:
        check(case, "csr")
    instructions, full = (launches[-1].statistics.thread_instructions for launches in (walked, by_csr))
    assert (instructions < full / 4) == (arch in WALKING)


@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("topk", TOPK)
def test_the_combine_is_that_of_topk_and_partial_dtype(arch, topk, partial):
    with simulation(arch) as launches:
        run(case_of([3, 2], [300, 100], topk=topk), partial_dtype=partial)
    assert launches[-1].entry["options"] == {"partial": partial, "topk": topk}


@pytest.mark.parametrize("temperature", [None, 1.0, 0.7])
def test_only_another_temperature_than_one_takes_a_forward_that_knows_it(arch, temperature):
    with simulation(arch) as launches:
        run(case_of([20], [300]), temperature=temperature)
    assert launches[0].entry["options"]["temperature"] == (temperature == 0.7)


@pytest.mark.parametrize("csr", [False, True], ids=["host CSR", "simulated CSR"])
def test_a_schedule_that_was_not_given_is_made_by_kernels_if_the_options_say_so(arch, csr):
    with simulation(arch, csr=csr) as launches:
        run(case_of([20], [300]), schedule=None)
    assert ("csr_split" in [launch.operation for launch in launches]) == csr


def test_the_speed_line_is_met(capsys, arch):
    """256 queries, 1,024 keys, one KV head, G 4, topk 4: forward and combine with all checks in under 20 s."""
    case = case_of([256], [1024], head_kv=1)
    start = time.perf_counter()
    with simulation(arch) as launches:
        run(case)
    seconds = time.perf_counter() - start
    statistics = [launch.statistics for launch in launches]
    simulated_seconds = sum(s.seconds for s in statistics)
    rate = sum(s.thread_instructions for s in statistics) / simulated_seconds
    with capsys.disabled():
        print(
            f"\nptxsim {arch}: forward, combine in {simulated_seconds:.2f} s, {rate / 1e6:.0f} M instructions a second"
        )
    assert len(statistics) == 2 and seconds < 20
