"""The kernels of CSR, schedule and walk plan in the simulator: the bits that host code and tests/reference.py give."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from reference import BLOCK
from selections import WALK_ARRAYS, Selection, any_selection, assert_same, random_selection
from simulated import ATTENTION, SEEDS, TOPK, G, simulation

from sparse_aot._bundle import get_bundle
from sparse_aot._csr_host import walks


def neighbours():
    """Every token selects the latest blocks up to its own, in any order."""
    last = (np.arange(500) + 1000) // BLOCK
    q2k = last[None, :, None] - np.arange(4)
    return Selection(np.random.default_rng(0).permuted(q2k, axis=-1).astype(np.int32), [500], [1500], 16)


# name -> (selection, whether it crosses the edge, from its results and the grids of each operation's launches)
EDGES = {
    "empty sequences": (
        random_selection(0, 9, 60, 900, 2, 4, g=8),
        lambda s, grids, got: 0 in s.lens_q and 0 in s.lens_k,
    ),
    "more sequences than lanes": (random_selection(70, 70, 20, 700, 1, 16, g=1), lambda s, *_: len(s.lens_q) > 32),
    "tokens and rows of no sequence": (
        random_selection(9, 4, 90, 900, 2, 8, padding=77, empty_rows=300),
        lambda s, *_: s.total_q > s.cu_q[-1] and s.empty_rows,
    ),
    "nothing selected": (
        Selection(np.full((2, 90, 4), -1, np.int32), [90], [900]),
        lambda s, grids, got: len(got["items"]) == 0 and grids["schedule_fill"],
    ),
    "nothing to select": (Selection(np.zeros((2, 90, 4), np.int32), [90], [0]), lambda s, grids, got: not grids),
    "several tiles of entries": (
        random_selection(5, 5, 150, 3000, 2, 32, g=2),
        lambda s, grids, got: grids["csr_keys"][0] > s.head_kv and grids["radix_scatter"][0] > s.head_kv,
    ),
    "several tiles of rows": (
        random_selection(6, 3, 100, 70_000, 2, 8),
        lambda s, grids, got: grids["csr_row_ptr"][0] > s.head_kv and grids["schedule_fill"][0] > s.head_kv,
    ),
    "one radix pass": (
        random_selection(1, 1, 30, 2047 * BLOCK, 2, 4, g=16),
        lambda s, grids, got: len(grids["radix_scatter"]) == 1,
    ),
    "two radix passes": (
        random_selection(1, 1, 30, 2048 * BLOCK, 2, 4, g=16),
        lambda s, grids, got: len(grids["radix_scatter"]) == 2,
    ),
    "two radix passes of several tiles": (
        random_selection(2, 1, 200, 2200 * BLOCK, 2, 32, g=16),
        lambda s, grids, got: grids["radix_count"] == [4],
    ),
    "more buckets than a CTA scans": (
        random_selection(8, 1, 4200, 2000, 1, 4, g=1),
        lambda s, grids, got: grids["radix_scan"][-1] > s.head_kv,
    ),
    "several items a row": (
        Selection(np.zeros((2, 300, 4), np.int32), [200, 100], [700, 1], 16),
        lambda s, grids, got: (got["items"][:, 2] > 0).any(),
    ),
    "blocks that neighbours share": (
        neighbours(),
        lambda s, grids, got: walks(*got["walk_totals"], 128 // s.g),
    ),
    "unions overflow": (
        random_selection(1, 1, 150, 60_000, 1, 32, g=1),
        lambda s, grids, got: (got["walk_counts"] == 129).all(),
    ),
    "some unions overflow": (
        random_selection(1, 1, 300, 24_000, 2, 8, g=4),
        lambda s, grids, got: len(np.unique(got["walk_counts"] == 129)) == 2,
    ),
}


def assert_exact(selection, arch, seed):
    """All functions give what they give on the host and what the reference wants; the grids of each operation."""
    with simulation():
        on_host = selection.build()
    with simulation(arch=arch, csr=True, seed=seed) as launches:
        got = selection.build()
        grids = defaultdict(list)
        for launch in launches:
            grids[launch.operation].append(launch.grid)
        without_schedule = selection.build(return_schedule=False)
        prepared = selection.prepare(**got)
    selection.check(got)
    assert_same(got, on_host)
    assert_same(without_schedule, {name: got[name] for name in without_schedule})
    assert_same(prepared, {name: None if name in WALK_ARRAYS else got[name] for name in prepared})
    return grids, got


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EDGES)
def test_build_is_exact_under_every_interleaving(arch, name, seed):
    selection, crosses = EDGES[name]
    assert crosses(selection, *assert_exact(selection, arch, seed)), "the case is not what its name says"


@pytest.mark.parametrize("seed", range(20))
def test_random_selections_are_exact(arch, seed):
    assert_exact(any_selection(seed), arch, seed)


@pytest.mark.parametrize("batch, max_q, max_k", [(5, 120, 2000), (1, 150, 60_000)], ids=["short", "long"])
@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("g", G)
def test_every_group_size_and_topk_is_exact(arch, g, topk, batch, max_q, max_k):
    assert_exact(random_selection(topk, batch, max_q, max_k, 2, topk, g), arch, seed=g)


def test_three_radix_passes_are_exact(arch):
    """More than 2^22 rows; a schedule would take long."""
    selection = random_selection(1, 1, 30, 3000, 1, 4, empty_rows=1 << 22)
    with simulation(arch=arch, csr=True) as launches:
        selection.check(selection.build(return_schedule=False))
    assert sum(launch.operation == "radix_scatter" for launch in launches) == 3


@pytest.mark.parametrize("distinct", [127, 128, 129, 250, 300])
def test_union_of_about_128_blocks_under_every_interleaving(distinct, arch):
    rng = np.random.default_rng(distinct)
    q2k = rng.permutation(300)[rng.permutation(512) % distinct].astype(np.int32).reshape(1, 16, 32)
    selection = Selection(q2k, [16], [300 * BLOCK], 8)
    for seed in range(4):
        _, got = assert_exact(selection, arch, seed)
        assert got["walk_counts"][0, 0] == min(distinct, 129)


def views(q2k):
    """The same blocks in other strides, and in memory of other types."""
    head_kv, total_q, topk = q2k.shape
    wide = np.full((head_kv, total_q + 1, topk + 3), 1, np.int32)
    wide[:, :-1, :-3] = q2k
    backwards = np.ascontiguousarray(q2k[::-1, ::-1])
    return {
        "token-major": np.ascontiguousarray(q2k.transpose(1, 0, 2)).transpose(1, 0, 2),
        "wide": wide[:, :-1, :-3],
        "backwards": backwards[::-1, ::-1],
        "torch": torch.from_numpy(wide)[:, :-1, :-3],
    }


def test_strides_of_q2k_are_honoured(arch):
    selection = random_selection(4, 3, 100, 2000, 2, 8)
    contiguous = selection.q2k
    for seed, view in enumerate(views(contiguous).values()):
        selection.q2k = view
        with simulation(arch=arch, csr=True, seed=seed):
            got = selection.build()
        selection.q2k = contiguous
        selection.check({name: np.asarray(array) for name, array in got.items()})


def test_every_kernel_that_is_not_of_the_attention_runs(arch):
    with simulation(arch=arch, csr=True) as launches:
        for topk in TOPK:
            selection = random_selection(topk, 1, 20, 2048 * BLOCK, 1, topk)
            selection.prepare(**selection.build())
    bundle = get_bundle().configurations
    wanted = {entry["name"] for entry in bundle if entry["arch"] == arch and entry["operation"] not in ATTENTION}
    assert {launch.entry["name"] for launch in launches} == wanted and len(wanted) >= 17
    assert {launch.entry["arch"] for launch in launches} == {arch}


WORDS = np.array([-(2**31), -7, -1, 0, 1, 127, 128, 300, (1 << 24) - 1, 1 << 24, 2**31 - 1], np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_garbage_in_q2k_selects_only_blocks_that_exist(arch, seed):
    selection = any_selection(seed)
    rng = np.random.default_rng(seed)
    kind = rng.random(selection.q2k.shape)
    selection.q2k[kind < 0.4] = rng.choice(WORDS, (kind < 0.4).sum())
    selection.q2k[kind > 0.6] = rng.integers(-(2**31), 2**31, (kind > 0.6).sum())
    assert_exact(selection, arch, seed)


@pytest.mark.parametrize("share", [0.02, 0.3, 1])
@pytest.mark.parametrize("seed", range(5))
def test_garbage_in_a_csr_stays_within_bounds(arch, seed, share):
    """The global_bounds check sees to what is read and written; what comes of it is in range too."""
    selection = any_selection(seed)
    rng = np.random.default_rng(seed)
    with simulation():
        arrays = selection.build(return_schedule=False)
    for array in arrays.values():
        bad = rng.random(array.shape) < share
        array[bad] = rng.choice(WORDS, bad.sum()) if seed % 2 else rng.integers(-(2**31), 2**31, bad.sum())
    with simulation(arch=arch, csr=True, seed=seed):
        got = selection.prepare(**arrays)
    size = selection.total_q * selection.topk
    for name, low, high in (("split_counts", 0, selection.topk), ("split_entries", -1, size - 1)):
        assert got[name].min() >= low and got[name].max() <= high
