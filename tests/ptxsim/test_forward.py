"""Forward and combine of both architectures in the simulator, at sizes that cross every edge of the tile pipeline."""

import numpy as np
import pytest
import torch
from reference import make_case
from simulated import PARTIALS, SEEDS, G, attention, check


def case_of(g, layout="flat", causal=True, **options):
    """Three sequences, one without queries: partial tiles and blocks, rows that see nothing, -1 anywhere, the diagonal,
    several items a CTA."""
    return make_case(
        lens_q=[37, 0, 70], lens_k=[300, 90, 513], qhead_per_kv=g, topk=4, layout=layout, causal=causal, **options
    )


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("g", G)
def test_every_configuration_matches_the_reference_under_every_seed(arch, g, partial, temperature):
    case = case_of(g, layout="paged", trim=True)
    for seed in SEEDS:
        check(case, arch, partial=partial, temperature=temperature, seed=seed)


@pytest.mark.parametrize("layout", ["flat", "interleaved", "packed", "token-major"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("g", [2, 16])
def test_every_layout_matches_the_reference(arch, g, causal, layout):
    check(case_of(g, layout, causal, seed=3), arch, partial="bfloat16")


@pytest.mark.parametrize("ctas", [1, 2, 64])
@pytest.mark.parametrize("g", [1, 16])
def test_items_of_a_single_tile_follow_one_another(arch, g, ctas):
    """An item's K and V come where those of the item before last were: with a tile each, products may not run ahead."""
    case = make_case(lens_q=[3, 1, 2, 5], lens_k=[400, 1, 128, 129], qhead_per_kv=g, topk=4, causal=True)
    for seed in SEEDS:
        check(case, arch, partial="bfloat16", ctas=ctas, seed=seed)


@pytest.mark.parametrize("partial", PARTIALS)
def test_items_of_many_tiles_follow_one_another(arch, partial):
    """Two blocks, both selected by all of 90 tokens of 16 heads: items of odd and even numbers of tiles."""
    q2k = np.tile(np.array([1, -1, 0, -1], np.int32), (1, 90, 1))
    case = make_case(lens_q=[90], lens_k=[200], head_kv=1, qhead_per_kv=16, topk=4, q2k=q2k)
    for seed in SEEDS:
        check(case, arch, partial=partial, ctas=1, seed=seed)


def test_rows_that_see_nothing_and_an_empty_schedule(arch):
    q2k = np.full((2, 40, 4), -1, np.int32)
    case = make_case(lens_q=[40], lens_k=[300], qhead_per_kv=4, topk=4, q2k=q2k)
    check(case, arch, partial="bfloat16", temperature=0.7)


def test_a_diagonal_that_hides_whole_rows_of_a_tile(arch):
    """More queries than keys: the first queries see nothing, and the diagonal crosses the only block."""
    case = make_case(lens_q=[150], lens_k=[70], head_kv=1, qhead_per_kv=4, topk=4, causal=True)
    check(case, arch, partial="float32", temperature=1.3)


def test_scores_far_apart_keep_their_softmax(arch):
    """Maxima of +-100 and more: every exponential but the largest underflows."""
    case = make_case(lens_q=[60], lens_k=[256], head_kv=1, qhead_per_kv=8, topk=4)
    case.q *= 16
    check(case, arch, partial="float32")
    case.q = torch.zeros_like(case.q)  # and none does
    check(case, arch, partial="float32")


@pytest.mark.parametrize("partial", PARTIALS)
def test_a_tile_writes_its_own_rows_only(arch, partial):
    """With the items in reverse, what a tile wrote too much would replace rows that are there already."""

    def reverse(row_ptr, q_indices, schedule):
        count = int(schedule.work_count[0])
        schedule.scheduler_metadata[:count] = schedule.scheduler_metadata[:count].flip(0)

    check(case_of(8), arch, change=reverse, partial=partial, temperature=0.7, ctas=1)


WORDS = (-(2**31), -7, -1, 0, 1, 127, 128, (1 << 24) - 1, 1 << 24, 2**31 - 1)


def corrupt(array, share, rng):
    """Overwrite some of the elements."""
    at = rng.random(array.shape) < share
    array[torch.from_numpy(at)] = torch.from_numpy(rng.choice(WORDS, at.sum())).to(array.dtype)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_device_arrays_faults_or_hangs(arch, seed, g):
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(row_ptr, 0.05, rng)
        corrupt(schedule.scheduler_metadata, 0.1, rng)
        corrupt(schedule.qsplit_indices, 0.2, rng)
        corrupt(schedule.split_counts, 0.2, rng)
        corrupt(schedule.split_entries, 0.2, rng)
        corrupt(schedule.work_count, seed % 2, rng)
        corrupt(case.cu_seqlens_q, 0.3, rng)
        corrupt(case.cu_seqlens_k, 0.3, rng)

    case = case_of(g, layout="paged", trim=True)
    corrupt(case.page_table, 0.3, rng)
    corrupt(case.seqused_k, 0.3, rng)
    attention(case, arch, change=change, partial=PARTIALS[seed % 2], temperature=0.7, seed=seed)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_a_walk_plan_faults_or_hangs(arch, seed, g):
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(schedule.walk_blocks, 0.1, rng)
        corrupt(schedule.walk_counts, 0.3, rng)
        corrupt(case.cu_seqlens_q, 0.3, rng)
        schedule.walk_totals[:] = torch.tensor([0, 1])  # the forward walks

    case = case_of(g, layout="paged", trim=True)
    corrupt(case.page_table, 0.3, rng)
    attention(case, arch, change=change, partial=PARTIALS[seed % 2], temperature=0.7, seed=seed)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_a_csr_faults_or_hangs(arch, seed, g):
    """Kernels make the schedule, too."""
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(row_ptr, 0.05, rng)
        corrupt(q_indices, 0.2, rng)

    call = {"schedule": None}
    attention(case_of(g), arch, change=change, call=call, partial=PARTIALS[seed % 2], csr=True, seed=seed)
