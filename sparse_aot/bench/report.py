"""Results as text, JSON and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import triton
from cuda.bindings import driver

from sparse_aot._core.bundle import get_bundle
from sparse_aot.bench.measure import Result


def environment(argv: Sequence[str]) -> dict[str, str]:
    """What the numbers were measured on and with."""
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
    keys = f"{shape['skv']} keys" + (" paged" if shape["paged"] else "")
    print(
        f"\n{shape['name']} · {result.pattern} · {'causal' if shape['causal'] else 'full'} · {result.partial_dtype} "
        f"partials\n  B {shape['batch']}, {shape['sq']} queries, {keys}, Hkv {shape['head_kv']}, "
        f"G {shape['qhead_per_kv']}, topk {shape['topk']}, of which {result.selected_share:.1%} are blocks that exist"
    )
    rows = [
        ("CSR + schedule", result.csr_ms, ""),
        ("forward + combine", result.forward_ms, f"{result.tflops:7.1f} TFLOP/s"),
        ("sum", result.total_ms, f"{result.total_tflops:7.1f} TFLOP/s"),
        ("gather baseline", result.gather_ms, f"{result.speedup:7.2f} = speed-up of the sum over it"),
    ]
    if result.dense_ms is not None:
        rows.append(("dense cuDNN", result.dense_ms, f"{result.dense_tflops:7.1f} TFLOP/s of its own products"))
    for name, milliseconds, note in rows:
        print(f"  {name:18} {milliseconds:9.3f}  {note}".rstrip())
    print(
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


def write_plot(path: str, environment: dict[str, str], results: list[Result]) -> None:
    """A bar for each case: CSR and forward stacked, and the gather baseline beside them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(2 + 1.6 * len(results), 4.5), layout="constrained")
    at = range(len(results))
    csr = [result.csr_ms for result in results]
    left, right = [x - 0.2 for x in at], [x + 0.2 for x in at]
    axes.bar(left, csr, 0.38, label="CSR + schedule", color="#f2a541")
    axes.bar(left, [result.forward_ms for result in results], 0.38, bottom=csr, label="forward", color="#2f6690")
    axes.bar(right, [result.gather_ms for result in results], 0.38, label="gather baseline", color="#b8c4cc")
    for x, result in zip(left, results, strict=True):
        axes.annotate(f"{result.speedup:.1f}x", (x, result.total_ms), ha="center", va="bottom")
    axes.set_xticks(at, [f"{result.shape['name']}\n{result.pattern}" for result in results])
    axes.set_ylabel("ms, median")
    axes.set_title(f"{environment['device']}, {environment['command']}", fontsize=9, wrap=True)
    axes.margins(y=0.15)
    axes.legend(ncols=3, loc="upper center")
    figure.savefig(path, dpi=150)
