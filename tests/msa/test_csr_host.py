"""CSR and schedule of host arrays against plain loops over Python sets; bad arguments. Exactly equal, always."""

import itertools

import numpy as np
import pytest
from places import planned
from stub_driver import ImmutableArray

from sparse_aot import build_k2q_csr, prepare_sparse_fwd_schedule_and_split, sim
from sparse_aot.msa._csr_host import walk_rule

BLOCK = 128
WALK_ROWS = 128  # query rows of a group
WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_flags", "rest_indices")
FINAL = WALKED = 1 << 30  # in walk_counts, and in split_entries
NO_BLOCKS = (-1, -2, -(2**31), 2**31 - 1)


def offsets(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def count_rows(cu_seqlens_k):
    return int((-(-np.diff(cu_seqlens_k) // BLOCK)).sum())


def build(q2k, cu_q, cu_k, **options):
    return build_k2q_csr(q2k, cu_q, cu_k, total_k=int(cu_k[-1]), **options)


def build_all(q2k, cu_q, cu_k, **options):
    """The results by name, with a schedule."""
    row_ptr, q_indices, schedule = build(q2k, cu_q, cu_k, return_schedule=True, **options)
    return {"k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices} | arrays_of(schedule)


def arrays_of(schedule):
    assert schedule.enabled
    assert schedule.scheduler_metadata.shape == (schedule.work_capacity, 6)
    names = ("scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries")
    arrays = {name: getattr(schedule, name) for name in names} | {"target_q_per_cta": schedule.target_q_per_cta}
    arrays["split_entries"] -= WALKED * ((arrays["split_entries"] >= 0) & (arrays["split_entries"] & WALKED != 0))
    return arrays


def prepare(csr, q2k, cu_q, cu_k, g, **changes):
    """(schedule of a CSR, the two arrays that it fills)"""
    head_kv, total_q, topk = q2k.shape
    filled = {
        "k2q_qsplit_indices": np.full((head_kv, total_q * topk), 77, np.int32),
        "split_counts": np.full((total_q, head_kv), 77, np.int32),
    }
    arguments = {name: csr[name] for name in ("k2q_row_ptr", "k2q_q_indices")} | filled
    arguments |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "total_q": total_q, "max_seqlen_q": None, "topk": topk}
    arguments |= {"head_kv": head_kv, "qhead_per_kv": g, "blk_kv": BLOCK, "device": "cpu", "enabled": True}
    return prepare_sparse_fwd_schedule_and_split(**arguments | changes), filled


def brute_force(q2k, cu_q, cu_k, total_rows, target, bucket_tokens):
    """The contract, one token at a time."""
    head_kv, total_q, topk = q2k.shape
    blocks_of = [-(-int(n) // BLOCK) for n in np.diff(cu_k)]
    rows = sorted((block, sequence) for sequence, count in enumerate(blocks_of) for block in range(count))
    number = {row: i for i, row in enumerate(rows)}
    row_ptr = np.zeros((head_kv, total_rows + 1), np.int32)
    q_indices = np.full((head_kv, total_q * topk), -1, np.int32)
    qsplit_indices = q_indices.copy()
    split_counts = np.zeros((total_q, head_kv), np.int32)
    split_entries = np.full((head_kv, total_q, topk), -1, np.int32)
    items = []
    for head in range(head_kv):
        entries = []  # (row, token, slot)
        for sequence, blocks in enumerate(blocks_of):
            for token in range(cu_q[sequence], cu_q[sequence + 1]):
                kept = sorted(set(q2k[head, token].tolist()) & set(range(blocks)))
                split_counts[token, head] = len(kept)
                entries += [(number[block, sequence], token, slot) for slot, block in enumerate(kept)]
        entries.sort()
        for i, (row, token, slot) in enumerate(entries):
            q_indices[head, i] = token
            qsplit_indices[head, i] = token | slot << 24
            split_entries[head, token, slot] = i
            row_ptr[head, row + 1 :] += 1
            first = i - int(row_ptr[head, row])
            if first % target == 0:
                items.append([head, token // bucket_tokens, row, first, 0, rows[row][1], rows[row][0]])
        for item in items:
            if item[0] == head:
                item[4] = min(target, int(row_ptr[head, item[2] + 1] - row_ptr[head, item[2]]) - item[3])
    items.sort()
    return {
        "k2q_row_ptr": row_ptr,
        "k2q_q_indices": q_indices,
        "qsplit_indices": qsplit_indices,
        "split_counts": split_counts,
        "split_entries": split_entries,
        "items": np.array([item[:1] + item[2:] for item in items], np.int32).reshape(-1, 6),
    }


def walk_plan(q2k, cu_q, cu_k, g, csr, cost=5, gain=5):
    """The walk plan's arrays, from the set of blocks of each group: what each group walks by the rule, in eighths."""
    head_kv, total_q, _ = q2k.shape
    tokens = WALK_ROWS // g
    groups, words = -(-total_q // tokens), -(-tokens // 32)
    blocks = np.zeros((head_kv, groups, 128, 2 + words), np.uint32)
    counts = np.zeros((head_kv, groups), np.int32)
    rest = csr["k2q_q_indices"].copy()
    entries = csr["split_entries"].copy()
    blocks_of = [-(-int(n) // BLOCK) for n in np.diff(cu_k)]
    sequence_of = {t: s for s in range(len(cu_q) - 1) for t in range(cu_q[s], cu_q[s + 1])}
    for head in range(head_kv):
        for group in range(groups):
            bits = {}  # (block, sequence) -> tokens
            for t in range(min(tokens, total_q - group * tokens)):
                token = group * tokens + t
                sequence = sequence_of.get(token)
                kept = set(q2k[head, token].tolist()) & set(range(0 if sequence is None else blocks_of[sequence]))
                for slot, block in enumerate(sorted(kept)):
                    bits.setdefault((block, sequence), []).append((t, slot))
            price = {row: 8 * len(members) for row, members in bits.items()}
            prices = {
                "none": sum(price.values()),
                "all": cost * tokens * len(bits),
                "some": sum(min(cost * tokens, eighths) for eighths in price.values()) + gain * tokens,
            }
            if not bits or len(bits) > 128 or prices["none"] <= min(prices["all"], prices["some"]):
                walked = []
            elif prices["all"] <= prices["some"]:
                walked = sorted(bits)
            else:
                walked = sorted(row for row in bits if price[row] > cost * tokens)
            counts[head, group] = len(walked) + (FINAL if walked and len(walked) == len(bits) else 0)
            for i, row in enumerate(walked):
                field = sum(1 << t for t, _ in bits[row])
                blocks[head, group, i] = [row[1], row[0], *(field >> 32 * w & 0xFFFFFFFF for w in range(words))]
                for t, slot in bits[row]:
                    rest[head, entries[head, group * tokens + t, slot]] = -1
                    entries[head, group * tokens + t, slot] |= WALKED
    left = (rest >= 0).any()
    return {
        "walk_blocks": blocks.view(np.int32),
        "walk_counts": counts,
        "walk_flags": np.array([counts.any(), left, (counts & FINAL == 0).any()], np.int32),
        "rest_indices": rest,
        "split_entries": entries,
    }


def assert_walk_plan(schedule, want):
    for name, array in want.items():
        got = getattr(schedule, name)
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array, name)


def assert_equal(got, want):
    items = want["items"]
    assert got["work_count"].tolist() == [len(items)]
    assert len(items) <= len(got["scheduler_metadata"]), "work_capacity is an upper bound"
    np.testing.assert_array_equal(got["scheduler_metadata"][: len(items)], items)
    assert not got["scheduler_metadata"][len(items) :].any(), "unused rows are 0"
    for name in ("k2q_row_ptr", "k2q_q_indices", "qsplit_indices", "split_counts", "split_entries"):
        assert got[name].dtype == np.int32
        np.testing.assert_array_equal(got[name], want[name], name)


def random_case(seed):
    """(q2k, cu_seqlens_q, cu_seqlens_k, total_rows, G): ragged, empty sequences, padding tokens, padding rows."""
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 3, 17, 200]))
    lens_q = rng.integers(0, max(2, 400 // batch), batch) * (rng.random(batch) > 0.3)
    lens_k = rng.integers(0, 4000 // batch + 300, batch) * (rng.random(batch) > 0.3)
    head_kv, topk = int(rng.integers(1, 4)), int(rng.choice([4, 8, 16, 32]))
    blocks = np.repeat(-(-lens_k // BLOCK), lens_q)
    blocks = np.concatenate([blocks, np.full(rng.choice([0, 3]), 5)])  # tokens of no sequence
    q2k = (rng.random((head_kv, len(blocks), topk)) * (blocks[:, None] + 1)).astype(np.int32)
    kind = rng.random(q2k.shape)
    q2k[kind < 0.2] = rng.choice(NO_BLOCKS, (kind < 0.2).sum())
    q2k[kind > 0.8] = 0  # duplicates, and a hot block
    q2k[rng.random(q2k.shape[:2]) < 0.1] = -1
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    return q2k, cu_q, cu_k, count_rows(cu_k) + int(rng.choice([0, 0, 5])), int(rng.choice([1, 2, 4, 8, 16]))


@pytest.mark.parametrize("seed", range(60))
def test_random_cases_equal_brute_force(seed):
    q2k, cu_q, cu_k, total_rows, g = random_case(seed)
    got = build_all(q2k, cu_q, cu_k, total_rows=total_rows, qhead_per_kv=g)
    assert_equal(got, brute_force(q2k, cu_q, cu_k, total_rows, got["target_q_per_cta"], 128))


@pytest.mark.parametrize("seed", range(60))
def test_schedule_of_a_csr_equals_the_one_made_with_it(seed):
    q2k, cu_q, cu_k, total_rows, g = random_case(seed)
    want = build_all(q2k, cu_q, cu_k, total_rows=total_rows, qhead_per_kv=g)
    schedule, filled = prepare(want, q2k, cu_q, cu_k, g)
    assert schedule.qsplit_indices is filled["k2q_qsplit_indices"]
    assert schedule.split_counts is filled["split_counts"]
    got = arrays_of(schedule)
    for name, array in got.items():
        np.testing.assert_array_equal(array, want[name], name)


@pytest.mark.parametrize("seed", range(60))
def test_walk_plan_equals_brute_force(seed):
    q2k, cu_q, cu_k, total_rows, g = random_case(seed)
    if seed % 2:
        q2k[:, :, : q2k.shape[2] // 2] = q2k[:, :1, : q2k.shape[2] // 2]  # much that all share
    csr = build_csr_only(q2k, cu_q, cu_k, total_rows, g)
    for cost, gain in ((5, 5), (0, 0), (9, 0), (4, 0), (8, 1), (2, 20)):
        before = walk_rule(cost, gain, 0)
        try:
            _, _, schedule = build(q2k, cu_q, cu_k, total_rows=total_rows, qhead_per_kv=g, return_schedule=True)
        finally:
            walk_rule(*before)
        assert_walk_plan(schedule, walk_plan(q2k, cu_q, cu_k, g, csr, cost, gain))


def build_csr_only(q2k, cu_q, cu_k, total_rows, g):
    """What the same selection gives where nothing is walked."""
    with planned("csr"):
        return build_all(q2k, cu_q, cu_k, total_rows=total_rows, qhead_per_kv=g)


@pytest.mark.parametrize("g", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("distinct", [127, 128, 129, 250])
def test_a_union_has_up_to_128_blocks(distinct, g):
    total_q = 400
    rng = np.random.default_rng(distinct)
    q2k = rng.integers(0, 3, (2, total_q, 32), np.int32)
    first = q2k[0, : WALK_ROWS // g].reshape(-1)
    first[:distinct] = rng.permutation(300)[:distinct]
    first[distinct:] = first[0]
    cu_q, cu_k = offsets([total_q]), offsets([300 * BLOCK])
    csr = build_csr_only(q2k, cu_q, cu_k, 300, g)
    with planned("walk"):
        _, _, schedule = build(q2k, cu_q, cu_k, total_rows=300, qhead_per_kv=g, return_schedule=True)
    assert schedule.walk_counts[0, 0] == (distinct | FINAL if distinct <= 128 else 0)
    assert_walk_plan(schedule, walk_plan(q2k, cu_q, cu_k, g, csr, 0, 0))


@pytest.mark.parametrize(
    "members, others, walked",
    [(5, 0, 0), (6, 0, 8 | FINAL), (8, 0, 8 | FINAL), (8, 1, 9 | FINAL), (8, 2, 8), (5, 3, 0), (6, 9, 8)],
)
def test_what_pays_is_walked(members, others, walked):
    """A block costs five eighths of an entry for each of the eight tokens; to leave something costs as much once more.

    ``members`` of the tokens select eight blocks; each of ``others`` blocks is selected by one."""
    q2k = np.full((1, 8, 32), -1, np.int32)
    q2k[0, :members, :8] = np.arange(8)
    for i in range(others):
        q2k[0, i % 8, 8 + i // 8] = 8 + i
    _, _, schedule = build(q2k, offsets([8]), offsets([200 * BLOCK]), qhead_per_kv=16, return_schedule=True)
    assert schedule.walk_counts.tolist() == [[walked]]


def test_only_the_build_makes_a_walk_plan():
    q2k, cu_q, cu_k, _, g = random_case(4)
    schedule, _ = prepare(build_all(q2k, cu_q, cu_k), q2k, cu_q, cu_k, g)
    disabled, _ = prepare(build_all(q2k, cu_q, cu_k), q2k, cu_q, cu_k, g, enabled=False)
    assert all(getattr(made, name) is None for made in (schedule, disabled) for name in WALK_ARRAYS)


def test_few_groups_and_architectures_that_do_not_walk_have_no_plan(monkeypatch):
    def planned_for(groups):
        q2k = np.zeros((2, groups * 8, 4), np.int32)
        *_, schedule = build(q2k, offsets([groups * 8]), offsets([300]), qhead_per_kv=16, return_schedule=True)
        return [getattr(schedule, name) is not None for name in WALK_ARRAYS]

    before = walk_rule()
    try:
        assert planned_for(66) == [True] * 4 and planned_for(65) == [False] * 4
    finally:
        walk_rule(*before)
    monkeypatch.setattr(sim, "options", sim.Options(arch="sm_100f"))
    assert planned_for(66) == [False] * 4


@pytest.mark.parametrize("batch", [1, 2, 31, 32, 33, 4096])
def test_rows_number_blocks_outermost_for_any_batch(batch):
    rng = np.random.default_rng(batch)
    lens_k = rng.integers(0, 700, batch)
    lens_q = np.ones(batch, np.int64)
    q2k = np.tile(np.arange(8, dtype=np.int32), (1, batch, 1))
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    row_ptr, q_indices = build(q2k, cu_q, cu_k)
    rows = sorted((block, sequence) for sequence in range(batch) for block in range(-(-lens_k[sequence] // BLOCK)))
    np.testing.assert_array_equal(row_ptr[0], np.arange(len(rows) + 1))
    np.testing.assert_array_equal(q_indices[0, : len(rows)], [sequence for _, sequence in rows])
    assert (q_indices[0, len(rows) :] == -1).all()


@pytest.mark.parametrize(
    "total_q, g, target", [(64, 16, 32), (64, 1, 512), (1 << 17, 16, 128), (1 << 18, 1, 1024), (1 << 19, 4, 512)]
)
def test_items_have_512_to_2048_query_rows(total_q, g, target):
    q2k = np.zeros((1, total_q, 16), np.int32)
    _, _, schedule = build(q2k, offsets([total_q]), offsets([BLOCK]), qhead_per_kv=g, return_schedule=True)
    assert schedule.target_q_per_cta == target
    assert schedule.scheduler_metadata[: schedule.work_count[0], 3].max() <= target
    assert schedule.scheduler_metadata[:, 3].sum() == total_q


def test_items_are_ordered_by_the_bucket_of_their_first_token():
    total_q, rows = 1 << 19, 300  # more tokens than 256 buckets of 128: buckets of 2048
    rng = np.random.default_rng(0)
    q2k = rng.integers(0, rows, (2, total_q, 4), np.int32)
    got = build_all(q2k, offsets([total_q]), offsets([rows * BLOCK]), qhead_per_kv=16)
    items = got["scheduler_metadata"][: got["work_count"][0]]
    head, row, first = items[:, 0], items[:, 1], items[:, 2]
    bucket = got["k2q_q_indices"][head, got["k2q_row_ptr"][head, row] + first] // 2048
    np.testing.assert_array_equal(np.lexsort((first, row, bucket, head)), np.arange(len(items)))


@pytest.mark.parametrize("lens_q, lens_k", [([0], [0]), ([0, 0], [5, 300]), ([4, 4], [0, 0]), ([4, 0, 4], [0, 9, 200])])
def test_empty_sequences(lens_q, lens_k):
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    q2k = np.zeros((2, int(cu_q[-1]), 4), np.int32)
    got = build_all(q2k, cu_q, cu_k)
    assert_equal(got, brute_force(q2k, cu_q, cu_k, count_rows(cu_k), got["target_q_per_cta"], 128))
    _, _, schedule = build(q2k, cu_q, cu_k, qhead_per_kv=8, return_schedule=True)
    if len(q2k[0]):
        assert_walk_plan(schedule, walk_plan(q2k, cu_q, cu_k, 8, got))
    else:
        assert schedule.walk_flags is None


def test_strides_of_q2k_are_honoured():
    q2k, cu_q, cu_k, _, _ = random_case(3)
    token_major = np.ascontiguousarray(q2k.transpose(1, 0, 2)).transpose(1, 0, 2)
    wide = np.full((*q2k.shape[:2], q2k.shape[2] + 3), 1, np.int32)
    wide[..., : q2k.shape[2]] = q2k
    want = build(q2k, cu_q, cu_k)
    for view in (token_major, wide[..., : q2k.shape[2]]):
        for got, expected in zip(build(view, cu_q, cu_k), want, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("hint", [None, 0, 1, 2**31 - 1])
def test_stale_length_hints_are_harmless(hint):
    q2k, cu_q, cu_k, _, _ = random_case(5)
    want = build(q2k, cu_q, cu_k)
    for got, expected in zip(build(q2k, cu_q, cu_k, max_seqlen_k=hint, max_seqlen_q=hint), want, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_results_are_of_the_type_that_went_in():
    torch = pytest.importorskip("torch")
    q2k, cu_q, cu_k, _, _ = random_case(7)
    want = build_all(q2k, cu_q, cu_k)
    got = build_all(*(torch.from_numpy(x) for x in (q2k, cu_q)), torch.from_numpy(cu_k))
    for name, array in want.items():
        if name != "target_q_per_cta":
            assert isinstance(got[name], torch.Tensor) and got[name].dtype == torch.int32
            np.testing.assert_array_equal(got[name].numpy(), array, name)


def test_a_tensor_without_memory_is_refused():
    torch = pytest.importorskip("torch")
    freed = torch.zeros((2, 10, 4), dtype=torch.int32)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q2k_indices: expected an array with memory"):
        build_k2q_csr(**GOOD | {"q2k_indices": freed})


def test_a_disabled_schedule_leaves_the_buffers_alone():
    q2k, cu_q, cu_k, _, g = random_case(8)
    schedule, filled = prepare(build_all(q2k, cu_q, cu_k), q2k, cu_q, cu_k, g, enabled=False)
    assert not schedule.enabled and schedule.scheduler_metadata is None and schedule.split_entries is None
    assert all((array == 77).all() for array in filled.values())


GOOD = {
    "q2k_indices": np.zeros((2, 10, 4), np.int32),
    "cu_seqlens_q": np.array([0, 4, 10], np.int32),
    "cu_seqlens_k": np.array([0, 100, 300], np.int32),
    "total_k": 300,
}


UNALIGNED = np.zeros(4 * 80 + 1, np.uint8)[1:].view(np.int32)


class Speaker:
    """Speaks DLPack, but no module makes arrays of its type."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


class Mute(Speaker):
    def __dlpack__(self, **options):
        raise RuntimeError("not today\nwith a backtrace")


def test_every_argument_but_the_first_may_be_of_any_type():
    want = build_k2q_csr(**GOOD)
    got = build_k2q_csr(**GOOD | {name: Speaker(GOOD[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")})
    for array, expected in zip(got, want, strict=True):
        assert type(array) is np.ndarray
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q2k_indices": np.zeros((2, 10), np.int32)}, ValueError, "q2k_indices: expected 3 dimensions, got 2"),
        ({"q2k_indices": np.zeros((2, 10, 4), np.int64)}, TypeError, "q2k_indices: expected dtype int32, got int64"),
        ({"q2k_indices": np.zeros((2, 10, 8), np.int32)[..., ::2]}, ValueError, "q2k_indices: .*contiguous last dim"),
        ({"q2k_indices": np.zeros((2, 10, 5), np.int32)}, NotImplementedError, r"q2k_indices: .*10, 5\]; topk: supp"),
        ({"q2k_indices": np.zeros((0, 10, 4), np.int32)}, ValueError, r"q2k_indices: .*\[0, 10, 4\]; Hkv: expected"),
        ({"q2k_indices": np.ma.zeros((2, 10, 4), np.int32)}, TypeError, "q2k_indices: .*without a mask"),
        ({"cu_seqlens_q": np.ma.masked_array([0, 4, 10], dtype=np.int32)}, TypeError, "cu_seqlens_q: .*without a mask"),
        ({"q2k_indices": [1]}, TypeError, "q2k_indices: expected an array that speaks DLPack"),
        ({"q2k_indices": np.lib.stride_tricks.as_strided(np.zeros(4, np.int32), (1, 1 << 24, 4), (0, 0, 4))},
         ValueError, "q2k_indices: .*total_q: expected from 0 to 16777215"),
        ({"cu_seqlens_q": np.array([0], np.int32)}, ValueError, "cu_seqlens_q"),
        ({"cu_seqlens_q": np.array([0, 4, 10], np.int64)}, TypeError, "cu_seqlens_q: expected dtype int32"),
        ({"cu_seqlens_q": np.array([0, 9, 4, 9, 10, 9], np.int32)[::2]}, ValueError, "cu_seqlens_q: .*contiguous"),
        ({"cu_seqlens_q": np.array([1, 4, 10], np.int32)}, ValueError, "cu_seqlens_q: expected 0 as the first"),
        ({"cu_seqlens_q": np.array([0, 4, 2], np.int32)}, ValueError, "cu_seqlens_q: expected non-decreasing"),
        ({"cu_seqlens_q": np.array([0, 4, 11], np.int32)}, ValueError, "cu_seqlens_q: expected at most 10 .total_q"),
        ({"cu_seqlens_k": np.array([0, 100], np.int32)}, ValueError, "cu_seqlens_k: expected 3 in dimension 0"),
        ({"cu_seqlens_k": np.array([0, -1, 300], np.int32)}, ValueError, "cu_seqlens_k: expected non-decreasing"),
        ({"cu_seqlens_k": np.array([0, 100, 301], np.int32)}, ValueError, "cu_seqlens_k: .*at most 300 .total_k"),
        ({"total_k": -1}, ValueError, "total_k: expected an integer from 0"),
        ({"total_k": 1.5}, TypeError, "total_k: expected an integer, got float"),
        ({"total_rows": 2}, ValueError, "total_rows: expected at least 3, the blocks in cu_seqlens_k, got 2"),
        ({"total_rows": -1}, ValueError, "total_rows: expected an integer from 0"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: expected an integer from 0"),
        ({"return_schedule": "no"}, TypeError, "return_schedule: expected True or False, got 'no'"),
        ({"return_schedule": None}, TypeError, "return_schedule: expected True or False, got None"),
        ({"total_k": 0}, ValueError, "cu_seqlens_k: .*at most 0 .total_k"),
        ({"blk_kv": 64}, NotImplementedError, "blk_kv: got 64; supported: 128"),
        ({"qhead_per_kv": 3}, NotImplementedError, "qhead_per_kv: got 3; supported: 1, 2, 4, 8, 16"),
        ({"qhead_per_kv": 4.0}, TypeError, "qhead_per_kv: expected an integer, got float"),
        ({"blk_kv": np.array([128, 128])}, TypeError, "blk_kv: expected an integer, got ndarray"),
        ({"stream": "main"}, TypeError, "stream: expected an int handle or an object with __cuda_stream__, got str"),
        ({"q2k_indices": UNALIGNED.reshape(2, 10, 4)}, ValueError, "q2k_indices: expected an address aligned to 4"),
        ({"cu_seqlens_k": UNALIGNED[:3]}, ValueError, "cu_seqlens_k: expected an address aligned to 4 bytes"),
        ({"q2k_indices": np.zeros((2, 10, 4), ">i4")}, ValueError, "q2k_indices: .*over DLPack: .*byte order"),
        ({"cu_seqlens_q": np.array([0, 4, 10], object)}, ValueError, "cu_seqlens_q: .*over DLPack: "),
        ({"q2k_indices": Speaker(np.zeros((2, 10, 4), np.int32))}, TypeError, "q2k_indices: .* no from_dlpack for Spe"),
        ({"cu_seqlens_q": Speaker(None)}, TypeError, "cu_seqlens_q: expected an array that speaks DLPack"),
        ({"cu_seqlens_q": Mute(GOOD["cu_seqlens_q"])}, ValueError, "cu_seqlens_q: .*over DLPack: not today"),
    ],
)  # fmt: skip
def test_bad_arguments_of_build_are_named(changes, error, message):
    build_k2q_csr(**GOOD)
    with pytest.raises(error, match=message):
        build_k2q_csr(**GOOD | changes)


@pytest.mark.parametrize("topk", [4, 8])
@pytest.mark.parametrize(
    "head_kv, order",
    [(2, (2, 1, 0)), *itertools.product((2, 4), [(1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])],
)
def test_a_selection_in_another_order_is_named(head_kv, order, topk):
    """Dimensions [Hkv, total_q, topk] of a right one, permuted; the tokens of cu_seqlens_q tell."""
    q2k = np.zeros((head_kv, 10, topk), np.int32).transpose(order)
    with pytest.raises((ValueError, NotImplementedError), match=r"^q2k_indices: expected \[Hkv, total_q, topk\], got"):
        build_k2q_csr(**GOOD | {"q2k_indices": np.ascontiguousarray(q2k)})


def test_with_total_rows_a_total_k_of_0_says_nothing():
    want = build_k2q_csr(**GOOD)
    for got, expected in zip(build_k2q_csr(**GOOD | {"total_k": 0, "total_rows": 3}), want, strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match=r"cu_seqlens_k: expected at most 1 \(total_k"):
        build_k2q_csr(**GOOD | {"total_k": 1, "total_rows": 3})


READ_ONLY = np.zeros((10, 2), np.int32)
READ_ONLY.flags.writeable = False
IMMUTABLE = ImmutableArray(np.zeros((10, 2), np.int32), device=(1, 0))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"k2q_row_ptr": np.zeros(4, np.int32)}, ValueError, "k2q_row_ptr: expected 2 dimensions, got 1"),
        ({"k2q_row_ptr": np.zeros((2, 0), np.int32)}, ValueError, "k2q_row_ptr: .*number of rows"),
        ({"k2q_row_ptr": np.zeros((3, 4), np.int32)}, ValueError, "k2q_row_ptr: expected 2 in dimension 0"),
        ({"k2q_row_ptr": np.zeros((2, 3), np.int32)}, ValueError, "total_rows: expected at least 3"),
        ({"k2q_row_ptr": np.full((2, 4), 1, np.int32)}, ValueError, "k2q_row_ptr: expected each head to run from 0"),
        ({"k2q_row_ptr": np.array([[0, 0, 0, 41]] * 2, np.int32)}, ValueError, "k2q_row_ptr: .*at most 40"),
        ({"k2q_row_ptr": np.array([[0, 5, 3, 9]] * 2, np.int32)}, ValueError, "k2q_row_ptr: expected non-decreasing"),
        ({"k2q_q_indices": np.full((2, 40), 10, np.int32)}, ValueError, "k2q_q_indices: expected ascending tokens"),
        ({"k2q_q_indices": np.zeros((2, 40), np.int32)}, ValueError, "k2q_q_indices: expected ascending tokens below"),
        ({"k2q_q_indices": np.zeros((2, 39), np.int32)}, ValueError, "k2q_q_indices: expected 40 in dimension 1"),
        ({"k2q_qsplit_indices": np.zeros((2, 41), np.int32)}, ValueError, "k2q_qsplit_indices: expected 40 in dim"),
        ({"split_counts": np.zeros((10, 3), np.int32)}, ValueError, "split_counts: expected 2 in dimension 1"),
        ({"split_counts": READ_ONLY}, ValueError, "split_counts: expected a writable array"),
        ({"split_counts": IMMUTABLE}, ValueError, "split_counts: expected a writable array"),
        ({"total_q": 9}, ValueError, r"k2q_q_indices: expected 36 in dimension 1 \(total_q \* topk\)"),
        ({"topk": 6}, NotImplementedError, "topk: got 6"),
        ({"head_kv": 1}, ValueError, "k2q_row_ptr: expected 1 in dimension 0"),
        ({"blk_kv": 64}, NotImplementedError, "blk_kv: got 64"),
        ({"qhead_per_kv": 32}, NotImplementedError, "qhead_per_kv: got 32"),
        ({"max_seqlen_q": "x"}, TypeError, "max_seqlen_q: expected an integer, got str"),
        ({"enabled": "no"}, TypeError, "enabled: expected True or False, got 'no'"),
        ({"device": "cuda:0"}, ValueError, "device: expected that of the arrays, the host, got 'cuda:0'"),
    ],
)  # fmt: skip
def test_bad_arguments_of_prepare_are_named(changes, error, message):
    arrays = {name: GOOD[name] for name in ("q2k_indices", "cu_seqlens_q", "cu_seqlens_k")}
    csr = build_all(*arrays.values())
    prepare(csr, *arrays.values(), 1)
    with pytest.raises(error, match=message):
        prepare(csr, *arrays.values(), 1, **changes)


@pytest.mark.parametrize(
    "written, other",
    [
        ("k2q_qsplit_indices", "k2q_q_indices"),
        ("k2q_qsplit_indices", "k2q_row_ptr"),
        ("k2q_qsplit_indices", "cu_seqlens_q"),
        ("split_counts", "cu_seqlens_k"),
        ("split_counts", "k2q_q_indices"),
        ("k2q_qsplit_indices", "split_counts"),
    ],
)
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_what_prepare_writes_must_not_overlap_what_it_reads(written, other, shift):
    arrays = {name: GOOD[name] for name in ("q2k_indices", "cu_seqlens_q", "cu_seqlens_k")}
    csr = build_all(*arrays.values())
    _, filled = prepare(csr, *arrays.values(), 1)
    good = csr | filled | arrays
    first, second = good[written], good[other]
    room = np.zeros(first.size + second.size, np.int32)

    def place(start):
        views = room[: first.size].reshape(first.shape), room[start : start + second.size].reshape(second.shape)
        views[1][...] = second
        return {name: view for name, view in zip((written, other), views, strict=True) if name not in arrays}, views[1]

    def run(start):
        placed, view = place(start)
        cu_seqlens = [view if name == other else arrays[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        return prepare(csr, arrays["q2k_indices"], *cu_seqlens, 1, **placed)

    run(first.size)  # neighbours do not overlap
    with pytest.raises(ValueError, match=f"{written}: expected memory of its own, got some of {other}"):
        run(max(0, min(first.size - 1, first.size // 2 + shift)))


class Copies:
    """A producer older than DLPack 1.0, each of whose exports is a copy that the capsule alone owns."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, stream=None):
        return self.array.copy().__dlpack__()


def test_what_a_producer_copies_to_hand_it_out_lives_as_long_as_the_call():
    cu_q, cu_k = offsets([2000, 3000]), offsets([40_000, 30_000])
    q2k = np.random.default_rng(0).integers(-1, 200, (1, 5000, 4), dtype=np.int32)
    want = build(q2k, cu_q, cu_k)
    for _ in range(20):
        got = build_k2q_csr(q2k, Copies(cu_q), Copies(cu_k), total_k=70_000)
        for array, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(array, expected)
