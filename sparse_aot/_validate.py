"""SPARSE_AOT_VALIDATE=1: checks of values, on copies read back from the device."""

import numpy as np

BLK_KV = 128


def check_cu_seqlens(name, cu_seqlens, total, max_seqlen=None):
    """``cu_seqlens`` starts at 0, does not decrease, ends at ``total`` unless it is None, no step over the hint."""
    lengths = np.diff(cu_seqlens.astype(np.int64))
    if cu_seqlens[0] != 0:
        raise ValueError(f"{name}: expected 0 first, got {cu_seqlens[0]}")
    if (lengths < 0).any():
        raise ValueError(f"{name}: expected values that do not decrease, got {cu_seqlens.tolist()}")
    if total is not None and cu_seqlens[-1] != total:
        raise ValueError(f"{name}: expected {total} last, got {cu_seqlens[-1]}")
    if max_seqlen is not None and lengths.max() > max_seqlen:
        raise ValueError(f"max_seqlen_{name[-1]}: got {max_seqlen}, the longest sequence has {lengths.max()}")


def check_range(name, values, low, high):
    """Every value is in ``low .. high``."""
    bad = values[(values < low) | (values > high)]
    if bad.size:
        raise ValueError(f"{name}: expected values from {low} to {high}, got {bad.flat[0]}")


def validate_attention(
    *,
    total_q,
    topk,
    max_seqlen_q,
    max_seqlen_k,
    kv_shape,
    cu_seqlens_q,
    cu_seqlens_k,
    k2q_row_ptr,
    k2q_q_indices,
    page_table,
    seqused_k,
    work_count,
    work_capacity,
    split_counts,
):
    """Raise ``ValueError`` for the first value that the attention could only ignore.

    Arrays are int32 NumPy copies of the arguments of ``sparse_atten_func``; ``kv_shape`` is the shape of k.
    """
    paged = page_table is not None
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, total_q, max_seqlen_q)
    check_cu_seqlens(
        "cu_seqlens_k", cu_seqlens_k, None if paged else kv_shape[0], max_seqlen_k if seqused_k is None else None
    )
    lengths = np.diff(cu_seqlens_k)
    if seqused_k is not None:
        if paged:
            check_range("seqused_k", seqused_k, 0, page_table.shape[1] * BLK_KV)
        elif (over := seqused_k > lengths).any():
            raise ValueError(f"seqused_k: got {seqused_k[over][0]} for a sequence of {lengths[over][0]} keys")
        check_range("seqused_k", seqused_k, 0, max_seqlen_k)
        lengths = seqused_k
    if paged:
        used = -(-lengths[:, None] // BLK_KV) > np.arange(page_table.shape[1])[None, :]
        check_range("page_table", page_table[used], 0, kv_shape[0] - 1)
    entries = total_q * topk
    check_range("k2q_row_ptr", k2q_row_ptr, 0, entries)
    if (k2q_row_ptr[:, 0] != 0).any() or (np.diff(k2q_row_ptr, axis=1) < 0).any():
        raise ValueError("k2q_row_ptr: expected rows that start at 0 and do not decrease")
    in_use = np.arange(entries)[None, :] < k2q_row_ptr[:, -1:]
    check_range("k2q_q_indices", k2q_q_indices[in_use], 0, max(total_q - 1, 0))
    if work_count is not None:
        check_range("schedule.work_count", work_count, 0, work_capacity)
        check_range("schedule.split_counts", split_counts, 0, topk)
