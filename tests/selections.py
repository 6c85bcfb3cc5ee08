"""Inputs of the functions that make CSR and schedule, and their results by name."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from places import HOST, TOPK, G
from reference import BLOCK, check_schedule, csr, offsets, ragged, random_q2k

from sparse_aot import build_k2q_csr, prepare_sparse_fwd_schedule_and_split
from sparse_aot.msa._csr import take_chunks
from sparse_aot.msa._csr_host import walk_rule

WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_flags", "rest_indices")
WALK_FINAL = 1 << 30  # in walk_counts
WALKED = np.int32(1 << 30)  # in split_entries
SPLIT_ARRAYS = ("qsplit_indices", "split_counts", "split_entries")


# How a build may go: (whether in the launches that a chunk takes, the groups from which on there is a walk plan).
WAYS = {
    "chunk": (True, 1 << 30),
    "any size": (False, 1 << 30),
    "chunk, walk plan": (True, 0),
    "any size, walk plan": (False, 0),
}


@contextlib.contextmanager
def going(way: str) -> Iterator[None]:
    """Builds go one of WAYS meanwhile; those that are no chunk never go its."""
    chunks, groups = WAYS[way]
    before = take_chunks(chunks), walk_rule(groups=groups)
    try:
        yield
    finally:
        take_chunks(before[0])
        walk_rule(*before[1])


@dataclass
class Selection:
    """What the functions take: blocks of each token, lengths, group size, and rows that no sequence has at the end."""

    q2k: np.ndarray
    lens_q: np.ndarray
    lens_k: np.ndarray
    g: int = 4
    empty_rows: int = 0

    def __post_init__(self):
        self.cu_q, self.cu_k = offsets(self.lens_q), offsets(self.lens_k)
        self.head_kv, self.total_q, self.topk = self.q2k.shape
        self.total_rows = int((-(-np.asarray(self.lens_k) // BLOCK)).sum()) + self.empty_rows

    def build(self, place=HOST, **changes):
        """The results by name."""
        options = {"total_k": int(self.cu_k[-1]), "total_rows": self.total_rows, "qhead_per_kv": self.g}
        options |= {"return_schedule": True} | changes
        arrays = (at(place, array) for array in (self.q2k, self.cu_q, self.cu_k))
        row_ptr, q_indices, *schedule = map(on_host, build_k2q_csr(*arrays, **options))
        return {"k2q_row_ptr": row_ptr, "k2q_q_indices": q_indices} | (by_name(*schedule) if schedule else {})

    def prepare(self, place=HOST, *, k2q_row_ptr, k2q_q_indices, qsplit_indices=None, split_counts=None, **_):
        """The arrays by name of the schedule that is made from a CSR, in the buffers that are given."""
        if qsplit_indices is None:
            qsplit_indices = at(place, np.full((self.head_kv, self.total_q * self.topk), 77, np.int32))
        if split_counts is None:
            split_counts = at(place, np.full((self.total_q, self.head_kv), 77, np.int32))
        schedule = prepare_sparse_fwd_schedule_and_split(
            k2q_row_ptr=at(place, k2q_row_ptr),
            k2q_q_indices=at(place, k2q_q_indices),
            k2q_qsplit_indices=qsplit_indices,
            split_counts=split_counts,
            cu_seqlens_q=at(place, self.cu_q),
            cu_seqlens_k=at(place, self.cu_k),
            total_q=self.total_q,
            max_seqlen_q=None,
            topk=self.topk,
            head_kv=self.head_kv,
            qhead_per_kv=self.g,
            blk_kv=BLOCK,
            device=place.device,
            enabled=True,
        )
        return by_name(schedule)

    def check(self, got):
        """What is in the CSR and in the schedule, if there is one, is right."""
        want = csr(self.q2k, self.cu_q, self.cu_k, self.total_rows)
        wanted = {"k2q_row_ptr": want.row_ptr, "k2q_q_indices": want.q_indices}
        if "items" in got:
            wanted |= {"qsplit_indices": want.qsplit_indices, "split_counts": want.split_counts}
            wanted |= {"split_entries": want.split_entries(self.topk)}
            check_schedule(got["items"], len(got["items"]), got["target_q_per_cta"], want)
        assert_same({name: without_plan(got)[name] for name in wanted}, wanted)


def without_plan(results):
    """What a schedule of the same CSR without a walk plan has."""
    if "split_entries" not in results:
        return results
    entries = results["split_entries"]
    return results | dict.fromkeys(WALK_ARRAYS) | {"split_entries": np.where(entries < 0, entries, entries & ~WALKED)}


def at(place, array):
    """An array of NumPy where calls of a place take it: as it is in the simulator. A tensor is there already."""
    if place.device == "cpu" or torch.is_tensor(array):
        return array
    return torch.from_numpy(np.ascontiguousarray(array)).to(place.device)


def on_host(value):
    """A tensor as an array of NumPy; anything else as it is."""
    return value.cpu().numpy() if torch.is_tensor(value) else value


def by_name(schedule):
    """Everything that a schedule holds, the items and walked blocks that exist only."""
    names = ("work_count", *SPLIT_ARRAYS, *WALK_ARRAYS, "target_q_per_cta", "work_capacity")
    count = int(schedule.work_count[0])
    assert schedule.enabled and 0 <= count <= schedule.work_capacity
    assert schedule.scheduler_metadata.shape == (schedule.work_capacity, 6)
    arrays = {name: on_host(getattr(schedule, name)) for name in names}
    if arrays["walk_blocks"] is not None:
        walked = np.arange(arrays["walk_blocks"].shape[2]) < (arrays["walk_counts"] & ~WALK_FINAL)[..., None]
        arrays["walk_blocks"] = arrays["walk_blocks"] * walked[..., None]
    return arrays | {"items": on_host(schedule.scheduler_metadata)[:count]}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert getattr(got[name], "dtype", None) == getattr(array, "dtype", None)
        np.testing.assert_array_equal(got[name], array, name)


def random_selection(seed, batch, max_q, max_k, head_kv, topk, g=4, padding=0, **options):
    """Lengths and blocks as tests/reference.py draws them, and ``padding`` tokens of no sequence that name blocks."""
    rng = np.random.default_rng(seed)
    lens_q, lens_k = ragged(rng, batch, max_q, max_k) if batch > 1 else ([max_q], [max_k])
    q2k = random_q2k(rng, lens_q, lens_k, head_kv, topk)
    q2k = np.concatenate([q2k, np.zeros((head_kv, padding, topk), np.int32)], axis=1)
    return Selection(q2k, lens_q, lens_k, g, **options)


def neighbours():
    """Every token selects the latest blocks up to its own, in any order."""
    last = (np.arange(500) + 1000) // BLOCK
    q2k = last[None, :, None] - np.arange(4)
    return Selection(np.random.default_rng(0).permuted(q2k, axis=-1).astype(np.int32), [500], [1500], 16)


def any_selection(seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 3, 17, 200]))
    head_kv, topk, g = int(rng.integers(1, 4)), int(rng.choice(TOPK)), int(rng.choice(G))
    sizes = (batch, 1 + 600 // batch, 1 + int(rng.choice([3000, 100_000])) // batch)
    padding, empty_rows = int(rng.choice([0, 3])), int(rng.choice([0, 5, 300]))
    return random_selection(seed, *sizes, head_kv, topk, g, padding, empty_rows=empty_rows)
