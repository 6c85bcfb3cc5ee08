"""``sparse-aot bench``: times CSR, schedule, forward and combine, next to baselines. Needs torch and Triton.

``options`` parses the command line, ``cases`` makes inputs, ``baselines`` is what we compare with, ``measure`` times
and makes a ``result`` of each case, ``report`` prints, plots and writes JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sparse_aot.bench.options import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark with the options of ``sparse-aot bench --help``; returns the process's exit status."""
    options = parse(argv)
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        print(f"sparse-aot bench needs torch and Triton: {error}", file=sys.stderr)
        return 1
    if not torch.cuda.is_available():
        print("sparse-aot bench needs a CUDA device; torch sees none", file=sys.stderr)
        return 1
    return _run(options, sys.argv[1:] if argv is None else argv)


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    from sparse_aot.bench import cases, measure, report

    environment = report.environment(argv)
    report.print_header(environment)
    results = []
    for shape in cases.shapes(options):
        dense_ms = measure.dense_ms(shape, options)
        for pattern in options.q2k_pattern:
            results.append(measure.case(shape, pattern, dense_ms, options))
            report.print_case(results[-1])
    host_us = measure.host_us(options)
    report.print_host(host_us)
    if options.json:
        report.write_json(options.json, environment, results, host_us)
    if options.plot:
        report.write_plot(options.plot, environment, results)
    return 0
