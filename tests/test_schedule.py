"""The schedule as an object: what it knows of its CSR, and that it can be kept, copied and sent elsewhere."""

import copy
import gc
import pickle
import warnings
import weakref

import ml_dtypes
import numpy as np
import pytest
from calls import Call
from stub_driver import DeviceArray, on_stub

from sparse_aot import Schedule, build_k2q_csr, prepare_sparse_fwd_schedule_and_split, sim, sparse_atten_func
from sparse_aot._schedule import _restore

ARRAYS = ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries")
WALK_PLAN = ("walk_blocks", "walk_counts", "walk_totals")
NUMBERS = ("enabled", "target_q_per_cta", "work_capacity", "qhead_per_kv", "total_rows", "batch", "csr_digest")
TOTAL_Q, TOTAL_K, HEAD_KV, G, TOPK = 20, 300, 2, 2, 4
CU_SEQLENS_Q, CU_SEQLENS_K = np.array([0, 9, 20], np.int32), np.array([0, 140, 300], np.int32)


def build(seed=0, **options):
    """(k2q_row_ptr, k2q_q_indices, schedule) of a random selection; all have the same shapes."""
    q2k = np.random.default_rng(seed).integers(-1, 2, (HEAD_KV, TOTAL_Q, TOPK), dtype=np.int32)
    options = {"total_k": TOTAL_K, "qhead_per_kv": G, "return_schedule": True} | options
    return build_k2q_csr(q2k, CU_SEQLENS_Q, CU_SEQLENS_K, **options)


def prepare(row_ptr, q_indices, **changes):
    arguments = {
        "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices, "k2q_qsplit_indices": np.empty_like(q_indices),
        "split_counts": np.empty((TOTAL_Q, HEAD_KV), np.int32), "cu_seqlens_q": CU_SEQLENS_Q,
        "cu_seqlens_k": CU_SEQLENS_K, "total_q": TOTAL_Q, "topk": TOPK, "head_kv": HEAD_KV, "qhead_per_kv": G,
        "blk_kv": 128, "device": None, "enabled": True,
    }  # fmt: skip
    return prepare_sparse_fwd_schedule_and_split(**arguments | changes)


def attend(row_ptr, q_indices, schedule, g=G):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((n, heads, 128), dtype=np.float32).astype(ml_dtypes.bfloat16)
        for n, heads in ((TOTAL_Q, HEAD_KV * g), (TOTAL_K, HEAD_KV), (TOTAL_K, HEAD_KV))
    )
    return sparse_atten_func(
        q, k, v, row_ptr, q_indices, TOPK, cu_seqlens_q=CU_SEQLENS_Q, cu_seqlens_k=CU_SEQLENS_K, schedule=schedule
    ).view(np.uint16)


needs_simulator = pytest.mark.skipif(not sim.is_installed(), reason="the simulator is not installed")


# ------------------------------------------------------------------------------------------------------------ its CSR


@needs_simulator
def test_a_schedule_of_another_selection_is_refused():
    row_ptr, q_indices, schedule = build()
    other_row_ptr, other_q_indices, other = build(1)
    assert schedule.csr_digest != other.csr_digest
    want = attend(row_ptr, q_indices, schedule)
    np.testing.assert_array_equal(attend(row_ptr.copy(), q_indices.copy(), schedule), want)  # copies are as good
    for csr in ((other_row_ptr, other_q_indices), (other_row_ptr, q_indices), (row_ptr, other_q_indices)):
        with pytest.raises(ValueError, match="schedule: expected one for this k2q_row_ptr and k2q_q_indices"):
            attend(*csr, schedule)


def test_the_digest_is_of_the_csr_alone():
    row_ptr, q_indices, schedule = build()
    assert 0 <= schedule.csr_digest < 1 << 64
    assert build(qhead_per_kv=16)[2].csr_digest == schedule.csr_digest
    q_indices[:, row_ptr[:, -1].max() :] = 77  # the tail is of no entry
    assert prepare(row_ptr, q_indices).csr_digest == schedule.csr_digest
    assert build(total_rows=9)[2].csr_digest != schedule.csr_digest  # a CSR with other rows, if empty ones


@needs_simulator
def test_a_schedule_for_another_number_of_query_heads_is_right_and_said_once(monkeypatch):
    """The default of qhead_per_kv is 1."""
    row_ptr, q_indices, schedule = build()
    want = attend(row_ptr, q_indices, schedule)
    forgotten = build(qhead_per_kv=1)[2]
    with pytest.warns(RuntimeWarning, match="schedule: made with qhead_per_kv=1, but q has 2 .*: pass qhead_per_kv=2"):
        got = attend(row_ptr, q_indices, forgotten)
    difference = np.abs(got.view(ml_dtypes.bfloat16).astype(float) - want.view(ml_dtypes.bfloat16).astype(float))
    assert difference.max() < 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(row_ptr, q_indices, forgotten)


# --------------------------------------------------------------------------------------------------- keeping, copying


def test_a_schedule_can_be_weakly_referenced():
    schedule = build()[2]
    reference = weakref.ref(schedule)
    assert reference() is schedule
    del schedule
    gc.collect()
    assert reference() is None


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda schedule: pickle.loads(pickle.dumps(schedule)),
}


@needs_simulator
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_does_what_the_schedule_does(how):
    row_ptr, q_indices, schedule = build()
    want = attend(row_ptr, q_indices, schedule)
    for made, arrays in ((schedule, ARRAYS + WALK_PLAN), (prepare(row_ptr, q_indices), ARRAYS)):
        copied = COPIES[how](made)
        assert {name: getattr(copied, name) for name in NUMBERS} == {name: getattr(made, name) for name in NUMBERS}
        for name in arrays:
            np.testing.assert_array_equal(getattr(copied, name), getattr(made, name))
            if how != "copy":
                getattr(made, name).fill(-1)  # the copy has memory of its own
        np.testing.assert_array_equal(attend(row_ptr, q_indices, copied), want)


@pytest.mark.parametrize("how", COPIES)
def test_a_disabled_schedule_can_be_copied(how):
    row_ptr, q_indices, _ = build()
    copied = COPIES[how](prepare(row_ptr, q_indices, enabled=False))
    assert isinstance(copied, Schedule) and not copied.enabled and copied.work_count is None


@needs_simulator
@pytest.mark.parametrize("name", ARRAYS + WALK_PLAN)
def test_an_array_that_was_resized_in_place_is_named(name):
    """Its memory may be gone."""
    row_ptr, q_indices, schedule = build()
    array = getattr(schedule, name)
    array.resize((1 << 20, *array.shape[1:]), refcheck=False)
    with pytest.raises(ValueError, match=rf"^schedule.{name}: expected the memory that it had at first"):
        attend(row_ptr, q_indices, schedule)


def test_what_is_restored_must_be_what_a_schedule_has():
    schedule = build()[2]
    arrays = [getattr(schedule, name) for name in ARRAYS]
    numbers = schedule.__reduce__()[1][1:]
    _restore(arrays, *numbers)
    for wrong, error in ((arrays[0].astype(np.int64), TypeError), (arrays[0].T, ValueError)):
        with pytest.raises(error, match="scheduler_metadata: expected"):
            _restore([wrong, *arrays[1:]], *numbers)


@on_stub
def test_a_restored_schedule_notices_that_an_array_was_resized():
    """Copies of torch tensors can be, unlike what the exchange API allocates."""
    call = Call()
    schedule = copy.deepcopy(call.arguments["schedule"])
    call.run(schedule=schedule)
    schedule.walk_counts.resize_(1 << 20, 1 << 4)
    with pytest.raises(ValueError, match=r"^schedule.walk_counts: expected the memory that it had at first"):
        call.run(schedule=schedule)


@on_stub
def test_a_schedule_whose_totals_are_no_array_says_why_it_cannot_be_pickled():
    """JAX may have int32 of them; without a walk plan there are none."""
    q2k, cu_q, cu_k = (DeviceArray(array) for array in (np.zeros((2, 20, 4), np.int32), CU_SEQLENS_Q, CU_SEQLENS_K))
    schedule = build_k2q_csr(q2k, cu_q, cu_k, total_k=300, total_rows=4, return_schedule=True)[2]
    assert copy.copy(schedule) is schedule
    for refused in (pickle.dumps, copy.deepcopy):
        with pytest.raises(
            TypeError, match="Schedule with a walk plan in arrays of type DeviceArray cannot be pickled"
        ):
            refused(schedule)
