"""Mutations of our own forward: each must be caught, by a check or by the numbers, under one of three seeds.

A mutation replaces one occurrence of a pattern in the PTX, or changes a tensor map. What caught it is part of the test.
"""

import functools

import pytest
from places import SEEDS, assert_close, needs_simulator
from places import run as attend
from reference import make_case
from simulated import BLACKWELL, HOPPER, changed_maps, further, mutants, ptx, replaced, simulation

from aot.configs import ARCHS
from sparse_aot import sim

pytestmark = needs_simulator

GROUPS = {"sm_90a": 4, "sm_100f": 16}  # G of the forward that is mutated
NUMBERS = "numbers"
ORDER = {"race", "async_early", "uninitialized", "mbarrier", "proxy_fence"}  # by whichever the seed meets first
TENSOR = ORDER | {NUMBERS, "tensor_bounds"}


@functools.cache
def case(g):
    """Several items a CTA, so that every ring wraps, some too small for every consumer, a partial block, a diagonal."""
    return make_case(lens_q=[70, 3], lens_k=[400, 200], head_kv=1, qhead_per_kv=g, topk=4, causal=True)


@functools.cache
def wanted(g):
    return case(g).reference()


def run(arch, g, seed):
    """(out, lse), and the launches that they took."""
    with simulation(arch, multiprocessors=2, seed=seed, max_steps=3_000_000) as launches:
        return attend(case(g), partial_dtype="bfloat16"), launches


def caught_by(arch, g):
    """The check that stops a call, or "numbers", under the first seed that catches something; None: nothing does."""
    for seed in SEEDS:
        try:
            results, _ = run(arch, g, seed)
            assert_close(results, wanted(g))
        except sim.SimulationError as stopped:
            return str(stopped).split(":")[0]
        except AssertionError:
            return NUMBERS
    return None


def constant(change):
    """Changes the last number of what was found; None: this one is left alone."""

    def edit(match):
        changed = change(int(match[2]))
        return None if changed is None else f"{match[1]}{changed};"

    return edit


def leading_offset(bits):
    """A K-major operand has no use for it, and holds 1 there."""
    return bits + (64 << 16) if bits >> 16 & 0x3FFF > 1 else None


LOW_HALF = r"(or\.b64 \s*%rd\d+, %rd\d+, )(46116\d{14});"  # of matrix descriptors: the constants that the DSL adds
HIGH_HALF = r"(mov\.b32 \s*%r\d+, )(107374\d{4});"

# (name, architectures, pattern, replacement, what may catch it): a mutant for each occurrence of the pattern.
EDITS = [
    ("wait for an mbarrier dropped", ARCHS, r"mbarrier\.try_wait[^;]* P1, [^;]*;", "setp.eq.u32 P1, 0, 0;", ORDER),
    ("arrival dropped", ARCHS, r"mbarrier\.arrive\.shared[^;]*;", "", {"deadlock"}),
    ("arrival relaxed", ARCHS, r"mbarrier\.arrive\.shared", "mbarrier.arrive.relaxed.cta.shared", ORDER),
    ("arrival twice", ARCHS, r"(mbarrier\.arrive\.shared[^;]*;)", r"\1 \1", ORDER | {"deadlock"}),
    ("expected bytes halved", ARCHS, r"(expect_tx[^;]*), %r\d+;", r"\1, 8192;", {"mbarrier"}),
    ("proxy fence dropped", ARCHS, r"fence\.proxy\.async[^;]*;", "", {"proxy_fence"}),
    ("barrier dropped", ARCHS, r"bar\.sync[^;]*;", "", ORDER | {"tensor_bounds"}),
    ("wgmma fence dropped", HOPPER, r"wgmma\.fence[^;]*;", "", {"in_flight_registers"}),
    ("wgmma commit dropped", HOPPER, r"wgmma\.commit_group[^;]*;", "", {"in_flight_registers"}),
    ("wgmma wait dropped", HOPPER, r"wgmma\.wait_group[^;]*;", "", {"in_flight_registers"}),
    ("commit dropped", BLACKWELL, r"tcgen05\.commit[^;]*;", "", {"deadlock"}),
    ("wait for stores dropped", BLACKWELL, r"tcgen05\.wait::st[^;]*;", "", ORDER),
    ("tensor memory kept", BLACKWELL, r"tcgen05\.dealloc[^;]*;", "", {"tensor_leak"}),
    ("product left out", BLACKWELL, r"tcgen05\.mma[^;]*;", "", ORDER | {NUMBERS}),
    ("accumulator elsewhere", BLACKWELL, r"(tcgen05\.mma[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
    ("load from elsewhere", BLACKWELL, r"(tcgen05\.ld[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
    ("store elsewhere", BLACKWELL, r"(tcgen05\.st[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
    ("wait for copies dropped", HOPPER, r"cp\.async\.wait_group[^;]*;", "", ORDER),
    ("wait for bulk copies dropped", ARCHS, r"cp\.async\.bulk\.wait_group[^;]*;", "", {"async_early"}),
    (
        "copy displaced",
        ARCHS,
        r"(cp\.async\.bulk\.tensor[^;\[]*\[%r\d+)(\+\d+)?",
        further(1024),
        ORDER | {"shared_bounds"},
    ),
    ("copy left out", ARCHS, r"cp\.async\.bulk\.tensor[^;]*;", "", {"deadlock"}),
    ("descriptor: swizzle 64", HOPPER, HIGH_HALF, constant(lambda bits: bits ^ 3 << 30), ORDER | {NUMBERS}),
    ("descriptor: no swizzle", HOPPER, HIGH_HALF, constant(lambda bits: bits ^ 1 << 30), ORDER | {NUMBERS}),
    ("descriptor: stride offset", HOPPER, HIGH_HALF, constant(lambda bits: bits + 64), ORDER | {NUMBERS}),
    ("descriptor: leading offset", HOPPER, LOW_HALF, constant(leading_offset), ORDER | {NUMBERS}),
    ("descriptor: start", HOPPER, LOW_HALF, constant(lambda bits: bits + 2), ORDER | {NUMBERS}),
    ("wgmma: A negated", HOPPER, r"(wgmma\.mma_async[^;]*), 1,\s+1, ", r"\1, -1, 1, ", {NUMBERS}),
    ("wgmma: B transposed", HOPPER, r"(wgmma\.mma_async[^;]*), 1;", r"\1, 0;", ORDER | {NUMBERS}),
    ("registers not taken", ARCHS, r"setmaxnreg\.inc[^;]*;", "", {"registers"}),
    ("registers kept", ARCHS, r"setmaxnreg\.dec[^;]*;", "", {"registers", "deadlock"}),
    ("shuffle from elsewhere", HOPPER, r"shfl\.sync\.bfly(.*), 2, 31, -1;", r"shfl.sync.bfly\1, 4, 31, -1;", {NUMBERS}),
]


@functools.cache
def forward(arch):
    """(path, PTX, lines that the case runs) of an architecture's forward; a mutation of other lines can not show."""
    launches = [run(arch, GROUPS[arch], seed)[1][0] for seed in SEEDS]
    return launches[0].path, ptx(launches[0].path), frozenset.union(*(run.statistics.lines for run in launches))


# How many of an edit's mutants change nothing, because other barriers imply the same order in this kernel.
EQUIVALENT = {
    ("sm_90a", "registers not taken"): 1,  # of warps whose 124 values fit into the 128 that they start with
    ("sm_100f", "arrival relaxed"): 1,  # of a reader of an item's words, whose later arrivals also release the read
    ("sm_100f", "wait for an mbarrier dropped"): 1,  # for an item's words, which the products' warp has waited for
}


def test_the_kernel_itself_is_not_caught(arch):
    assert caught_by(arch, GROUPS[arch]) is None


@pytest.mark.parametrize(
    "arch, name, pattern, replacement, catchers",
    [(arch, name, *edit) for name, archs, *edit in EDITS for arch in archs],
    ids=[f"{arch}-{name}" for name, archs, *_ in EDITS for arch in archs],
)
def test_no_mutant_survives(arch, name, pattern, replacement, catchers):
    path, text, lines = forward(arch)
    survivors, tried = [], 0
    for tried, mutant in enumerate(mutants(text, lines, pattern, replacement), 1):
        with replaced(path, mutant):
            caught = caught_by(arch, GROUPS[arch])
        if caught is None:
            survivors.append(tried)
        else:
            assert caught in catchers, f"mutant {tried} ({name}) was caught by {caught}"
    assert tried, "the pattern is in no line that runs"
    assert len(survivors) <= EQUIVALENT.get((arch, name), 0), f"mutants survive ({name}): {survivors}"


def test_there_are_enough_mutants(arch):
    _, text, lines = forward(arch)
    edits = [edit for _, archs, *edit, _ in EDITS if arch in archs]
    made = [mutant for edit in edits for mutant in mutants(text, lines, *edit)]
    assert len(made) == len(set(made)) >= 75


@pytest.mark.parametrize("number", range(3), ids=["q", "k", "v"])
def test_a_wrong_swizzle_of_a_tensor_map_shows_in_the_numbers(arch, number):
    def change(made, arguments):
        if made == number:
            arguments["swizzle"] = 0

    with changed_maps(change):
        assert caught_by(arch, 16) == NUMBERS
