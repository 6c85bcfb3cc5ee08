"""Inputs of the functions that make CSR and schedule, and their results by name."""

from dataclasses import dataclass

import numpy as np
import torch
from places import HOST, TOPK, G
from reference import BLOCK, check_schedule, csr, offsets, ragged, random_q2k

from sparse_aot import build_k2q_csr, prepare_sparse_fwd_schedule_and_split

WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_flags", "rest_indices")
WALK_FINAL = WALKED = 1 << 30  # in walk_counts, and in split_entries
PLANNED = (*WALK_ARRAYS, "walked")  # of by_name, what a schedule without a walk plan has not
SPLIT_ARRAYS = ("qsplit_indices", "split_counts", "split_entries")


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
        assert_same({name: got[name] for name in wanted}, wanted)


def at(place, array):
    """An array of NumPy where calls of a place take it: as it is in the simulator. A tensor is there already."""
    if place.device == "cpu" or torch.is_tensor(array):
        return array
    return torch.from_numpy(np.ascontiguousarray(array)).to(place.device)


def on_host(value):
    """A tensor as an array of NumPy; anything else as it is."""
    return value.cpu().numpy() if torch.is_tensor(value) else value


def by_name(schedule):
    """Everything that a schedule holds, the items and walked blocks that exist only; ``walked``: which of the
    ``split_entries`` are."""
    names = ("work_count", *SPLIT_ARRAYS, *WALK_ARRAYS, "target_q_per_cta", "work_capacity")
    count = int(schedule.work_count[0])
    assert schedule.enabled and 0 <= count <= schedule.work_capacity
    assert schedule.scheduler_metadata.shape == (schedule.work_capacity, 6)
    arrays = {name: on_host(getattr(schedule, name)) for name in names}
    entries = arrays["split_entries"]
    arrays["walked"] = None
    if arrays["walk_flags"] is not None:
        arrays["walked"] = (entries >= 0) & (entries & WALKED != 0)
        arrays["split_entries"] = np.where(arrays["walked"], entries ^ WALKED, entries)
        counts = arrays["walk_counts"] & ~WALK_FINAL
        exists = np.arange(arrays["walk_blocks"].shape[2]) < counts[..., None]
        arrays["walk_blocks"] = np.where(exists[..., None], arrays["walk_blocks"], 0)
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


def half_shared():
    """Of eight tokens, blocks that all select, that most do, that few do, and some that are a token's own; for each
    group of them others, and groups that share everything or nothing."""
    rng = np.random.default_rng(0)
    tokens, topk = 400, 8
    group, slot = np.arange(tokens)[:, None] // 8, np.arange(topk)
    shared = (group * 3 + slot) % 100
    own = 100 + rng.permuted(np.tile(np.arange(50), (tokens, 1)), axis=1)[:, :topk]
    kept = rng.random((tokens, topk)) < np.array([1, 1, 0.9, 0.8, 0.7, 0.6, 0.4, 0.1])
    kept[(group % 7 == 1)[:, 0]] = True
    kept[(group % 7 == 2)[:, 0]] = False
    q2k = rng.permuted(np.where(kept, shared, own), axis=-1)[None]
    return Selection(q2k.astype(np.int32), [tokens], [150 * BLOCK], 16)


def any_selection(seed):
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 3, 17, 200]))
    head_kv, topk, g = int(rng.integers(1, 4)), int(rng.choice(TOPK)), int(rng.choice(G))
    sizes = (batch, 1 + 600 // batch, 1 + int(rng.choice([3000, 100_000])) // batch)
    padding, empty_rows = int(rng.choice([0, 3])), int(rng.choice([0, 5, 300]))
    return random_selection(seed, *sizes, head_kv, topk, g, padding, empty_rows=empty_rows)
