"""The kernels of CSR, schedule and walk plan: the bits that host code and tests/reference.py give."""

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from guarded import Guarded
from places import HOST, SEEDS, TOPK, WALKING, G, axes, planned
from reference import BLOCK
from selections import (
    WALK_FINAL,
    WAYS,
    Selection,
    any_selection,
    assert_same,
    going,
    neighbours,
    on_host,
    random_selection,
    without_plan,
)
from simulated import ATTENTION, get_bundle, recorded, simulation

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
        lambda s, grids, got: "walk_plan" not in grids or got["walk_counts"].any(),
    ),
    "unions overflow": (
        random_selection(1, 1, 150, 60_000, 1, 32, g=1),
        lambda s, grids, got: "walk_plan" not in grids or not got["walk_counts"].any(),
    ),
}


# Shapes of the large matrices: batch, longest query, longest key sequence.
SHAPES = {
    "short sequences": (5, 120, 2000),
    "one long sequence": (1, 150, 60_000),
    # for a device
    "one sequence": (1, 3000, 20_000),
    "ragged batch": (9, 500, 5000),
    "more than 2048 rows": (1, 300, 400_000),
    "many short sequences": (1500, 6, 300),
    "one token each": (64, 1, 40_000),
    "4096 sequences": (4096, 3, 700),
}
SMALL, LARGE = list(SHAPES)[:2], list(SHAPES)[2:]


def selection_of(shape, topk, head_kv=2, g=4, seed=0):
    return random_selection(seed, *SHAPES[shape], head_kv, topk, g)


# The same for the launches that a chunk takes: at its limits, and just past them.
MOST_TOKENS, MOST_ROWS, MOST_SEQUENCES = 2048, 3584, 256


def tokens_at_random(tokens, rows, topk=4, head_kv=1, g=16, **options):
    return random_selection(tokens + rows, 1, tokens, rows * BLOCK, head_kv, topk, g, **options)


CHUNKS = {
    name: (EDGES[name][0], crosses)
    for name, crosses in {
        "empty sequences": lambda s, got: 0 in s.lens_q and 0 in s.lens_k,
        "more sequences than lanes": lambda s, got: len(s.lens_q) > 32,
        "tokens and rows of no sequence": lambda s, got: s.total_q > s.cu_q[-1] and s.empty_rows,
        "nothing selected": lambda s, got: len(got["items"]) == 0,
        "several items a row": lambda s, got: (got["items"][:, 2] > 0).any(),
        "several tiles of rows": lambda s, got: s.total_rows > 512,
        "blocks that neighbours share": lambda s, got: s.total_q > 256,
    }.items()
} | {
    "one token": (tokens_at_random(1, 40), lambda s, got: s.total_q == 1),
    "most tokens": (
        tokens_at_random(MOST_TOKENS, 200, topk=32, padding=0),
        lambda s, got: s.total_q == MOST_TOKENS and len(np.unique(got["k2q_q_indices"][0] // 256)) >= 8,
    ),
    "most rows": (tokens_at_random(40, MOST_ROWS, 32, 2), lambda s, got: s.total_rows == MOST_ROWS),
    "most sequences": (
        random_selection(1, MOST_SEQUENCES, 4, 1700, 2, 8),
        lambda s, got: len(s.lens_q) == MOST_SEQUENCES,
    ),
}
NO_CHUNKS = {
    "tokens": tokens_at_random(MOST_TOKENS + 1, 20),
    "rows": tokens_at_random(10, MOST_ROWS, empty_rows=1),
    "sequences": random_selection(1, MOST_SEQUENCES + 1, 4, 300, 1, 4),
}


def assert_exact(selection, place, seed=0, way="any size, walk plan"):
    """All functions give what they give on the host and what the reference wants; the grids of each operation.

    A device does not tell the grids: none.
    """
    with going(way):
        return assert_as_it_goes(selection, place, seed)


def assert_as_it_goes(selection, place, seed=0):
    with HOST.opened(arch=place.arch):
        wanted = selection.build()
    with place.opened(csr=True, seed=seed), recorded() as launches:
        got = selection.build(place)
        grids = defaultdict(list)
        for launch in launches:
            grids[launch.operation].append(launch.grid)
        without_schedule = selection.build(place, return_schedule=False)
        prepared = selection.prepare(place, **csr_of(got))
    selection.check(got)
    assert_same(got, wanted)
    assert_same(without_schedule, {name: got[name] for name in without_schedule})
    assert_same(prepared, {name: without_plan(got)[name] for name in prepared})
    return grids, got


def csr_of(results):
    return {name: results[name] for name in ("k2q_row_ptr", "k2q_q_indices")}


@axes(sim={"name": EDGES, "seed": SEEDS}, cuda={"name": EDGES})
def test_build_is_exact_under_every_interleaving(place, name, seed):
    selection, crosses = EDGES[name]
    grids, got = assert_exact(selection, place, seed)
    assert place.arch is None or crosses(selection, grids, got), "the case is not what its name says"


@axes(
    sim={"name": CHUNKS, "way": ["chunk", "chunk, walk plan"], "seed": SEEDS},
    cuda={"name": CHUNKS, "way": ["chunk", "chunk, walk plan"]},
)
def test_a_chunk_is_exact_under_every_interleaving(place, name, way, seed):
    selection, crosses = CHUNKS[name]
    grids, got = assert_exact(selection, place, seed, way)
    assert crosses(selection, got), "the case is not what its name says"
    assert place.arch is None or (grids["chunk_csr"] == [8 * selection.head_kv] and not grids["csr_keys"])


@pytest.mark.parametrize("name", NO_CHUNKS)
def test_what_is_no_chunk_goes_the_way_of_any_size(place, name):
    grids, _ = assert_exact(NO_CHUNKS[name], place, way="chunk, walk plan")
    assert place.arch is None or (grids["csr_keys"] and not grids["chunk_csr"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(10))
def test_random_selections_are_exact(place, seed, way):
    assert_exact(any_selection(seed), place, seed, way)


@pytest.mark.parametrize("way", ["chunk", "any size"])
def test_rows_past_too_small_a_number_of_rows_are_dropped(place, way):
    """Of what a longer call gives, the entries of the rows that there are."""
    selection = random_selection(3, 4, 60, 2000, 2, 8)
    with place.opened(csr=True), going(way):
        whole = selection.build(place)
        part = selection.build(place, total_rows=20)
    np.testing.assert_array_equal(part["k2q_row_ptr"], whole["k2q_row_ptr"][:, :21])
    for head, used in enumerate(part["k2q_row_ptr"][:, -1]):
        got, want = (made["k2q_q_indices"][head] for made in (part, whole))
        np.testing.assert_array_equal(got[:used], want[:used])
        assert (got[used:] == -1).all()


@axes(
    sim={"shape": SMALL, "topk": TOPK, "head_kv": [2], "g": G},
    cuda=[
        {"shape": [*SMALL, "ragged batch"], "topk": TOPK, "head_kv": [2], "g": G},
        {"shape": LARGE, "topk": [4, 16, 32], "head_kv": [1, 4], "g": [4]},
    ],
)
def test_every_shape_topk_and_group_size_is_exact(place, shape, topk, head_kv, g):
    for way in ("chunk, walk plan", "any size, walk plan"):
        assert_exact(selection_of(shape, topk, head_kv, g, seed=topk + head_kv), place, seed=g, way=way)


@axes(sim={"g": [1, 16]}, cuda={"g": G})
def test_groups_with_too_many_blocks_have_no_plan(place, g):
    _, got = assert_exact(selection_of("more than 2048 rows", 32, g=g), place)
    assert got["walk_counts"] is None or not got["walk_counts"].any()


def test_three_radix_passes_are_exact(place):
    """More than 2^22 rows; a schedule would take long."""
    selection = random_selection(1, 1, 30, 3000, 1, 4, empty_rows=1 << 22)
    with place.opened(csr=True), recorded() as launches:
        selection.check(selection.build(place, return_schedule=False))
    assert place.arch is None or sum(launch.operation == "radix_scatter" for launch in launches) == 3


@axes(
    sim={"chunks": [False, True], "traversal": ["walk", "mixed", None], "g": G},
    cuda={"chunks": [False, True], "traversal": ["walk", "mixed", None], "g": G},
    archs=WALKING,
)
def test_what_groups_walk_is_exact(place, chunks, traversal, g):
    """Tokens that name the same blocks as their neighbours, but for some: groups that walk nothing, some and all."""
    rng = np.random.default_rng(g)
    shared = rng.integers(0, 60, (2, 8, 8)).repeat(40, axis=1)
    loose = rng.random((8, 1)).repeat(40, axis=0) * 1.2 > rng.random(shared.shape)
    q2k = np.where(loose, rng.integers(0, 60, shared.shape), shared).astype(np.int32)
    selection = Selection(q2k, [200, 100, 20], [7680, 5000, 3000], g)
    with going("chunk" if chunks else "any size"), planned(traversal):
        _, got = assert_as_it_goes(selection, place, seed=g)
    walked, whole = got["walk_counts"] % WALK_FINAL > 0, got["walk_counts"] >= WALK_FINAL
    assert walked.all() if traversal == "walk" else walked.any() and not whole.all()


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("distinct", [127, 128, 129, 250, 300])
def test_union_of_about_128_blocks_under_every_interleaving(distinct, chunks, place):
    rng = np.random.default_rng(distinct)
    q2k = rng.permutation(300)[rng.permutation(512) % distinct].astype(np.int32).reshape(1, 16, 32)
    selection = Selection(q2k, [16], [300 * BLOCK], 8)
    for seed in range(place.choose(sim=4, cuda=1)):
        with going("chunk" if chunks else "any size"), planned("walk"):
            _, got = assert_as_it_goes(selection, place, seed)
        if got["walk_counts"] is not None:
            assert got["walk_counts"][0, 0] == (distinct | WALK_FINAL if distinct <= 128 else 0)


def views(q2k, device):
    """The same blocks in other strides: tensors, and on the host arrays of NumPy too, whose strides may be negative."""
    head_kv, total_q, topk = q2k.shape
    blocks = torch.from_numpy(q2k).to(device)
    wide = torch.ones((head_kv, total_q + 1, topk + 3), dtype=torch.int32, device=device)
    wide[:, :-1, :-3] = blocks
    tensors = [blocks.transpose(0, 1).contiguous().transpose(0, 1), wide[:, :-1, :-3]]
    backwards = np.ascontiguousarray(q2k[::-1, ::-1])
    arrays = [*(tensor.numpy() for tensor in tensors), backwards[::-1, ::-1]] if device == "cpu" else []
    return tensors + arrays


def test_strides_of_q2k_are_honoured(place):
    selection = random_selection(4, 3, 100, 2000, 2, 8)
    for seed, view in enumerate(views(selection.q2k, place.device)):
        with place.opened(csr=True, seed=seed):
            got = replace(selection, q2k=view).build(place)
        selection.check(got)


def test_without_total_rows_they_are_read_from_cu_seqlens_k(place):
    selection = selection_of("short sequences", 8)
    with place.opened(csr=True):
        assert_same(selection.build(place, total_rows=None), selection.build(place))


@axes(sim={"shape": ["short sequences"]}, cuda={"shape": ["more than 2048 rows"]})
def test_two_builds_are_bitwise_equal(place, shape):
    selection = selection_of(shape, 16, head_kv=4)
    with place.opened(csr=True):
        first = selection.build(place)
        for _ in range(3):
            assert_same(selection.build(place), first)


@axes(sim={"shape": SMALL}, cuda={"shape": SHAPES})
def test_prepare_fills_the_given_buffers_like_the_build_and_nothing_beside_them(place, shape):
    selection = selection_of(shape, 16, seed=5)
    qsplit = Guarded((2, selection.total_q * selection.topk), torch.int32, place.device)
    counts = Guarded((selection.total_q, 2), torch.int32, place.device)
    with place.opened(csr=True):
        built = selection.build(place)
        buffers = {"qsplit_indices": qsplit.tensor, "split_counts": counts.tensor}
        prepared = selection.prepare(place, **csr_of(built), **buffers)
    qsplit.assert_intact()
    counts.assert_intact()
    for name in ("qsplit_indices", "split_counts"):
        np.testing.assert_array_equal(on_host(buffers[name]), built[name])
    assert_same(prepared, {name: without_plan(built)[name] for name in prepared})


WORDS = np.array([-(2**31), -7, -1, 0, 1, 127, 128, 300, (1 << 24) - 1, 1 << 24, 2**31 - 1], np.int32)


@pytest.mark.parametrize("seed", range(5))
def test_garbage_in_q2k_selects_only_blocks_that_exist(place, seed):
    selection = any_selection(seed)
    rng = np.random.default_rng(seed)
    kind = rng.random(selection.q2k.shape)
    selection.q2k[kind < 0.4] = rng.choice(WORDS, (kind < 0.4).sum())
    selection.q2k[kind > 0.6] = rng.integers(-(2**31), 2**31, (kind > 0.6).sum())
    assert_exact(selection, place, seed)


# What only the simulator shows --------------------------------------------------------------------------------------


def test_every_kernel_that_is_not_of_the_attention_runs(arch):
    with simulation(arch, csr=True) as launches:
        for topk, way in itertools.product(TOPK, WAYS):
            selection = random_selection(topk, 1, 20, 2048 * BLOCK, 1, topk)
            with going(way):
                selection.prepare(**csr_of(selection.build()))
    bundle = get_bundle().configurations
    wanted = {entry["name"] for entry in bundle if entry["arch"] == arch and entry["operation"] not in ATTENTION}
    if arch not in WALKING:
        wanted.remove("walk-plan")
    assert {launch.entry["name"] for launch in launches} == wanted and len(wanted) >= 20
    assert {launch.entry["arch"] for launch in launches} == {arch}


@pytest.mark.parametrize("share", [0.02, 0.3, 1])
@pytest.mark.parametrize("seed", range(5))
def test_garbage_in_a_csr_stays_within_bounds(arch, seed, share):
    """The global_bounds check sees to what is read and written; what comes of it is in range too."""
    selection = any_selection(seed)
    rng = np.random.default_rng(seed)
    with HOST.opened():
        arrays = selection.build(return_schedule=False)
    for array in arrays.values():
        bad = rng.random(array.shape) < share
        array[bad] = rng.choice(WORDS, bad.sum()) if seed % 2 else rng.integers(-(2**31), 2**31, bad.sum())
    with simulation(arch, csr=True, seed=seed):
        got = selection.prepare(**arrays)
    size = selection.total_q * selection.topk
    for name, low, high in (("split_counts", 0, selection.topk), ("split_entries", -1, size - 1)):
        assert got[name].min() >= low and got[name].max() <= high
