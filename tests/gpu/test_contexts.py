"""Work in other CUDA contexts than the device's primary one: order, multiprocessors, and what is left behind."""

import gc
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cuda.bindings import driver  # noqa: E402
from places import attend, build, run  # noqa: E402
from reference import make_case, ragged  # noqa: E402

from sparse_aot import sparse_atten_func  # noqa: E402

LEGACY_STREAM = 1
PRODUCER_CYCLES = 400_000_000  # about a fifth of a second


def ask(answer):
    """What a driver call returned, without its status."""
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values


class Green:
    """A green context of about a quarter of the device, with a stream of its own."""

    def __init__(self):
        torch.cuda.init()
        self.device = ask(driver.cuDeviceGet(0))
        kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        everything = ask(driver.cuDeviceGetDevResource(self.device, kind))
        groups, _, _ = ask(driver.cuDevSmResourceSplitByCount(1, everything, 0, everything.sm.smCount // 4))
        self.multiprocessors = groups[0].sm.smCount
        assert self.multiprocessors < everything.sm.smCount
        described = ask(driver.cuDevResourceGenerateDesc(groups, 1))
        default_stream = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        self.green = ask(driver.cuGreenCtxCreate(described, self.device, default_stream))
        self.context = ask(driver.cuCtxFromGreenCtx(self.green))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.stream = int(ask(driver.cuGreenCtxStreamCreate(self.green, flags, 0)))

    @contextmanager
    def current(self):
        ask(driver.cuCtxPushCurrent(self.context))
        try:
            yield
        finally:
            ask(driver.cuCtxSynchronize())
            assert int(ask(driver.cuCtxPopCurrent())) == int(self.context), "the call left another context current"

    def destroy(self):
        ask(driver.cuStreamSynchronize(self.stream))
        ask(driver.cuStreamDestroy(self.stream))
        ask(driver.cuGreenCtxDestroy(self.green))


@pytest.fixture
def green():
    made = Green()
    yield made
    torch.cuda.synchronize()
    made.destroy()


def small_case(seed):
    lens_q, lens_k = ragged(np.random.default_rng(seed), 6, 200, 2500)
    return make_case(
        lens_q=lens_q, lens_k=lens_k, qhead_per_kv=4, topk=8, layout="flat", causal=True, seed=seed, device="cuda"
    )


def fill_late(case):
    """The case with q, k and v that are written, on torch's current stream, only after a while."""
    full = case.q, case.k, case.v
    case.q, case.k, case.v = (torch.zeros_like(array) for array in full)
    torch.cuda.synchronize()
    torch.cuda._sleep(PRODUCER_CYCLES)
    for empty, array in zip((case.q, case.k, case.v), full, strict=True):
        empty.copy_(array)
    return case


def assert_same(got, want):
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_work_follows_the_current_green_contexts_default_stream(green):
    case = small_case(1)
    want = run(case)
    torch.cuda.synchronize()
    with green.current():
        got = run(fill_late(case))
        ask(driver.cuStreamSynchronize(LEGACY_STREAM))
        assert_same(got, want)


@pytest.mark.parametrize("current", ["primary", "green"])
def test_work_on_a_green_contexts_stream_follows_what_is_on_it(green, current):
    """As inference engines have it: the framework's current stream is the green context's, its context is not."""
    case = small_case(2)
    want = run(case)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(green.stream)):
        if current == "primary":
            got = run(fill_late(case))
        else:
            with green.current():
                got = run(fill_late(case))
        torch.cuda.current_stream().synchronize()
    assert_same(got, want)


def test_a_green_contexts_stream_waits_for_the_primary_contexts_current_one(green):
    case = small_case(3)
    plan, want = build(case), run(case)
    out, lse = (torch.zeros_like(result) for result in want)
    attend(fill_late(case), plan, out=out, lse=lse, stream=green.stream)
    ask(driver.cuStreamSynchronize(green.stream))
    assert_same((out, lse), want)


def test_the_default_stream_of_a_green_context_waits_for_a_stream_of_the_primary_one(green):
    case = small_case(4)
    plan, want = build(case), run(case)
    out, lse = (torch.zeros_like(result) for result in want)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        fill_late(case)
        with green.current():
            attend(case, plan, out=out, lse=lse, stream=0)
            ask(driver.cuStreamSynchronize(LEGACY_STREAM))
    assert_same((out, lse), want)


@pytest.mark.parametrize("warm", [False, True])
def test_a_persistent_grid_is_the_contexts_multiprocessors_and_capture_works(green, warm):
    """Captured even where that is the context's first launch."""
    case = small_case(5)
    plan, want = build(case), run(case)
    out, lse = (torch.zeros_like(result) for result in want)
    torch.cuda.synchronize()
    if warm:
        attend(case, plan, out=out, lse=lse, stream=green.stream)
        ask(driver.cuStreamSynchronize(green.stream))
        out.zero_()
        torch.cuda.synchronize()
    ask(driver.cuStreamBeginCapture(green.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    attend(case, plan, out=out, lse=lse, stream=green.stream)
    graph = ask(driver.cuStreamEndCapture(green.stream))
    _, count = ask(driver.cuGraphGetNodes(graph))
    nodes, _ = ask(driver.cuGraphGetNodes(graph, count))
    kernels = [
        n for n in nodes if ask(driver.cuGraphNodeGetType(n)) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL
    ]
    grids = [ask(driver.cuGraphKernelNodeGetParams(node)).gridDimX for node in kernels]
    assert len(grids) == 2 and green.multiprocessors in grids, grids
    executable = ask(driver.cuGraphInstantiate(graph, 0))
    ask(driver.cuGraphLaunch(executable, green.stream))
    ask(driver.cuStreamSynchronize(green.stream))
    assert_same((out, lse), want)
    ask(driver.cuGraphExecDestroy(executable))
    ask(driver.cuGraphDestroy(graph))


class Foreign:
    """A torch tensor that speaks ``__dlpack__`` alone: the results' memory is the package's own."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)


def from_dlpack(source):
    """What the package finds as the importer of ``Foreign``."""
    return Foreign(torch.from_dlpack(source))


def test_what_a_call_leaves_behind_outlives_the_context_that_it_ran_in():
    """Results, and what is kept until the work is done: events and inputs."""
    case = small_case(6)
    row_ptr, q_indices, schedule = build(case)
    want = run(case)
    torch.cuda.synchronize()
    arrays = [Foreign(array) for array in (case.q, case.k, case.v, row_ptr, q_indices)]
    named = {name: Foreign(value) if torch.is_tensor(value) else value for name, value in case.arguments.items()}
    for _ in range(3):
        green = Green()
        call = {**named, "schedule": schedule, "return_softmax_lse": True, "stream": green.stream}
        results = sparse_atten_func(*arrays, case.topk, **call)
        unscheduled = sparse_atten_func(*arrays, case.topk, **call | {"schedule": None})
        green.destroy()
        assert_same([result.tensor for result in results], want)
        assert torch.isfinite(unscheduled[0].tensor.float()).all()
        del results, unscheduled
        gc.collect()
    assert_same(run(case), want)
    torch.cuda.synchronize()


ORDINARY = """
import sys
sys.path[:0] = {paths!r}
import torch
from cuda.bindings import driver
from test_contexts import assert_same, ask, fill_late, run, small_case
case = small_case(7)
want = run(case)
torch.cuda.synchronize()
context = ask(driver.cuCtxCreate(None, 0, ask(driver.cuDeviceGet(0))))  # current from here on
got = run(fill_late(case))
assert int(ask(driver.cuCtxGetCurrent())) == int(context)
ask(driver.cuStreamSynchronize(1))
assert_same(got, want)
ask(driver.cuCtxSynchronize())
"""


def test_work_follows_the_default_stream_of_an_ordinary_context():
    """In a process of its own, where torch has to work in that context too."""
    script = ORDINARY.format(paths=sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
