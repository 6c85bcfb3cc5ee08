"""Mutations of our own forward: each must be caught, by a check or by the numbers, under one of three seeds.

A mutation replaces one occurrence of a pattern in the PTX, or changes a tensor map. What caught it is part of the test.
"""

import dataclasses
import functools
import re

import ptxsim
import pytest
from kernels import simulated
from reference import assert_lse_close, assert_out_close, make_case
from test_attention_kernels import FORWARD, attention

SEEDS = range(3)
KERNELS = [("sm_90a", 4), ("sm_100f", 16)]
NUMBERS = "numbers"
ORDER = {"race", "async_early", "uninitialized", "mbarrier", "proxy_fence"}  # by whichever the seed meets first


@functools.cache
def case(g):
    """Several items a CTA, so that every ring wraps, some too small for every consumer, a partial block, a diagonal."""
    return make_case(lens_q=[70, 3], lens_k=[400, 200], head_kv=1, qhead_per_kv=g, topk=4, causal=True)


@functools.cache
def forward(arch, g):
    return simulated(FORWARD[arch], arch, g=g, partial="bfloat16", temperature=False)


@functools.cache
def wanted(g):
    return case(g).reference()


def caught_by(arch, g, text=None, **options):
    """The check that stops the mutant, or "numbers", under the first seed that catches it; None: it survives."""
    module = ptxsim.load(text) if text else None
    for seed in SEEDS:
        try:
            out, lse, _, _ = attention(
                case(g),
                arch,
                partial="bfloat16",
                ctas=2,
                seed=seed,
                forward_module=module,
                max_steps=3_000_000,
                **options,
            )
            assert_lse_close(lse, wanted(g).lse)
            assert_out_close(out, wanted(g))
        except ptxsim.SimulationError as stopped:
            return str(stopped).split(":")[0]
        except AssertionError:
            return NUMBERS
    return None


def further(distance):
    """Adds to the offset of an address."""
    return lambda match: f"{match[1]}+{int(match[2] or 0) + distance}"


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

# (name, pattern, replacement, what may catch it): one mutant for each occurrence of the pattern.
EDITS = [
    ("wait for an mbarrier dropped", r"mbarrier\.try_wait[^;]* P1, [^;]*;", "setp.eq.u32 P1, 0, 0;", ORDER),
    ("arrival dropped", r"mbarrier\.arrive\.shared[^;]*;", "", {"deadlock"}),
    ("arrival relaxed", r"mbarrier\.arrive\.shared", "mbarrier.arrive.relaxed.cta.shared", ORDER),
    ("arrival twice", r"(mbarrier\.arrive\.shared[^;]*;)", r"\1 \1", ORDER | {"deadlock"}),
    ("expected bytes halved", r"(expect_tx[^;]*), %r\d+;", r"\1, 8192;", {"mbarrier"}),
    ("proxy fence dropped", r"fence\.proxy\.async[^;]*;", "", {"proxy_fence"}),
    ("barrier dropped", r"bar\.sync[^;]*;", "", ORDER | {"tensor_bounds"}),
    ("wgmma fence dropped", r"wgmma\.fence[^;]*;", "", {"in_flight_registers"}),
    ("wgmma commit dropped", r"wgmma\.commit_group[^;]*;", "", {"in_flight_registers"}),
    ("wgmma wait dropped", r"wgmma\.wait_group[^;]*;", "", {"in_flight_registers"}),
    ("commit dropped", r"tcgen05\.commit[^;]*;", "", {"deadlock"}),
    ("wait for stores dropped", r"tcgen05\.wait::st[^;]*;", "", ORDER),
    ("tensor memory kept", r"tcgen05\.dealloc[^;]*;", "", {"tensor_leak"}),
    ("product left out", r"tcgen05\.mma[^;]*;", "", ORDER | {NUMBERS}),
    ("accumulator elsewhere", r"(tcgen05\.mma[^;\[]*\[%r\d+)(\+\d+)?", further(16), ORDER | {NUMBERS, "tensor_bounds"}),
    ("load from elsewhere", r"(tcgen05\.ld[^;\[]*\[%r\d+)(\+\d+)?", further(16), ORDER | {NUMBERS, "tensor_bounds"}),
    ("store elsewhere", r"(tcgen05\.st[^;\[]*\[%r\d+)(\+\d+)?", further(16), ORDER | {NUMBERS, "tensor_bounds"}),
    ("wait for copies dropped", r"cp\.async\.wait_group[^;]*;", "", ORDER),
    ("wait for bulk copies dropped", r"cp\.async\.bulk\.wait_group[^;]*;", "", {"async_early"}),
    ("copy displaced", r"(cp\.async\.bulk\.tensor[^;\[]*\[%r\d+)(\+\d+)?", further(1024), ORDER | {"shared_bounds"}),
    ("copy left out", r"cp\.async\.bulk\.tensor[^;]*;", "", {"deadlock"}),
    ("descriptor: swizzle 64", HIGH_HALF, constant(lambda bits: bits ^ 3 << 30), ORDER | {NUMBERS}),
    ("descriptor: no swizzle", HIGH_HALF, constant(lambda bits: bits ^ 1 << 30), ORDER | {NUMBERS}),
    ("descriptor: stride offset", HIGH_HALF, constant(lambda bits: bits + 64), ORDER | {NUMBERS}),
    ("descriptor: leading offset", LOW_HALF, constant(leading_offset), ORDER | {NUMBERS}),
    ("descriptor: start", LOW_HALF, constant(lambda bits: bits + 2), ORDER | {NUMBERS}),
    ("wgmma: A negated", r"(wgmma\.mma_async[^;]*), 1, 1, ", r"\1, -1, 1, ", {NUMBERS}),
    ("wgmma: B transposed", r"(wgmma\.mma_async[^;]*), 1;", r"\1, 0;", ORDER | {NUMBERS}),
    ("shuffle from elsewhere", r"shfl\.sync\.bfly(.*), 2, 31, -1;", r"shfl.sync.bfly\1, 4, 31, -1;", {NUMBERS}),
]


@functools.cache
def executed_lines(arch, g):
    """Lines of the forward's PTX that the case runs; a mutation of others can not show."""
    runs = [attention(case(g), arch, partial="bfloat16", ctas=2, seed=seed)[3][0] for seed in SEEDS]
    return frozenset.union(*(run.lines for run in runs))


# How many of an edit's mutants change nothing, because other barriers imply the same order in this kernel.
EQUIVALENT = {
    ("sm_100f", "arrival relaxed"): 1,  # of a reader of an item's words, whose later arrivals also release the read
    (
        "sm_100f",
        "wait for an mbarrier dropped",
    ): 1,  # for an item's words, which the products' warp has waited for before
}


def mutants(arch, g, pattern, replacement):
    text = forward(arch, g).text
    for match in re.finditer(pattern, text):
        if text.count("\n", 0, match.start()) + 1 not in executed_lines(arch, g):
            continue
        changed = replacement(match) if callable(replacement) else match.expand(replacement)
        if changed is not None:
            yield text[: match.start()] + changed + text[match.end() :]


@pytest.mark.parametrize("arch, g", KERNELS)
def test_the_kernel_itself_is_not_caught(arch, g):
    assert caught_by(arch, g) is None


@pytest.mark.parametrize("name, pattern, replacement, catchers", EDITS, ids=[edit[0] for edit in EDITS])
@pytest.mark.parametrize("arch, g", KERNELS)
def test_no_mutant_survives(arch, g, name, pattern, replacement, catchers):
    survivors = []
    for i, text in enumerate(mutants(arch, g, pattern, replacement)):
        caught = caught_by(arch, g, text)
        if caught is None:
            survivors.append(i)
        else:
            assert caught in catchers, f"mutant {i} ({name}) was caught by {caught}"
    assert len(survivors) <= EQUIVALENT.get((arch, name), 0), f"mutants survive ({name}): {survivors}"


def test_there_are_enough_mutants():
    texts = [text for arch, g in KERNELS for edit in EDITS for text in mutants(arch, g, *edit[1:3])]
    assert len(texts) == len(set(texts)) >= 100


@pytest.mark.parametrize("parameter", ["q_map", "k_map", "v_map"])
def test_a_wrong_swizzle_of_a_tensor_map_shows_in_the_numbers(parameter):
    assert caught_by("sm_90a", 16, edit_map=(parameter, lambda kind: dataclasses.replace(kind, swizzle=0))) == NUMBERS
