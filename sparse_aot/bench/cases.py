"""Shapes, selection patterns and inputs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

BLOCK = 128
DIM = 128
KI = 1024


@dataclass(frozen=True)
class Shape:
    """Sizes of one case; ``skv`` counts the keys in use, ``trim`` those after them that are not."""

    name: str
    batch: int
    sq: int
    skv: int
    topk: int
    head_kv: int
    qhead_per_kv: int
    causal: bool
    paged: bool
    trim: int

    @property
    def total_q(self) -> int:
        return self.batch * self.sq

    @property
    def heads(self) -> int:
        return self.head_kv * self.qhead_per_kv

    @property
    def capacity(self) -> int:
        """Keys of a sequence that its blocks may cover."""
        return self.skv + self.trim

    @property
    def total_rows(self) -> int:
        return self.batch * -(-self.capacity // BLOCK)

    def flop(self, pairs: int) -> int:
        """Of the products QK and PV of the selected blocks; ``pairs``: of (token, KV head, block that is there).

        A block counts as a whole, as it is computed: also where it lies across the diagonal or ends a sequence.
        """
        return 4 * pairs * self.qhead_per_kv * BLOCK * DIM


def shapes(options: argparse.Namespace) -> list[Shape]:
    """What ``--customer-case`` names."""

    def shape(name, batch, sq, skv, head_kv, qhead_per_kv):
        trim = options.seqused_trim
        return Shape(
            name, batch, sq, skv - trim, options.topk, head_kv, qhead_per_kv, options.causal, options.paged, trim
        )

    manual = shape("manual", options.b, options.sq, options.skv, options.head_kv, options.qhead_per_kv)
    ring = shape("ring48k", 1, 48 * KI, 48 * KI, 1, 16)
    ulysses = shape("ulysses384k", 1, 384 * KI, 384 * KI, 1, 2)
    sweep = [shape(f"G={g}", 1, 768 * KI // g, 768 * KI // g, 1, g) for g in (1, 2, 4, 8, 16)]
    return {
        "manual": [manual],
        "ring48k": [ring],
        "ulysses384k": [ulysses],
        "both": [ring, ulysses],
        "qhead_sweep": sweep,
    }[options.customer_case]


def patterns(options: argparse.Namespace) -> list[str]:
    return ["uniform", "sink"] if options.q2k_pattern == "both" else [options.q2k_pattern]


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


def make_inputs(shape: Shape, pattern: str, seed: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size):
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)

    def cumulative(length):
        return torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * length

    page_table = seqused_k = None
    if shape.paged:
        k, v = normal(shape.total_rows, 2, shape.head_kv, BLOCK, DIM).unbind(1)
        page_table = torch.randperm(shape.total_rows, generator=generator, device="cuda").int().view(shape.batch, -1)
        if shape.trim:
            seqused_k = torch.full((shape.batch,), shape.skv, dtype=torch.int32, device="cuda")
    else:
        k, v = (normal(shape.batch * shape.skv, shape.head_kv, DIM) for _ in "kv")
    return Inputs(
        q=normal(shape.total_q, shape.heads, DIM),
        k=k,
        v=v,
        q2k=select(shape, pattern, seed),
        cu_seqlens_q=cumulative(shape.sq),
        cu_seqlens_k=cumulative(shape.capacity),
        page_table=page_table,
        seqused_k=seqused_k,
    )


def select(shape: Shape, pattern: str, seed: int, device: str = "cuda") -> torch.Tensor:
    """q2k int32 ``[Hkv, total_q, topk]`` on ``device``; -1 where a query has fewer blocks than ``topk``.

    A causal query sees blocks 0 .. c, c being its own. ``uniform``: c, c - 1, ...; ``sink``: 0, c, and one hashed
    choice from each of ``topk - 2`` equal ranges of the blocks between. Without a causal mask every block is in reach:
    c is at the query's relative position, ``uniform`` wraps around, and ``sink`` draws from all other blocks.
    """
    num_blocks = -(-shape.skv // BLOCK)
    token = torch.arange(shape.total_q, device=device)[None, :, None]
    head = torch.arange(shape.head_kv, device=device)[:, None, None]
    slot = torch.arange(shape.topk, device=device)
    position = token % shape.sq
    if shape.causal:
        current = (position + shape.skv - shape.sq) // BLOCK
        between = current - 1  # blocks 1 .. current - 1
    else:
        current = position * num_blocks // shape.sq
        between = torch.full_like(current, num_blocks - 2)
    if pattern == "uniform":
        blocks = current - slot
        if not shape.causal:
            blocks = torch.where(slot < num_blocks, blocks % num_blocks, -1)
        return blocks.clamp(min=-1).expand(shape.head_kv, -1, -1).int().contiguous()
    between = between.clamp(min=0)
    ranges = shape.topk - 2
    first = (slot - 2) * between // ranges
    size = (slot - 1) * between // ranges - first
    hashed = _mix(token + _mix(head + _mix(slot + _mix(torch.tensor(seed, device=device)))))
    blocks = 1 + first + hashed % size.clamp(min=1)
    if not shape.causal:  # skip block 0 and the current block
        blocks = blocks + (blocks >= current.clamp(min=1)) * (current > 0)
    blocks = torch.where(size > 0, blocks, -1)
    blocks = torch.where(slot == 0, 0, blocks)
    blocks = torch.where(slot == 1, torch.where(current > 0, current, -1), blocks)
    return blocks.int()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A hash of int64 values to 0 .. 2^31 - 1."""
    for multiplier in (0x7FEB352D, 0x45D9F3B):
        x = ((x & 0xFFFFFFFF) ^ ((x & 0xFFFFFFFF) >> 16)) * multiplier
    return (x & 0xFFFFFFFF) >> 1
