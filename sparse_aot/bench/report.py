"""Results as text, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from sparse_aot.bench.options import lens_text, parse_pattern
from sparse_aot.bench.result import Result


def environment(argv: Sequence[str]) -> dict[str, str]:
    """What the numbers were measured on and with."""
    import torch
    import triton
    from cuda.bindings import driver

    from sparse_aot._core.bundle import get_bundle

    return {
        "command": " ".join(["sparse-aot bench", *argv]),
        "device": torch.cuda.get_device_name(),
        "driver_cuda": str(driver.cuDriverGetVersion()[1]),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "sparse_aot": get_bundle().manifest["package_version"],
    }


def print_header(environment: dict[str, str]) -> None:
    for name, value in environment.items():
        print(f"{name:12} {value}")
    print(
        "Times in ms, medians of CUDA events. TFLOP/s count the blocks that a token selects and that exist.", flush=True
    )


def print_case(result: Result) -> None:
    shape = result.shape
    keys = f"{shape['paged']} pages" if shape["paged"] else "flat keys"
    print(
        f"\n{shape['name']} · {result.pattern} · {'causal' if shape['causal'] else 'full'} · {result.partial_dtype} "
        f"partials\n  {lens_text(shape['lens'])} queries:keys, {keys}, Hkv {shape['head_kv']}, "
        f"G {shape['qhead_per_kv']}, topk {shape['topk']}, of which {result.selected_share:.1%} are blocks that exist"
    )
    rows = [
        ("CSR + schedule", result.csr_ms, ""),
        ("forward + combine", result.forward_ms, f"{result.tflops:7.1f} TFLOP/s"),
        ("sum", result.total_ms, f"{result.total_tflops:7.1f} TFLOP/s"),
        ("gather baseline", result.gather_ms, f"{result.speedup:7.2f} = speed-up of the sum; {result.gather_config}"),
    ]
    if result.graph_ms is not None:
        speedup = result.gather_graph_ms / result.graph_ms
        rows += [
            ("sum, CUDA graph", result.graph_ms, f"{result.graph_min_ms:7.3f} at least"),
            (
                "gather, CUDA graph",
                result.gather_graph_ms,
                f"{result.gather_graph_min_ms:7.3f} at least, {speedup:.2f} = speed-up",
            ),
        ]
    if result.dense_ms is not None:
        rows.append(("dense cuDNN", result.dense_ms, f"{result.dense_tflops:7.1f} TFLOP/s of its own products"))
    for name, milliseconds, note in rows:
        print(f"  {name:18} {milliseconds:9.3f}  {note}".rstrip())
    print(
        f"  overlap            {result.overlap:9.2f}  of a token's blocks and the next one's, over topk\n"
        f"  fan-out            {result.fan_out_mean:9.1f}  queries a selected block, at most {result.fan_out_max}; "
        f"{result.work_items} work items\n"
        f"  largest difference {result.max_difference:9.4f}  from the gather baseline's output, relative to 1 + |value|"
    )
    for name, microseconds in result.kernels_us.items():
        print(f"  {microseconds:9.1f} us  {name[:90]}")
    print(end="", flush=True)


def print_host(host_us: dict[str, float]) -> None:
    print("\nHost time of one call in us, median:")
    for name, microseconds in host_us.items():
        print(f"  {name:42} {microseconds:7.2f}")


def write_json(path: str, environment: dict[str, str], results: list[Result], host_us: dict[str, float]) -> None:
    document = {"environment": environment, "cases": [asdict(result) for result in results], "host_us": host_us}
    with open(path, "w") as file:
        json.dump(document, file, indent=1)


def sum_and_gather_ms(result: Result) -> tuple[float, float]:
    """CSR to combine, and the gather baseline: in a CUDA graph where that was measured."""
    if result.graph_ms is not None:
        return result.graph_ms, result.gather_graph_ms
    return result.total_ms, result.gather_ms


Line = list[tuple[float, float, float]]  # x and the two of sum_and_gather_ms, by x


def over_overlap(results: list[Result]) -> dict[str, Line]:
    """A line for each shape over the overlap of neighbours that ``runs`` and ``noise`` patterns have."""
    return _lines(
        (f"{result.shape['name']} {lens_text(result.shape['lens'])}", result.overlap, result)
        for result in results
        if parse_pattern(result.pattern)[0] in ("runs", "noise")
    )


def over_chunk(results: list[Result]) -> dict[str, Line]:
    """A line for each pattern and number of keys over the queries of a sequence, where all sequences have as many."""
    return _lines(
        (f"{result.pattern}, {keys} keys", queries, result)
        for result in results
        if len(set(result.shape["lens"])) == 1
        for queries, keys in result.shape["lens"][:1]
    )


def _lines(points: Iterable[tuple[str, float, Result]]) -> dict[str, Line]:
    """The lines that have two points at least."""
    lines = {}
    for name, x, result in points:
        lines.setdefault(name, {})[x] = (x, *sum_and_gather_ms(result))
    return {name: [line[x] for x in sorted(line)] for name, line in lines.items() if len(line) > 1}


def write_plot(path: str, environment: dict[str, str], results: list[Result]) -> None:
    """A bar for each case, and lines over overlap and over chunk size where several were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        (over_overlap(results), "share of a token's blocks that the next one selects too", "linear"),
        (over_chunk(results), "queries of each sequence", "log"),
    ]
    panels = [panel for panel in panels if panel[0]]
    places = [[0] * len(panels), range(1, 1 + len(panels))] if panels else [[0]]
    size = (max(6, 2 + 1.2 * len(results), 6 * len(panels)), 4.5 * len(places))
    figure, axes = pyplot.subplot_mosaic(places, figsize=size, layout="constrained")
    _draw_bars(axes[0], results)
    for place, panel in enumerate(panels, 1):
        _draw_lines(axes[place], *panel)
    figure.suptitle(f"{environment['device']}, {environment['command']}", fontsize=9, wrap=True)
    figure.savefig(path, dpi=150)


def _draw_bars(axes, results: list[Result]) -> None:
    """CSR and forward stacked, and the gather baseline beside them."""
    at = range(len(results))
    csr = [result.csr_ms for result in results]
    left, right = [x - 0.2 for x in at], [x + 0.2 for x in at]
    axes.bar(left, csr, 0.38, label="CSR + schedule", color="#f2a541")
    axes.bar(left, [result.forward_ms for result in results], 0.38, bottom=csr, label="forward", color="#2f6690")
    axes.bar(right, [result.gather_ms for result in results], 0.38, label="gather baseline", color="#b8c4cc")
    for x, result in zip(left, results, strict=True):
        axes.annotate(f"{result.speedup:.1f}x", (x, result.total_ms), ha="center", va="bottom")
    names = [(result.shape["name"], lens_text(result.shape["lens"]), result.pattern) for result in results]
    axes.set_xticks(at, ["\n".join(name) for name in names])
    axes.set_ylabel("ms, median")
    axes.margins(y=0.15)
    axes.legend(ncols=3, loc="upper center")


def _draw_lines(axes, lines: dict[str, Line], label: str, scale: str) -> None:
    for number, (name, line) in enumerate(lines.items()):
        x, ours, gather = zip(*line, strict=True)
        axes.plot(x, ours, "o-", color=f"C{number}", label=name)
        axes.plot(x, gather, "s--", color=f"C{number}", alpha=0.5, label=f"{name}: gather baseline")
    axes.set(xlabel=label, ylabel="ms, CSR to combine", xscale=scale, yscale=scale)
    if scale == "log":
        numbers = sorted({x for line in lines.values() for x, *_ in line})
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
