"""CSR, schedule and walk plan in plain C loops over host arrays; see the ``.pxd``."""

from libc.stdint cimport uint32_t
from libc.string cimport memmove, memset


cdef extern from *:
    """
    #define popcount __builtin_popcount
    """
    int popcount(unsigned int word) nogil


cdef enum:
    # The work of an item in query rows (tokens * G): enough to pay for loading a block of K and V, little enough to
    # balance.
    MIN_ITEM_ROWS = 512
    MAX_ITEM_ROWS = 2048
    ITEMS_WANTED = 132 * 16  # sixteen a multiprocessor of a Hopper GPU; a constant, so that every machine plans alike
    MIN_BUCKET_SHIFT = 7  # 128 tokens of Q: 512 KiB at G = 16, a small part of the L2
    MAX_ITEM_ENTRIES = 1024  # a warp of the forward has a bit for each
    MAX_CAPACITY = 1 << 30
    MAX_TOPK = 32

# Architecture -> the query rows of a group that its forward walks together, and what a block costs it for each token of
# the group, in eighths of what an entry costs in CSR order, its partial result and the merge of that included.
cdef dict WALKS = {"sm_90a": (128, 5), "sm_100f": (256, 3)}
# Where this is not None it stands for the cost above. In eighths of an entry, a token: what a group saves that leaves no
# partial results. And how many groups there must be: fewer do not fill a GPU, where CSR order cuts finer.
cdef object _cost = None
cdef int _gain = 5
cdef int _groups = 132


cpdef tuple walk_rule(object cost=None, object gain=None, object groups=None):
    """Change the rule of the walk plan, for measurements and tests; what it was: (cost, gain, groups).

    cost 0 walks every block, a cost above 8 none; gain 0 or more; groups 0 plans for any number of groups.
    """
    global _cost, _gain, _groups
    before = _cost, _gain, _groups
    _cost, _gain, _groups = cost, 5 if gain is None else gain, 132 if groups is None else groups
    return before


cdef int plan_schedule(const Shape* shape, int qhead_per_kv, Plan* plan) except -1:
    cdef int64_t entries = <int64_t>shape.size * shape.head_kv
    cdef int64_t rows = min(shape.total_rows, shape.size)
    cdef int64_t target = 1
    cdef int64_t capacity
    plan.target_log2 = 0
    while target * qhead_per_kv < MIN_ITEM_ROWS or (
        2 * target * qhead_per_kv <= MAX_ITEM_ROWS
        and 2 * target <= MAX_ITEM_ENTRIES
        and 2 * target * ITEMS_WANTED <= entries
    ):
        target *= 2
        plan.target_log2 += 1
    plan.bucket_shift = MIN_BUCKET_SHIFT
    while shape.total_q > 0 and (shape.total_q - 1) >> plan.bucket_shift >= MAX_BUCKETS:
        plan.bucket_shift += 1
    plan.buckets = ((max(shape.total_q, 1) - 1) >> plan.bucket_shift) + 1
    # The sum of ceil(length / target) over the rows: at most `rows` are not empty, and no token is in a row twice.
    capacity = shape.head_kv * ((min(<int64_t>shape.size, rows * shape.total_q) + rows * (target - 1)) // target)
    if capacity > MAX_CAPACITY:
        raise ValueError(f"the schedule needs {capacity} work items, at most {MAX_CAPACITY} are supported")
    plan.capacity = <int32_t>capacity
    plan.groups = 0
    return 0


cdef int plan_walk(const Shape* shape, int qhead_per_kv, str arch, Plan* plan) except -1:
    cdef int rows, cost
    plan.groups = 0
    if arch not in WALKS:
        return 0
    rows, cost = WALKS[arch]
    plan.tokens_per_group = rows // qhead_per_kv
    plan.walk_columns = 2 + (plan.tokens_per_group + 31) // 32
    plan.walk_cost = cost if _cost is None else _cost
    plan.walk_gain = _gain
    groups = (shape.total_q + plan.tokens_per_group - 1) // plan.tokens_per_group
    if shape.head_kv * groups >= _groups:
        plan.groups = groups
    return 0


cdef int check_cu_seqlens(str name, const int32_t* cu_seqlens, int32_t batch, int64_t total, str total_name) except -1:
    cdef int32_t s
    if cu_seqlens[0] != 0:
        raise ValueError(f"{name}: expected 0 as the first value, got {cu_seqlens[0]}")
    for s in range(batch):
        if cu_seqlens[s + 1] < cu_seqlens[s]:
            raise ValueError(
                f"{name}: expected non-decreasing values, got {cu_seqlens[s + 1]} after {cu_seqlens[s]} at {s + 1}"
            )
    if cu_seqlens[batch] > total:
        raise ValueError(f"{name}: expected at most {total} ({total_name}) as the last value, got {cu_seqlens[batch]}")
    return 0


cdef inline int32_t block_count(const int32_t* cu_seqlens_k, int32_t sequence) noexcept nogil:
    return <int32_t>((<int64_t>cu_seqlens_k[sequence + 1] - cu_seqlens_k[sequence] + BLOCK - 1) // BLOCK)


cdef int64_t count_rows(const int32_t* cu_seqlens_k, int32_t batch) noexcept nogil:
    cdef int64_t rows = 0
    cdef int32_t s
    for s in range(batch):
        rows += max(block_count(cu_seqlens_k, s), 0)
    return rows


cdef int check_csr(const Shape* shape, const Arrays* arrays) except -1:
    cdef int32_t head, row, i, previous
    cdef const int32_t* row_ptr
    cdef const int32_t* q_indices
    for head in range(shape.head_kv):
        row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
        q_indices = arrays.q_indices + <int64_t>head * shape.size
        if row_ptr[0] != 0 or row_ptr[shape.total_rows] > shape.size:
            raise ValueError(
                f"k2q_row_ptr: expected each head to run from 0 to at most {shape.size} (total_q * topk), got "
                f"{row_ptr[0]} .. {row_ptr[shape.total_rows]} for head {head}"
            )
        for row in range(shape.total_rows):
            if row_ptr[row + 1] < row_ptr[row]:
                raise ValueError(f"k2q_row_ptr: expected non-decreasing values, head {head} decreases at row {row}")
        for row in range(shape.total_rows):
            previous = -1
            for i in range(row_ptr[row], row_ptr[row + 1]):
                if q_indices[i] <= previous or q_indices[i] >= shape.total_q:
                    raise ValueError(
                        f"k2q_q_indices: expected ascending tokens below {shape.total_q} within a row, got "
                        f"{q_indices[i]} at [{head}, {i}]"
                    )
                previous = q_indices[i]
    return 0


cdef void number_rows(const int32_t* cu_seqlens_k, const Shape* shape, Rows* rows, int32_t* counters) noexcept nogil:
    cdef int32_t s, b, count, row, first
    cdef int32_t next_row = 0
    cdef int32_t most = 0
    memset(counters, 0, (<int64_t>shape.total_rows + 1) * sizeof(int32_t))
    for s in range(shape.batch):
        count = block_count(cu_seqlens_k, s)
        rows.sequence_base[s] = next_row
        next_row += count
        most = max(most, count)
        for b in range(count):
            counters[b] += 1
    first = 0
    for b in range(most):
        count = counters[b]
        counters[b] = first
        first += count
    for s in range(shape.batch):
        for b in range(block_count(cu_seqlens_k, s)):
            row = counters[b]
            counters[b] += 1
            rows.row_of[rows.sequence_base[s] + b] = row
            rows.row_sequence[row] = s
            rows.row_block[row] = b
    for row in range(next_row, shape.total_rows):
        rows.row_sequence[row] = -1
        rows.row_block[row] = -1


cdef inline int32_t distinct_blocks(
    const int32_t* named, int32_t topk, int32_t limit, int32_t* kept
) noexcept nogil:
    """The distinct blocks below `limit` of a selection, ascending."""
    cdef int32_t count = 0
    cdef int32_t i, j, block
    for i in range(topk):
        block = named[i]
        if block < 0 or block >= limit:
            continue
        j = count
        while j > 0 and kept[j - 1] > block:
            j -= 1
        if j > 0 and kept[j - 1] == block:
            continue
        memmove(kept + j + 1, kept + j, (count - j) * sizeof(int32_t))
        kept[j] = block
        count += 1
    return count


cdef void build_csr(
    const int32_t* q2k_indices, int64_t stride_head, int64_t stride_token, const int32_t* cu_seqlens_q,
    const int32_t* cu_seqlens_k, const Shape* shape, const Rows* rows, Arrays* arrays, int32_t* counters,
) noexcept nogil:
    """Counting sort by row: count, sum up, place. A token's blocks ascend, so their positions are their slots."""
    cdef int32_t[MAX_TOPK] kept
    cdef int32_t head, s, token, i, count, row, place, limit
    cdef int32_t* row_ptr
    cdef int32_t* q_indices
    cdef int32_t* qsplit_indices
    cdef int32_t* split_entries
    cdef const int32_t* row_of
    memset(arrays.split_counts, 0, <int64_t>shape.total_q * shape.head_kv * sizeof(int32_t))  # padding tokens too
    if arrays.split_entries is not NULL:
        memset(arrays.split_entries, 0xFF, <int64_t>shape.head_kv * shape.size * sizeof(int32_t))
    for head in range(shape.head_kv):
        row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
        q_indices = arrays.q_indices + <int64_t>head * shape.size
        qsplit_indices = arrays.qsplit_indices + <int64_t>head * shape.size
        memset(counters, 0, (<int64_t>shape.total_rows + 1) * sizeof(int32_t))
        memset(q_indices, 0xFF, <int64_t>shape.size * sizeof(int32_t))
        memset(qsplit_indices, 0xFF, <int64_t>shape.size * sizeof(int32_t))
        for s in range(shape.batch):
            row_of = rows.row_of + rows.sequence_base[s]
            limit = block_count(cu_seqlens_k, s)
            for token in range(cu_seqlens_q[s], cu_seqlens_q[s + 1]):
                count = distinct_blocks(
                    q2k_indices + head * stride_head + token * stride_token, shape.topk, limit, kept
                )
                arrays.split_counts[<int64_t>token * shape.head_kv + head] = count
                for i in range(count):
                    counters[row_of[kept[i]]] += 1
        place = 0
        for row in range(shape.total_rows):
            row_ptr[row] = place
            place += counters[row]
            counters[row] = row_ptr[row]
        row_ptr[shape.total_rows] = place
        for s in range(shape.batch):
            row_of = rows.row_of + rows.sequence_base[s]
            limit = block_count(cu_seqlens_k, s)
            for token in range(cu_seqlens_q[s], cu_seqlens_q[s + 1]):
                count = distinct_blocks(
                    q2k_indices + head * stride_head + token * stride_token, shape.topk, limit, kept
                )
                for i in range(count):
                    row = row_of[kept[i]]
                    place = counters[row]
                    counters[row] += 1
                    q_indices[place] = token
                    qsplit_indices[place] = token | i << TOKEN_BITS
                    if arrays.split_entries is not NULL:
                        split_entries = arrays.split_entries + <int64_t>head * shape.size
                        split_entries[token * shape.topk + i] = place


cdef void split_csr(const Shape* shape, Arrays* arrays) noexcept nogil:
    """Entries ascend by row, so an entry's slot is the number of its token's entries before it."""
    cdef int32_t head, i, token, used
    cdef int32_t* slot
    cdef const int32_t* q_indices
    cdef int32_t* qsplit_indices
    cdef int32_t* split_entries
    memset(arrays.split_counts, 0, <int64_t>shape.total_q * shape.head_kv * sizeof(int32_t))
    memset(arrays.split_entries, 0xFF, <int64_t>shape.head_kv * shape.size * sizeof(int32_t))
    for head in range(shape.head_kv):
        used = arrays.row_ptr[<int64_t>head * (shape.total_rows + 1) + shape.total_rows]
        q_indices = arrays.q_indices + <int64_t>head * shape.size
        qsplit_indices = arrays.qsplit_indices + <int64_t>head * shape.size
        split_entries = arrays.split_entries + <int64_t>head * shape.size
        memset(qsplit_indices, 0xFF, <int64_t>shape.size * sizeof(int32_t))
        for i in range(used):
            token = q_indices[i]
            slot = arrays.split_counts + <int64_t>token * shape.head_kv + head
            if slot[0] < shape.topk:
                qsplit_indices[i] = token | slot[0] << TOKEN_BITS
                split_entries[token * shape.topk + slot[0]] = i
                slot[0] += 1


cdef void fill_schedule(const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays) noexcept nogil:
    cdef int32_t[MAX_BUCKETS] places
    cdef int32_t head, row, chunk, first, length, bucket, count
    cdef int32_t target = 1 << plan.target_log2
    cdef int32_t work = 0
    cdef const int32_t* row_ptr
    cdef const int32_t* q_indices
    cdef int32_t* item
    for head in range(shape.head_kv):
        row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
        q_indices = arrays.q_indices + <int64_t>head * shape.size
        memset(places, 0, sizeof(places))
        for row in range(shape.total_rows):
            for chunk in range((row_ptr[row + 1] - row_ptr[row] + target - 1) >> plan.target_log2):
                places[q_indices[row_ptr[row] + (chunk << plan.target_log2)] >> plan.bucket_shift] += 1
        for bucket in range(plan.buckets):
            count = places[bucket]
            places[bucket] = work
            work += count
        for row in range(shape.total_rows):
            length = row_ptr[row + 1] - row_ptr[row]
            for chunk in range((length + target - 1) >> plan.target_log2):
                first = chunk << plan.target_log2
                bucket = q_indices[row_ptr[row] + first] >> plan.bucket_shift
                item = arrays.scheduler_metadata + <int64_t>places[bucket] * 6
                places[bucket] += 1
                item[0] = head
                item[1] = row
                item[2] = first
                item[3] = min(length - first, target)
                item[4] = rows.row_sequence[row]
                item[5] = rows.row_block[row]
    memset(arrays.scheduler_metadata + <int64_t>work * 6, 0, (<int64_t>plan.capacity - work) * 6 * sizeof(int32_t))
    arrays.work_count[0] = work


cdef void fill_walk_plan(const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays) noexcept nogil:
    """List the union of each group, then keep of it what is walked, and mark the entries that are."""
    cdef int64_t union_size = WALK_CAP * plan.walk_columns
    cdef int32_t head, group, count, walked, left
    memset(arrays.walk_blocks, 0, shape.head_kv * plan.groups * union_size * sizeof(int32_t))
    memset(arrays.walk_counts, 0, <int64_t>shape.head_kv * plan.groups * sizeof(int32_t))
    memset(arrays.walk_flags, 0, 3 * sizeof(int32_t))
    memmove(arrays.rest_indices, arrays.q_indices, <int64_t>shape.head_kv * shape.size * sizeof(int32_t))
    for head in range(shape.head_kv):
        list_unions(
            shape, plan, rows, arrays, head, arrays.walk_blocks + head * plan.groups * union_size,
            arrays.walk_counts + <int64_t>head * plan.groups,
        )
        for group in range(plan.groups):
            count = arrays.walk_counts[<int64_t>head * plan.groups + group]
            walked = choose_walk(
                shape, plan, rows, arrays, head, group,
                arrays.walk_blocks + (<int64_t>head * plan.groups + group) * union_size, count, &left,
            )
            arrays.walk_counts[<int64_t>head * plan.groups + group] = walked
            arrays.walk_flags[0] |= walked & ~WALK_FINAL != 0
            arrays.walk_flags[1] |= left
            arrays.walk_flags[2] |= walked & WALK_FINAL == 0


cdef void list_unions(
    const Shape* shape, const Plan* plan, const Rows* rows, const Arrays* arrays, int32_t head, int32_t* blocks,
    int32_t* counts,
) noexcept nogil:
    """The unions of a head's groups; WALK_CAP + 1 in ``counts`` where one has more blocks than fit.

    Rows ascend and so do the tokens of a row: the first token of a group in a row adds the row to its union."""
    cdef const int32_t* row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
    cdef const int32_t* q_indices = arrays.q_indices + <int64_t>head * shape.size
    cdef int32_t row, entry, group, previous, token
    cdef int32_t* block
    for row in range(shape.total_rows):
        previous = -1
        for entry in range(row_ptr[row], row_ptr[row + 1]):
            group = q_indices[entry] // plan.tokens_per_group
            token = q_indices[entry] - group * plan.tokens_per_group
            if group != previous:
                previous = group
                counts[group] = min(counts[group] + 1, WALK_CAP + 1)
            if counts[group] <= WALK_CAP:
                block = blocks + (<int64_t>group * WALK_CAP + counts[group] - 1) * plan.walk_columns
                block[0] = rows.row_sequence[row]
                block[1] = rows.row_block[row]
                block[2 + token // 32] |= <int32_t>(<uint32_t>1 << (token % 32))


cdef int32_t choose_walk(
    const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays, int32_t head, int32_t group,
    int32_t* blocks, int32_t count, int32_t* left,
) noexcept nogil:
    """Keep of a group's union what is walked, and mark those entries: the group's element of walk_counts.

    ``left``: whether an entry is left to CSR order."""
    cdef int32_t columns = plan.walk_columns
    cdef int32_t cost = plan.walk_cost * plan.tokens_per_group
    cdef int32_t kept = 0
    cdef int32_t selected = 0
    cdef int32_t mixed = plan.walk_gain * plan.tokens_per_group
    cdef int32_t i, members
    cdef bint all
    left[0] = count > 0
    if count == 0 or count > WALK_CAP:
        memset(blocks, 0, <int64_t>WALK_CAP * columns * sizeof(int32_t))
        return 0
    for i in range(count):
        members = members_of(blocks + i * columns, columns)
        selected += 8 * members
        mixed += min(8 * members, cost)
    all = count * cost < selected and count * cost <= mixed
    if not all and mixed >= selected:
        memset(blocks, 0, <int64_t>WALK_CAP * columns * sizeof(int32_t))
        return 0
    for i in range(count):
        if all or 8 * members_of(blocks + i * columns, columns) > cost:
            mark_walked(shape, plan, rows, arrays, head, group, blocks + i * columns)
            memmove(blocks + kept * columns, blocks + i * columns, columns * sizeof(int32_t))
            kept += 1
    memset(blocks + kept * columns, 0, (WALK_CAP - kept) * columns * sizeof(int32_t))
    left[0] = kept < count
    return kept if left[0] else kept | WALK_FINAL


cdef inline int32_t members_of(const int32_t* block, int32_t columns) noexcept nogil:
    cdef int32_t column
    cdef int32_t members = 0
    for column in range(2, columns):
        members += popcount(<uint32_t>block[column])
    return members


cdef void mark_walked(
    const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays, int32_t head, int32_t group,
    const int32_t* block,
) noexcept nogil:
    """Take a group's entries of a block out of rest_indices, and mark them in split_entries."""
    cdef int32_t row = rows.row_of[rows.sequence_base[block[0]] + block[1]]
    cdef const int32_t* row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
    cdef const int32_t* words = arrays.qsplit_indices + <int64_t>head * shape.size
    cdef const int32_t* q_indices = arrays.q_indices + <int64_t>head * shape.size
    cdef int32_t first = group * plan.tokens_per_group
    cdef int32_t low = row_ptr[row]
    cdef int32_t high = row_ptr[row + 1]
    cdef int32_t middle
    while low < high:
        middle = low + (high - low) // 2
        if q_indices[middle] < first:
            low = middle + 1
        else:
            high = middle
    while low < row_ptr[row + 1] and q_indices[low] < first + plan.tokens_per_group:
        arrays.rest_indices[<int64_t>head * shape.size + low] = -1
        arrays.split_entries[
            <int64_t>head * shape.size + <int64_t>q_indices[low] * shape.topk + (words[low] >> TOKEN_BITS)
        ] |= WALKED
        low += 1
