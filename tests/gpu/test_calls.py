"""What a call does besides computing: memory, streams, threads, CUDA graphs."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from places import attend, build, run  # noqa: E402
from reference import (  # noqa: E402
    BLOCK,
    GARBAGE_PAGES,
    assert_lse_close,
    assert_out_close,
    make_case,
    neighbours_q2k,
    ragged,
    random_q2k,
)

from sparse_aot import build_k2q_csr  # noqa: E402


def small_case(seed, layout="flat", **options):
    lens_q, lens_k = ragged(np.random.default_rng(seed), 8, 200, 2500)
    shape = {"qhead_per_kv": 4, "topk": 8, "layout": layout, "causal": True, "seed": seed, "device": "cuda"}
    return make_case(lens_q=lens_q, lens_k=lens_k, **shape | options)


# -------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("partial_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["flat", "interleaved"])
def test_extra_device_memory_is_the_partials_and_their_lse_only(layout, partial_dtype):
    q2k = np.tile(np.arange(8, dtype=np.int32), (2, 8192, 1))
    case = make_case(
        lens_q=[8192], lens_k=[50_000], qhead_per_kv=8, topk=8, layout=layout, q2k=q2k, poison=False, device="cuda"
    )
    plan = build(case)
    out, lse = attend(case, plan, partial_dtype=partial_dtype)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    attend(case, plan, partial_dtype=partial_dtype, out=out, lse=lse)
    extra = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    rows = case.q.shape[0] * case.q.shape[1] * (case.topk + 1)  # a token's splits, and what its walk leaves
    assert extra <= rows * (128 * (4 if partial_dtype == "float32" else 2) + 4) + 4096


def test_public_calls_return_before_the_device_is_done():
    case = small_case(3, layout="paged")
    run(case)
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy.record()
    start = time.perf_counter()
    out, _ = run(case)
    elapsed = time.perf_counter() - start
    assert not busy.query() and elapsed < 0.5
    assert_out_close(out, case.reference())


# --------------------------------------------------------------------------------------------- streams and threads


def test_work_goes_on_the_current_stream_of_the_producer():
    case = small_case(4)
    want = run(case)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    fresh = [torch.zeros_like(x) for x in (case.q, case.k, case.v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for empty, full in zip(fresh, (case.q, case.k, case.v), strict=True):
            empty.copy_(full)
        case.q, case.k, case.v = fresh
        got = run(case)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_an_explicit_stream_is_used_as_handle_or_object():
    case = small_case(5)
    plan, want = build(case), run(case)

    class Wrapped:
        def __init__(self, stream):
            self.handle = stream.cuda_stream

        def __cuda_stream__(self):
            return (0, self.handle)

    for wrap in (lambda stream: stream.cuda_stream, Wrapped):
        stream = torch.cuda.Stream()
        out, lse = (torch.zeros_like(x) for x in want)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            done_before = torch.cuda.Event()
            done_before.record()
        attend(case, plan, out=out, lse=lse, stream=wrap(stream))
        assert not done_before.query(), "the call waited"
        torch.cuda.current_stream().synchronize()
        stream.synchronize()
        assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_many_threads_on_their_own_streams_give_the_single_threaded_bits():
    layouts = ("flat", "paged", "packed", "interleaved")
    cases = [small_case(20 + i, layout=layouts[i % 4], qhead_per_kv=(1, 4, 16)[i % 3]) for i in range(8)]
    want = [run(case, partial_dtype="bfloat16") for case in cases]
    torch.cuda.synchronize()
    failures = []

    def work(case, expected):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [run(case, partial_dtype="bfloat16") for _ in range(25)]
                torch.cuda.current_stream().synchronize()
                for got in results:
                    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two devices")
def test_each_device_runs_its_own_copy():
    for device in range(2):
        case = small_case(30)
        for name in ("q", "k", "v", "q2k", "cu_seqlens_q", "cu_seqlens_k"):
            setattr(case, name, getattr(case, name).to(f"cuda:{device}"))
        out, _ = run(case)
        assert out.device.index == device
        assert_out_close(out, case.reference())


FORKED = """
import os, sys
sys.path[:0] = {paths!r}
import sparse_aot
from places import check
from reference import make_case
if os.fork() == 0:
    check(make_case(lens_q=[40], lens_k=[700], device="cuda"))
    os._exit(0)
_, status = os.wait()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_works_when_cuda_was_not_initialised_before():
    script = FORKED.format(paths=sys.path)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


# ------------------------------------------------------------------------------------------------------ CUDA graph


def captured(case, **options):
    """A graph of the whole pipeline into fixed (out, lse), warmed up as CUDA asks."""
    out = torch.empty_like(case.q)
    lse = torch.empty(case.q.shape[:2], dtype=torch.float32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(case, out=out, lse=lse, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(case, out=out, lse=lse, **options)
    return graph, out, lse


@pytest.mark.parametrize("partial_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["flat", "paged", "packed"])
def test_a_captured_graph_follows_changed_data(layout, partial_dtype):
    case = small_case(40, layout=layout, trim=True, poison=False)
    graph, out, lse = captured(case, partial_dtype=partial_dtype)
    rng = np.random.default_rng(41)
    lens_q, lens_k = (np.diff(x.cpu().numpy()) for x in (case.cu_seqlens_q, case.cu_seqlens_k))
    for _ in range(3):
        case.q.normal_()
        case.k.normal_()
        case.v.normal_()
        case.q2k.copy_(torch.from_numpy(random_q2k(rng, lens_q, lens_k, case.q2k.shape[0], case.topk)))
        case.seqused_k.copy_(torch.from_numpy(rng.integers(0, lens_k + 1).astype(np.int32)))
        if case.page_table is not None:
            shuffled = torch.randperm(case.k.shape[0], device="cuda").int()
            real = (case.page_table >= 0) & (case.page_table < case.k.shape[0])
            case.page_table[real] = shuffled[case.page_table[real].long()]
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want = case.reference()
        assert_out_close(out, want)
        assert_lse_close(lse, want.lse)


def test_a_captured_graph_follows_shorter_batches_with_padding():
    # Captured for 4 full sequences; replayed with fewer and shorter ones, padded by length 0 and garbage pages.
    case = make_case(
        lens_q=[64] * 4, lens_k=[1024] * 4, layout="paged", qhead_per_kv=8, topk=8, causal=True, poison=False,
        device="cuda",
    )  # fmt: skip
    graph, out, lse = captured(case)
    for lens_q, lens_k in (([64, 30, 0, 0], [1000, 129, 0, 0]), ([1, 0, 0, 0], [1, 0, 0, 0]), ([64] * 4, [1024] * 4)):
        for buffer, lengths in ((case.cu_seqlens_q, lens_q), (case.cu_seqlens_k, lens_k)):
            buffer[1:] = torch.tensor(lengths).cumsum(0)
        padding = torch.tensor(lens_k, device="cuda") == 0
        pages = case.page_table.clone()
        case.page_table[padding] = torch.tensor(GARBAGE_PAGES, dtype=torch.int32, device="cuda")[0]
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want = case.reference()
        assert_out_close(out, want)
        assert_lse_close(lse, want.lse)
        case.page_table.copy_(pages)


def test_one_captured_graph_walks_or_not_as_the_selection_of_a_replay_asks():
    lens = {"lens_q": [512], "lens_k": [64 * BLOCK]}
    q2k = neighbours_q2k(np.random.default_rng(0), *lens.values(), head_kv=2, topk=16)
    case = make_case(**lens, qhead_per_kv=16, topk=16, causal=True, q2k=q2k, device="cuda")
    torch.cuda.synchronize()
    local = case.q2k.clone()
    spread = torch.from_numpy(
        np.stack([[np.random.default_rng(t + 1000 * h).permutation(64)[:16] for t in range(512)] for h in range(2)])
    ).to(local)
    plan = build(case)
    attend(case, plan, partial_dtype="bfloat16")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = build(case)
        out, lse = attend(case, plan, partial_dtype="bfloat16")
    case.k.normal_()
    case.v.normal_()
    for selection, walks in ((local, True), (spread, False), (local, True)):
        case.q2k.copy_(selection)
        graph.replay()
        torch.cuda.synchronize()
        assert bool(plan[2].walk_flags[0]) == walks
        want = case.reference()
        assert_out_close(out, want)
        assert_lse_close(lse, want.lse)


def test_capture_refuses_a_build_that_would_need_a_host_read():
    case = small_case(42)
    run(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises((ValueError, RuntimeError), match="total_rows"):
            build_k2q_csr(case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, total_k=case.total_k)
        case.q.add_(0)  # an empty capture is a warning
    run(case)
    torch.cuda.synchronize()
