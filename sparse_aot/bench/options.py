"""The benchmark's command line; importable without torch."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence

PARTIAL_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
LAYOUTS = ("interleaved", "packed")
BLOCK = 128  # keys; also the tokens of a run, at most
Lens = tuple[tuple[int, int], ...]  # queries and keys of each sequence


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sparse-aot bench",
        description="Times block-sparse prefill attention next to a per-query gather kernel in Triton and dense cuDNN. "
        "TFLOP/s are 4 * pairs * G * 128 * D / time, where pairs are those of a query token, a KV head and a selected "
        "block that exists: early tokens of a causal sequence have fewer than topk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    case = parser.add_argument_group("case")
    case.add_argument(
        "--customer-case",
        choices=("manual", "ring48k", "ulysses384k", "both", "qhead_sweep"),
        default="manual",
        help="a named shape, or manual: the shape that the options below give",
    )
    case.add_argument(
        "--q2k-pattern",
        metavar="PATTERN,...",
        type=pattern_list,
        default="both",
        help="selected blocks. uniform: the latest. The others: block 0, the token's current one, and hashed earlier "
        "ones, which are each token's own (sink), shared by runs of N tokens (runs:N), or shared by runs of "
        f"{BLOCK} tokens, of which each token replaces P percent by its own (noise:P). both: uniform and sink",
    )
    case.add_argument("--b", type=positive, default=1, help="sequences")
    case.add_argument(
        "--sq",
        metavar="SQ,...",
        type=positive_list,
        default=str(32 * 1024),
        help="queries in each sequence: its last tokens, where there are more keys; a case for each number",
    )
    case.add_argument("--skv", type=positive, default=32 * 1024, help="keys in each sequence")
    case.add_argument(
        "--lens",
        metavar="[COUNTx]Q:K,...",
        type=lens,
        help="queries and keys of each sequence, instead of --b, --sq and --skv: 16x512:4096,100:700 has 17 sequences",
    )
    case.add_argument("--topk", type=int, choices=(4, 8, 16, 32), default=16, help="selected blocks of a query")
    case.add_argument("--head-kv", type=positive, default=4, help="KV heads")
    case.add_argument("--qhead-per-kv", type=int, choices=(1, 2, 4, 8, 16), default=16, help="query heads of a KV head")
    case.add_argument("--dim", type=int, choices=(128,), default=128, help="head dimension")
    case.add_argument("--blk-kv", type=int, choices=(128,), default=128, help="keys in a block")
    case.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True, help="causal mask")
    case.add_argument("--dtype", choices=("bf16",), default="bf16", help="storage of q, k and v")
    case.add_argument("--partial-dtype", choices=tuple(PARTIAL_DTYPES), default="bf16", help="partial outputs")
    case.add_argument("--seed", type=int, default=0, help="of the inputs")
    paged = parser.add_argument_group("paged cache")
    paged.add_argument(
        "--paged",
        nargs="?",
        choices=LAYOUTS,
        const=LAYOUTS[0],
        help="K and V are views of one paged cache: of pages that follow each other (interleaved, which is meant where "
        "none is named), or with K and V of a token in one row (packed)",
    )
    paged.add_argument("--page-size", type=int, choices=(128,), default=128, help="keys in a page")
    paged.add_argument("--seqused-trim", type=int, default=0, help="keys at the end of each sequence that are not used")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--warmup", type=positive, default=5, help="calls before the timed ones")
    measuring.add_argument("--iters", type=positive, default=20, help="timed calls; the median is printed")
    measuring.add_argument(
        "--graph",
        action="store_true",
        help="also capture CSR, schedule and forward in one CUDA graph, the gather kernel in another, and time replays",
    )
    measuring.add_argument("--profile", action="store_true", help="also print the time of each kernel of a call")
    measuring.add_argument(
        "--cuda-profiler-capture",
        action="store_true",
        help="bracket our timed calls with cudaProfilerStart/Stop, for nsys -c cudaProfilerApi or ncu",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="write all results")
    output.add_argument("--plot", metavar="FILE", help="write a picture of the results (needs matplotlib)")
    options = parser.parse_args(argv)
    if options.seqused_trim and not options.paged:
        parser.error("--seqused-trim needs --paged")
    for queries, keys in (sequence for manual in manual_lens(options) for sequence in manual):
        if not 0 <= options.seqused_trim < keys:
            parser.error(f"--seqused-trim is {options.seqused_trim}, 0 .. {keys - 1} expected")
        if options.causal and queries > keys - options.seqused_trim:
            parser.error(
                "causal: the queries of a sequence (--sq, --lens) must not exceed its keys minus --seqused-trim; "
                f"{queries} of {keys} do"
            )
    return options


def manual_lens(options: argparse.Namespace) -> list[Lens]:
    """Of each case of ``--customer-case manual``."""
    return [options.lens] if options.lens else [((sq, options.skv),) * options.b for sq in options.sq]


def lens_text(lens: Lens) -> str:
    """As ``--lens`` takes it."""
    groups = [(len(list(group)), *pair) for pair, group in itertools.groupby(lens)]
    return ",".join(f"{count}x{q}:{k}" if count > 1 else f"{q}:{k}" for count, q, k in groups)


def lens(text: str) -> Lens:
    sequences = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:(\d+)x)?(\d+):(\d+)", part)
        count, queries, keys = map(int, match.groups(default=1)) if match else (0, 0, 0)
        if not count * queries * keys:
            raise argparse.ArgumentTypeError(f"{part!r} is not [COUNTx]Q:K of positive numbers")
        sequences += [(queries, keys)] * count
    return tuple(sequences)


def pattern_list(text: str) -> list[str]:
    patterns = []
    for name in text.split(","):
        patterns += ["uniform", "sink"] if name == "both" else [name]
        parse_pattern(patterns[-1])
    return patterns


def parse_pattern(name: str) -> tuple[str, int]:
    """``runs`` and N of ``runs:N``, ``noise`` and P of ``noise:P``; ``uniform`` and ``sink`` have no number."""
    kind, _, number = name.partition(":")
    limits = {"runs": range(1, BLOCK + 1), "noise": range(101)}
    if name in ("uniform", "sink"):
        return name, 0
    if kind in limits and number.isdecimal() and int(number) in limits[kind]:
        return kind, int(number)
    raise argparse.ArgumentTypeError(f"{name!r} is none of uniform, sink, both, runs:1 .. runs:{BLOCK}, noise:0 .. 100")


def positive_list(text: str) -> list[int]:
    return [positive(number) for number in text.split(",")]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
