"""Timing: device times are medians of CUDA events, host times medians of a monotonic clock.

Calls follow each other, so what of a small case fits the L2 stays there, for ours and for the baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch.cuda import nvtx

import sparse_aot
from sparse_aot.bench.baselines import Dense, Gather
from sparse_aot.bench.cases import Inputs, Shape, count_pairs, make_inputs, overlap
from sparse_aot.bench.options import BLOCK, PARTIAL_DTYPES, lens_text
from sparse_aot.bench.result import Result

QUEUE_CYCLES = 20_000_000  # about 10 ms in which the host gets ahead, so that its own time is not measured
LONG_RUN_S = 2.0  # a baseline runs fewer times when its timed calls would take longer than this
CHUNK = 1 << 13  # tokens compared at a time
AGREEMENT = 0.02  # bound of largest_difference: both round P, and the result, to bf16


def times_ms(name: str, call: Callable[[], object], warmup: int, iters: int, capture: bool = False) -> list[float]:
    """Device times of ``iters`` calls, in an NVTX range of that ``name``."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iters)]
    torch.cuda._sleep(QUEUE_CYCLES)
    with _profiler_capture() if capture else contextlib.nullcontext(), nvtx.range(name):
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def median_ms(*arguments) -> float:
    return statistics.median(times_ms(*arguments))


def graph_ms(name: str, call: Callable[[], object], warmup: int, iters: int) -> tuple[float, float]:
    """Median and least time of a replay of ``call``, which is captured once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = times_ms(f"{name}, CUDA graph", graph.replay, warmup, iters)
    return statistics.median(times), min(times)


@contextlib.contextmanager
def _profiler_capture():
    torch.cuda.profiler.start()
    yield
    torch.cuda.profiler.stop()


def case(shape: Shape, pattern: str, dense_ms: float | None, options: argparse.Namespace) -> Result:
    """Times one case and its gather baseline; raises RuntimeError where the two disagree."""
    inputs = make_inputs(shape, pattern, options.seed)
    partial_dtype = PARTIAL_DTYPES[options.partial_dtype]
    out = torch.empty_like(inputs.q)
    lse = torch.empty(inputs.q.shape[:2], dtype=torch.float32, device=inputs.q.device)
    plan = build(shape, inputs)

    def forward():
        attend(shape, inputs, plan, partial_dtype, out=out, lse=lse)

    label = f"{shape.name} {lens_text(shape.lens)} {pattern}"
    capture = options.cuda_profiler_capture
    timing = (options.warmup, options.iters)
    csr_ms = median_ms(f"{label}: CSR + schedule", lambda: build(shape, inputs), *timing, capture)
    forward_ms = median_ms(f"{label}: forward", forward, *timing, capture)
    kernels_us = {}
    if options.profile:
        kernels_us = kernel_times_us(lambda: attend(shape, inputs, build(shape, inputs), partial_dtype))
    gather = Gather(shape, inputs)
    gather()
    gather_ms = _baseline_ms(f"{label}: gather baseline", gather, options)
    graph, gather_graph = (None, None), (None, None)
    if options.graph:
        out.zero_()  # what is compared below comes from a replay
        graph = graph_ms(
            label, lambda: attend(shape, inputs, build(shape, inputs), partial_dtype, out=out, lse=lse), *timing
        )
        gather_graph = graph_ms(f"{label}: gather baseline", gather, *timing)
    difference = largest_difference(out, gather.out)
    if not difference < AGREEMENT:
        raise RuntimeError(f"{label}: the output differs from the gather baseline's by up to {difference}")

    row_ptr, _, schedule = plan
    pairs = count_pairs(row_ptr)
    fan_out = row_ptr.diff(dim=1)
    fan_out = fan_out[fan_out > 0]
    total_ms = csr_ms + forward_ms
    return Result(
        shape=asdict(shape),
        pattern=pattern,
        partial_dtype=partial_dtype,
        csr_ms=csr_ms,
        forward_ms=forward_ms,
        total_ms=total_ms,
        pairs=pairs,
        selected_share=pairs / (shape.total_q * shape.head_kv * shape.topk),
        tflops=shape.flop(pairs) / forward_ms * 1e-9,
        total_tflops=shape.flop(pairs) / total_ms * 1e-9,
        overlap=overlap(shape, inputs.q2k),
        fan_out_mean=float(fan_out.float().mean()),
        fan_out_max=int(fan_out.max()),
        work_items=int(schedule.work_count),
        gather_ms=gather_ms,
        gather_config=gather.config,
        speedup=gather_ms / total_ms,
        graph_ms=graph[0],
        graph_min_ms=graph[1],
        gather_graph_ms=gather_graph[0],
        gather_graph_min_ms=gather_graph[1],
        dense_ms=dense_ms,
        dense_tflops=dense_ms and Dense.flop(shape) / dense_ms * 1e-9,
        max_difference=difference,
        kernels_us=kernels_us,
    )


def largest_difference(out: torch.Tensor, baseline: torch.Tensor) -> float:
    """max |out - baseline| / (1 + |baseline|); NaN if there is one."""
    pairs = zip(out.split(CHUNK), baseline.split(CHUNK), strict=True)
    return float(torch.stack([((a.float() - b.float()) / (1 + b.float().abs())).abs().max() for a, b in pairs]).max())


def build(shape: Shape, inputs: Inputs):
    return sparse_aot.build_k2q_csr(
        inputs.q2k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, BLOCK, total_k=sum(shape.capacities),
        max_seqlen_k=max(shape.capacities), max_seqlen_q=shape.max_q, total_rows=shape.total_rows,
        qhead_per_kv=shape.qhead_per_kv, return_schedule=True,
    )  # fmt: skip


def attend(shape: Shape, inputs: Inputs, plan, partial_dtype: str, **buffers):
    row_ptr, q_indices, schedule = plan
    return sparse_aot.sparse_atten_func(
        inputs.q, inputs.k, inputs.v, row_ptr, q_indices, shape.topk, causal=shape.causal, partial_dtype=partial_dtype,
        return_softmax_lse=True, cu_seqlens_q=inputs.cu_seqlens_q, cu_seqlens_k=inputs.cu_seqlens_k,
        max_seqlen_q=shape.max_q, max_seqlen_k=max(shape.capacities), page_table=inputs.page_table,
        seqused_k=inputs.seqused_k, schedule=schedule, **buffers,
    )  # fmt: skip


def dense_ms(shape: Shape, options: argparse.Namespace) -> float | None:
    """Dense attention through cuDNN at the same lengths; None where it does not apply or has no plan for the shape."""
    if any(lens != (shape.max_q, shape.max_q) for lens in shape.lens):
        return None  # one length a call; torch aligns its causal mask to the top left
    try:
        dense = Dense(shape)
        dense()
    except RuntimeError as error:
        print(f"dense attention left out: {str(error).splitlines()[0]}")
        return None
    return _baseline_ms(f"{shape.name}: dense cuDNN", dense, options)


def _baseline_ms(name: str, call: Callable[[], object], options: argparse.Namespace) -> float:
    once = median_ms(name, call, 1, 1)
    iters = max(3, min(options.iters, int(LONG_RUN_S * 1000 / once)))
    return median_ms(name, call, min(options.warmup, iters), iters)


def kernel_times_us(call: Callable[[], object], calls: int = 5) -> dict[str, float]:
    """Mean device time of each kernel and copy of ``call``, in microseconds a call, longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / calls for event in profile.key_averages()}
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def host_us(options: argparse.Namespace, calls: int = 1000, queue: int = 20) -> dict[str, float]:
    """Median host time of one call in microseconds, on sizes so small that the device never holds the host up."""
    shape = Shape("tiny", ((64, 512),), 4, 1, 16, options.causal, options.paged, 0)
    inputs = make_inputs(shape, "uniform", options.seed)
    partial_dtype = PARTIAL_DTYPES[options.partial_dtype]
    plan = build(shape, inputs)
    out, lse = attend(shape, inputs, plan, partial_dtype)
    measured = {
        "sparse_atten_func": lambda: attend(shape, inputs, plan, partial_dtype),
        "sparse_atten_func, out= and lse= given": lambda: attend(shape, inputs, plan, partial_dtype, out=out, lse=lse),
        "build_k2q_csr with schedule": lambda: build(shape, inputs),
        "gather baseline (one Triton launch)": Gather(shape, inputs),
    }
    return {name: _median_host_us(call, calls, queue) for name, call in measured.items()}


def _median_host_us(call: Callable[[], object], calls: int, queue: int) -> float:
    times = []
    for _ in range(calls // queue):
        torch.cuda.synchronize()
        call()  # the first call after a wait runs on cold caches
        for _ in range(queue):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000
