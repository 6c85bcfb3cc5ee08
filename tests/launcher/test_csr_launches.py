"""What build_k2q_csr and prepare_sparse_fwd_schedule_and_split launch for device arrays, seen by a stub driver."""

import numpy as np
import pytest
from stub_driver import DeviceArray, failing, launches, on_stub, recorded, torch_on_cuda

from sparse_aot import build_k2q_csr, prepare_sparse_fwd_schedule_and_split

CAPTURING = 0x10C  # the stub says so of streams whose handle ends in c
SCHEDULE = ["schedule_count", "radix_scan", "schedule_fill"]


def arguments(total_q=3000, total_rows=1000, topk=16, head_kv=2, foreign=False):
    def array(values):
        values = np.asarray(values, np.int32)
        return DeviceArray(values) if foreign else torch_on_cuda().from_numpy(values)

    return {
        "q2k_indices": array(np.zeros((head_kv, total_q, topk))),
        "cu_seqlens_q": array([0, total_q]),
        "cu_seqlens_k": array([0, total_rows * 128]),
        "total_k": total_rows * 128,
        "total_rows": total_rows,
    }


def operations():
    return [launch["operation"] for launch in launches()]


def prepare(given, row_ptr, q_indices, schedule, **changes):
    head_kv, total_q, topk = given["q2k_indices"].shape
    call = {"k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices, "k2q_qsplit_indices": schedule.qsplit_indices}
    call |= {"split_counts": schedule.split_counts, "cu_seqlens_q": given["cu_seqlens_q"], "max_seqlen_q": None}
    call |= {"cu_seqlens_k": given["cu_seqlens_k"], "total_q": total_q, "topk": topk, "head_kv": head_kv}
    call |= {"qhead_per_kv": 4, "blk_kv": 128, "device": "cuda:0", "enabled": True}
    return prepare_sparse_fwd_schedule_and_split(**call | changes)


@pytest.mark.parametrize("total_rows, passes, bits", [(1, 1, 1), (2047, 1, 11), (2048, 2, 6), (1 << 22, 3, 8)])
@on_stub
def test_build_sorts_in_as_few_passes_as_the_rows_need(total_rows, passes, bits):
    build_k2q_csr(**arguments(total_rows=total_rows))
    sort = ["radix_scan", "radix_scatter"] + ["radix_count", "radix_scan", "radix_scatter"] * (passes - 1)
    assert operations() == ["csr_rows", "csr_keys", *sort, "csr_row_ptr"]
    scatters = [launch["params"] for launch in launches() if launch["operation"] == "radix_scatter"]
    assert [(scatter["shift"], scatter["bits"]) for scatter in scatters] == [(p * bits, bits) for p in range(passes)]


@pytest.mark.parametrize("total_rows", [1000, 3000, 1 << 22])
@on_stub
def test_each_pass_reads_what_the_one_before_wrote_and_the_last_writes_the_results(total_rows):
    row_ptr, q_indices, schedule = build_k2q_csr(**arguments(total_rows=total_rows), return_schedule=True)
    entries = schedule.split_entries
    first, *_ = (launch["params"] for launch in launches() if launch["operation"] == "csr_keys")
    assert first["split_entries"] == entries.data_ptr() and entries.shape == (2, 3000, 16)
    keys, values = first["keys"], first["values"]
    scatters = [launch["params"] for launch in launches() if launch["operation"] == "radix_scatter"]
    for scatter in scatters:
        assert (scatter["keys_in"], scatter["values_in"]) == (keys, values)
        results = scatter["indices_out"], scatter["entries_out"]
        assert results == ((q_indices.data_ptr(), entries.data_ptr()) if scatter is scatters[-1] else (0, 0))
        keys, values = scatter["keys_out"], scatter["values_out"]
        assert len({keys, values, scatter["keys_in"], scatter["values_in"]}) == 4
    assert values == schedule.qsplit_indices.data_ptr()
    (search,) = (launch["params"] for launch in launches() if launch["operation"] == "csr_row_ptr")
    assert (search["keys"], search["row_ptr"]) == (keys, row_ptr.data_ptr())


@pytest.mark.parametrize("total_q, total_rows", [(2048, 3584), (128, 1), (1, 3584)])
@pytest.mark.parametrize("return_schedule", [False, True])
@on_stub
def test_a_chunk_takes_a_launch_and_one_for_its_schedule(total_q, total_rows, return_schedule):
    made = build_k2q_csr(**arguments(total_q=total_q, total_rows=total_rows), return_schedule=return_schedule)
    assert operations() == ["chunk_csr", "schedule_fill"][: 1 + return_schedule]
    first, *others = launches()
    assert first["grid"] == [2 * 8, 1, 1] and first["cluster"] == 8 and first["pdl"] == 1
    results = {"row_ptr": made[0], "q_indices": made[1]}
    if return_schedule:
        (fill,) = others
        assert fill["grid"] == [2 * -(-total_rows // 256), 1, 1] and fill["cluster"] == 1 and fill["pdl"] == 1
        shared = ("row_ptr", "q_indices", "row_sequence", "row_block", "counts", "totals", "target_log2", "buckets")
        assert all(fill["params"][name] == first["params"][name] for name in shared)
        results |= {name: getattr(made[2], name) for name in ("qsplit_indices", "split_counts", "split_entries")}
    assert all(first["params"][name] == array.data_ptr() for name, array in results.items())
    assert not recorded("cuMemsetD32Async")


@on_stub
def test_a_chunk_makes_the_walk_plan_in_the_same_launches():
    *_, schedule = build_k2q_csr(**arguments(total_q=500, head_kv=3), qhead_per_kv=16, return_schedule=True)
    assert operations() == ["chunk_csr", "schedule_fill"]
    chunk, fill = (launch["params"] for launch in launches())
    assert [chunk[name] for name in ("groups", "tokens_per_group", "walk_cost", "walk_gain")] == [63, 8, 5, 5]
    for name in ("walk_blocks", "walk_counts", "rest_indices"):
        assert chunk[name] == getattr(schedule, name).data_ptr()
    assert fill["walk_flags"] == schedule.walk_flags.data_ptr() and fill["head_flags"] == chunk["head_flags"] != 0


@on_stub
def test_flags_are_made_of_heads_only_in_a_chunk_with_a_walk_plan():
    for given in (arguments(), arguments(total_q=300)):
        built = build_k2q_csr(**given, return_schedule=True)
        prepare(given, *built)
    fills = [launch["params"] for launch in launches() if launch["operation"] == "schedule_fill"]
    assert [fill["head_flags"] for fill in fills] == [0] * 4


@pytest.mark.parametrize(
    "more",
    [{"total_q": 2049}, {"total_rows": 3585}, {"cu_seqlens": 257}],
    ids=["tokens", "rows", "sequences"],
)
@on_stub
def test_what_is_larger_than_a_chunk_is_sorted(more):
    sequences = more.pop("cu_seqlens", 1)
    given = arguments(**{"total_q": 300} | more)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        last = given[name][-1:]
        given[name] = torch_on_cuda().cat([torch_on_cuda().zeros(sequences, dtype=last.dtype), last])
    build_k2q_csr(**given, return_schedule=True)
    assert operations()[:2] == ["csr_rows", "csr_keys"]


@on_stub
def test_grids_cover_entries_rows_and_digits():
    build_k2q_csr(**arguments(total_q=3000, total_rows=1000, topk=16, head_kv=3), return_schedule=True)
    entries, rows = 3 * -(-3000 * 16 // 4096), 3 * -(-1000 // 256)
    grids = [launch["grid"][0] for launch in launches() if launch["operation"] != "csr_rows"]  # which is persistent
    assert grids == [entries, 3 * 1024 // 32, entries, 3 * -(-1001 // 256), rows, 3, rows]
    assert all(launch["grid"][1:] == [1, 1] for launch in launches())


@pytest.mark.parametrize("return_schedule", [False, True])
@on_stub
def test_with_total_rows_nothing_waits_and_scratch_is_one_allocation(return_schedule):
    build_k2q_csr(**arguments(foreign=True), return_schedule=return_schedule)
    assert operations()[-3:] == (SCHEDULE if return_schedule else operations()[-3:])
    assert not recorded("cuStreamSynchronize") and not recorded("cuMemcpy2DAsync") and not recorded("cuMemsetD32Async")
    results = 7 if return_schedule else 2
    assert len(recorded("cuMemAllocAsync")) == results + 1


@on_stub
def test_total_rows_is_read_where_it_is_not_passed():
    row_ptr, _ = build_k2q_csr(**arguments(total_rows=77) | {"total_rows": None})
    assert row_ptr.shape == (2, 78)
    assert len(recorded("cuMemcpy2DAsync")) == 1


@on_stub
def test_under_capture_total_rows_must_be_passed():
    given = arguments()
    build_k2q_csr(**given, stream=CAPTURING)
    count = len(launches())
    with pytest.raises(ValueError, match="total_rows: expected an integer under graph capture, got None"):
        build_k2q_csr(**given | {"total_rows": None}, stream=CAPTURING)
    assert len(launches()) == count


@pytest.mark.parametrize("total_q, total_rows", [(0, 10), (10, 0), (0, 0)])
@on_stub
def test_empty_problems_are_filled_without_kernels(total_q, total_rows):
    given = arguments(total_q=total_q, total_rows=total_rows)
    row_ptr, q_indices, schedule = build_k2q_csr(**given, return_schedule=True)
    prepared = prepare(given, row_ptr, q_indices, schedule)
    assert not launches()
    assert row_ptr.shape == (2, total_rows + 1) and not row_ptr.any()
    assert (q_indices == -1).all() and (schedule.qsplit_indices == -1).all() and not schedule.split_counts.any()
    assert schedule.split_entries.shape == (2, total_q, 16)
    for made in (schedule, prepared):
        assert (made.split_entries == -1).all()
        assert made.work_capacity == 0 and made.scheduler_metadata.shape == (0, 6) and made.work_count.tolist() == [0]


@pytest.mark.parametrize("g, tokens, words", [(1, 128, 4), (2, 64, 2), (4, 32, 1), (8, 16, 1), (16, 8, 1)])
@on_stub
def test_the_walk_plan_is_made_of_unsorted_keys(g, tokens, words):
    *_, schedule = build_k2q_csr(**arguments(head_kv=6), qhead_per_kv=g, return_schedule=True)
    assert operations()[:3] == ["csr_rows", "csr_keys", "walk_plan"]
    rows, keys, walk = (launch["params"] for launch in launches()[:3])
    groups = -(-3000 // tokens)
    assert launches()[2]["grid"] == [6 * groups, 1, 1]
    assert schedule.walk_blocks.shape == (6, groups, 128, 2 + words) and schedule.walk_counts.shape == (6, groups)
    assert schedule.walk_flags.shape == (3,) and schedule.rest_indices.shape == (6, 3000 * 16)
    assert all(walk[name] == keys[name] for name in ("keys", "values")) and walk["walk_flags"] == rows["walk_flags"]
    for name in ("walk_blocks", "walk_counts", "walk_flags"):
        assert walk[name] == getattr(schedule, name).data_ptr()
    sizes = {name: walk[name] for name in ("size", "topk", "total_rows", "groups", "tokens_per_group")}
    assert list(sizes.values()) == [3000 * 16, 16, 1000, groups, tokens]


@on_stub
def test_the_last_pass_writes_what_no_group_walks():
    *_, schedule = build_k2q_csr(**arguments(head_kv=6, total_rows=3000), return_schedule=True)
    scatters = [launch["params"] for launch in launches() if launch["operation"] == "radix_scatter"]
    assert [scatter["rest_out"] for scatter in scatters] == [0, schedule.rest_indices.data_ptr()]


@on_stub
def test_prepare_makes_slots_and_schedule_without_a_sort():
    given = arguments()
    row_ptr, q_indices, schedule = build_k2q_csr(**given, return_schedule=True)
    count = len(launches())
    prepared = prepare(given, row_ptr, q_indices, schedule)
    assert operations()[count:] == ["csr_collect", "csr_split", "csr_rows", *SCHEDULE]
    (cleared,) = recorded("cuMemsetD32Async")
    assert cleared["pointer"] == schedule.split_counts.data_ptr() and cleared["count"] == 3000 * 2
    collected, ordered = (launch["params"]["split_entries"] for launch in launches()[count : count + 2])
    assert collected == ordered == prepared.split_entries.data_ptr() != schedule.split_entries.data_ptr()
    (rows,) = (launch["params"] for launch in launches()[count:] if launch["operation"] == "csr_rows")
    assert rows["walk_flags"] == 0 and prepared.walk_blocks is prepared.walk_counts is prepared.walk_flags is None
    assert prepared.qsplit_indices is schedule.qsplit_indices and prepared.split_counts is schedule.split_counts


@pytest.mark.parametrize("device", ["cuda:0", "cuda", "<CUDA Device 0>", 0, None])
@on_stub
def test_a_device_that_is_that_of_the_arrays_is_taken(device):
    given = arguments()
    prepare(given, *build_k2q_csr(**given, return_schedule=True), device=device)


@pytest.mark.parametrize("device", ["cuda:1", "cpu", "<CUDA Device 12>", 1])
@on_stub
def test_a_device_that_contradicts_the_arrays_is_named(device):
    given = arguments()
    built = build_k2q_csr(**given, return_schedule=True)
    count = len(launches())
    with pytest.raises(ValueError, match=r"device: expected that of the arrays, cuda:0 .*, got "):
        prepare(given, *built, device=device)
    assert len(launches()) == count


@on_stub
def test_addresses_that_a_kernel_cannot_read_are_refused():
    given = arguments(foreign=True)
    given["cu_seqlens_k"].host = np.zeros(9, np.uint8)[1:].view(np.int32)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected an address aligned to 4 bytes"):
        build_k2q_csr(**given)
    assert not launches()


@on_stub
def test_a_disabled_schedule_launches_nothing():
    given = arguments()
    row_ptr, q_indices, schedule = build_k2q_csr(**given, return_schedule=True)
    count = len(launches())
    assert not prepare(given, row_ptr, q_indices, schedule, enabled=False).enabled
    assert len(launches()) == count


@on_stub(validate=True)
def test_validation_reads_the_lengths_back():
    good = arguments()
    build_k2q_csr(**good)
    array = torch_on_cuda().tensor
    int32 = torch_on_cuda().int32
    for changes, message in (
        ({"cu_seqlens_q": array([0, 3001], dtype=int32)}, "cu_seqlens_q: expected at most 3000"),
        ({"cu_seqlens_k": array([1, 128], dtype=int32)}, "cu_seqlens_k: expected 0 as the first value"),
        ({"total_rows": 999}, "total_rows: expected at least 1000"),
    ):
        with pytest.raises(ValueError, match=message):
            build_k2q_csr(**good | changes)


@on_stub
def test_a_failed_launch_names_the_kernel():
    with failing("cuLaunchKernelEx", 700), pytest.raises(RuntimeError, match=r"csr_rows.*CUDA_ERROR_ILLEGAL_ADDRESS"):
        build_k2q_csr(**arguments())
