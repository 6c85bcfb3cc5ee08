"""SPEC 7 for ``sparse_atten_func``: every bad argument is an error that names it, before anything is launched."""

import ctypes
import operator
import types

import numpy as np
import pytest
from calls import BLK_KV, DIM, Call
from stub_driver import DeviceArray, ImmutableArray, VersionedArray, clear_log, on_stub, recorded, torch_on_cuda

from sparse_aot import prepare_sparse_fwd_schedule_and_split


def zeros(shape, dtype="int32"):
    torch = torch_on_cuda()
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def bf16(*shape):
    return zeros(shape, "bfloat16")


def shifted(array, elements=1):
    """An array of the same shape, that many elements past an aligned address."""
    room = zeros(array.numel() + elements, str(array.dtype).removeprefix("torch."))
    return room[elements:].view(array.shape)


def strided(array, dim):
    """An array of the same shape in which neighbours in ``dim`` are one element further apart."""
    room = [*array.shape]
    room[dim] *= 2
    return zeros(room, str(array.dtype).removeprefix("torch."))[(slice(None),) * dim + (slice(None, None, 2),)]


class Stream:
    def __init__(self, protocol):
        self.protocol = protocol

    def __cuda_stream__(self):
        return self.protocol


# What changes -> (the changes, given the right call's arguments; the error; what its message starts with).
FLAT = {
    "q: no array": (lambda a: {"q": [1.0]}, TypeError, "q: expected an array that speaks DLPack"),
    "q: on the host": (
        lambda a: {"q": np.zeros((64, 8, DIM), np.float32)},
        ValueError,
        "k: expected an array on the host, like the first argument",
    ),
    "q: rank": (lambda a: {"q": bf16(64, 8 * DIM)}, ValueError, "q: expected 3 dimensions, got 2"),
    "q: dtype": (
        lambda a: {"q": zeros((64, 8, DIM), "float16")},
        NotImplementedError,
        "q, k: no kernels for q of float16",
    ),
    "q: head dimension": (lambda a: {"q": bf16(64, 8, 64)}, ValueError, "q: expected 128 in dimension 2"),
    "q: heads": (lambda a: {"q": bf16(64, 7, DIM)}, ValueError, "q: expected a multiple of k's 2 heads, got 7"),
    "q: G": (lambda a: {"q": bf16(64, 6, DIM)}, NotImplementedError, "q: got 3 query heads a KV head"),
    "q: no heads": (lambda a: {"q": bf16(64, 0, DIM)}, NotImplementedError, "q: got 0 query heads a KV head"),
    "q: tokens": (
        lambda a: {
            "q": torch_on_cuda().empty((1 << 27) + 1024, dtype=a["q"].dtype).as_strided((1 << 24, 8, DIM), (8, DIM, 1))
        },
        ValueError,
        "q: expected fewer than 16777216 tokens",
    ),
    "q: last dimension": (lambda a: {"q": strided(a["q"], 2)}, ValueError, "q: expected a contiguous last dimension"),
    "q: stride": (lambda a: {"q": bf16(64, 8, DIM + 4)[..., :DIM]}, ValueError, "q: expected a positive stride"),
    "q: expanded": (lambda a: {"q": bf16(64, 1, DIM).expand(64, 8, DIM)}, ValueError, "q: expected a positive stride"),
    "q: alignment": (lambda a: {"q": shifted(a["q"])}, ValueError, "q: expected an address aligned to 16 bytes"),
    "k: no array": (lambda a: {"k": None}, TypeError, "k: expected an array that speaks DLPack"),
    "k: device": (
        lambda a: {"k": DeviceArray(np.zeros((400, 2, DIM), np.int16), True, (2, 1))},
        ValueError,
        "k: expected an array on cuda:0, like the first argument, got one on cuda:1",
    ),
    "k: rank": (lambda a: {"k": bf16(400, 2 * DIM)}, ValueError, "k: expected 3 dimensions, got 2"),
    "k: paged without a table": (lambda a: {"k": bf16(5, 2, BLK_KV, DIM)}, ValueError, "page_table: missing"),
    "k: dtype": (
        lambda a: {"k": a["k"].half(), "v": a["v"].half()},
        NotImplementedError,
        "q, k: no kernels for q of bfloat16 with k and v of float16; supported: bfloat16 / bfloat16",
    ),
    "k: no heads": (
        lambda a: {"k": bf16(400, 0, DIM), "v": bf16(400, 0, DIM)},
        ValueError,
        "q: expected a multiple of k's 0",
    ),
    "k: alignment": (lambda a: {"k": shifted(a["k"])}, ValueError, "k: expected an address aligned"),
    "k: stride": (lambda a: {"k": bf16(400, 2, DIM + 1)[..., :DIM]}, ValueError, "k: expected a positive stride"),
    "v: shape": (lambda a: {"v": bf16(399, 2, DIM)}, ValueError, "v: expected 400 in dimension 0"),
    "v: rank": (lambda a: {"v": bf16(400, DIM)}, ValueError, "v: expected 3 dimensions"),
    "v: dtype": (lambda a: {"v": a["v"].half()}, TypeError, "v: expected dtype bfloat16, got float16"),
    "v: alignment": (lambda a: {"v": shifted(a["v"], 4)}, ValueError, "v: expected an address aligned"),
    "k2q_row_ptr: rank": (lambda a: {"k2q_row_ptr": zeros(10)}, ValueError, "k2q_row_ptr: expected 2 dimensions"),
    "k2q_row_ptr: dtype": (
        lambda a: {"k2q_row_ptr": zeros((2, 5), "int64")},
        TypeError,
        "k2q_row_ptr: expected dtype int32, got int64",
    ),
    "k2q_row_ptr: heads": (
        lambda a: {"k2q_row_ptr": zeros((3, 5))},
        ValueError,
        "k2q_row_ptr: expected 2 in dimension 0",
    ),
    "k2q_row_ptr: empty": (lambda a: {"k2q_row_ptr": zeros((2, 0))}, ValueError, "k2q_row_ptr: expected"),
    "k2q_row_ptr: strides": (
        lambda a: {"k2q_row_ptr": zeros((2, 9))[:, :5]},
        ValueError,
        "k2q_row_ptr: expected a contig",
    ),
    "k2q_q_indices: length": (
        lambda a: {"k2q_q_indices": zeros((2, 64 * 4 + 1))},
        ValueError,
        "k2q_q_indices: expected 256 in dimension 1",
    ),
    "k2q_q_indices: dtype": (
        lambda a: {"k2q_q_indices": zeros((2, 256), "float32")},
        TypeError,
        "k2q_q_indices: expected dtype int32",
    ),
    "cu_seqlens_q: rank": (
        lambda a: {"cu_seqlens_q": zeros((3, 1))},
        ValueError,
        "cu_seqlens_q: expected 1 dimensions",
    ),
    "cu_seqlens_q: dtype": (
        lambda a: {"cu_seqlens_q": zeros(3, "int64")},
        TypeError,
        "cu_seqlens_q: expected dtype int32",
    ),
    "cu_seqlens_q: length": (lambda a: {"cu_seqlens_q": zeros(1)}, ValueError, "cu_seqlens_q: expected B"),
    "cu_seqlens_q: strides": (
        lambda a: {"cu_seqlens_q": zeros(6)[::2]},
        ValueError,
        "cu_seqlens_q: expected a contiguous",
    ),
    "cu_seqlens_k: length": (
        lambda a: {"cu_seqlens_k": zeros(4)},
        ValueError,
        "cu_seqlens_k: expected 3 in dimension 0",
    ),
    "cu_seqlens_k: missing": (lambda a: {"cu_seqlens_k": None}, TypeError, "cu_seqlens_k: expected an array"),
    "seqused_k: length": (lambda a: {"seqused_k": zeros(3)}, ValueError, "seqused_k: expected 2 in dimension 0"),
    "seqused_k: dtype": (lambda a: {"seqused_k": zeros(2, "int64")}, TypeError, "seqused_k: expected dtype int32"),
    "page_table: flat k": (lambda a: {"page_table": zeros((2, 3))}, ValueError, "k: expected 4 dimensions"),
    "topk: value": (lambda a: {"topk": 5}, NotImplementedError, "topk: got 5; supported: 4, 8, 16, 32"),
    "topk: other": (lambda a: {"topk": 8}, ValueError, "k2q_q_indices: expected 512 in dimension 1"),
    "topk: missing": (lambda a: {"topk": None}, TypeError, "topk: missing; expected the number"),
    "topk: type": (lambda a: {"topk": 4.0}, TypeError, "topk: expected an integer, got float"),
    "blk_kv": (lambda a: {"blk_kv": 64}, NotImplementedError, "blk_kv: got 64; supported: 128"),
    "max_seqlen_q: type": (lambda a: {"max_seqlen_q": "x"}, TypeError, "max_seqlen_q: expected an integer, got str"),
    "max_seqlen_k: negative": (lambda a: {"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected an integer from 0"),
    "softmax_scale: zero": (lambda a: {"softmax_scale": 0.0}, ValueError, "softmax_scale: expected a positive finite"),
    "softmax_scale: nan": (lambda a: {"softmax_scale": float("nan")}, ValueError, "softmax_scale: expected a positive"),
    "softmax_scale: past float32": (
        lambda a: {"softmax_scale": 1e300},
        ValueError,
        "softmax_scale: expected a positive finite",
    ),
    "softmax_scale: below float32": (
        lambda a: {"softmax_scale": 1e-60},
        ValueError,
        "softmax_scale: expected a positive finite",
    ),
    "softmax_scale: no double": (
        lambda a: {"softmax_scale": 10**400},
        ValueError,
        "softmax_scale: expected a positive finite",
    ),
    "softmax_scale: type": (lambda a: {"softmax_scale": "1"}, TypeError, "softmax_scale: expected a number"),
    "lse_temperature_scale": (
        lambda a: {"lse_temperature_scale": -2.0},
        ValueError,
        "lse_temperature_scale: expected a pos",
    ),
    "partial_dtype: float16": (
        lambda a: {"partial_dtype": "float16"},
        NotImplementedError,
        "partial_dtype: got 'float16'; supported: float32, bfloat16",
    ),
    "partial_dtype: unknown": (lambda a: {"partial_dtype": "int7"}, NotImplementedError, "partial_dtype: got 'int7'"),
    "qk_dtype": (
        lambda a: {"qk_dtype": "float8_e4m3fn"},
        NotImplementedError,
        "qk_dtype, pv_dtype: got float8_e4m3fn / bfloat16; q of bfloat16 with k and v of bfloat16 is computed in",
    ),
    "pv_dtype": (lambda a: {"pv_dtype": "float32"}, NotImplementedError, "qk_dtype, pv_dtype: got bfloat16 / float32"),
    "q_scale": (
        lambda a: {"q_scale": 1.0},
        NotImplementedError,
        "q_scale: expected None with bfloat16 storage, got 1.0",
    ),
    "v_scale": (
        lambda a: {"v_scale": zeros(1, "float32")},
        NotImplementedError,
        "v_scale: expected None with bfloat16",
    ),
    "schedule: type": (lambda a: {"schedule": (1, 2)}, TypeError, "schedule: expected a Schedule or None, got tuple"),
    "schedule: other call": (
        lambda a: {"schedule": Call(topk=8).arguments["schedule"]},
        ValueError,
        "schedule.qsplit_indices: expected 256 in dimension 1",
    ),
    "out: shape": (lambda a: {"out": bf16(64, 4, DIM)}, ValueError, "out: expected 8 in dimension 1"),
    "out: rank": (lambda a: {"out": bf16(64, 8 * DIM)}, ValueError, "out: expected 3 dimensions"),
    "out: dtype": (lambda a: {"out": zeros((64, 8, DIM), "float32")}, TypeError, "out: expected dtype bfloat16"),
    "out: strides": (lambda a: {"out": strided(a["q"], 2)}, ValueError, "out: expected a contiguous last"),
    "out: expanded": (lambda a: {"out": bf16(1, 8, DIM).expand(64, 8, DIM)}, ValueError, "out: expected a positive"),
    "out: alignment": (lambda a: {"out": shifted(a["q"])}, ValueError, "out: expected an address aligned"),
    "out: read-only": (
        lambda a: {"out": read_only()},
        ValueError,
        "out: expected a writable array",
    ),
    "out: immutable": (
        lambda a: {"out": ImmutableArray(np.zeros((64, 8, DIM), np.int16), True)},
        ValueError,
        "out: expected a writable array",
    ),
    "lse: immutable": (
        lambda a: {"lse": ImmutableArray(np.zeros((64, 8), np.float32))},
        ValueError,
        "lse: expected a writable array",
    ),
    "lse: shape": (lambda a: {"lse": zeros((8, 64), "float32")}, ValueError, "lse: expected 64 in dimension 0"),
    "lse: dtype": (lambda a: {"lse": bf16(64, 8)}, TypeError, "lse: expected dtype float32, got bfloat16"),
    "lse: expanded": (
        lambda a: {"lse": zeros((64, 1), "float32").expand(64, 8)},
        ValueError,
        "lse: expected a positive",
    ),
    "lse: strided, with a temperature": (
        lambda a: {
            "lse": zeros((8, 64), "float32").t(),
            "return_temperature_lse": True,
            "lse_temperature_scale": 2.0,
        },
        ValueError,
        "lse: expected a contiguous array",
    ),
    "stream: type": (lambda a: {"stream": "main"}, TypeError, "stream: expected an int handle or an object"),
    "stream: negative": (lambda a: {"stream": -1}, ValueError, "stream: expected a stream handle, got -1"),
    "stream: bool": (lambda a: {"stream": True}, TypeError, "stream: expected an int handle"),
    "stream: too large": (lambda a: {"stream": 1 << 64}, ValueError, "stream: expected a stream handle, got 1844"),
    "stream: no handle": (lambda a: {"stream": Stream(5)}, TypeError, "stream: expected __cuda_stream__() to return"),
    "stream: handle of another type": (lambda a: {"stream": Stream((0, "x"))}, TypeError, "stream: expected an int"),
}
PAGED = {
    "k: page size": (
        lambda a: {"k": bf16(5, 2, 64, DIM), "v": bf16(5, 2, 64, DIM)},
        ValueError,
        "k: expected 128 in dimension 2",
    ),
    "k: flat": (
        lambda a: {"k": bf16(400, 2, DIM), "v": bf16(400, 2, DIM)},
        ValueError,
        "k: expected 4 dimensions, got 3",
    ),
    "page_table: missing": (lambda a: {"page_table": None}, ValueError, "page_table: missing"),
    "page_table: batch": (lambda a: {"page_table": zeros((3, 3))}, ValueError, "page_table: expected 2 in dimension 0"),
    "page_table: rank": (lambda a: {"page_table": zeros(6)}, ValueError, "page_table: expected 2 dimensions"),
    "page_table: dtype": (
        lambda a: {"page_table": zeros((2, 3), "int64")},
        TypeError,
        "page_table: expected dtype int32",
    ),
    "page_table: last dimension": (
        lambda a: {"page_table": zeros((2, 6))[:, ::2]},
        ValueError,
        "page_table: expected a contiguous last dimension",
    ),
}


def read_only():
    array = VersionedArray(np.zeros((64, 8, DIM), np.int16), True)
    array.host.flags.writeable = False
    return array


def check_refused(call, change, error, message):
    changes = change(call.arguments)
    clear_log()
    with pytest.raises(error) as caught:
        call.run(**changes)
    assert str(caught.value).startswith(message), str(caught.value)
    assert not recorded("launch") and not recorded("cuMemsetD32Async")


@pytest.mark.parametrize("what", FLAT)
@on_stub
def test_a_bad_argument_is_named(what):
    check_refused(Call(), *FLAT[what])


@pytest.mark.parametrize("what", PAGED)
@on_stub
def test_a_bad_argument_with_paged_keys_is_named(what):
    check_refused(Call(layout="paged"), *PAGED[what])


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "topk"])
@on_stub
def test_required_arguments_are_required(name):
    call = Call()
    del call.arguments[name]
    with pytest.raises(TypeError, match=name):
        call.run()


@on_stub
def test_dtypes_go_by_the_end_of_their_name():
    torch = torch_on_cuda()
    call = Call()
    for dtype in ("bfloat16", torch.bfloat16, np.float32, np.dtype("float32"), torch.float32):
        call.run(partial_dtype=dtype)
    call.run(qk_dtype=torch.bfloat16, pv_dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="partial_dtype: got 'int8'"):
        call.run(partial_dtype=np.int8)


@on_stub
def test_sizes_that_are_only_hints_may_be_wrong():
    Call().run(max_seqlen_q=0, max_seqlen_k=np.int64(1))
    Call().run(max_seqlen_q=None, max_seqlen_k=None)


@on_stub
def test_topk_has_a_second_name():
    call = Call()
    del call.arguments["topk"]
    call.run(topK=4)
    with pytest.raises(TypeError, match="topk: expected one number, got topK too"):
        call.run(topk=4, topK=4)


@pytest.mark.parametrize("name", ["causal", "return_softmax_lse", "return_temperature_lse"])
@on_stub
def test_a_flag_is_true_or_false(name):
    call = Call()
    for value in (True, False, 1, 0, np.bool_(True), np.int32(0)):
        call.run(**{name: value})
    for value in ("no", None, 2, 1.0, [], np.array([True])):
        check_refused(call, lambda _, value=value: {name: value}, TypeError, f"{name}: expected True or False, got")


# ------------------------------------------------------------------------------------------------------ shared memory


def refuse_overlap(call, message, **changes):
    check_refused(call, lambda _: changes, ValueError, message)


@pytest.mark.parametrize(
    "name",
    [
        "q", "k", "v", "k2q_row_ptr", "k2q_q_indices", "cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k",
        "schedule.scheduler_metadata", "schedule.work_count", "schedule.qsplit_indices", "schedule.split_counts",
        "schedule.split_entries", "schedule.walk_blocks", "schedule.walk_counts", "schedule.walk_flags",
        "schedule.rest_indices",
    ],
)  # fmt: skip
@on_stub
def test_what_a_call_writes_must_not_overlap_what_it_reads(name):
    """One element of lse is the first of the array, the others are where nothing is."""
    call = Call(layout="paged")
    array = operator.attrgetter(name)(types.SimpleNamespace(**call.arguments))
    buffer = (ctypes.c_char * 4).from_address(array.data_ptr())
    element = np.frombuffer(buffer, np.float32)
    lse = DeviceArray(np.lib.stride_tricks.as_strided(element, (64, 8), (1 << 40, 1 << 36)))
    refuse_overlap(call, f"lse: expected memory of its own, got some of {name}", lse=lse)


@on_stub
def test_out_and_lse_must_not_overlap_each_other():
    torch = torch_on_cuda()
    buffer = torch.zeros(64, 8, 2 * DIM, dtype=torch.bfloat16)
    lse = buffer.view(torch.float32)
    call = Call()
    call.run(out=buffer[..., :DIM], lse=lse[..., DIM // 2])  # the first word past a row of out
    message = "lse: expected memory of its own, got some of out"
    refuse_overlap(call, message, out=buffer[..., :DIM], lse=lse[..., DIM // 2 - 1])


@on_stub
def test_an_out_that_overlaps_itself_is_refused():
    torch = torch_on_cuda()
    buffer = torch.zeros(64 * 8 * DIM, dtype=torch.bfloat16)
    call = Call()
    for strides in ((8 * DIM, DIM - 8, 1), (7 * DIM, DIM, 1), (8, 8, 1)):
        out = buffer.as_strided((64, 8, DIM), strides)
        refuse_overlap(call, f"out: expected elements that do not overlap, got strides [{strides[0]}", out=out)
    lse = torch.zeros(64 * 8).as_strided((64, 8), (7, 1))
    refuse_overlap(call, "lse: expected elements that do not overlap, got strides [7, 1] for shape [64, 8]", lse=lse)
    call.run(lse=torch.zeros(64 * 15).as_strided((64, 8), (15, 2)))


def refused(call, **changes):
    try:
        call.run(**changes)
    except ValueError as error:
        return str(error).partition(":")[2]
    return None


@on_stub
def test_memory_is_compared_byte_by_byte():
    """Random views of one buffer, with few elements and many strides, against sets of their words."""
    torch = torch_on_cuda()
    call = Call(layout="paged")
    rng = np.random.default_rng(0)
    words = torch.zeros(6000, dtype=torch.int32)
    found = []
    for _ in range(1500):
        steps = rng.choice([1, 2, 3, 5, 8, 9, 64, 65, 70], 2)
        first = [int(offset) for offset in rng.integers(0, 500, 2)]
        lse = words.view(torch.float32).as_strided((64, 8), [int(step) for step in steps], first[0])
        table = words.as_strided((2, 3), (int(rng.integers(1, 900)), 1), first[1])
        own = [first[0] + token * steps[0] + head * steps[1] for token in range(64) for head in range(8)]
        others = {first[1] + row * table.stride(0) + column for row in range(2) for column in range(3)}
        expected = None
        if len(set(own)) < len(own):
            expected = " expected elements that do not overlap"
        elif not others.isdisjoint(own):
            expected = " expected memory of its own, got some of page_table"
        got = refused(call, lse=lse, page_table=table)
        assert got == expected or (expected and got.startswith(expected)), (steps, first, table.stride())
        found.append(expected)
    assert all(found.count(kind) > 50 for kind in set(found)) and len(set(found)) == 3


@on_stub
def test_tiles_are_compared_byte_by_byte():
    torch = torch_on_cuda()
    call = Call()
    rng = np.random.default_rng(0)
    buffer = torch.zeros(1 << 20, dtype=torch.bfloat16)
    strides = ((8 * DIM, DIM), (16 * DIM, DIM), (16 * DIM, 2 * DIM), (DIM, 64 * DIM), (DIM + 8, 65 * DIM + 520))
    found = []
    for _ in range(300):
        views, blocks = [], []  # blocks of 8 elements, what strides and addresses are multiples of
        for _ in "qo":
            steps = strides[rng.integers(len(strides))]
            first = int(rng.choice([0, 8, DIM, 2 * DIM, 8 * DIM, 64 * DIM])) + int(rng.integers(2)) * 70000 // 8 * 8
            views.append(buffer.as_strided((64, 8, DIM), (*steps, 1), first))
            at = first + np.add.outer(np.arange(64) * steps[0], np.arange(8) * steps[1])
            blocks.append(set(np.add.outer(at // 8, np.arange(DIM // 8)).flat))
        expected = None if blocks[0].isdisjoint(blocks[1]) else " expected memory of its own, got some of q"
        assert refused(call, q=views[0], out=views[1]) == expected
        found.append(expected)
    assert all(found.count(kind) > 50 for kind in set(found)) and len(set(found)) == 2


@on_stub
def test_views_that_interleave_in_one_buffer_do_not_overlap():
    torch = torch_on_cuda()
    call = Call()
    packed = torch.zeros(64, 8, 2 * DIM, dtype=torch.bfloat16)
    call.run(q=packed[..., :DIM], out=packed[..., DIM:])
    refuse_overlap(
        call, "out: expected memory of its own, got some of q", q=packed[..., :DIM], out=packed[..., 8 : DIM + 8]
    )
    heads = torch.zeros(64, 16, DIM, dtype=torch.bfloat16)  # q, out and k in the heads of one token
    call.run(q=heads[:, ::2], out=heads[:, 1::2])
    refuse_overlap(call, "out: expected memory of its own, got some of q", q=heads[:, :8], out=heads[:, 7:15])
    shared = torch.zeros(400, 10, DIM, dtype=torch.bfloat16)  # k and out of different lengths and numbers of heads
    call.run(k=shared[:, 8:], out=shared[:64, :8])
    refuse_overlap(call, "out: expected memory of its own, got some of k", k=shared[:, 8:], out=shared[336:, 2:])
    tokens = torch.zeros(128, 8, DIM, dtype=torch.bfloat16)  # a slice of a larger batch
    call.run(q=tokens[:64], out=tokens[64:])
    refuse_overlap(call, "out: expected memory of its own, got some of q", q=tokens[:64], out=tokens[63:127])


# ------------------------------------------------------------------------------------------------ values read back

VALUES = {
    "cu_seqlens_q: start": ({"cu_seqlens_q": [1, 40, 64]}, "cu_seqlens_q: expected 0 first, got 1"),
    "cu_seqlens_q: order": ({"cu_seqlens_q": [0, 70, 64]}, "cu_seqlens_q: expected values that do not decrease"),
    "cu_seqlens_q: end": ({"cu_seqlens_q": [0, 40, 65]}, "cu_seqlens_q: expected at most 64 last, got 65"),
    "max_seqlen_q": ({"max_seqlen_q": 39}, "max_seqlen_q: got 39, the longest sequence has 40"),
    "max_seqlen_k": ({"max_seqlen_k": 289}, "max_seqlen_k: got 289, the longest sequence has 290"),
    "seqused_k: past the pages": (
        {"seqused_k": [385, 100], "max_seqlen_k": None},
        "seqused_k: expected values up to 384, the keys of page_table's columns, got 385",
    ),
    "page_table: in use": (
        {"page_table": [[3, 5, 0], [2, -1, -1]]},
        "page_table: expected page numbers below 5, or -1, got 5",
    ),
    "k2q_row_ptr: order": (
        {"k2q_row_ptr": [[0, 5, 4, 6, 6], [0] * 5]},
        "k2q_row_ptr: expected rows that start at 0 and do not",
    ),
    "k2q_row_ptr: range": ({"k2q_row_ptr": [[0, 5, 5, 6, 999], [0] * 5]}, "k2q_row_ptr: expected values from 0 to 256"),
    "k2q_q_indices: range": (
        {"k2q_row_ptr": [[0, 1, 1, 1, 1]] * 2, "k2q_q_indices": [[64] + [-1] * 255] * 2},
        "k2q_q_indices: expected values from 0 to 63, got 64",
    ),
}


def call_with_good_values(layout="paged"):
    """Nothing is selected. The kernels that would say so do not run."""
    call = Call(layout=layout)
    torch, given = call.torch, call.arguments
    given["k2q_row_ptr"].zero_()
    given["k2q_q_indices"].fill_(-1)
    given["schedule"] = schedule = prepare_sparse_fwd_schedule_and_split(
        k2q_row_ptr=given["k2q_row_ptr"], k2q_q_indices=given["k2q_q_indices"],
        k2q_qsplit_indices=torch.full((2, 256), -1, dtype=torch.int32),
        split_counts=torch.zeros((64, 2), dtype=torch.int32), cu_seqlens_q=given["cu_seqlens_q"],
        cu_seqlens_k=given["cu_seqlens_k"], total_q=64, topk=4, head_kv=2, qhead_per_kv=4, blk_kv=BLK_KV, device=None,
        enabled=True,
    )  # fmt: skip
    schedule.work_count.zero_()
    schedule.split_entries.fill_(-1)
    return call


def as_arrays(call, changes):
    return {name: call.int32(value) if isinstance(value, list) else value for name, value in changes.items()}


@pytest.mark.parametrize("what", VALUES)
@on_stub(validate=True)
def test_with_validation_bad_values_are_named(what):
    call = call_with_good_values()
    changes, message = VALUES[what]
    check_refused(call, lambda _: as_arrays(call, changes), ValueError, message)


@on_stub(validate=True)
def test_with_validation_good_values_pass():
    call_with_good_values().run()
    assert len(recorded("launch")) >= 2


# What SPEC 4.2 gives a meaning: padding, most of it.
MEANT = {
    "query rows past the last sequence": ("paged", {"cu_seqlens_q": [0, 40, 63]}),
    "a request without queries": ("paged", {"cu_seqlens_q": [0, 40, 40]}),
    "no page in use": ("paged", {"page_table": [[3, -1, 0], [-1, -1, -1]]}),
    "garbage in columns past the length": ("paged", {"page_table": [[3, 1, 0], [2, 99, -(2**31)]]}),
    "no keys in use": ("paged", {"seqused_k": [0, 100]}),
    "a length below 0": ("paged", {"seqused_k": [-1, 100]}),
    "paged keys beyond cu_seqlens_k": ("paged", {"seqused_k": [290, 300]}),
    "flat keys beyond the sequence's own": ("flat", {"seqused_k": [301, 2**31 - 1]}),
    "keys past the last sequence": ("flat", {"cu_seqlens_k": [0, 300, 390]}),
    "no hints": ("paged", {"max_seqlen_q": None, "max_seqlen_k": None}),
}


@pytest.mark.parametrize("what", MEANT)
@on_stub(validate=True)
def test_with_validation_what_has_a_meaning_passes(what):
    layout, changes = MEANT[what]
    call = call_with_good_values(layout)
    clear_log()
    call.run(**as_arrays(call, changes))
    assert recorded("launch")


@on_stub(validate=True)
def test_with_validation_a_schedule_of_another_csr_is_refused():
    call = call_with_good_values()
    other = {"k2q_row_ptr": call.arguments["k2q_row_ptr"].clone()}
    call.run(**other)  # a copy is as good
    other["k2q_row_ptr"][0, 3:] = 1
    other["k2q_q_indices"] = call.arguments["k2q_q_indices"].clone()
    other["k2q_q_indices"][0, 0] = 7
    check_refused(call, lambda _: other, ValueError, "schedule: expected one for this k2q_row_ptr and k2q_q_indices")


@pytest.mark.parametrize("name", ["split_counts", "split_entries", "work_count"])
@on_stub(validate=True)
def test_with_validation_a_schedule_that_is_not_of_its_csr_is_refused(name):
    call = call_with_good_values()
    getattr(call.arguments["schedule"], name).fill_(1)
    check_refused(call, lambda _: {}, ValueError, f"schedule.{'scheduler_metadata' if name == 'work_count' else name}")


@on_stub
def test_a_schedule_for_other_sizes_is_named():
    """Whatever the values are: nothing is read back."""
    call = Call()
    rows = zeros((2, 6))
    check_refused(call, lambda _: {"k2q_row_ptr": rows}, ValueError, "schedule: expected one for a CSR of 5 rows and 2")
    lengths = {name: zeros(2) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    check_refused(call, lambda _: lengths, ValueError, "schedule: expected one for a CSR of 4 rows and 1 sequences")
    assert call.arguments["schedule"].csr_digest is None


@pytest.mark.parametrize("size", [2, 1 << 20])
@on_stub
def test_an_array_of_a_schedule_that_was_resized_is_named(size):
    """The caller's own, of which the schedule has the address; torch does not resize the others."""
    call = call_with_good_values()
    schedule = call.arguments["schedule"]
    schedule.qsplit_indices.resize_(2, size)
    check_refused(call, lambda _: {}, ValueError, "schedule.qsplit_indices: expected the memory that it had at first")
    with pytest.raises(RuntimeError, match="not resizable"):
        schedule.work_count.resize_(size)


@on_stub(validate=True)
def test_validation_cannot_read_back_under_graph_capture():
    call = call_with_good_values()
    with pytest.raises(ValueError, match="its values are needed on the host"):
        call.run(stream=0x90C)


@on_stub
def test_without_validation_nothing_is_read_back():
    call = Call(layout="paged")
    for changes, _ in VALUES.values():
        clear_log()
        call.run(**as_arrays(call, changes))
        assert not recorded("cuStreamSynchronize") and not recorded("cuMemcpy2DAsync")
