"""Operations that torch has for CUDA alone and that programs compute their references with, in float32 on the host."""

from __future__ import annotations

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _values(matrix: torch.Tensor) -> torch.Tensor:
    """A row-major matrix in float32; of float4, two elements a byte, the first one lowest."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.float()
    raw = matrix.contiguous().view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2).long()
    return torch.tensor(E2M1 + tuple(-x for x in E2M1))[codes]


def _scales(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Scale factors, a row of them for each of ``rows``, for ``columns`` elements: blocks of 128 rows by 4 factors take
    512 bytes, in which rows 0, 32, 64 and 96 stand together."""
    row_blocks, padded = -(-rows // 128), scale.numel() // (-(-rows // 128) * 128)
    blocks = scale.float().reshape(row_blocks, padded // 4, 32, 4, 4)
    factors = blocks.permute(0, 3, 2, 1, 4).reshape(row_blocks * 128, padded)[:rows]
    block = next(size for size in (16, 32) if -(-columns // size // 4) * 4 == padded)
    return factors.repeat_interleave(block, dim=1)[:, :columns]


def scaled_mm(a, b, scale_a, scale_b, bias=None, out_dtype=None, **_) -> torch.Tensor:
    """torch._scaled_mm where each 16 or 32 elements of a row of a, and of a column of b, have a scale factor."""
    left, right = _values(a), _values(b.t())
    left = left * _scales(scale_a, *left.shape)
    right = right * _scales(scale_b, *right.shape)
    product = left @ right.T
    return (product if bias is None else product + bias.float()).to(out_dtype or a.dtype)


ON_HOST = {torch._scaled_mm: scaled_mm}
