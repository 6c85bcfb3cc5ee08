"""The kernels that are mutated, and the calls that must notice it.

A target is a configuration, in one traversal. Its cases are calls that run it and look at the results: the cheap one
comes first, the others see what is left.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from guarded import Guarded
from large import LargeCall, heads_far_apart, spread
from places import HOST, SEEDS, Place, assert_close, attend, build, without_digest
from reference import BLOCK, make_case, random_q2k
from selections import Selection, assert_same, going, neighbours, random_selection, without_plan
from simulated import ATTENTION, ptx, replaced, simulation

from mutants.edits import ENDLESS, NUMBERS
from sparse_aot import sim

FURTHER = ("limits", "long", "splits", "totals", "garbage")  # cases that execute what the others do


@dataclass(frozen=True, eq=False)
class Target:
    """``cases``: name -> a call in the simulator that raises AssertionError where its results are wrong."""

    name: str
    arch: str
    operation: str
    cases: dict[str, Callable]

    def run(self, case: str, seed: int, **options):
        """All launches of a call."""
        return run_case(self.arch, self.operation not in ATTENTION, self.cases[case], seed=seed, **options)

    @functools.cached_property
    def launches(self):
        """case -> the launches of this kernel, of each case that may execute lines that the others do not."""
        csr = self.operation not in ATTENTION
        cases = {name: case for name, case in self.cases.items() if not name.startswith(FURTHER)}
        launches = {name: launches_of(self.arch, csr, case) for name, case in cases.items()}
        return {name: [launch for launch in launches[name] if launch.operation == self.operation] for name in cases}

    @functools.cached_property
    def kernel(self):
        """(path, PTX, lines that the cases execute); a mutation of other lines can not show."""
        mine = [launch for launches in self.launches.values() for launch in launches]
        (path,) = {launch.path for launch in mine}
        return path, ptx(path), frozenset().union(*(launch.statistics.lines for launch in mine))

    def caught_by(self, text: str, seeds=SEEDS, first: str | None = None) -> str | None:
        """The check that stops a call of the changed kernel, NUMBERS or ENDLESS; None: nothing notices.

        first: what the names of the cases to begin with begin with.
        """
        with replaced(self.kernel[0], text):
            cases = [case for case in self.cases if self.launches.get(case, True)]
            for case in sorted(cases, key=lambda name: not name.startswith(first or "")):
                for seed in seeds:
                    try:
                        self.run(case, seed, max_steps=MAX_STEPS)
                    except sim.SimulationError as stopped:
                        reason = str(stopped)
                        return ENDLESS if reason.startswith("stopped after max_steps") else reason.split(":")[0]
                    except AssertionError:
                        return NUMBERS
        return None


def run_case(arch, csr, case, **options):
    """All launches of a call; csr: those that make CSR and schedule too."""
    with simulation(arch, csr=csr, **options) as launches:
        case()
    return launches


@functools.cache
def launches_of(arch, csr, case):
    """The same, made once for all targets that share a case."""
    return run_case(arch, csr, case, seed=SEEDS[-1])


# Attention ------------------------------------------------------------------------------------------------------------

MAX_STEPS = 4_000_000  # warp instructions of a launch; none takes two thirds of that
ARRAYS = {
    "csr": ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries"),
    "walk": ("walk_blocks", "walk_counts"),
}
WORDS = np.array([-(2**31), -7, -1, 0, 1, 127, 128, (1 << 24) - 1, 1 << 24, 2**31 - 1])


def totals(traversal, tokens_per_group):
    """(blocks of all unions, selections that count) that just ask for a traversal, and others that do."""
    if traversal == "walk":
        return [(7, 5 * tokens_per_group), (0, 1), (1, 1 << 36), ((1 << 40) - 1, 1 << 60)]
    return [(7, 5 * tokens_per_group - 1), (0, 0), (-1, 1 << 60), (1 << 36, 1), (1 << 40, 1 << 60)]


def only(schedule, traversal):
    """What the other traversal would do is wrong, and so is what no item says."""
    count = int(schedule.work_count)
    schedule.scheduler_metadata[count:] = schedule.scheduler_metadata[0]
    schedule.scheduler_metadata[count:, 5] += 1
    if traversal == "csr":
        schedule.walk_counts.zero_()
    else:
        schedule.work_count.zero_()


@functools.lru_cache(maxsize=1)  # a few of them are more than there are addresses
def large_call(*options):
    return LargeCall(*options)


def attention(arch, operation, g, topk=4, partial="bfloat16", temperature=None, layout="paged"):
    """Two KV heads; NaN and Inf in all that must not be read, garbage in page tables, -1 anywhere, rows of no split,
    scores far apart, canaries around the results."""
    tokens_per_group = 128 // g
    lengths = {  # of queries and keys
        # Partial blocks, items too small for every consumer.
        "small": ([320 // g, 3, 2, 2, 1], [400, 200, 45, 110, 127]),
        "long": ([min(150, 640 // g), 20], [2000, 600]),  # by one CTA: every ring goes round 16 times
        "limits": ([BLOCK], [428]),  # a row for each number of keys that it may see of a block
        "splits": ([20, 10], [topk * BLOCK, 600]),  # of some tokens, as many as there may be
    }

    @functools.cache
    def prepared(size, traversal):
        lens_q, lens_k = lengths[size]
        options = {"layout": layout, "causal": True, "trim": size == "long"}
        if size in ("long", "splits"):  # every entry of the CSR counts
            rng = np.random.default_rng(0)
            blocks = [
                rng.random((2, n, max(topk, -(-keys // BLOCK)))).argsort(-1)[..., :topk]
                for n, keys in zip(lens_q, lens_k, strict=True)
            ]
            options["q2k"] = np.concatenate(blocks, axis=1).astype(np.int32)
        if size == "limits":
            options["q2k"] = np.full((2, BLOCK, topk), -1, np.int32)
            options["q2k"][..., 0] = np.arange(lens_k[0] - BLOCK, lens_k[0]) // BLOCK
        case = make_case(lens_q=lens_q, lens_k=lens_k, qhead_per_kv=g, topk=topk, **options)
        if size == "small" and topk == 4:
            first = case.q2k[:, : lens_q[0], 0]
            first[first >= 0] = 3  # three tiles of the last keys: their first product comes before the next item begins
            case.q2k[:, 48:56] = torch.arange(4)  # the 52nd token and those beside it in a warp see 127 keys and more
        if layout == "paged":
            case.page_table[0, 1] = case.k.shape[0]  # a page that is not there
            case.page_table = case.page_table[:, : {"small": 3, "long": 14}.get(size)]  # nor those of further columns
        if size == "small":
            case.q[::2] *= 2048
        plan = build(case)
        only(plan[2], traversal)
        return case, plan, case.reference(lse_temperature_scale=temperature or 1.0)

    def check(size, traversal, multiprocessors, some=slice(1)):
        case, plan, want = prepared(size, traversal)
        sim.options.multiprocessors = multiprocessors
        for these in totals(traversal, tokens_per_group)[some]:
            plan[2].walk_totals.copy_(torch.tensor(these))
            beside = (1, 2) if temperature is None else (0, 0)  # with a temperature, lse has no gaps
            out = Guarded(case.q.shape, torch.bfloat16, "cpu", margins=((1, 1), (1, 2)))
            lse = Guarded(case.q.shape[:2], torch.float32, "cpu", margins=((1, 1), beside))
            buffers = {"out": out.tensor, "lse": lse.tensor}
            assert_close(attend(case, plan, temperature, partial_dtype=partial, **buffers), want)
            out.assert_intact()
            lse.assert_intact()

    def garbage(traversal):
        """In a schedule, which nothing may follow out of bounds; two items may be the same."""
        sim.options.off = ("race", "async_early")
        case, plan, _ = prepared("small", traversal)
        schedule = without_digest(plan[2])
        schedule.walk_totals.copy_(torch.tensor(totals(traversal, tokens_per_group)[0]))
        for seed, name in enumerate(ARRAYS[traversal]):
            array = getattr(schedule, name)
            kept = array.clone()
            rng = np.random.default_rng(seed)
            at = torch.from_numpy(rng.random(kept.shape) < 0.2)
            array[at] = torch.from_numpy(rng.choice(WORDS, int(at.sum()))).to(array.dtype)
            try:
                attend(case, (*plan[:2], schedule), temperature, partial_dtype=partial)
            finally:
                array.copy_(kept)

    def large(traversal):
        sim.options.multiprocessors = 2
        large_call(g, traversal, topk, partial, temperature).check()

    cases = {}
    traversals = Place("cpu", arch).traversals
    cases |= {f"small {way}": functools.partial(check, "small", way, 2) for way in traversals}
    for size in ("limits", "long") if operation == "fwd" else ("splits",):
        cases |= {f"{size} {way}": functools.partial(check, size, way, 1) for way in traversals}
    if len(traversals) > 1:
        cases |= {f"totals {way}": functools.partial(check, "small", way, 2, slice(1, None)) for way in traversals}
    cases |= {f"garbage {way}": functools.partial(garbage, way) for way in traversals}
    walks_far = operation == "fwd" and temperature is None
    for way in traversals if walks_far else traversals[:1]:
        cases[f"large {way}"] = functools.partial(large, way)
    words = [arch, operation, f"g{g}" if operation == "fwd" else f"topk{topk}", partial]
    return Target(" ".join(words + ["temperature"] * (temperature is not None)), arch, operation, cases)


# CSR, schedule, walk plan ---------------------------------------------------------------------------------------------


def strided(selection):
    """The same blocks, token outermost, in wider rows."""
    head_kv, total_q, topk = selection.q2k.shape
    wide = np.zeros((total_q, head_kv, topk + 3), np.int32).transpose(1, 0, 2)[..., :topk]
    wide[...] = selection.q2k
    selection.q2k = wide
    return selection


def unequal(lens_q, lens_k):
    """Random blocks of given lengths."""
    return Selection(random_q2k(np.random.default_rng(0), lens_q, lens_k, 2, 4), lens_q, lens_k, 2)


def spread_blocks(selection):
    """The same blocks, gigabytes apart."""
    selection.q2k = spread(torch.from_numpy(selection.q2k), (1 << 33, (1 << 32) + 64, 1)).numpy()
    return selection


WALK_CAP = 128  # rows of a group that walks


def a_row_too_many():
    """Groups that name as many rows as a walk can, all by each warp in its first round, and in the second one more:
    each group in another of the four entries that a thread takes a round."""
    tokens, group = np.arange(512), np.arange(4)
    q2k = (tokens % 2 * 16 + tokens // 8 % 4 * 32)[None, :, None] + np.arange(16)
    q2k[0, 128 * group + 64 + 8 * group, 0] = WALK_CAP
    return Selection(q2k.astype(np.int32), [512], [(WALK_CAP + 1) * BLOCK], g=1)


def same_blocks(tokens, blocks, g, heads=1):
    """Of all tokens."""
    q2k = np.tile(np.array(blocks, np.int32), (heads, tokens, 1))
    return Selection(q2k, [tokens], [(max(blocks) + 1) * BLOCK], g)


def many_buckets():
    """More than a thousand of all heads, which are scanned in two rounds; few of them have an item."""
    q2k = np.full((8, 128 * 128 + 1, 4), -1, np.int32)
    q2k[:, -300:, 0] = 0
    return Selection(q2k, [q2k.shape[1]], [BLOCK])


MANY_ROWS = 2100  # which are sorted in several passes
SELECTIONS = {
    "three sequences": lambda: random_selection(5, 3, 800, 3000, 2, 4, g=1),
    "rows of no sequence": lambda: strided(random_selection(9, 4, 90, 900, 2, 4, padding=77, empty_rows=300)),
    "many rows": lambda: unequal([700, *[10] * 40], [1000 * BLOCK, *(BLOCK * blocks for blocks in range(20, 60))]),
    "many sequences": lambda: random_selection(70, 70, 20, 700, 2, 4, g=1),
    "several items a row": lambda: Selection(np.zeros((2, 300, 4), np.int32), [200, 100], [700, 1], 16),
    "neighbours": neighbours,
    "large": lambda: spread_blocks(random_selection(3, 1, 1024, MANY_ROWS * BLOCK, 4, 4, g=4)),
    "unions overflow": lambda: random_selection(1, 1, 300, 24_000, 2, 4, g=2),
    "several tiles": lambda: same_blocks(8200, range(4), g=16, heads=2),
    "one row": lambda: same_blocks(300, [0] * 4, g=16),
    "one token": lambda: same_blocks(1, range(4), g=16),
    "a row too many": a_row_too_many,
    "a row in the last slot": lambda: same_blocks(128, range(113, 145), g=1),
    "many buckets": many_buckets,
} | {  # a thread takes an entry in 256: the first that does not exist is each of the 8 that a round of a loop takes
    f"{tokens} tokens": functools.partial(random_selection, 1, 1, tokens, 300, 2, 4, empty_rows=MANY_ROWS)
    for tokens in range(1, 512, 64)
}
OF_CHUNKS = (  # of the selections above; and some that are smaller than there
    "three sequences", "rows of no sequence", "many sequences", "several items a row", "neighbours", "unions overflow",
    "one row", "one token",
)  # fmt: skip
SELECTIONS |= {
    "chunk of many rows": lambda: unequal(
        [300, *[10] * 8], [200 * BLOCK, *(BLOCK * blocks for blocks in range(40, 48))]
    ),
    "large chunk": lambda: spread_blocks(random_selection(3, 1, 300, 40 * BLOCK, 4, 4, g=4)),
    "chunk of words": lambda: same_blocks(400, [0, 3, 3, 70], g=1, heads=2),
}
FROM_CSR = ("csr_collect", "csr_split", "schedule_count", "schedule_fill")


@functools.cache
def expected(name, way):
    """(selection, results of the build, CSR, results from the CSR), as the host gives them."""
    selection = SELECTIONS[name]()
    with HOST.opened(), going(way):
        built = selection.build()
    csr = {name: built[name] for name in ("k2q_row_ptr", "k2q_q_indices")}
    return selection, built, csr, {name: array for name, array in without_plan(built).items() if name not in csr}


def far(name, csr):
    """Where the arrays of a case are."""
    return heads_far_apart(*csr["k2q_q_indices"].shape) if name == "large" else contextlib.nullcontext()


def build_all(name):
    selection, built, csr, _ = expected(name, "any size, walk plan")
    with far(name, csr), going("any size, walk plan"):
        assert_same(selection.build(), built)


def build_chunk(name, way):
    selection, built, _, _ = expected(name, way)
    with going(way):
        assert_same(selection.build(), built)


def prepare_all(name):
    selection, _, csr, prepared = expected(name, "chunk")
    with far(name, csr):
        got = selection.prepare(**csr)
    assert_same({name: got[name] for name in prepared}, prepared)


def garbage():
    """In a CSR, which nothing may follow out of bounds."""
    for seed in range(2):
        selection, _, csr, _ = expected("three sequences", "chunk")
        rng = np.random.default_rng(seed)
        for array in (csr := {name: array.copy() for name, array in csr.items()}).values():
            at = rng.random(array.shape) < 0.1
            array[at] = rng.choice([*WORDS, selection.total_q], at.sum())
        selection.prepare(**csr)


SLOW = ("many buckets",)  # to build
BUILDING = {name: functools.partial(build_all, name) for name in SELECTIONS if name not in SLOW and "chunk" not in name}
CHUNKS = {
    name + end: functools.partial(build_chunk, name, "chunk" + end)
    for end in (", walk plan", "")
    for name in SELECTIONS
    if name in OF_CHUNKS or "chunk" in name
}
PREPARING = {f"{name}, from a CSR": functools.partial(prepare_all, name) for name in SELECTIONS if "chunk" not in name}
OF_TOPK = ("csr_keys", "csr_split", "chunk_csr")  # made for one topk each: 4 here


def preparation(operation):
    """A kernel that CSR, schedule or walk plan are made by; it is the same for every architecture."""
    cases = BUILDING if operation not in FROM_CSR else PREPARING | {"garbage": garbage}
    if operation == "chunk_csr":
        cases = CHUNKS
    if operation == "csr_rows":
        cases = BUILDING | PREPARING | {"garbage": garbage}
    if operation in OF_TOPK:
        cases = {name: case for name, case in cases.items() if not name.startswith("a row ")}
    return Target(operation, "sm_90a", operation, cases)


TARGETS = [
    attention("sm_90a", "fwd", 4),
    attention("sm_90a", "fwd", 16, temperature=0.7),
    attention("sm_90a", "fwd", 1, partial="float32", layout="flat"),
    attention("sm_100f", "fwd", 4),
    attention("sm_100f", "fwd", 16, temperature=0.7),
    attention("sm_100f", "fwd", 1, partial="float32", layout="flat"),
    attention("sm_90a", "combine", 2),
    attention("sm_90a", "combine", 2, topk=16, partial="float32", temperature=0.7),
    attention("sm_100f", "combine", 2, topk=8),
    attention("sm_100f", "combine", 2, topk=32, partial="float32", temperature=0.7),
    *map(
        preparation,
        (
            "csr_rows", "csr_keys", "csr_row_ptr", "csr_collect", "csr_split", "walk_plan", "radix_count", "radix_scan",
            "radix_scatter", "schedule_count", "schedule_fill", "chunk_csr",
        ),
    ),
]  # fmt: skip
