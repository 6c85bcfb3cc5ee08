"""What is done to the PTX of a kernel to see whether it is noticed: a table of edits.

An edit makes a mutant for each place that its pattern matches, or one for all places together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from places import SEEDS

NUMBERS = "numbers"  # what catches a mutant that runs to its end: its results are wrong
ENDLESS = "endless"  # and one that does not
ORDER = {"race", "async_early", "uninitialized", "mbarrier", "proxy_fence"}  # by whichever the seed meets first
TENSOR = ORDER | {NUMBERS, "tensor_bounds", "tensor_order"}
HANGS = {"deadlock", ENDLESS}
REGISTERS = HANGS | {"registers"}
ANY = None  # of arithmetic, anything may come

ATTENTION = ("fwd", "combine")


@dataclass(frozen=True)
class Edit:
    """``of``: what a target's name begins with; ``caught_by``: the checks that may catch a mutant, NUMBERS among them.

    replacement: a template, or a function of the match, which gives None to leave it alone. together: one mutant, of
    all matches. seeds: under which it must be noticed; numbers do not depend on them. case: which to try first.
    spare: what is left alone.
    """

    name: str
    of: tuple[str, ...]
    pattern: str
    replacement: str | Callable[[re.Match], str | None]
    caught_by: frozenset[str] | set[str] | None = ANY
    together: bool = False
    seeds: tuple[int, ...] = SEEDS
    case: str | None = None
    spare: str | None = None


@dataclass(frozen=True)
class Mutant:
    number: int  # of the edit's mutants of a kernel, from 1, those included that no call can show
    line: int
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.number}: line {self.line}: {self.before[:160]!r} -> {self.after[:160]!r}"


def mutants(text: str, lines, edit: Edit) -> Iterator[Mutant]:
    """The mutants of a kernel where a match begins in one of ``lines``, those that are executed."""
    whole, last, number = [], 0, 0
    spared = [match.span() for match in re.finditer(edit.spare, text)] if edit.spare else []
    for match in re.finditer(edit.pattern, text, re.MULTILINE):
        if any(begin <= match.start() < end for begin, end in spared):
            continue
        changed = edit.replacement(match) if callable(edit.replacement) else match.expand(edit.replacement)
        if changed is None:
            continue
        number += 1
        if edit.together:
            whole += [text[last : match.start()], changed]
            last = match.end()
        elif (line := text.count("\n", 0, match.start()) + 1) in lines:
            mutant = text[: match.start()] + changed + text[match.end() :]
            yield Mutant(number, line, match[0].strip(), changed.strip(), mutant)
    if whole:
        yield Mutant(1, 0, f"{number} places", "", "".join(whole) + text[last:])


# Replacements ---------------------------------------------------------------------------------------------------------


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


def of_lanes(condition: str, instruction: str = r"\1") -> str:
    """An instruction for those lanes only whose number satisfies a comparison, like "lt 16"."""
    comparison, number = condition.split()
    return (
        "{ .reg .pred MINE; .reg .b32 LANE; mov.u32 LANE, %laneid; "
        f"setp.{comparison}.u32 MINE, LANE, {number}; @MINE {instruction} }}"
    )


def swap(one: str, other: str):
    """One word for the other, in the first group of what was found."""
    return lambda match: match[0].replace(match[1], {one: other, other: one}[match[1]], 1)


def registers(change):
    """Changes the count of a setmaxnreg; it stays one that the instruction takes."""
    return lambda match: f"{match[1]}{change(int(match[2]))};"


def opcode(name: str, operands: str = "[^;]*") -> str:
    """A whole instruction at the start of its line, not predicated."""
    return rf"^[ \t]*({name}\b{operands};)"


LOW_HALF = r"(or\.b64 \s*%rd\d+, %rd\d+, )(46116\d{14});"  # of matrix descriptors: the constants that the DSL adds
HIGH_HALF = r"(mov\.b32 \s*%r\d+, )(107374\d{4});"
TWO_LATER = r"((?:(?!{0})[\s\S])*?)"  # what lies between, without a further {0}
CONSTANT = r"((?:add|and|mul\.lo|mul\.wide|mov|min|max)\.[bsu](?:32|64) [^;]*, )(-?\d+);"
OFFSET = r"(?:mul\.wide\.[su]32|mul\.lo\.s64|mad\.lo\.s64|shl\.b64|add\.s64)\s+(%rd\d+), %rd?\d+, [^;]*"

BOTH, HOPPER, BLACKWELL = ("sm_90a fwd", "sm_100f fwd"), ("sm_90a fwd",), ("sm_100f fwd",)
COMBINE, ALL = ("sm_90a combine", "sm_100f combine"), ("",)

SYNCHRONISATION = [
    Edit("wait for an mbarrier dropped", BOTH, r"mbarrier\.try_wait[^;]* P1, [^;]*;", "setp.eq.u32 P1, 0, 0;", ORDER),
    Edit(
        "wait for the other phase", BOTH, r"(mbarrier\.try_wait[^;]* P1, \[[^;]*\]), (%r\d+|0), (\d+);",
        r"{ .reg .b32 PHASE; xor.b32 PHASE, \2, 1; \1, PHASE, \3; }", ORDER | HANGS | TENSOR,
    ),
    Edit("arrival dropped", BOTH, r"mbarrier\.arrive\.shared[^;]*;", "", HANGS),
    Edit("arrival relaxed", BOTH, r"mbarrier\.arrive\.shared", "mbarrier.arrive.relaxed.cta.shared", ORDER),
    Edit("arrival twice", BOTH, r"(mbarrier\.arrive\.shared[^;]*;)", r"\1 \1", ORDER | HANGS),
    Edit(
        "one arrival more", BOTH, r"(mbarrier\.init[^;]*), (%r\d+);",
        r"{ .reg .b32 COUNT; add.s32 COUNT, \2, 1; \1, COUNT; }", HANGS | {"mbarrier"},
    ),
    Edit("expected bytes halved", BOTH, r"(expect_tx[^;]*), %r\d+;", r"\1, 8192;", {"mbarrier", NUMBERS}),
    Edit("proxy fence dropped", BOTH, r"fence\.proxy\.async[^;]*;", "", {"proxy_fence"}),
    Edit("proxy fence of one lane", BOTH, opcode(r"fence\.proxy\.async"), of_lanes("lt 1"), {"proxy_fence"}),
    Edit(
        "proxy fence before the store", BOTH,
        r"(st\.shared[^;]*;)" + TWO_LATER.format(r"st\.shared") + r"(fence\.proxy\.async[^;]*;)", r"\3 \1\2",
        {"proxy_fence"},
    ),
    Edit(
        "proxy fence before the copies", BOTH, r"(cp\.async\.wait_group[^;]*;)\s*(fence\.proxy\.async[^;]*;)", r"\2 \1",
        {"proxy_fence"},
    ),
    Edit("barrier dropped", ALL, opcode(r"bar\.sync"), "", ORDER | {"tensor_bounds", NUMBERS}),
    Edit("barrier of a warp dropped", ALL, opcode(r"bar\.warp\.sync"), "", ORDER | {NUMBERS}),
    Edit(
        "aligned instruction of some lanes", ALL,
        opcode(r"(?:bar\.sync|wgmma\.(?:fence|commit_group|wait_group)|tcgen05[\w:.]*\.sync\.aligned|setmaxnreg)"),
        of_lanes("lt 16"), {"convergence", "registers"},  # what a load of some lanes leaves as it is stays in registers
    ),
    Edit("setmaxnreg dropped", BOTH, opcode(r"setmaxnreg"), "", REGISTERS),
    Edit("setmaxnreg: direction", BOTH, r"setmaxnreg\.(inc|dec)", swap("inc", "dec"), REGISTERS),
    Edit("setmaxnreg: more", BOTH, r"(setmaxnreg[\w.]*\s+)(\d+);", registers(lambda n: n + 8), REGISTERS),
    Edit(
        "setmaxnreg: few", BOTH, r"(setmaxnreg[\w.]*\s+)(\d+);", registers(lambda n: 24 if n > 24 else 240),
        REGISTERS,
    ),
    Edit("wait for copies dropped", BOTH, r"cp\.async\.wait_group[^;]*;", "", ORDER),
    Edit("wait for bulk copies dropped", BOTH, r"cp\.async\.bulk\.wait_group[^;]*;", "", {"async_early"}),
    Edit(
        "wait for all bulk copies but one", BOTH, r"(cp\.async\.bulk\.wait_group\.read\s+)0;", r"\g<1>1;",
        {"async_early"},
    ),
    Edit("wait for the launch before dropped", ALL, r"griddepcontrol\.wait;", "", {"race"}),
    Edit("atomic of a CTA", ALL, r"atom\.global", "atom.relaxed.cta.global", {"race"}),
    Edit("load without order", ALL, r"ld\.relaxed\.cta\.", "ld.", {"race"}),
    Edit("atomic as load and store", ALL,
         r"atom\.(shared|global)\.(add|or)\.(u32|b32)\s+(%r\d+), (\[[^\]]*\]), ([^;]*);",
         lambda m: f"{{ .reg .b32 NEW; ld.{m[1]}.b32 {m[4]}, {m[5]}; {m[2]}.{'s32' if m[2] == 'add' else 'b32'} NEW, "
         f"{m[4]}, {m[6]}; st.{m[1]}.b32 {m[5]}, NEW; }}", {"race", NUMBERS}),
]  # fmt: skip

HOPPER_PRODUCTS = [
    Edit("wgmma fence dropped", HOPPER, r"wgmma\.fence[^;]*;", "", {"in_flight_registers"}),
    Edit(
        "wgmma fence before the operand", HOPPER,
        r"(cvt\.rn\.bf16x2\.f32[^;]*;)" + TWO_LATER.format("wgmma|cvt.rn.bf16x2") + r"(wgmma\.fence[^;]*;)", r"\3 \1\2",
        {"in_flight_registers"},
    ),
    Edit(
        "wgmma fence after the product", HOPPER,
        r"(wgmma\.fence[^;]*;)([\s\S]*?wgmma\.mma_async[^;]*;)", r"\2 \1", {"in_flight_registers"},
    ),
    Edit("wgmma commit dropped", HOPPER, r"wgmma\.commit_group[^;]*;", "", {"in_flight_registers"}),
    Edit("wgmma wait dropped", HOPPER, r"wgmma\.wait_group[^;]*;", "", {"in_flight_registers"}),
    Edit("descriptor: swizzle 64", HOPPER, HIGH_HALF, constant(lambda bits: bits ^ 3 << 30), ORDER | {NUMBERS}),
    Edit("descriptor: no swizzle", HOPPER, HIGH_HALF, constant(lambda bits: bits ^ 1 << 30), ORDER | {NUMBERS}),
    Edit("descriptor: stride offset", HOPPER, HIGH_HALF, constant(lambda bits: bits + 64), ORDER | {NUMBERS}),
    Edit("descriptor: leading offset", HOPPER, LOW_HALF, constant(leading_offset), ORDER | {NUMBERS}),
    Edit("descriptor: start", HOPPER, LOW_HALF, constant(lambda bits: bits + 2), ORDER | {NUMBERS}),
    Edit("wgmma: A negated", HOPPER, r"(wgmma\.mma_async[^;]*), 1,\s+1, ", r"\1, -1, 1, ", {NUMBERS}),
    Edit("wgmma: B transposed", HOPPER, r"(wgmma\.mma_async[^;]*), 1;", r"\1, 0;", ORDER | {NUMBERS}),
    Edit("shuffle from elsewhere", HOPPER, r"(shfl\.sync\.bfly.*), 2, 31, -1;", r"\1, 4, 31, -1;", {NUMBERS}),
]  # fmt: skip

BLACKWELL_PRODUCTS = [
    Edit("commit dropped", BLACKWELL, r"tcgen05\.commit[^;]*;", "", HANGS),
    Edit(
        "commit of another lane", BLACKWELL,
        r"(tcgen05\.commit[^;]*;)((?:\s*tcgen05\.commit[^;]*;)*\s*\$L__\w+:)", r"\2 " + of_lanes("eq 5"), ORDER,
    ),
    Edit("wait for loads dropped", BLACKWELL, r"tcgen05\.wait::ld[^;]*;", "", {"async_early"}),
    Edit("all waits for loads dropped", BLACKWELL, r"tcgen05\.wait::ld[^;]*;", "", {"async_early"}, together=True),
    Edit("wait for stores dropped", BLACKWELL, r"tcgen05\.wait::st[^;]*;", "", ORDER),
    Edit("fence after a barrier dropped", BLACKWELL, r"tcgen05\.fence::after[^;]*;", "", {"tensor_fence"}),
    Edit("fence before a barrier dropped", BLACKWELL, r"tcgen05\.fence::before[^;]*;", "", {"tensor_fence"}),
    Edit("all tensor fences dropped", BLACKWELL, r"tcgen05\.fence[^;]*;", "", {"tensor_fence"}, together=True),
    Edit("tensor memory kept", BLACKWELL, r"tcgen05\.dealloc[^;]*;", "", {"tensor_leak"}),
    Edit("product left out", BLACKWELL, r"tcgen05\.mma[^;]*;", "", ORDER | {NUMBERS}),
    Edit("accumulator elsewhere", BLACKWELL, r"(tcgen05\.mma[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
    Edit("load from elsewhere", BLACKWELL, r"(tcgen05\.ld[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
    Edit("store elsewhere", BLACKWELL, r"(tcgen05\.st[^;\[]*\[%r\d+)(\+\d+)?", further(16), TENSOR),
]  # fmt: skip

COPIES = [
    Edit(
        "copy displaced", BOTH, r"(cp\.async\.bulk\.tensor[^;\[]*\[%r\d+)(\+\d+)?", further(1024),
        ORDER | {"shared_bounds"},
    ),
    Edit("copy left out", BOTH, r"cp\.async\.bulk\.tensor[^;]*;", "", HANGS),
    Edit("rows left out", BOTH, r"cp\.async\.(?:cg|bulk\.global)[^;]*;", ""),
]  # fmt: skip

ARITHMETIC = [
    Edit("signed offset cut", ALL, opcode(OFFSET, ""), r"\1 shl.b64 \2, \2, 32; shr.s64 \2, \2, 32;", case="large"),
    Edit("offset cut", ALL, opcode(OFFSET, ""), r"\1 shl.b64 \2, \2, 32; shr.u64 \2, \2, 32;", case="large"),
    Edit("log2(e) off by 0.01 %", ALL, "0f3FB8AA3B", "0f3FB8AEF5", {NUMBERS}),
    Edit("ln(2) off by 0.01 %", ALL, "0f3F317218", "0f3F3176A3", {NUMBERS}),
    Edit("1 % more", ALL, r"^[ \t]*(mul(?:\.rn)?\.f32 \s*(%r\d+),[^;]*;)", r"\1 mul.f32 \2, \2, 0f3F8147AE;"),
    Edit("lt and le", ALL, r"setp\.(lt|le)\.", swap("lt", "le")),
    Edit("gt and ge", ALL, r"setp\.(gt|ge)\.", swap("gt", "ge")),
    Edit("minimum and maximum", ALL, r"^[ \t]*(min|max)\.", swap("min", "max")),
    Edit(
        "shift by a bit more", ALL, r"(sh[lr]\.[bsu](?:32|64) \s*[^;]*, )(\d+);", constant(lambda n: n + 1)
    ),
    Edit("constant one more", ALL, CONSTANT, constant(lambda n: n + 1)),
    Edit("constant one less", ALL, CONSTANT, constant(lambda n: n - 1)),
]  # fmt: skip

# A division that rounds down is one that rounds to zero, and a correction for negative numbers: there are none.
ROUNDING = (
    r"shr\.s32 [^;]*, 31;\s*shr\.u32 [^;]*;|(?:and\.b32 [^;]*, -\d+|mul\.lo\.s32 [^;]*);\s*setp\.ne[^;]*;"
    r"\s*setp\.lt\.s32[^;]*;\s*and\.pred[^;]*;\s*selp\.b32[^;]*, -1, 0, %p\d+;"
)
ORDERED = [*SYNCHRONISATION, *HOPPER_PRODUCTS, *BLACKWELL_PRODUCTS, *COPIES]
EDITS = [*ORDERED, *(replace(edit, seeds=SEEDS[-1:], spare=ROUNDING) for edit in ARITHMETIC)]
