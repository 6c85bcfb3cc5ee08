"""What the package must compute, in plain torch and NumPy, how close it must come, and inputs to try.

Nothing here imports the package. Attention gathers the selected keys of every (token, KV head), so flat and paged
caches, any number of sequences and any subset of tokens take the same path, on the CPU or on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 128  # keys in a block, and in a page
DIM = 128
DROPPED_BLOCKS = (-1, -7, -(2**31), 2**31 - 1)  # block numbers that no sequence has
GARBAGE_PAGES = (-1, -123, -(2**31), 2**31 - 1, 1_000_000_007)
GATHER_BYTES = 1 << 29  # of gathered keys at a time


# ---------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Reference:
    """Results for some tokens, float32: ``out``, ``spread`` [n, Hq, 128]; ``lse``, ``lse_temperature`` [n, Hq].

    ``spread`` is the root of the sum of squares of what each key adds to ``out``: rounding them adds up to about that.
    """

    out: torch.Tensor
    spread: torch.Tensor
    lse: torch.Tensor
    lse_temperature: torch.Tensor

    @property
    def tolerance(self) -> torch.Tensor:
        """Of each element of ``out``: half a unit of bf16 for the result, and 4.5 times that of what P and the partial
        results are rounded by. The most that is seen of 10^5 elements is 3.6."""
        return 2**-8 * (self.out.abs() + 4.5 * self.spread)


def sparse_attention(
    q,
    k,
    v,
    q2k,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    page_table=None,
    seqused_k=None,
    causal=False,
    softmax_scale=None,
    lse_temperature_scale=1.0,
    tokens=None,
) -> Reference:
    """Block-sparse attention for ``tokens`` (int64 [n]; None = all), straight from ``q2k``.

    Tokens past ``cu_seqlens_q[-1]`` belong to no sequence and see nothing.
    """
    if tokens is None:
        tokens = torch.arange(q.shape[0], device=q.device)
    bytes_per_token = 4 * DIM * BLOCK * q2k.shape[0] * q2k.shape[2]
    parts = [
        _attend(
            q, k, v, q2k, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, causal, softmax_scale,
            lse_temperature_scale, part,
        )
        for part in tokens.split(max(1, GATHER_BYTES // bytes_per_token))
    ]  # fmt: skip
    return Reference(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _attend(q, k, v, q2k, cu_q, cu_k, page_table, seqused_k, causal, scale, temperature, tokens):
    head_kv = q2k.shape[0]
    n, group = tokens.shape[0], q.shape[1] // head_kv
    cu_q, cu_k = cu_q.long(), cu_k.long()
    in_sequence = tokens < cu_q[-1]
    seq = torch.searchsorted(cu_q[1:].contiguous(), tokens, right=True).clamp_(max=cu_q.shape[0] - 2)
    capacity = cu_k[seq + 1] - cu_k[seq]
    len_k = capacity if seqused_k is None else seqused_k.long()[seq]
    if page_table is None:
        len_k = torch.minimum(len_k, capacity)
    len_k = len_k.clamp(min=0)
    position = tokens - cu_q[seq]
    last_visible = len_k - 1
    if causal:
        last_visible = torch.minimum(last_visible, position + len_k - (cu_q[seq + 1] - cu_q[seq]))

    blocks = q2k[:, tokens].transpose(0, 1).long()  # [n, Hkv, topk]
    exists = (blocks >= 0) & (blocks < ((capacity + BLOCK - 1) // BLOCK)[:, None, None]) & in_sequence[:, None, None]
    blocks = torch.where(exists, blocks, -1).sort(-1).values
    exists = blocks >= 0
    exists[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]

    within = torch.arange(BLOCK, device=q.device)
    keys = (blocks[..., None] * BLOCK + within).flatten(2)  # [n, Hkv, topk * 128]
    visible = exists.repeat_interleave(BLOCK, -1) & (keys <= last_visible[:, None, None])
    heads = torch.arange(head_kv, device=q.device)[None, :, None]
    seqs = seq[:, None, None]
    if page_table is None:
        visible &= cu_k[seqs] + keys < k.shape[0]
    else:
        columns = keys // BLOCK
        pages = page_table.long()[seqs, columns.clamp(0, page_table.shape[1] - 1)]
        visible &= (columns < page_table.shape[1]) & (pages >= 0) & (pages < k.shape[0])
    keys = torch.where(visible, keys, 0)
    if k.shape[0] == 0:
        gathered_k = gathered_v = torch.zeros(*keys.shape, DIM, device=q.device)
    elif page_table is None:
        at = (torch.where(visible, cu_k[seqs] + keys, 0), heads)
        gathered_k, gathered_v = k[at].float(), v[at].float()
    else:
        at = (torch.where(visible, pages, 0), heads, keys % BLOCK)
        gathered_k, gathered_v = k[at].float(), v[at].float()
    gathered_k = torch.where(visible[..., None], gathered_k, 0.0)
    gathered_v = torch.where(visible[..., None], gathered_v, 0.0)

    queries = q[tokens].float().view(n, head_kv, group, DIM)
    scores = (queries @ gathered_k.transpose(-1, -2)) * (DIM**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    p = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = p.sum(-1, keepdim=True)
    share = torch.where(total > 0, 1 / total, 0.0)
    out = (p @ gathered_v) * share
    spread = (p.square() @ gathered_v.square()).sqrt() * share
    lse = torch.logsumexp(scores, -1)
    lse_temperature = torch.logsumexp(scores / temperature, -1)
    shape = (n, head_kv * group)
    return out.view(*shape, DIM), spread.view(*shape, DIM), lse.view(shape), lse_temperature.view(shape)


def assert_lse_close(got, want) -> None:
    """-inf in the same places, elsewhere within 5e-6 absolute and relative: the most that is seen is 2e-7."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    empty = want == -torch.inf
    assert torch.equal(got == -torch.inf, empty), "lse is -inf exactly where a row sees nothing"
    excess = ((got - want).abs() - 5e-6 * (1 + want.abs())).masked_fill(empty, -1.0)
    assert not excess.isnan().any() and (excess.numel() == 0 or excess.max() <= 0), f"lse off by {excess.max()} more"


def assert_out_close(out, reference: Reference) -> None:
    """Within ``reference.tolerance``, and exactly 0 for rows that see nothing."""
    assert out.dtype == torch.bfloat16 and out.shape == reference.out.shape
    difference = (out.float() - reference.out).abs()
    assert not difference.isnan().any(), "NaN in out"
    if difference.numel():
        excess = difference - reference.tolerance
        assert excess.max() <= 0, f"out off by {excess.max()} more, by {difference.max()} at most"
    assert not out[reference.lse == -torch.inf].any(), "out is 0 where a row sees nothing"


# ------------------------------------------------------------------------------------------------- CSR, schedule


@dataclass(frozen=True)
class Csr:
    """The reverse map block -> queries, int32 NumPy arrays; ``sequence`` and ``block`` describe the rows."""

    row_ptr: np.ndarray
    q_indices: np.ndarray
    qsplit_indices: np.ndarray
    split_counts: np.ndarray
    sequence: np.ndarray
    block: np.ndarray

    def split_entries(self, topk: int) -> np.ndarray:
        """[Hkv, total_q, topk]: in which entry of its head each split slot stands, -1 for slots not in use."""
        head, entry = np.nonzero(self.qsplit_indices >= 0)
        word = self.qsplit_indices[head, entry]
        entries = np.full((len(self.qsplit_indices), self.qsplit_indices.shape[1] // topk, topk), -1, np.int32)
        entries[head, word & 0xFFFFFF, word >> 24] = entry
        return entries


def csr(q2k: np.ndarray, cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray, total_rows: int | None = None) -> Csr:
    """CSR, split slots and split counts; ``total_rows`` above the live number of rows adds empty rows at the end."""
    head_kv, total_q, topk = q2k.shape
    num_blocks = -(-np.diff(cu_seqlens_k.astype(np.int64)) // BLOCK)
    sequence = np.repeat(np.arange(len(num_blocks)), num_blocks)
    block = np.arange(num_blocks.sum()) - np.repeat(num_blocks.cumsum() - num_blocks, num_blocks)
    order = np.lexsort((sequence, block))
    row_of = np.empty(len(order), np.int64)  # by sequence, then block
    row_of[order] = np.arange(len(order))
    first = num_blocks.cumsum() - num_blocks
    total_rows = len(order) if total_rows is None else total_rows

    token = np.arange(total_q)
    seq = np.searchsorted(cu_seqlens_q[1:], token, side="right")
    live = token < cu_seqlens_q[-1]
    seq[~live] = 0
    blocks = q2k.astype(np.int64)
    exists = (blocks >= 0) & (blocks < num_blocks[seq][None, :, None]) & live[None, :, None]
    blocks = np.sort(np.where(exists, blocks, -1), axis=-1)
    exists = blocks >= 0
    exists[..., 1:] &= blocks[..., 1:] != blocks[..., :-1]
    slot = exists.cumsum(-1) - 1

    row_ptr = np.zeros((head_kv, total_rows + 1), np.int32)
    q_indices = np.full((head_kv, total_q * topk), -1, np.int32)
    qsplit_indices = q_indices.copy()
    for head in range(head_kv):
        t, c = np.nonzero(exists[head])
        rows = row_of[first[seq[t]] + blocks[head, t, c]]
        by_row = np.argsort(rows, kind="stable")  # tokens stay ascending within a row
        row_ptr[head, 1:] = np.bincount(rows, minlength=total_rows).cumsum()
        q_indices[head, : len(t)] = t[by_row]
        qsplit_indices[head, : len(t)] = (t | slot[head, t, c] << 24)[by_row]
    split_counts = exists.sum(-1).T.astype(np.int32)
    return Csr(row_ptr, q_indices, qsplit_indices, split_counts, sequence[order], block[order])


def check_schedule(metadata: np.ndarray, work_count: int, target_q_per_cta: int, want: Csr) -> None:
    """Asserts that the work items cover every CSR entry once and name the right sequence and block."""
    assert 0 <= work_count <= len(metadata), "work_count exceeds the capacity"
    items = metadata[:work_count].astype(np.int64)
    head, row, begin, count, sequence, block = items[np.lexsort((items[:, 2], items[:, 1], items[:, 0]))].T
    assert (count > 0).all() and (count <= target_q_per_cta).all(), "items of 1 .. target_q_per_cta entries"
    np.testing.assert_array_equal(sequence, want.sequence[row])
    np.testing.assert_array_equal(block, want.block[row])
    starts_row = np.ones(len(row), bool)
    starts_row[1:] = (head[1:] != head[:-1]) | (row[1:] != row[:-1])
    previous_end = np.concatenate([[0], (begin + count)[:-1]])
    np.testing.assert_array_equal(begin, np.where(starts_row, 0, previous_end), "gap or overlap within a row")
    covered = np.zeros_like(want.row_ptr[:, 1:], np.int64)
    np.add.at(covered, (head, row), count)
    np.testing.assert_array_equal(covered, np.diff(want.row_ptr, axis=1), "entries without a work item")


# --------------------------------------------------------------------------------------------------------- cases

LAYOUTS = {
    "flat": "[total_k, Hkv, 128]",
    "paged": "[pages, Hkv, 128, 128]",
    "interleaved": "K and V are views of one [pages, 2, Hkv, 128, 128]",
    "packed": "K and V of a token side by side in one row of [pages, Hkv, 128, 256]",
    "token-major": "views of [pages, 128, 2, Hkv, 128]",
}


@dataclass
class Case:
    """The inputs of one call, on one device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q2k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor | None
    seqused_k: torch.Tensor | None
    causal: bool
    total_rows: int
    total_k: int
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def topk(self) -> int:
        return self.q2k.shape[2]

    @property
    def qhead_per_kv(self) -> int:
        return self.q.shape[1] // self.q2k.shape[0]

    @property
    def arguments(self) -> dict[str, object]:
        """What describes the case among the keyword arguments of ``sparse_atten_func``."""
        return {
            "causal": self.causal,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "page_table": self.page_table,
            "seqused_k": self.seqused_k,
        }

    def reference(self, tokens=None, **options) -> Reference:
        return sparse_attention(
            self.q, self.k, self.v, self.q2k, cu_seqlens_q=self.cu_seqlens_q, cu_seqlens_k=self.cu_seqlens_k,
            page_table=self.page_table, seqused_k=self.seqused_k, causal=self.causal, tokens=tokens, **options,
        )  # fmt: skip

    def csr(self) -> Csr:
        arrays = (x.cpu().numpy() for x in (self.q2k, self.cu_seqlens_q, self.cu_seqlens_k))
        return csr(*arrays, total_rows=self.total_rows)


def offsets(lengths) -> np.ndarray:
    """int32 [B + 1] cumulative lengths, starting at 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def random_q2k(rng: np.random.Generator, lens_q, lens_k, head_kv: int, topk: int) -> np.ndarray:
    """int32 [Hkv, total_q, topk]: random blocks, some named twice, some missing (-1) anywhere, some rows empty."""
    num_blocks = np.repeat(-(-np.asarray(lens_k) // BLOCK), lens_q)
    shape = (head_kv, len(num_blocks), topk)
    q2k = (rng.random(shape) * num_blocks[None, :, None]).astype(np.int64)
    kind = rng.random(shape)
    q2k[kind < 0.12] = -1
    outside = (kind > 0.97) | (num_blocks == 0)[None, :, None]
    q2k[outside] = rng.choice(DROPPED_BLOCKS, outside.sum())
    just_past = (kind > 0.96) & (kind <= 0.97)
    q2k[just_past] = np.broadcast_to(num_blocks[None, :, None], shape)[just_past]
    q2k[rng.random(shape[:2]) < 0.05] = -1
    return q2k.astype(np.int32)


def neighbours_q2k(rng: np.random.Generator, lens_q, lens_k, head_kv: int, topk: int) -> np.ndarray:
    """int32 [Hkv, total_q, topk]: the blocks up to each token's diagonal, in any order, some of them left out.

    Neighbouring tokens share most of their blocks, so that the forward walks the blocks' union.
    """
    rows = []
    for len_q, len_k in zip(lens_q, lens_k, strict=True):
        last = np.maximum(np.arange(len_q) + len_k - len_q, 0) // BLOCK
        blocks = last[None, :, None] - np.arange(topk)
        keep = rng.random((head_kv, len_q, topk)) < 0.99
        rows.append(rng.permuted(np.where(keep & (blocks >= 0), blocks, -1), axis=-1))
    return np.concatenate(rows, axis=1).astype(np.int32)


def ragged(rng: np.random.Generator, batch: int, max_q: int, max_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of ``batch`` sequences: uneven, some without queries, some without keys, some of whole blocks."""
    lens_q, lens_k = rng.integers(1, max_q + 1, batch), rng.integers(1, max_k + 1, batch)
    lens_q[rng.random(batch) < 0.15] = 0
    lens_k[rng.random(batch) < 0.15] = 0
    whole = rng.random(batch) < 0.2
    lens_k[whole] = -(-lens_k[whole] // BLOCK) * BLOCK
    return lens_q, lens_k


def make_case(
    *,
    lens_q,
    lens_k,
    head_kv=2,
    qhead_per_kv=4,
    topk=4,
    layout="flat",
    causal=False,
    trim=False,
    poison=True,
    q2k=None,
    seed=0,
    device="cpu",
) -> Case:
    """Random inputs.

    ``trim``: ``seqused_k`` is given and at most ``lens_k``. ``poison``: NaN and Inf in every key that no query of its
    head selects and past the end of each sequence. Page numbers are shuffled, page-table rows start at odd columns of a
    wider table, and entries past the last page are garbage.
    """
    rng = np.random.default_rng(seed)
    generator = torch.Generator(device).manual_seed(seed)
    lens_q, lens_k = np.asarray(lens_q), np.asarray(lens_k)
    used = (rng.random(len(lens_k)) * (lens_k + 1)).astype(np.int64) if trim else lens_k
    cu_q, cu_k = offsets(lens_q), offsets(lens_k)
    total_q, total_k = int(cu_q[-1]), int(cu_k[-1])
    num_blocks = -(-lens_k // BLOCK)
    if q2k is None:
        q2k = random_q2k(rng, lens_q, lens_k, head_kv, topk)

    def normal(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def on_device(array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    # One entry per (block, key), blocks by sequence: where the key lies in the cache, and whether it may be read.
    seq = np.repeat(np.arange(len(lens_k)), num_blocks)
    block = np.arange(len(seq)) - np.repeat(num_blocks.cumsum() - num_blocks, num_blocks)
    position = block[:, None] * BLOCK + np.arange(BLOCK)
    page_table = None
    if layout == "flat":
        k, v = normal(total_k, head_kv, DIM), normal(total_k, head_kv, DIM)
        inside = position < lens_k[seq][:, None]
        where = (on_device((cu_k[seq][:, None] + position)[inside]),)
    else:
        num_pages = len(seq) + 3
        k, v = _paged_cache(normal, num_pages, head_kv, layout)
        pages = rng.permutation(num_pages)[: len(seq)]
        max_pages = int(num_blocks.max(initial=0)) + 2
        table = rng.choice(GARBAGE_PAGES, (len(lens_k), (max_pages + 5) | 1)).astype(np.int32)
        table[seq, 1 + block] = pages
        page_table = on_device(table)[:, 1 : 1 + max_pages]
        inside = np.ones_like(position, bool)
        where = (on_device(np.repeat(pages, BLOCK)), on_device(np.tile(np.arange(BLOCK), len(seq))))
    if poison:
        live = _selected(q2k, cu_q, num_blocks)[:, :, None] & (position < used[seq][:, None])  # [Hkv, blocks, 128]
        live = on_device(live[:, inside].T.reshape(-1, head_kv))
        for cache in (k, v):
            by_token = cache if layout == "flat" else cache.transpose(1, 2)  # head is the dimension after the indices
            values = by_token[where]
            bad = torch.full_like(values, torch.nan)
            bad[..., ::3] = torch.inf
            bad[..., 1::3] = -torch.inf
            by_token[...] = torch.nan
            by_token[where] = torch.where(live[..., None], values, bad)
    return Case(
        q=normal(total_q, head_kv * qhead_per_kv, DIM),
        k=k,
        v=v,
        q2k=on_device(q2k),
        cu_seqlens_q=on_device(cu_q),
        cu_seqlens_k=on_device(cu_k),
        page_table=page_table,
        seqused_k=on_device(used.astype(np.int32)) if trim else None,
        causal=causal,
        total_rows=int(num_blocks.sum()),
        total_k=total_k,
        max_seqlen_q=int(lens_q.max(initial=0)),
        max_seqlen_k=int(lens_k.max(initial=0)),
    )


def _paged_cache(normal, num_pages, head_kv, layout):
    if layout == "paged":
        return normal(num_pages, head_kv, BLOCK, DIM), normal(num_pages, head_kv, BLOCK, DIM)
    if layout == "interleaved":
        return normal(num_pages, 2, head_kv, BLOCK, DIM).unbind(1)
    if layout == "packed":
        return normal(num_pages, head_kv, BLOCK, 2 * DIM).split(DIM, -1)
    if layout == "token-major":
        return normal(num_pages, BLOCK, 2, head_kv, DIM).transpose(1, 3).unbind(2)
    raise ValueError(f"layout is {layout!r}, one of {list(LAYOUTS)} expected")


def _selected(q2k, cu_q, num_blocks) -> np.ndarray:
    """bool [Hkv, blocks of all sequences]: blocks that some query of the head names."""
    seq = np.repeat(np.arange(len(num_blocks)), np.diff(cu_q))
    exists = (q2k >= 0) & (q2k < num_blocks[seq][None, :, None])
    head, token, _ = np.nonzero(exists)
    selected = np.zeros((q2k.shape[0], int(num_blocks.sum())), bool)
    selected[head, (num_blocks.cumsum() - num_blocks)[seq[token]] + q2k[exists]] = True
    return selected
