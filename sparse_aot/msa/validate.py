"""SPARSE_AOT_VALIDATE=1: checks of values, on copies read back from the device."""

import numpy as np

BLK_KV = 128
WALK_ROWS = 128  # query rows of a group of the walk plan
WALK_FINAL = 1 << 30  # in walk_counts: nothing of the group is left to the CSR's order
WALKED = 1 << 30  # in split_entries: the entry is walked


def check_cu_seqlens(name, cu_seqlens, total):
    """``cu_seqlens`` starts at 0, does not decrease, ends at ``total`` at the latest unless that is None."""
    if cu_seqlens[0] != 0:
        raise ValueError(f"{name}: expected 0 first, got {cu_seqlens[0]}")
    if (np.diff(cu_seqlens.astype(np.int64)) < 0).any():
        raise ValueError(f"{name}: expected values that do not decrease, got {cu_seqlens.tolist()}")
    if total is not None and cu_seqlens[-1] > total:
        raise ValueError(f"{name}: expected at most {total} last, got {cu_seqlens[-1]}")


def check_longest(name, lengths, hint):
    """No sequence is longer than the hint, if there is one."""
    if hint is not None and lengths.max() > hint:
        raise ValueError(f"{name}: got {hint}, the longest sequence has {lengths.max()}")


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
):
    """Raise ``ValueError`` for the first value that can only be a mistake.

    What has a meaning is none: query rows past the last sequence, lengths in ``seqused_k`` below 0 or, of flat keys,
    past the sequence's own, negative page numbers (no page), and anything in columns of ``page_table`` past the length.

    Arrays are int32 NumPy copies of the arguments of ``sparse_atten_func``; ``kv_shape`` is the shape of k.
    """
    paged = page_table is not None
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, total_q)
    check_longest("max_seqlen_q", np.diff(cu_seqlens_q), max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, None if paged else kv_shape[0])
    lengths = np.diff(cu_seqlens_k)
    if seqused_k is not None:
        lengths = np.maximum(seqused_k if paged else np.minimum(seqused_k, lengths), 0)
    check_longest("max_seqlen_k", lengths, max_seqlen_k)
    if paged:
        room = page_table.shape[1] * BLK_KV
        if seqused_k is not None and (seqused_k > room).any():
            raise ValueError(
                f"seqused_k: expected values up to {room}, the keys of page_table's columns, got {seqused_k.max()}"
            )
        used = -(-lengths[:, None] // BLK_KV) > np.arange(page_table.shape[1])[None, :]
        if (beyond := page_table[used & (page_table >= kv_shape[0])]).size:
            raise ValueError(f"page_table: expected page numbers below {kv_shape[0]}, or -1, got {beyond[0]}")
    entries = total_q * topk
    check_range("k2q_row_ptr", k2q_row_ptr, 0, entries)
    if (k2q_row_ptr[:, 0] != 0).any() or (np.diff(k2q_row_ptr, axis=1) < 0).any():
        raise ValueError("k2q_row_ptr: expected rows that start at 0 and do not decrease")
    in_use = np.arange(entries)[None, :] < k2q_row_ptr[:, -1:]
    check_range("k2q_q_indices", k2q_q_indices[in_use], 0, max(total_q - 1, 0))


def check_schedule(
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    k2q_row_ptr,
    k2q_q_indices,
    metadata,
    work_count,
    qsplit_indices,
    split_counts,
    split_entries,
):
    """Raise ``ValueError`` unless the schedule is one of the CSR: its items have every entry once, slots are right.

    Arrays are NumPy copies, those of the CSR as ``validate_attention`` takes them.
    """
    split_entries = np.where(split_entries >= 0, split_entries & ~WALKED, split_entries)
    head_kv, total_q, topk = split_entries.shape
    head, entry = np.nonzero(np.arange(total_q * topk)[None, :] < k2q_row_ptr[:, -1:])
    words = qsplit_indices[head, entry]
    token, slot = words & 0xFFFFFF, words >> 24
    if (bad := token != k2q_q_indices[head, entry]).any():
        at = np.flatnonzero(bad)[0]
        raise ValueError(
            f"schedule.qsplit_indices: expected the tokens of k2q_q_indices, got {token[at]} instead of "
            f"{k2q_q_indices[head[at], entry[at]]} at [{head[at]}, {entry[at]}]"
        )
    check_range("schedule.qsplit_indices >> 24 (split slots)", slot, 0, topk - 1)
    entries = np.full(split_entries.shape, -1, np.int32)
    entries[head, token, slot] = entry
    counts = np.zeros((head_kv, total_q), np.int32)
    np.add.at(counts, (head, token), 1)
    if (counts != split_counts.T).any():
        raise ValueError("schedule.split_counts: expected the number of entries of each token and KV head")
    if ((entries >= 0) != (np.arange(topk) < counts[:, :, None])).any():
        raise ValueError("schedule.qsplit_indices >> 24 (split slots): expected 0 .. split_counts - 1, each once")
    if (split_entries != entries).any():
        raise ValueError("schedule.split_entries: expected the entry of each split slot, and -1 in the others")
    check_range("schedule.work_count", work_count, 0, len(metadata))
    items = metadata[: work_count[0]].astype(np.int64)
    _check_items(items, cu_seqlens_q, number_rows(cu_seqlens_k), k2q_row_ptr, k2q_q_indices)


def check_walk_plan(
    *,
    qhead_per_kv,
    cu_seqlens_k,
    k2q_row_ptr,
    k2q_q_indices,
    split_entries,
    walk_blocks,
    walk_counts,
    walk_flags,
    rest_indices,
):
    """Raise ``ValueError`` unless each entry of the CSR is walked by its group or left to the CSR's order, and once.

    Arrays are NumPy copies of what ``Schedule`` describes. Which entries are walked is a matter of speed alone.
    """
    tokens = WALK_ROWS // qhead_per_kv
    groups = walk_counts.shape[1]
    head, entry = np.nonzero(np.arange(k2q_q_indices.shape[1])[None, :] < k2q_row_ptr[:, -1:])
    row = np.concatenate([np.repeat(np.arange(len(steps)), steps) for steps in np.diff(k2q_row_ptr, axis=1)])
    token, left = k2q_q_indices[head, entry], rest_indices[head, entry]
    used = np.zeros(rest_indices.shape, bool)
    used[head, entry] = True
    if (left[left != -1] != token[left != -1]).any() or (rest_indices[~used] != -1).any():
        raise ValueError("schedule.rest_indices: expected the tokens of k2q_q_indices, and -1 for what is walked")
    walked = left == -1
    marked = np.zeros(rest_indices.shape, bool)
    at = np.nonzero(split_entries >= 0)
    marked[at[0], split_entries[at] & ~WALKED] = split_entries[at] & WALKED != 0
    if (marked[head, entry] != walked).any():
        raise ValueError("schedule.split_entries: expected 2^30 more where rest_indices is -1")

    counts = walk_counts & ~WALK_FINAL
    check_range("schedule.walk_counts, but for 2^30", counts, 0, walk_blocks.shape[2])
    exists = np.arange(walk_blocks.shape[2]) < counts[..., None]
    of_head, of_group, _ = np.nonzero(exists)
    elements = walk_blocks[exists]
    rows = number_rows(cu_seqlens_k)
    batch = len(cu_seqlens_k)
    number = np.searchsorted(rows[1] * batch + rows[0], elements[:, 1].astype(np.int64) * batch + elements[:, 0])
    known = number < len(rows[0])
    known[known] = (rows[0][number[known]] == elements[known, 0]) & (rows[1][number[known]] == elements[known, 1])
    bits = np.unpackbits(np.ascontiguousarray(elements[:, 2:]).view(np.uint8), axis=1, bitorder="little")
    element, member = np.nonzero(bits)
    of_token = of_group[element] * tokens + member
    got = np.stack([of_head[element], number[element], of_token])
    wanted = np.stack([head[walked], row[walked], token[walked]])
    same = known.all() and got.shape == wanted.shape
    if not same or (got[:, np.lexsort(got)] != wanted[:, np.lexsort(wanted)]).any():
        raise ValueError("schedule.walk_blocks: expected the entries that rest_indices leaves out, each in its group")

    remains = np.zeros((len(k2q_row_ptr), groups), bool)
    remains[head[~walked], token[~walked] // tokens] = True
    final = walk_counts & WALK_FINAL != 0
    if (final != ((counts > 0) & ~remains)).any():
        raise ValueError("schedule.walk_counts: expected 2^30 more where a group walks and leaves nothing")
    if (walk_flags != [(counts > 0).any(), remains.any(), (~final).any()]).any():
        raise ValueError(
            "schedule.walk_flags: expected whether any group walks, any entry is left, any group is not finished by it"
        )


def number_rows(cu_seqlens_k):
    """(sequence, block) of each CSR row: rows are numbered with the block outermost and the sequence innermost."""
    blocks = np.maximum(-(-np.diff(cu_seqlens_k.astype(np.int64)) // BLK_KV), 0)
    sequence = np.repeat(np.arange(len(blocks)), blocks)
    block = np.arange(len(sequence)) - np.repeat(blocks.cumsum() - blocks, blocks)
    order = np.lexsort((sequence, block))
    return sequence[order], block[order]


def _check_items(items, cu_seqlens_q, rows, k2q_row_ptr, k2q_q_indices):
    name = "schedule.scheduler_metadata"
    head, row, first, count, sequence, block = items[np.lexsort((items[:, 2], items[:, 1], items[:, 0]))].T
    check_range(f"{name}: KV head", head, 0, len(k2q_row_ptr) - 1)
    check_range(f"{name}: CSR row", row, 0, k2q_row_ptr.shape[1] - 2)
    check_range(f"{name}: sequence", sequence, 0, len(cu_seqlens_q) - 2)
    lengths = np.diff(k2q_row_ptr.astype(np.int64), axis=1)
    covered = np.zeros_like(lengths)
    np.add.at(covered, (head, row), count)
    follows = (head[1:] == head[:-1]) & (row[1:] == row[:-1])  # the item before it in the same row
    expected = np.where(follows, (first + count)[:-1], 0)
    gaps = (first[1:] != expected).any() or (first[:1] != 0).any() or (count <= 0).any()
    if gaps or (covered != lengths).any():
        raise ValueError(f"{name}: expected items that have every entry of the CSR once")
    check_range(f"{name}: CSR row", row, 0, len(rows[0]) - 1)
    if (sequence != rows[0][row]).any() or (block != rows[1][row]).any():
        raise ValueError(f"{name}: expected the sequence and the block of each item's CSR row")
    start = k2q_row_ptr[head, row] + first
    tokens = k2q_q_indices[head, start], k2q_q_indices[head, start + count - 1]
    if (tokens[0] < cu_seqlens_q[sequence]).any() or (tokens[1] >= cu_seqlens_q[sequence + 1]).any():
        raise ValueError(f"{name}: expected items of tokens of their sequence")
