"""Shapes, selection patterns and inputs."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch

from sparse_aot.bench.options import BLOCK, Lens, manual_lens, parse_pattern

DIM = 128
KI = 1024


@dataclass(frozen=True)
class Shape:
    """Sizes of one case: ``lens`` are queries and keys in use of each sequence, ``trim`` keys after them that are not.

    The queries are a sequence's last tokens. ``paged`` is the layout of a paged cache, or None for flat keys.
    """

    name: str
    lens: Lens
    topk: int
    head_kv: int
    qhead_per_kv: int
    causal: bool
    paged: str | None
    trim: int

    @property
    def batch(self) -> int:
        return len(self.lens)

    @property
    def total_q(self) -> int:
        return sum(queries for queries, _ in self.lens)

    @property
    def max_q(self) -> int:
        return max(queries for queries, _ in self.lens)

    @property
    def heads(self) -> int:
        return self.head_kv * self.qhead_per_kv

    @property
    def capacities(self) -> list[int]:
        """Keys of each sequence that its blocks may cover."""
        return [keys + self.trim for _, keys in self.lens]

    @property
    def total_rows(self) -> int:
        return sum(-(-capacity // BLOCK) for capacity in self.capacities)

    def flop(self, pairs: int) -> int:
        """Of the products QK and PV of the selected blocks; ``pairs``: of (token, KV head, block that is there).

        A block counts as a whole, as it is computed: also where it lies across the diagonal or ends a sequence.
        """
        return 4 * pairs * self.qhead_per_kv * BLOCK * DIM


def shapes(options: argparse.Namespace) -> list[Shape]:
    """What ``--customer-case`` names."""

    def shape(name, lens, head_kv, qhead_per_kv):
        trim = options.seqused_trim
        used = tuple((queries, keys - trim) for queries, keys in lens)
        return Shape(name, used, options.topk, head_kv, qhead_per_kv, options.causal, options.paged, trim)

    def square(name, tokens, qhead_per_kv):
        return shape(name, ((tokens, tokens),), 1, qhead_per_kv)

    ring = square("ring48k", 48 * KI, 16)
    ulysses = square("ulysses384k", 384 * KI, 2)
    return {
        "manual": [shape("manual", lens, options.head_kv, options.qhead_per_kv) for lens in manual_lens(options)],
        "ring48k": [ring],
        "ulysses384k": [ulysses],
        "both": [ring, ulysses],
        "qhead_sweep": [square(f"G={g}", 768 * KI // g, g) for g in (1, 2, 4, 8, 16)],
    }[options.customer_case]


@dataclass(frozen=True)
class Inputs:
    """Device tensors of one call; K and V flat ``[total_k, Hkv, 128]`` or paged ``[pages, Hkv, 128, 128]``."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q2k: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    page_table: torch.Tensor | None
    seqused_k: torch.Tensor | None


def make_inputs(shape: Shape, pattern: str, seed: int, device: str = "cuda") -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size):
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)

    def int32(numbers):
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    page_table = seqused_k = None
    if shape.paged:
        if shape.paged == "packed":
            k, v = normal(shape.total_rows, shape.head_kv, BLOCK, 2, DIM).unbind(3)
        else:
            k, v = normal(shape.total_rows, 2, shape.head_kv, BLOCK, DIM).unbind(1)
        blocks = -(-int32(shape.capacities) // BLOCK)
        exists = torch.arange(int(blocks.max()), device=device) < blocks[:, None]
        page_table = torch.full_like(exists, -1, dtype=torch.int32)
        page_table[exists] = torch.randperm(shape.total_rows, generator=generator, device=device).int()
        if shape.trim:
            seqused_k = int32([keys for _, keys in shape.lens])
    else:
        k, v = (normal(sum(shape.capacities), shape.head_kv, DIM) for _ in "kv")
    return Inputs(
        q=normal(shape.total_q, shape.heads, DIM),
        k=k,
        v=v,
        q2k=select(shape, pattern, seed, device),
        cu_seqlens_q=int32([0, *itertools.accumulate(queries for queries, _ in shape.lens)]),
        cu_seqlens_k=int32([0, *itertools.accumulate(shape.capacities)]),
        page_table=page_table,
        seqused_k=seqused_k,
    )


def sequence_of_tokens(shape: Shape, device: str = "cuda") -> torch.Tensor:
    queries = torch.tensor([queries for queries, _ in shape.lens], device=device)
    return torch.arange(shape.batch, device=device).repeat_interleave(queries)


def select(shape: Shape, pattern: str, seed: int, device: str = "cuda") -> torch.Tensor:
    """q2k int32 ``[Hkv, total_q, topk]`` on ``device``; where a query has fewer blocks than ``topk``, -1 at the end.

    A causal query sees blocks 0 .. c, c being its own. ``uniform``: c, c - 1, ...; the other patterns: 0, c, and a
    hashed choice from each of ``topk - 2`` equal ranges of the blocks between, which is the token's own in ``sink``,
    that of N tokens of the block in ``runs:N``, and in ``noise:P`` one of the two: its own in P percent of the ranges,
    else that of all the block's tokens. Without a causal mask every block is in reach: c is at the query's relative
    position, ``uniform`` wraps around, and the others choose from all blocks but 0 and c.
    """
    kind, number = parse_pattern(pattern)
    sequence = sequence_of_tokens(shape, device)
    len_q, len_k = torch.tensor(shape.lens, device=device)[sequence].T[..., None]
    token = torch.arange(shape.total_q, device=device)[:, None]
    head = torch.arange(shape.head_kv, device=device)[:, None, None]
    slot = torch.arange(shape.topk, device=device)
    num_blocks = -(-len_k // BLOCK)
    position = token - torch.searchsorted(sequence, sequence)[:, None]
    if shape.causal:
        position = position + len_k - len_q
        current = position // BLOCK
        between = current - 1  # blocks 1 .. current - 1
    else:
        current = position * num_blocks // len_q
        between = num_blocks - 2
    if kind == "uniform":
        blocks = current - slot
        if not shape.causal:
            blocks = torch.where(slot < num_blocks, blocks % num_blocks, -1)
        return blocks.clamp(min=-1).expand(shape.head_kv, -1, -1).int().contiguous()
    between = between.clamp(min=0)
    ranges = shape.topk - 2
    first = (slot - 2) * between // ranges
    size = (slot - 1) * between // ranges - first

    def hashed(of):
        return _mix(of + _mix(head + _mix(slot + _mix(torch.tensor(seed, device=device)))))

    choice = own = hashed(token)
    if kind != "sink":
        run = number if kind == "runs" else BLOCK
        choice = hashed(~(token - position % BLOCK % run))  # no token's own
    if kind == "noise":
        choice = torch.where(_mix(own + 1) % 100 < number, own, choice)
    blocks = 1 + first + choice % size.clamp(min=1)
    if not shape.causal:  # skip block 0 and the current block
        blocks = blocks + (blocks >= current.clamp(min=1)) * (current > 0)
    blocks = torch.where(size > 0, blocks, -1)
    blocks = torch.where(slot == 0, 0, blocks)
    blocks = torch.where(slot == 1, torch.where(current > 0, current, -1), blocks).int()
    return blocks.gather(-1, (blocks < 0).byte().argsort(dim=-1, stable=True))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of int64 values to 0 .. 2^31 - 1."""
    for multiplier in (0x7FEB352D, 0x45D9F3B):
        x = ((x & 0xFFFFFFFF) ^ ((x & 0xFFFFFFFF) >> 16)) * multiplier
    return (x & 0xFFFFFFFF) >> 1


def overlap(shape: Shape, q2k: torch.Tensor) -> float:
    """Mean of the blocks that a token and the next one of its sequence both select, over ``topk``; 0 without such."""
    sequence = sequence_of_tokens(shape, q2k.device)
    here, following = (part[:, sequence[1:] == sequence[:-1]] for part in (q2k[:, :-1], q2k[:, 1:]))
    shared = torch.zeros_like(here[..., 0])
    for block in here.unbind(-1):
        shared += ((block >= 0)[..., None] & (following == block[..., None])).any(-1)
    return float(shared.double().mean()) / shape.topk if shared.numel() else 0.0


def count_pairs(row_ptr: torch.Tensor) -> int:
    """Of (token, KV head, block): a CSR has each once, and none of a block that does not exist."""
    return int(row_ptr[:, -1].sum())
