"""What the launcher asks of the driver: parameters, descriptors, grids, streams, loading, errors."""

import ctypes
import hashlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from calls import BLK_KV, DIM, Call
from stub_driver import (
    HEADS_PER_KV,
    LEGACY_STREAM,
    MULTIPROCESSORS,
    PARTIAL_DTYPES,
    REAL_BUNDLE,
    TOPK,
    DeviceArray,
    PlainArray,
    clear_log,
    descriptor,
    failing,
    launches,
    on_stub,
    read_manifest,
    recorded,
    set_current_stream,
    torch_on_cuda,
    write_manifest,
)

import sparse_aot

CONTEXT = 0x1000  # of cuda:0 in the stub
LAYOUTS = ("flat", "fused", "paged", "interleaved", "token_major", "packed_rows")
ILLEGAL_ADDRESS = 700


def address(array):
    return array.host.ctypes.data if isinstance(array, DeviceArray) else array.data_ptr()


def forward_and_combine():
    forward, combine = launches()[-2:]
    assert (forward["operation"], combine["operation"]) == ("fwd", "combine")
    return forward, combine


# ------------------------------------------------------------------------------------------------ parameters and grids


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("partial", PARTIAL_DTYPES)
@pytest.mark.parametrize("g", HEADS_PER_KV)
@on_stub
def test_forward_gets_its_kernel_and_parameters(g, partial, temperature, causal):
    call = Call(g=g)
    clear_log()
    scale = 0.5 if temperature else 1.0
    call.run(partial_dtype=partial, return_temperature_lse=True, lse_temperature_scale=scale, causal=causal)
    forward, combine = forward_and_combine()
    assert forward["name"] == f"fwd-bf16-g{g}-p{partial}" + ("-temperature" if temperature else "")
    given, params = call.arguments, forward["params"]
    schedule = given["schedule"]
    expected = {
        "row_ptr": address(given["k2q_row_ptr"]),
        "entry_words": address(schedule.rest_indices),
        "scheduler_metadata": address(schedule.scheduler_metadata),
        "work_count": address(schedule.work_count),
        "cu_seqlens_q": address(given["cu_seqlens_q"]),
        "cu_seqlens_k": address(given["cu_seqlens_k"]),
        "seqused_k": 0,
        "page_table": 0,
        "max_pages": 0,
        "kv_extent": 400,
        "batch": 2,
        "total_q": 64,
        "head_kv": 2,
        "total_rows": 4,
        "topk": 4,
        "work_capacity": schedule.work_capacity,
        "causal": int(causal),
        "softmax_scale": np.float32(DIM**-0.5),
        "lse_temperature_scale": np.float32(scale),
    }
    assert {name: params[name] for name in expected} == expected
    shared = ("partial_out", "partial_lse", "partial_lse_temperature")
    assert [params[name] for name in shared] == [combine["params"][name] for name in shared]
    assert bool(params["partial_lse_temperature"]) == temperature


@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("partial", PARTIAL_DTYPES)
@on_stub
def test_combine_gets_its_kernel_and_parameters(partial, topk):
    call = Call(topk=topk)
    clear_log()
    out, lse, lse_temperature = call.run(
        partial_dtype=partial, return_temperature_lse=True, lse_temperature_scale=2.0, softmax_scale=0.3
    )
    forward, combine = forward_and_combine()
    assert combine["name"] == f"combine-p{partial}-topk{topk}"
    expected = {
        "split_counts": address(call.arguments["schedule"].split_counts),
        "out": address(out),
        "lse": address(lse),
        "lse_temperature": address(lse_temperature),
        "out_stride_token": 8 * DIM,
        "out_stride_head": DIM,
        "lse_stride_token": 8,
        "lse_stride_head": 1,
        "total_q": 64,
        "head_kv": 2,
        "qhead_per_kv": 4,
    }
    assert {name: combine["params"][name] for name in expected} == expected
    assert forward["params"]["softmax_scale"] == np.float32(0.3)


@on_stub
def test_grids_blocks_and_launch_attributes_come_from_the_manifest():
    call = Call()
    clear_log()
    call.run()
    forward, combine = forward_and_combine()
    assert (forward["grid"], forward["block"], forward["smem"]) == ([MULTIPROCESSORS, 1, 1], [512, 1, 1], 220000)
    assert (combine["grid"], combine["block"], combine["smem"]) == ([64 * 8 // 8, 1, 1], [128, 1, 1], 0)
    assert (forward["pdl"], combine["pdl"]) == (0, 1)
    assert forward["context"] == combine["context"] == CONTEXT


@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("partial", PARTIAL_DTYPES)
@on_stub
def test_the_workspace_has_room_for_every_part_and_a_zeroed_counter(partial, temperature):
    call = Call()
    clear_log()
    call.run(partial_dtype=partial, return_temperature_lse=temperature, lse_temperature_scale=3.0)
    forward, _ = forward_and_combine()
    (memset,) = recorded("cuMemsetD32Async")
    rows = (64 * 4 + 64) * 8  # a split of each slot, and what a token's walk leaves
    sizes = {"partial_out": rows * DIM * (4 if partial == "float32" else 2), "partial_lse": rows * 4}
    if temperature:
        sizes["partial_lse_temperature"] = rows * 4
    sizes["work_counter"] = 8
    places = [(forward["params"][name], size) for name, size in sizes.items()]
    assert all(place % 256 == 0 for place, _ in places)
    assert all(place + size <= after for (place, size), (after, _) in itertools.pairwise(places))
    assert (memset["pointer"], memset["value"], memset["count"]) == (forward["params"]["work_counter"], 0, 2)
    assert memset["stream"] == forward["stream"]


@on_stub
def test_results_go_into_the_buffers_of_the_caller():
    call = Call()
    torch = torch_on_cuda()
    out = torch.zeros(64, 2, 8, DIM, dtype=torch.bfloat16)[:, 1]
    lse = torch.zeros(8, 64).t()
    clear_log()
    got_out, got_lse = call.run(out=out, lse=lse, return_softmax_lse=True)
    _, combine = forward_and_combine()
    assert got_out is out and got_lse is lse
    names = ("out", "lse", "out_stride_token", "out_stride_head", "lse_stride_token", "lse_stride_head")
    assert [combine["params"][name] for name in names] == [out.data_ptr(), lse.data_ptr(), 16 * DIM, DIM, 1, 64]


@on_stub
def test_lse_is_written_only_where_it_is_wanted():
    call = Call()
    lse = torch_on_cuda().zeros(64, 8)
    for options, wanted in (({}, False), ({"lse": lse}, True), ({"return_softmax_lse": True}, True)):
        call.run(**options)
        _, combine = forward_and_combine()
        assert bool(combine["params"]["lse"]) == wanted
        assert combine["params"]["lse_temperature"] == 0


@on_stub
def test_what_is_returned():
    torch = torch_on_cuda()
    call = Call()
    assert (call.run().shape, call.run().dtype) == ((64, 8, DIM), torch.bfloat16)
    out, lse = call.run(return_softmax_lse=True)
    assert type(out) is torch.Tensor and (lse.shape, lse.dtype) == ((64, 8), torch.float32)
    out, lse, lse_temperature = call.run(return_temperature_lse=True)
    assert lse_temperature is lse
    out, lse, lse_temperature = call.run(return_temperature_lse=True, lse_temperature_scale=2.0)
    assert lse_temperature.data_ptr() != lse.data_ptr() and lse_temperature.shape == lse.shape


@on_stub
def test_without_queries_nothing_is_launched():
    call = Call()
    torch = torch_on_cuda()
    empty = torch.zeros(2, 0, dtype=torch.int32)
    clear_log()
    out, lse = call.run(
        q=torch.zeros(0, 8, DIM, dtype=torch.bfloat16),
        k2q_q_indices=empty,
        cu_seqlens_q=torch.zeros(3, dtype=torch.int32),
        schedule=None,
        return_softmax_lse=True,
    )
    assert (out.shape, lse.shape) == ((0, 8, DIM), (0, 8)) and not recorded("launch")


@pytest.mark.parametrize("layout", ["flat", "paged"])
@on_stub
def test_without_keys_only_combine_is_launched(layout):
    call = Call(layout=layout)
    clear_log()
    call.run(k=call.arguments["k"][:0], v=call.arguments["v"][:0])
    assert [launch["operation"] for launch in launches()] == ["combine"]


@on_stub
def test_a_call_without_a_schedule_makes_one():
    call = Call(with_schedule=False)
    clear_log()
    call.run()
    found = launches()
    forward, combine = found[-2:]
    assert [launch["operation"] for launch in found].index("fwd") > 0
    assert forward["params"]["row_ptr"] == address(call.arguments["k2q_row_ptr"])
    assert forward["params"]["work_capacity"] > 0 and combine["params"]["split_counts"]


# -------------------------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("g", HEADS_PER_KV)
@on_stub
def test_the_descriptor_of_queries(g):
    call = Call(g=g)
    q = torch_on_cuda().zeros(64, 2 * g, 3 * DIM, dtype=torch_on_cuda().bfloat16)[..., DIM : 2 * DIM]
    clear_log()
    call.run(q=q)
    forward, _ = forward_and_combine()
    encoded = descriptor(forward["params"]["q_map"])
    rows, head, token = min(g, 8), 3 * DIM * 2, 2 * g * 3 * DIM * 2
    assert encoded["address"] == q.data_ptr()
    assert encoded["dims"] == [64, rows, 2, 2 * g // rows, 64]
    assert encoded["strides"] == [head, 128, rows * head, token]
    assert encoded["box"] == [64, rows, 2, g // rows, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_stub
def test_the_descriptors_of_keys_and_values_follow_their_strides(layout):
    call = Call(layout=layout)
    clear_log()
    call.run()
    forward, _ = forward_and_combine()
    for name in ("k", "v"):
        array = call.arguments[name]
        encoded = descriptor(forward["params"][f"{name}_map"])
        if array.ndim == 3:
            dims, (token, head), page = [64, 400, 2, 2, 1], array.stride()[:2], None
        else:
            dims, (page, head, token) = [64, BLK_KV, 2, 2, 5], array.stride()[:3]
        assert encoded["address"] == array.data_ptr()
        assert encoded["dims"] == dims
        assert encoded["strides"][:3] == [2 * token, 128, 2 * head]
        assert encoded["strides"][3] == 2 * page if page else encoded["strides"][3] % 16 == 0
        assert (encoded["box"], encoded["steps"]) == ([64, 128, 2, 1, 1], [1] * 5)
        assert (encoded["dtype"], encoded["swizzle"], encoded["interleave"], encoded["fill"]) == (9, 3, 0, 0)


@on_stub
def test_page_table_rows_keep_their_stride():
    call = Call(layout="paged")
    table = torch_on_cuda().zeros(2, 7, dtype=torch_on_cuda().int32)[:, 1:4]
    clear_log()
    call.run(page_table=table)
    params = forward_and_combine()[0]["params"]
    assert (params["page_table"], params["page_table_stride"], params["max_pages"]) == (table.data_ptr(), 7, 3)
    assert params["kv_extent"] == 5
    assert params["seqused_k"] == address(call.arguments["seqused_k"])


@on_stub
def test_strides_of_dimensions_of_one_element_do_not_matter():
    call = Call(head_kv=1, g=1)
    torch = torch_on_cuda()
    q, k = (torch.zeros(n, 3, DIM + 1, dtype=torch.bfloat16).as_strided((n, 1, DIM), (DIM, 13, 1)) for n in (64, 400))
    clear_log()
    call.run(q=q, k=k)
    params = forward_and_combine()[0]["params"]
    assert all(stride % 16 == 0 for name in ("q_map", "k_map") for stride in descriptor(params[name])["strides"])


@on_stub
def test_descriptors_are_encoded_once():
    call = Call()
    call.run()
    clear_log()
    call.run()
    assert not recorded("cuTensorMapEncodeTiled")
    call.run(k=call.arguments["k"][:200], v=call.arguments["v"][:200])
    assert len(recorded("cuTensorMapEncodeTiled")) == 2  # same addresses, other dims


@on_stub
def test_descriptors_outlive_the_cache():
    call = Call()
    keys = [call.bfloat16(400, 2, DIM) for _ in range(400)]
    for k in keys + keys:
        clear_log()
        call.run(k=k)
        params = forward_and_combine()[0]["params"]
        assert params["k_map"][0] == k.data_ptr()


# ------------------------------------------------------------------------------------------------------------ streams


class Stream:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


@pytest.mark.parametrize(
    ("stream", "handle"), [(None, 0x50), (0x60, 0x60), (Stream(0x70), 0x70), (0, LEGACY_STREAM), (Stream(0), 1)]
)
@on_stub
def test_work_goes_on_the_stream_asked_for(stream, handle):
    call = Call()
    set_current_stream(0x50)
    try:
        clear_log()
        call.run(stream=stream)
        assert {launch["stream"] for launch in launches()} == {handle}
        assert recorded("cuMemsetD32Async")[0]["stream"] == handle
        waits = [(call["call"], call["stream"]) for call in recorded() if "Event" in call["call"]]
        assert waits == ([] if handle == 0x50 else [("cuEventRecord", 0x50), ("cuStreamWaitEvent", handle)])
    finally:
        set_current_stream(0)


@on_stub
def test_the_current_stream_of_the_framework_is_the_default():
    call = Call()
    clear_log()
    call.run()
    assert {launch["stream"] for launch in launches()} == {LEGACY_STREAM}


@on_stub
def test_a_captured_stream_is_not_made_to_wait_and_nothing_is_allocated_on_the_current_one():
    call = Call()
    captured = 0x90C
    set_current_stream(captured)
    try:
        clear_log()
        call.run()
        found = {call["call"] for call in recorded()}
        assert found <= {"cuMemsetD32Async", "launch", "cuTensorMapEncodeTiled", "cuStreamGetCtx"}
    finally:
        set_current_stream(0)
    clear_log()
    call.run(stream=captured)
    assert not [call for call in recorded() if "Event" in call["call"]]


@on_stub
def test_a_schedule_is_asked_for_where_it_could_not_be_kept_for_a_captured_graph():
    call = Call(with_schedule=False)
    with pytest.raises(ValueError, match="schedule: expected one under graph capture"):
        call.run(stream=0x90C)


@on_stub
def test_scratch_on_another_stream_is_ordered_by_that_stream():
    call = Call()
    clear_log()
    call.run(stream=0x60)
    (allocated,) = recorded("cuMemAllocAsync")
    (freed,) = recorded("cuMemFreeAsync")
    assert allocated["stream"] == freed["stream"] == 0x60 and allocated["pointer"] == freed["pointer"]
    assert recorded()[-1]["call"] == "cuMemFreeAsync"


@on_stub
def test_arrays_with_the_exchange_api_need_no_driver_allocation():
    call = Call()
    clear_log()
    call.run(return_softmax_lse=True)
    assert not [call for call in recorded() if "Mem" in call["call"] and call["call"] != "cuMemsetD32Async"]


# ---------------------------------------------------------------------------------------------------- foreign arrays


@on_stub
def test_arrays_that_only_speak_dlpack_give_and_get_their_own_type():
    call = Call(foreign=True)
    clear_log()
    out, lse = call.run(return_softmax_lse=True, stream=0x60)
    forward, combine = forward_and_combine()
    assert type(out) is type(lse) is DeviceArray and out.bfloat16
    assert (out.host.shape, lse.host.shape) == ((64, 8, DIM), (64, 8))
    assert (combine["params"]["out"], combine["params"]["lse"]) == (address(out), address(lse))
    assert descriptor(forward["params"]["k_map"])["address"] == address(call.arguments["k"])
    # Every input is asked for on the stream of the work, and the importer's stream (2) waits for the work.
    assert [call.arguments[name].streams[-1] for name in ("q", "k", "v", "cu_seqlens_k")] == [0x60] * 4
    calls = [(call["call"], call.get("stream")) for call in recorded()]
    last_launch = max(i for i, (name, _) in enumerate(calls) if name == "launch")
    assert calls[last_launch + 1 :].count(("cuStreamWaitEvent", 2)) == 2


@pytest.mark.parametrize("stream", [None, 0x60])
@on_stub
def test_arrays_that_nothing_makes_take_buffers_for_the_results(stream):
    call = Call(foreign=True, with_schedule=False)
    owners = dict(call.arguments)
    for name, array in owners.items():
        if isinstance(array, DeviceArray):
            call.arguments[name] = PlainArray(array.host, array.bfloat16)
    out, lse = PlainArray(np.zeros((64, 8, DIM), np.int16), True), PlainArray(np.zeros((64, 8), np.float32))
    clear_log()
    assert call.run(out=out, lse=lse, return_softmax_lse=True, stream=stream) == (out, lse)
    forward, combine = forward_and_combine()
    assert (combine["params"]["out"], combine["params"]["lse"]) == (address(out), address(lse))
    assert forward["params"]["work_capacity"] > 0
    allocated = {made["pointer"] for made in recorded("cuMemAllocAsync")}
    Call(foreign=True)  # which lets go of what is done
    assert allocated <= {freed["pointer"] for freed in recorded("cuMemFreeAsync")}
    with pytest.raises(TypeError, match="q: expected an array of a type that results can be made of"):
        call.run(lse=lse)


@on_stub
def test_without_a_stream_foreign_arrays_are_asked_for_on_the_legacy_default_stream():
    call = Call(foreign=True)
    call.run()
    assert call.arguments["q"].streams[-1] == LEGACY_STREAM
    assert launches()[-1]["stream"] == LEGACY_STREAM


@on_stub
def test_memory_handed_to_a_foreign_framework_is_freed_by_it():
    call = Call(foreign=True)
    out = call.run()
    clear_log()
    place = address(out)
    del out
    assert [freed["pointer"] for freed in recorded("cuMemFreeAsync")] == [place]


@on_stub
def test_foreign_inputs_are_kept_until_their_work_is_done():
    call = Call(foreign=True)
    q = call.arguments.pop("q")
    import gc
    import weakref

    call.run(q=q)
    alive = weakref.ref(q.host)
    del q
    gc.collect()
    assert alive() is not None
    call.run(q=call.bfloat16(64, 8, DIM))
    gc.collect()
    assert alive() is None


# ------------------------------------------------------------------------------------------------------------ loading


@on_stub(fresh=True)
def test_kernels_are_loaded_on_first_use_in_a_relaxed_thread_and_in_the_primary_context():
    call = Call()
    clear_log()
    call.run()
    loads = recorded("cuLibraryLoadData")
    assert len(loads) == 2 and all(load["relaxed"] for load in loads)
    assert [load["context"] for load in recorded("cuFuncLoad")] == [CONTEXT] * 2
    assert {"attribute": 8, "value": 220000} in [
        {key: call[key] for key in ("attribute", "value")} for call in recorded("cuKernelSetAttribute")
    ]
    call.run()
    assert len(recorded("cuLibraryLoadData")) == 2


@on_stub(fresh=True)
def test_preload_leaves_nothing_to_load():
    n_entries = len([e for e in read_manifest(os.environ["SPARSE_AOT_CUBINS"]) if e["arch"] == "sm_90a"])
    assert sparse_aot.preload() == n_entries
    assert len(recorded("cuLibraryLoadData")) == n_entries
    call = Call()
    call.run()
    assert sparse_aot.preload(0) == n_entries
    assert len(recorded("cuLibraryLoadData")) == n_entries
    assert sparse_aot.preload(1) == n_entries  # what is loaded belongs to the process, what is set to the device
    assert len(recorded("cuLibraryLoadData")) == n_entries
    attributes = [(call["device"], call["symbol"]) for call in recorded("cuKernelSetAttribute")]
    assert [symbol for device, symbol in attributes if device == 0] == [
        symbol for device, symbol in attributes if device == 1
    ]


@on_stub(fresh=True)
def test_threads_share_one_load():
    call = Call()
    clear_log()
    start = threading.Barrier(8)
    errors = []

    def work():
        try:
            start.wait()
            for _ in range(50):
                call.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(recorded("cuLibraryLoadData")) == 2
    assert len(recorded("launch")) == 8 * 50 * 2


@on_stub(fresh=True)
def test_a_child_forked_before_cuda_is_used_can_use_it():
    assert not recorded("cuInit"), "importing the package initialised CUDA"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            Call().run()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    Call().run()
    assert len({call["pid"] for call in recorded("cuInit")}) == 2


@pytest.mark.parametrize("capability", ["8.9", "9.1", "10.1", "11.0", "12.0"])
@on_stub(fresh=True)
def test_an_unsupported_device_is_named_with_what_the_bundle_has(capability):
    os.environ["STUB_CAPABILITY"] = capability
    message = rf"cuda:0 \(Stub GPU, compute capability {capability}\).*bundle has sm_100f, sm_90a"
    for action in (Call, sparse_aot.preload):
        with pytest.raises(NotImplementedError, match=message):
            action()
    assert not recorded("cuLibraryLoadData")


@pytest.mark.parametrize("capability", ["10.0", "10.3", "10.7"])
@on_stub(fresh=True)
def test_the_family_cubin_runs_on_the_whole_family(capability):
    os.environ["STUB_CAPABILITY"] = capability
    call = Call()
    assert {launch["symbol"].split("_")[1:3] == ["sm", "100f"] for launch in recorded("launch")} == {True}
    with pytest.raises(
        NotImplementedError, match=r"no fwd kernel .* for sm_100f; the bundle has fwd kernels for sm_90a"
    ):
        call.run()


def edit_manifest(change):
    bundle = os.environ["SPARSE_AOT_CUBINS"]
    entries = read_manifest(bundle)
    change({entry["name"]: entry for entry in entries if entry["arch"] == "sm_90a"}["fwd-bf16-g4-pbfloat16"])
    write_manifest(bundle, entries)


def edit_layout(change):
    """Change the (offset, size) pairs, as text, that the driver reports for the forward kernel."""
    path = Path(os.environ["STUB_LAYOUTS"])
    lines = [line.split() for line in path.read_text().splitlines()]
    for line in lines:
        if line[0] == "kernel_sm_90a_fwd-bf16-g4-pbfloat16":
            change(line)
    path.write_text("\n".join(" ".join(line) for line in lines))


def forward_cubin():
    return Path(os.environ["SPARSE_AOT_CUBINS"]) / "sm_90a" / "fwd-bf16-g4-pbfloat16.cubin"


def replace_by_ptx():
    forward_cubin().write_bytes(b".version 9.0")
    digest = hashlib.sha256(forward_cubin().read_bytes()).hexdigest()
    edit_manifest(lambda entry: entry.update(size=12, sha256=digest))


DAMAGES = {
    "a changed byte": (lambda: forward_cubin().write_bytes(forward_cubin().read_bytes()[:-1] + b"!"), "SHA-256"),
    "a truncated file": (lambda: forward_cubin().write_bytes(forward_cubin().read_bytes()[:-1]), "SHA-256"),
    "no file": (lambda: forward_cubin().unlink(), "No such file"),
    "PTX": (replace_by_ptx, "not a cubin"),
    "a renamed parameter": (lambda: edit_manifest(lambda entry: entry["params"][3].update(name="x")), "launcher packs"),
    "another kind": (lambda: edit_manifest(lambda entry: entry["params"][3].update(kind="int64")), "launcher packs"),
    "another size": (lambda: edit_manifest(lambda entry: entry["params"][-1].update(size=8)), "launcher packs"),
    "a parameter less": (lambda: edit_manifest(lambda entry: entry["params"].pop()), "more parameters"),
    "a parameter twice": (lambda: edit_manifest(lambda entry: entry["params"].append(entry["params"][-1])), "twice"),
    "another swizzle": (
        lambda: edit_manifest(lambda entry: entry["params"][0]["tensor_map"].update(swizzle=96)),
        "does not encode",
    ),
    "a box of more dimensions than there can be": (
        lambda: edit_manifest(lambda entry: entry["params"][0]["tensor_map"].update(box=[1] * 9)),
        "does not encode",
    ),
    "a box of no extent": (
        lambda: edit_manifest(lambda entry: entry["params"][0]["tensor_map"].update(box=[64, -1])),
        "does not encode",
    ),
    "another offset in the driver": (
        lambda: edit_layout(lambda line: line.__setitem__(4, "440:8")),
        "parameter q: the driver",
    ),
    "another size in the driver": (
        lambda: edit_layout(lambda line: line.__setitem__(4, "432:4")),
        "parameter q: the driver",
    ),
    "more parameters in the driver": (lambda: edit_layout(lambda line: line.append("900:8")), "more parameters"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@on_stub(fresh=True)
def test_a_damaged_kernel_is_an_error_that_names_its_file(damage):
    change, message = DAMAGES[damage]
    change()
    call = Call()
    clear_log()
    with pytest.raises(sparse_aot.BundleError, match=rf"{forward_cubin()}: .*{message}"):
        call.run()
    assert not recorded("launch")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no bundle"),
        ("{", "not readable"),
        ("[" * 100_000, "not readable"),
        ("[]", "schema 2, got None"),
        (json.dumps({"schema": 1}), "schema 2, got 1: another version"),
        (json.dumps({"schema": 3}), "schema 2, got 3: another version"),
        (json.dumps({"schema": 2, "package_version": "0", "dsl_version": "0"}), "configurations .* list, got None"),
    ],
)
@on_stub(fresh=True)
def test_a_bad_manifest_is_an_error_that_names_it(text, message):
    path = Path(os.environ["SPARSE_AOT_CUBINS"]) / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(sparse_aot.BundleError, match=message) as caught:
        sparse_aot.preload()
    assert str(path) in str(caught.value)


MANIFEST_FIELDS = [
    "name",
    "arch",
    "operation",
    "options",
    "options.g",
    "file",
    "sha256",
    "size",
    "symbol",
    "threads",
    "smem_bytes",
    "work_per_cta",
    "pdl",
    "params.name",
    "params.offset",
    "params.tensor_map",
    "params.tensor_map.swizzle",
]


@pytest.mark.parametrize("value", [None, []])
@pytest.mark.parametrize("field", MANIFEST_FIELDS)
@on_stub(fresh=True)
def test_a_manifest_with_a_bad_field_is_an_error_that_names_both(field, value):
    path = Path(os.environ["SPARSE_AOT_CUBINS"]) / "manifest.json"
    *parents, name = field.split(".")

    def change(entry):
        for parent in parents:
            entry = entry[parent][0] if parent == "params" else entry[parent]
        entry[name] = value

    edit_manifest(change)
    with pytest.raises(sparse_aot.BundleError, match=rf"{path}: configuration 10: .*{name}"):
        sparse_aot.preload()
    assert not recorded("cuLibraryLoadData")


# ------------------------------------------------------------------------------------------------------ driver errors


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cuInit", ["cuInit"]),
        ("cuLibraryLoadData", ["cuLibraryLoadData", "combine-pbfloat16-topk4.cubin", "cuda:0"]),
        ("cuKernelSetAttribute", ["cuKernelSetAttribute(220000 bytes", "fwd-bf16-g4-pbfloat16.cubin"]),
        ("cuTensorMapEncodeTiled", ["cuTensorMapEncodeTiled of q", "dims [64, 4, 2, 2, 64]"]),
        ("cuMemsetD32Async", ["cuMemsetD32Async", "fwd-bf16-g4-pbfloat16"]),
        ("cuLaunchKernel", ["launch of sm_90a/fwd-bf16-g4-pbfloat16 on cuda:0", "grid 132, 512 threads, 220000 bytes"]),
        ("cuLaunchKernelEx", ["launch of sm_90a/combine-pbfloat16-topk4", "grid 64, 128 threads"]),
    ],
)
@on_stub(fresh=True)
def test_driver_errors_have_the_drivers_name_the_kernel_and_the_launch(function, words):
    call = Call() if function != "cuInit" else None
    with failing(function, ILLEGAL_ADDRESS), pytest.raises(sparse_aot.CudaError) as caught:
        call.run() if call else Call()
    assert caught.value.code == ILLEGAL_ADDRESS
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), copied.code, str(copied)) == (sparse_aot.CudaError, ILLEGAL_ADDRESS, str(caught.value))
    for word in [*words, "CUDA_ERROR_ILLEGAL_ADDRESS", "said by the stub driver"]:
        assert word in str(caught.value)


@on_stub(fresh=True)
def test_a_call_works_after_one_that_failed():
    call = Call()
    for function in ("cuLibraryLoadData", "cuKernelSetAttribute", "cuTensorMapEncodeTiled", "cuLaunchKernel"):
        with failing(function, ILLEGAL_ADDRESS), pytest.raises(sparse_aot.CudaError):
            call.run()
    call.run()
    forward_and_combine()


@on_stub(fresh=True)
def test_a_cubin_that_is_refused_is_unloaded():
    call = Call()
    clear_log()
    change, _ = DAMAGES["more parameters in the driver"]
    change()
    for attempt in (1, 2):
        with pytest.raises(sparse_aot.BundleError, match="more parameters"):
            call.run()
        assert len(recorded("cuLibraryUnload")) == attempt


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("cuda:0", TypeError, "device: expected an integer, got str"),
        (-1, ValueError, "device: expected an integer from 0"),
        (1 << 40, ValueError, "device: expected an integer from 0"),
    ],
)
@on_stub
def test_preload_takes_the_number_of_a_device(device, error, message):
    with pytest.raises(error, match=message):
        sparse_aot.preload(device)


@on_stub
def test_no_context_stays_current_where_an_importer_fails():
    call = Call(foreign=True)
    context = ctypes.c_void_p()

    def fail(source):
        raise RuntimeError("no import")

    with mock.patch("stub_driver.from_dlpack", fail), pytest.raises(RuntimeError, match="no import") as caught:
        call.run()
    ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    assert caught.value.__traceback__ is not None and context.value is None


@on_stub
def test_memory_that_the_driver_refuses_is_an_error():
    call = Call(foreign=True)
    with failing("cuMemAllocAsync", 2), pytest.raises(sparse_aot.CudaError, match="cuMemAllocAsync"):
        call.run()


def test_the_package_imports_without_a_driver_or_a_framework():
    code = (
        "import sys, sparse_aot, sparse_aot._core._driver as driver; "
        "assert not {'torch', 'cupy', 'jax'} & set(sys.modules); "
        "print(driver.device_count())"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout) == (0, "0\n"), result.stderr


def test_preload_without_a_driver_is_a_cuda_error():
    code = "import sparse_aot\ntry:\n    sparse_aot.preload()\nexcept sparse_aot.CudaError as error:\n    print(error)"
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("cuInit: "), result.stderr


# --------------------------------------------------------------------------------------------------- the real bundle

needs_bundle = pytest.mark.skipif(not (REAL_BUNDLE / "manifest.json").exists(), reason="no bundle built")


@needs_bundle
@on_stub(real=True)
def test_the_bundle_of_this_checkout_loads_and_is_what_the_launcher_packs():
    n_entries = len([e for e in read_manifest(REAL_BUNDLE) if e["arch"] == "sm_90a"])
    assert sparse_aot.preload() == n_entries


@needs_bundle
@pytest.mark.parametrize("g", HEADS_PER_KV)
@on_stub(real=True)
def test_the_bundle_of_this_checkout_takes_every_g_topk_and_partial_dtype(g):
    for topk in TOPK:
        call = Call(g=g, topk=topk, layout="interleaved")
        for partial in PARTIAL_DTYPES:
            for scale in (1.0, 2.0):
                clear_log()
                call.run(partial_dtype=partial, return_temperature_lse=True, lse_temperature_scale=scale)
                forward, combine = forward_and_combine()
                box = descriptor(forward["params"]["k_map"])["box"]
                assert box[0] == 64 and np.prod(box) <= BLK_KV * DIM and combine["params"]["qhead_per_kv"] == g
