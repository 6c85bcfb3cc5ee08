"""CSR, schedule and walk plan in plain C loops over host arrays, and the sizes that host and device share.

Same results as the kernels of aot/kernels/msa/smxx_csr.py, smxx_schedule.py, smxx_walk_plan.py, bit for bit. All arrays are
contiguous, ``q2k_indices`` excepted; sizes are checked by the caller, array contents by the ``check_*`` functions here.
"""

from libc.stdint cimport int32_t, int64_t


cdef enum:
    BLOCK = 128  # keys
    TOKEN_BITS = 24  # of a qsplit word; the slot is above
    MAX_BUCKETS = 256
    WALK_CAP = 128  # blocks in the union of a group that walks
    WALK_FINAL = 1 << 30  # in walk_counts: the walk finishes the group's rows
    WALKED = 1 << 30  # in split_entries: the entry is one that its group walks


# The sizes of a CSR.
cdef struct Shape:
    int32_t head_kv
    int32_t total_q
    int32_t topk
    int32_t batch
    int32_t total_rows
    int32_t size  # entries of a KV head: total_q * topk


# How a CSR is cut into work items and in what order; from sizes only, so that it needs no read from the device.
cdef struct Plan:
    int32_t target_log2  # an item has at most 2^target_log2 entries
    int32_t bucket_shift  # items are ordered by first token >> bucket_shift
    int32_t buckets
    int32_t capacity  # upper bound of the number of items
    # The walk plan, see Schedule in _schedule.pyx.
    int32_t tokens_per_group
    int32_t groups  # of a KV head; 0: there is no walk plan
    int32_t walk_columns  # int32 of a walked block
    int32_t walk_cost  # of a block that a group walks, in eighths of an entry in CSR order for each token of the group
    int32_t walk_gain  # of a group that leaves nothing to CSR order, likewise


# A CSR row is (block, sequence); row_of[sequence_base[s] + b] is the row of block b of sequence s.
cdef struct Rows:
    int32_t* row_of  # [total_rows]
    int32_t* sequence_base  # [batch]
    int32_t* row_sequence  # [total_rows]
    int32_t* row_block  # [total_rows]


cdef struct Arrays:
    int32_t* row_ptr  # [head_kv, total_rows + 1]
    int32_t* q_indices  # [head_kv, size]
    int32_t* qsplit_indices  # [head_kv, size]
    int32_t* split_counts  # [total_q, head_kv]
    int32_t* split_entries  # [head_kv, total_q, topk]; build_csr: NULL where it is not wanted
    int32_t* scheduler_metadata  # [capacity, 6]
    int32_t* work_count  # [1]
    int32_t* walk_blocks  # [head_kv, groups, WALK_CAP, walk_columns]
    int32_t* walk_counts  # [head_kv, groups]
    int32_t* walk_flags  # [3]
    int32_t* rest_indices  # [head_kv, size]


cdef int plan_schedule(const Shape* shape, int qhead_per_kv, Plan* plan) except -1
# `arch`: whose forward is to walk.
cdef int plan_walk(const Shape* shape, int qhead_per_kv, str arch, Plan* plan) except -1
cdef int check_cu_seqlens(str name, const int32_t* cu_seqlens, int32_t batch, int64_t total, str total_name) except -1
cdef int64_t count_rows(const int32_t* cu_seqlens_k, int32_t batch) noexcept nogil
cdef int check_csr(const Shape* shape, const Arrays* arrays) except -1

# `counters`: scratch of total_rows + 1.
cdef void number_rows(const int32_t* cu_seqlens_k, const Shape* shape, Rows* rows, int32_t* counters) noexcept nogil
cdef void build_csr(
    const int32_t* q2k_indices, int64_t stride_head, int64_t stride_token, const int32_t* cu_seqlens_q,
    const int32_t* cu_seqlens_k, const Shape* shape, const Rows* rows, Arrays* arrays, int32_t* counters,
) noexcept nogil
cdef void split_csr(const Shape* shape, Arrays* arrays) noexcept nogil
cdef void fill_schedule(const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays) noexcept nogil
cdef void fill_walk_plan(const Shape* shape, const Plan* plan, const Rows* rows, Arrays* arrays) noexcept nogil
cpdef tuple walk_rule(object cost=*, object gain=*, object groups=*)
