"""The benchmark's command line; importable without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

PARTIAL_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


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
    case.add_argument("--q2k-pattern", choices=("sink", "uniform", "both"), default="both", help="selected blocks")
    case.add_argument("--b", type=positive, default=1, help="sequences")
    case.add_argument("--sq", type=positive, default=32 * 1024, help="queries in each sequence")
    case.add_argument("--skv", type=positive, default=32 * 1024, help="keys in each sequence")
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
    paged.add_argument("--paged", action="store_true", help="K and V are views of one interleaved paged cache")
    paged.add_argument("--page-size", type=int, choices=(128,), default=128, help="keys in a page")
    paged.add_argument("--seqused-trim", type=int, default=0, help="keys at the end of each sequence that are not used")
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument("--warmup", type=positive, default=5, help="calls before the timed ones")
    measuring.add_argument("--iters", type=positive, default=20, help="timed calls; the median is printed")
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
    if not 0 <= options.seqused_trim < options.skv:
        parser.error(f"--seqused-trim is {options.seqused_trim}, 0 .. skv - 1 expected")
    if options.causal and options.sq > options.skv - options.seqused_trim:
        parser.error("causal: --sq must not exceed --skv minus --seqused-trim")
    return options


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
