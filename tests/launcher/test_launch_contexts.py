"""In which CUDA context a call works, how many multiprocessors it counts on, and what it keeps of a context."""

import contextlib
import ctypes
import threading

import pytest
from calls import Call
from stub_driver import (
    LEGACY_STREAM,
    MULTIPROCESSORS,
    clear_log,
    launches,
    on_stub,
    recorded,
    set_current_stream,
)

# See stub/libcuda.c for these numbers.
PRIMARY = 0x1000
GREEN = 0x2010
GREEN_MULTIPROCESSORS = 0x10
GREEN_STREAM = GREEN << 16 | 0x50
SIDE_STREAM = 0x60  # of the primary context
OTHER_DEVICE = 0x1001
ORDERING = ("cuEventRecord", "cuStreamWaitEvent")


@contextlib.contextmanager
def current(context):
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuCtxPushCurrent_v2(ctypes.c_void_p(context))
    try:
        yield
        assert current_context() == context, "the call left another context current"
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def current_context():
    context = ctypes.c_void_p()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    return context.value


@contextlib.contextmanager
def current_stream(handle):
    set_current_stream(handle)
    try:
        yield
    finally:
        set_current_stream(0)


def places():
    """{(context, stream)} of the launches so far, and the grid of the forward."""
    found = launches()
    (forward,) = (launch for launch in found if launch["operation"] == "fwd")
    return {(launch["context"], launch["stream"]) for launch in found}, forward["grid"][0]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (None, (PRIMARY, MULTIPROCESSORS)),
        (PRIMARY, (PRIMARY, MULTIPROCESSORS)),
        (GREEN, (GREEN, GREEN_MULTIPROCESSORS)),
        (OTHER_DEVICE, (PRIMARY, MULTIPROCESSORS)),
        (0x2110, (PRIMARY, MULTIPROCESSORS)),  # a green context of the other device
    ],
)
@on_stub
def test_the_current_context_is_worked_in_where_it_is_the_arrays_devices(context, expected):
    with current(context):
        call = Call()
        clear_log()
        call.run()
    assert places() == ({(expected[0], LEGACY_STREAM)}, expected[1])


@on_stub
def test_a_thread_that_has_no_context_works_in_the_primary_one():
    with current(GREEN):
        call = Call()
        clear_log()
        thread = threading.Thread(target=call.run)
        thread.start()
        thread.join()
    assert places() == ({(PRIMARY, LEGACY_STREAM)}, MULTIPROCESSORS)


@on_stub
def test_the_primary_context_and_a_default_stream_cost_no_question_to_the_driver():
    with current(PRIMARY):
        call = Call()
        call.run()
        clear_log()
        call.run()
    assert {call["call"] for call in recorded()} == {"cuMemsetD32Async", "launch"}


@on_stub
def test_a_context_is_asked_for_its_multiprocessors_once():
    with current(0x2009):
        call = Call()
        for _ in range(3):
            call.run()
    assert [asked["context"] for asked in recorded("cuCtxGetDevResource")] == [0x2009]
    assert launches()[-2]["grid"] == [9, 1, 1]


@pytest.mark.parametrize("context", [None, PRIMARY, 0x2008])
@on_stub
def test_work_on_a_stream_is_in_the_streams_own_context(context):
    with current(context):
        call = Call()
        clear_log()
        call.run(stream=GREEN_STREAM)
    assert places() == ({(GREEN, GREEN_STREAM)}, GREEN_MULTIPROCESSORS)
    # The framework's current stream is a default one: that of the context that was current.
    record, wait = (call for call in recorded() if call["call"] in ORDERING)
    assert (record["stream"], record["context"]) == (LEGACY_STREAM, context or PRIMARY)
    assert wait["stream"] == GREEN_STREAM


@on_stub
def test_a_frameworks_current_stream_may_be_a_green_contexts():
    with current(PRIMARY), current_stream(GREEN_STREAM):
        call = Call()
        clear_log()
        call.run()
    assert places() == ({(GREEN, GREEN_STREAM)}, GREEN_MULTIPROCESSORS)
    assert not [call for call in recorded() if call["call"] in ORDERING]


@on_stub
def test_the_default_stream_asked_for_is_that_of_the_current_context():
    with current(GREEN), current_stream(SIDE_STREAM):
        call = Call()
        clear_log()
        call.run(stream=0)
    assert places() == ({(GREEN, LEGACY_STREAM)}, GREEN_MULTIPROCESSORS)
    record, wait = (call for call in recorded() if call["call"] in ORDERING)
    assert (record["stream"], record["context"]) == (SIDE_STREAM, PRIMARY)
    assert (wait["stream"], wait["context"]) == (LEGACY_STREAM, GREEN)


@on_stub
def test_a_stream_of_another_device_is_refused():
    call = Call()
    clear_log()
    with current(PRIMARY), pytest.raises(ValueError, match="stream: expected one of cuda:0, got one of cuda:1"):
        call.run(stream=OTHER_DEVICE << 16 | 0x50)
    assert not recorded("launch")


@on_stub(fresh=True)
def test_a_kernel_is_loaded_once_for_all_contexts():
    for context in (GREEN, PRIMARY, 0x2008):
        with current(context):
            call = Call(g=2)
            call.run()
    loads = recorded("cuLibraryLoadData")
    assert len(loads) == len({launch["symbol"] for launch in launches()}) == len(recorded("cuFuncLoad"))
    assert {load["context"] for load in recorded("cuFuncLoad")} == {GREEN}


# -------------------------------------------------------------------------------- what outlives a context or a stream


@on_stub
def test_memory_handed_over_is_freed_without_the_calls_context_and_stream():
    with current(PRIMARY):
        call = Call(foreign=True)
        out = call.run(stream=GREEN_STREAM)
        ordered = [(call["call"], call["stream"]) for call in recorded() if call["call"] in ORDERING]
        clear_log()
        pointer = out.host.ctypes.data
        del out
    (freed,) = recorded("cuMemFreeAsync")
    assert freed["pointer"] == pointer and freed["context"] == PRIMARY
    # The stream that it is freed on waited for the work.
    record = max(i for i, event in enumerate(ordered) if event == ("cuStreamWaitEvent", freed["stream"])) - 1
    assert ordered[record] == ("cuEventRecord", GREEN_STREAM)


@on_stub
def test_memory_of_the_primary_contexts_default_stream_is_freed_there():
    call = Call(foreign=True)
    out = call.run()
    clear_log()
    del out
    (freed,) = recorded("cuMemFreeAsync")
    assert (freed["stream"], freed["context"]) == (LEGACY_STREAM, PRIMARY)


@on_stub
def test_scratch_is_freed_in_the_order_of_the_calls_stream():
    call = Call()
    clear_log()
    call.run(stream=GREEN_STREAM)
    (freed,) = recorded("cuMemFreeAsync")
    assert (freed["stream"], freed["context"]) == (GREEN_STREAM, GREEN)


@on_stub
def test_events_kept_after_a_call_are_the_primary_contexts():
    call = Call(foreign=True)
    call.run(stream=GREEN_STREAM)
    clear_log()
    call.run()
    assert {query["context"] for query in recorded("cuEventQuery")} == {PRIMARY}


# ---------------------------------------------------------------------------------------------- fewer multiprocessors


@pytest.mark.parametrize(("context", "wanted", "grid"), [(PRIMARY, 7, 7), (PRIMARY, 500, 132), (GREEN, 20, 16)])
@on_stub
def test_at_most_the_usable_multiprocessors_get_a_cta(context, wanted, grid):
    with current(context):
        call = Call()
        clear_log()
        call.run(usable_SM_count=wanted)
    assert places()[1] == grid


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("8", TypeError)])
@on_stub
def test_usable_multiprocessors_are_a_positive_integer(value, error):
    with pytest.raises(error, match="usable_SM_count: expected an integer"):
        Call().run(usable_SM_count=value)
