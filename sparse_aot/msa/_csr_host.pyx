"""CSR, schedule and walk plan in plain C loops over host arrays; see the ``.pxd``."""

from libc.stdint cimport uint32_t
from libc.string cimport memmove, memset


cdef enum:
    # The work of an item in query rows (tokens * G): enough to pay for loading a block of K and V, little enough to
    # balance.
    MIN_ITEM_ROWS = 512
    MAX_ITEM_ROWS = 2048
    ITEMS_WANTED = 132 * 16  # sixteen a multiprocessor of a Hopper GPU; a constant, so that every machine plans alike
    MIN_BUCKET_SHIFT = 7  # 128 tokens of Q: 512 KiB at G = 16, a small part of the L2
    MAX_CAPACITY = 1 << 30
    MAX_TOPK = 32

cdef int64_t WALK_TOO_MANY = <int64_t>1 << 40  # what a group of more than WALK_CAP blocks adds to the first total


cdef int plan_schedule(const Shape* shape, int qhead_per_kv, Plan* plan) except -1:
    cdef int64_t entries = <int64_t>shape.size * shape.head_kv
    cdef int64_t rows = min(shape.total_rows, shape.size)
    cdef int64_t target = 1
    cdef int64_t capacity
    plan.target_log2 = 0
    while target * qhead_per_kv < MIN_ITEM_ROWS or (
        2 * target * qhead_per_kv <= MAX_ITEM_ROWS and 2 * target * ITEMS_WANTED <= entries
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
    plan_walk(shape.total_q, qhead_per_kv, plan)
    return 0


cdef void plan_walk(int32_t total_q, int qhead_per_kv, Plan* plan) noexcept nogil:
    plan.tokens_per_group = WALK_ROWS // qhead_per_kv
    plan.groups = (total_q + plan.tokens_per_group - 1) // plan.tokens_per_group
    plan.walk_columns = 2 + (plan.tokens_per_group + 31) // 32


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
    """Rows ascend and so do the tokens of a row: the first token of a group in a row adds the row to its union."""
    cdef int64_t element_size = plan.walk_columns
    cdef int64_t union_size = WALK_CAP * element_size
    cdef int64_t unions = <int64_t>shape.head_kv * plan.groups
    cdef int64_t first_union, i
    cdef int32_t head, row, entry, group, previous, token
    cdef const int32_t* row_ptr
    cdef const int32_t* q_indices
    cdef int32_t* count
    cdef int32_t* element
    memset(arrays.walk_blocks, 0, unions * union_size * sizeof(int32_t))
    memset(arrays.walk_counts, 0, unions * sizeof(int32_t))
    arrays.walk_totals[0] = 0
    arrays.walk_totals[1] = 0
    for head in range(shape.head_kv):
        first_union = <int64_t>head * plan.groups
        row_ptr = arrays.row_ptr + <int64_t>head * (shape.total_rows + 1)
        q_indices = arrays.q_indices + <int64_t>head * shape.size
        arrays.walk_totals[1] += row_ptr[shape.total_rows]
        for row in range(shape.total_rows):
            previous = -1
            for entry in range(row_ptr[row], row_ptr[row + 1]):
                group = q_indices[entry] // plan.tokens_per_group
                token = q_indices[entry] - group * plan.tokens_per_group
                count = arrays.walk_counts + first_union + group
                if group != previous:
                    previous = group
                    count[0] = min(count[0] + 1, WALK_CAP + 1)
                if count[0] > WALK_CAP:
                    continue
                element = arrays.walk_blocks + (first_union + group) * union_size + (count[0] - 1) * element_size
                element[0] = rows.row_sequence[row]
                element[1] = rows.row_block[row]
                element[2 + token // 32] |= <int32_t>(<uint32_t>1 << (token % 32))
    for i in range(unions):
        if arrays.walk_counts[i] > WALK_CAP:
            memset(arrays.walk_blocks + i * union_size, 0, union_size * sizeof(int32_t))
            arrays.walk_totals[0] += WALK_TOO_MANY
        else:
            arrays.walk_totals[0] += arrays.walk_counts[i]


cpdef bint walks(int64_t blocks, int64_t selected, int64_t tokens_per_group) noexcept:
    """Whether the forward walks, given ``walk_totals``: as ``walks`` of aot/kernels/msa/work.py, which says why."""
    return 0 <= blocks < WALK_TOO_MANY and selected > 0 and blocks * tokens_per_group * 5 <= selected * 7
