"""The schedule as an object: what it knows of its CSR, and that it can be kept, copied and sent elsewhere."""

import copy
import gc
import json
import pickle
import weakref

import numpy as np
import pytest
from calls import Call
from host_calls import CU_SEQLENS_K, CU_SEQLENS_Q, HEAD_KV, TOPK, TOTAL_Q, G, attend, build
from places import needs_simulator, planned
from stub_driver import on_stub, run_python

from sparse_aot import Schedule, build_k2q_csr, prepare_sparse_fwd_schedule_and_split, sparse_atten_func
from sparse_aot.msa._schedule import _restore
from sparse_aot.msa.validate import check_schedule, check_walk_plan

ARRAYS = ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries")
WALK_PLAN = ("walk_blocks", "walk_counts", "walk_flags", "rest_indices")
NUMBERS = ("enabled", "target_q_per_cta", "work_capacity", "qhead_per_kv", "total_rows", "batch", "csr_digest")


def prepare(row_ptr, q_indices, **changes):
    arguments = {
        "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices, "k2q_qsplit_indices": np.empty_like(q_indices),
        "split_counts": np.empty((TOTAL_Q, HEAD_KV), np.int32), "cu_seqlens_q": CU_SEQLENS_Q,
        "cu_seqlens_k": CU_SEQLENS_K, "total_q": TOTAL_Q, "topk": TOPK, "head_kv": HEAD_KV, "qhead_per_kv": G,
        "blk_kv": 128, "device": None, "enabled": True,
    }  # fmt: skip
    return prepare_sparse_fwd_schedule_and_split(**arguments | changes)


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


@needs_simulator
def test_a_schedule_of_a_csr_whose_rows_are_other_blocks_is_refused():
    """The bytes of both CSRs are the same: what differs is which sequence and block their rows are."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    def made(blocks, cu_seqlens_k):
        q2k = np.tile(np.array([*blocks, -1], np.int32), (1, 4, 1))
        return build_k2q_csr(q2k, cu_q, cu_seqlens_k, total_k=1024, total_rows=8, return_schedule=True)

    cu_q = np.array([0, 4, 4], np.int32)
    one, other = np.array([0, 512, 1024], np.int32), np.array([0, 384, 1024], np.int32)
    row_ptr, q_indices, schedule = made([0, 2, 3], one)
    same = made([0, 1, 2], other)
    assert schedule.csr_digest != same[2].csr_digest
    q, k = (np.zeros((n, 1, 128), bfloat16) for n in (4, 1024))
    call = {"cu_seqlens_q": cu_q, "topk": 4}
    sparse_atten_func(q, k, k, row_ptr, q_indices, cu_seqlens_k=one, schedule=schedule, **call)
    with pytest.raises(ValueError, match="schedule: expected one for this"):
        sparse_atten_func(q, k, k, row_ptr, q_indices, cu_seqlens_k=other, schedule=schedule, **call)


def test_the_digest_is_of_the_csr_alone():
    row_ptr, q_indices, schedule = build()
    assert 0 <= schedule.csr_digest < 1 << 64
    assert build(qhead_per_kv=16)[2].csr_digest == schedule.csr_digest
    q_indices[:, row_ptr[:, -1].max() :] = 77  # the tail is of no entry
    assert prepare(row_ptr, q_indices).csr_digest == schedule.csr_digest
    assert build(total_rows=9)[2].csr_digest != schedule.csr_digest  # a CSR with other rows, if empty ones


@needs_simulator
def test_a_schedule_for_another_number_of_query_heads_is_right_and_said_once():
    """The default of qhead_per_kv is 1. In a process of its own: once is once in a process."""
    code = """
from host_calls import *
row_ptr, q_indices, schedule = build()
want, *got = (attend(row_ptr, q_indices, made) for made in (schedule, *2 * build(qhead_per_kv=1)[2:]))
print([float(np.abs(out.view(ml_dtypes.bfloat16) - want.view(ml_dtypes.bfloat16)).max()) for out in got])
"""
    done = run_python(code, PYTHONWARNINGS="always")
    assert max(json.loads(done.stdout)) < 0.02, done.stderr
    said = "schedule: made with qhead_per_kv=1, but q has 2 query heads a KV head."
    assert done.stderr.count(said) == 1 and "pass qhead_per_kv=2 where" in done.stderr


def validated(seed, **options):
    """The arguments of ``check_schedule`` for a schedule as it is made, in arrays that may be changed."""
    row_ptr, q_indices, schedule = build(seed, **options)
    return {
        "cu_seqlens_q": CU_SEQLENS_Q, "cu_seqlens_k": CU_SEQLENS_K, "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices,
        "metadata": schedule.scheduler_metadata, **{name: getattr(schedule, name) for name in ARRAYS[1:]},
    }  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"total_rows": 9}, {"qhead_per_kv": 16}], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_validation_takes_a_schedule_as_it_is_made(seed, options):
    arrays = validated(seed, **options)
    check_schedule(**arrays)
    items = arrays["metadata"][: arrays["work_count"][0]]
    items[:] = items[::-1].copy()  # their order is free
    check_schedule(**arrays)


def two_items(arrays):
    """Replace the first item that has two entries by one of each, and give both."""
    at = int(np.flatnonzero(arrays["metadata"][:, 3] > 1)[0])
    first = arrays["metadata"][at]
    second = first.copy()
    second[2] += 1
    second[3] -= 1
    first[3] = 1
    arrays["metadata"] = np.insert(arrays["metadata"], arrays["work_count"][0], second, axis=0)
    arrays["work_count"] += 1
    return arrays["metadata"][at], arrays["metadata"][arrays["work_count"][0] - 1]


def swap_slots(arrays):
    """The slots of a token that has two are exchanged in one array, not in the other."""
    head, token = np.argwhere(arrays["split_entries"][:, :, 1] >= 0)[0]
    entries = arrays["split_entries"][head, token]
    entries[:2] = entries[1::-1]


DAMAGE = {
    "an item less": (lambda a: a["work_count"].__isub__(1), "scheduler_metadata: expected items that have every entry"),
    "an item twice": (
        lambda a: two_items(a)[1].__setitem__(2, 0),
        "scheduler_metadata: expected items that have every",
    ),
    "an entry twice": (
        lambda a: two_items(a)[0].__setitem__(3, 2),
        "scheduler_metadata: expected items that have every",
    ),
    "another row": (lambda a: a["metadata"][0].__setitem__(1, 99), "scheduler_metadata: CSR row: expected values from"),
    "another head": (
        lambda a: a["metadata"][0].__setitem__(0, -1),
        "scheduler_metadata: KV head: expected values from",
    ),
    "no such sequence": (lambda a: a["metadata"][0].__setitem__(4, 2), "scheduler_metadata: sequence: expected values"),
    "another sequence": (
        lambda a: a["metadata"][0].__setitem__(4, 1 - a["metadata"][0][4]),
        "the sequence and the block of each item's",
    ),
    "two blocks of a row": (
        lambda a: two_items(a)[1].__setitem__(5, 1 << 20),
        "the sequence and the block of each item's",
    ),
    "too many items": (lambda a: a["work_count"].fill(1 << 20), "work_count: expected values from 0 to"),
    "a count": (lambda a: a["split_counts"][3].__iadd__(1), "split_counts: expected the number of entries"),
    "slots": (swap_slots, "split_entries: expected the entry of each split slot"),
    "a slot": (
        lambda a: a["qsplit_indices"][0, :1].__iadd__(3 << 24),
        r"qsplit_indices >> 24 \(split slots\): expected",
    ),
    "a slot past topk": (
        lambda a: a["qsplit_indices"][0, :1].__iadd__(9 << 24),
        r"split slots\): expected values from 0",
    ),
    "a token": (
        lambda a: a["qsplit_indices"][0, :1].__iadd__(1),
        "qsplit_indices: expected the tokens of k2q_q_indices",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_validation_names_what_is_not_of_the_csr(what):
    damage, message = DAMAGE[what]
    arrays = validated(0)
    damage(arrays)
    with pytest.raises(ValueError, match=f"^schedule.*{message}"):
        check_schedule(**arrays)


@needs_simulator
def test_with_validation_a_call_on_host_arrays_works():
    code = "from host_calls import *; csr = build(); attend(*csr); attend(*csr[:2], None)"
    run_python(code, SPARSE_AOT_VALIDATE="1")


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


def walk_plan(traversal, seed, **options):
    """The arguments of ``check_walk_plan`` for a schedule as it is made."""
    with planned(traversal):
        row_ptr, q_indices, schedule = build(seed, **options)
    names = ("split_entries", *WALK_PLAN)
    arrays = {name: getattr(schedule, name) for name in names}
    csr = {"cu_seqlens_k": CU_SEQLENS_K, "k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices}
    return csr | arrays | {"qhead_per_kv": schedule.qhead_per_kv}


PLAN_DAMAGE = {
    "a sequence": (lambda a: a["walk_blocks"][0, 0, 0].__setitem__(0, 77), "walk_blocks: expected the entries"),
    "a block": (lambda a: a["walk_blocks"][0, 0, 0].__setitem__(1, 1 << 30), "walk_blocks: expected the entries"),
    "a token": (lambda a: a["walk_blocks"][0, 0, 0, 2:].__ixor__(1), "walk_blocks: expected the entries"),
    "a block less": (lambda a: a["walk_counts"][0].__isub__(1), "walk_blocks: expected the entries"),
    "a count": (lambda a: a["walk_counts"][0].fill(129), "walk_counts, but for"),
    "nothing left": (lambda a: a["walk_counts"][0].__ixor__(1 << 30), "walk_counts: expected"),
    "a flag": (lambda a: a["walk_flags"].__ixor__(1), "walk_flags: expected whether"),
    "another token": (lambda a: a["rest_indices"].fill(1), "rest_indices: expected the tokens"),
    "a mark": (lambda a: a["split_entries"].__ixor__(1 << 30), "split_entries: expected"),
}


@pytest.mark.parametrize("options", [{}, {"total_rows": 9}, {"qhead_per_kv": 1}, {"qhead_per_kv": 16}], ids=str)
@pytest.mark.parametrize("traversal", ["csr", "mixed", "walk", None])
def test_validation_takes_a_walk_plan_as_it_is_made(traversal, options):
    for seed in range(3):
        check_walk_plan(**walk_plan(traversal, seed, **options))


@pytest.mark.parametrize("what", PLAN_DAMAGE)
def test_validation_names_what_is_wrong_in_a_walk_plan(what):
    damage, message = PLAN_DAMAGE[what]
    arrays = walk_plan("walk", 0)
    assert arrays["walk_counts"].all()
    damage(arrays)
    with pytest.raises(ValueError, match=f"^schedule.({message})"):
        check_walk_plan(**arrays)
