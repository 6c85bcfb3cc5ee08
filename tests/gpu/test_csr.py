"""CSR and schedule built on the device: against the reference, and bit for bit against the host code."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pipeline import Guarded, build  # noqa: E402
from reference import BLOCK, check_schedule, make_case, ragged, random_q2k  # noqa: E402

from sparse_aot import build_k2q_csr, prepare_sparse_fwd_schedule_and_split  # noqa: E402

SHAPES = {  # batch, longest query, longest key sequence
    "one sequence": (1, 3000, 20_000),
    "ragged batch": (9, 500, 5000),
    "more than 2048 rows": (1, 300, 400_000),
    "many short sequences": (1500, 6, 300),
    "one token each": (64, 1, 40_000),
    "4096 sequences": (4096, 3, 700),
}
WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_totals")
SCHEDULE_ARRAYS = ("qsplit_indices", "split_counts", "split_entries", *WALK_ARRAYS, "work_count")


def csr_case(shape, topk, head_kv, seed=0, qhead_per_kv=4):
    batch, max_q, max_k = SHAPES[shape]
    rng = np.random.default_rng(seed)
    lens_q, lens_k = ragged(rng, batch, max_q, max_k) if batch > 1 else ([max_q], [max_k])
    q2k = random_q2k(rng, lens_q, lens_k, head_kv, topk)
    tiny = {"head_kv": head_kv, "qhead_per_kv": qhead_per_kv, "topk": topk, "poison": False}
    return make_case(lens_q=lens_q, lens_k=lens_k, q2k=q2k, seed=seed, device="cuda", **tiny)


def numpy_of(plan, without=()):
    """row_ptr, q_indices, the schedule's arrays and its live work items, on the host."""
    row_ptr, q_indices, schedule = plan
    names = [name for name in SCHEDULE_ARRAYS if name not in without]
    arrays = [row_ptr, q_indices, *(getattr(schedule, name) for name in names), schedule.scheduler_metadata]
    arrays = [x if isinstance(x, np.ndarray) else x.cpu().numpy() for x in arrays]
    arrays[-1] = arrays[-1][: arrays[-2][0]]
    return arrays


def build_on_host(case):
    return build_k2q_csr(
        *(x.cpu().numpy() for x in (case.q2k, case.cu_seqlens_q, case.cu_seqlens_k)), BLOCK, total_k=case.total_k,
        max_seqlen_k=case.max_seqlen_k, max_seqlen_q=case.max_seqlen_q, total_rows=case.total_rows,
        qhead_per_kv=case.qhead_per_kv, return_schedule=True,
    )  # fmt: skip


def assert_same_as_on_host(plan, case):
    for on_device, on_host in zip(numpy_of(plan), numpy_of(build_on_host(case)), strict=True):
        assert isinstance(on_host, np.ndarray) and on_device.dtype == on_host.dtype
        np.testing.assert_array_equal(on_device, on_host)


@pytest.mark.parametrize("head_kv", [1, 4])
@pytest.mark.parametrize("topk", [4, 16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_device_csr_and_schedule_equal_the_host_ones_and_the_reference(shape, topk, head_kv):
    case = csr_case(shape, topk, head_kv, seed=topk + head_kv)
    plan = build(case)
    row_ptr, q_indices, qsplit_indices, split_counts, split_entries, *_, work_count, items = numpy_of(plan)
    want = case.csr()
    np.testing.assert_array_equal(row_ptr, want.row_ptr)
    np.testing.assert_array_equal(q_indices, want.q_indices)
    np.testing.assert_array_equal(qsplit_indices, want.qsplit_indices)
    np.testing.assert_array_equal(split_counts, want.split_counts)
    np.testing.assert_array_equal(split_entries, want.split_entries(topk))
    schedule = plan[2]
    assert schedule.enabled and schedule.scheduler_metadata.shape == (schedule.work_capacity, 6)
    check_schedule(items, work_count[0], schedule.target_q_per_cta, want)

    host = build_on_host(case)[2]
    assert host.target_q_per_cta == schedule.target_q_per_cta and host.work_capacity == schedule.work_capacity
    assert_same_as_on_host(plan, case)


@pytest.mark.parametrize("qhead_per_kv", [1, 2, 4, 8, 16])
def test_schedule_is_a_cover_for_every_group_size(qhead_per_kv):
    case = csr_case("ragged batch", 16, 2, seed=3, qhead_per_kv=qhead_per_kv)
    plan = build(case)
    *_, work_count, items = numpy_of(plan)
    check_schedule(items, work_count[0], plan[2].target_q_per_cta, case.csr())
    assert_same_as_on_host(plan, case)


@pytest.mark.parametrize("qhead_per_kv", [1, 2, 4, 8, 16])
def test_groups_with_too_many_blocks_have_no_plan(qhead_per_kv):
    case = csr_case("more than 2048 rows", 32, 2, qhead_per_kv=qhead_per_kv)
    plan = build(case)
    assert (plan[2].walk_counts == 129).any() and plan[2].walk_totals[0] >= 1 << 40
    assert_same_as_on_host(plan, case)


def test_without_total_rows_it_is_read_from_cu_seqlens_k():
    case = csr_case("ragged batch", 8, 2)
    for with_rows, without in zip(build(case)[:2], build(case, total_rows=None)[:2], strict=True):
        assert torch.equal(with_rows, without)


def test_without_return_schedule_only_the_csr_is_returned():
    case = csr_case("ragged batch", 8, 2)
    row_ptr, q_indices = build(case, return_schedule=False)
    assert torch.equal(row_ptr, build(case)[0]) and torch.equal(q_indices, build(case)[1])


def test_two_builds_are_bitwise_equal():
    case = csr_case("more than 2048 rows", 16, 4)
    first = numpy_of(build(case))
    for _ in range(3):
        for a, b in zip(first, numpy_of(build(case)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", SHAPES)
def test_prepare_fills_the_given_buffers_like_the_build_and_nothing_beside_them(shape):
    case = csr_case(shape, 16, 2, seed=5)
    row_ptr, q_indices, schedule = build(case)
    total_q = case.q.shape[0]
    qsplit = Guarded(tuple(q_indices.shape), torch.int32)
    counts = Guarded((total_q, 2), torch.int32)
    prepared = prepare_sparse_fwd_schedule_and_split(
        k2q_row_ptr=row_ptr, k2q_q_indices=q_indices, k2q_qsplit_indices=qsplit.tensor, split_counts=counts.tensor,
        cu_seqlens_q=case.cu_seqlens_q, cu_seqlens_k=case.cu_seqlens_k, total_q=total_q,
        max_seqlen_q=case.max_seqlen_q, topk=case.topk, head_kv=2, qhead_per_kv=case.qhead_per_kv, blk_kv=BLOCK,
        device="cuda:0", enabled=True,
    )  # fmt: skip
    qsplit.assert_intact()
    counts.assert_intact()
    assert torch.equal(qsplit.tensor, schedule.qsplit_indices)
    assert torch.equal(counts.tensor, schedule.split_counts)
    made, given = (numpy_of((row_ptr, q_indices, of), without=WALK_ARRAYS) for of in (prepared, schedule))
    for a, b in zip(made, given, strict=True):
        np.testing.assert_array_equal(a, b)
