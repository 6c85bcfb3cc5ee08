"""The schedule object that the CSR functions return and the attention takes.

    make_schedule(metadata_array, &metadata.view, ...)     an enabled schedule, from arrays and their Views
    schedule.set_csr(batch, rows, digest)                  what it is the schedule of; no digest: None
    schedule.set_walk_plan(blocks_array, &blocks.view, ...)  what build_k2q_csr may make; else its arrays are None
    Schedule.__new__(Schedule)                             a disabled one: enabled False, arrays None, numbers 0
"""

from sparse_aot._core._call cimport Call
from sparse_aot._core._dlpack cimport View, check_in_place


cdef class Schedule:
    cdef readonly bint enabled
    cdef readonly object scheduler_metadata
    cdef readonly object work_count
    cdef readonly object qsplit_indices
    cdef readonly object split_counts
    cdef readonly object split_entries
    cdef readonly object walk_blocks
    cdef readonly object walk_counts
    cdef readonly object walk_flags
    cdef readonly object rest_indices
    cdef readonly int target_q_per_cta
    cdef readonly int work_capacity
    cdef readonly int qhead_per_kv
    cdef readonly int total_rows
    cdef readonly int batch
    cdef readonly object csr_digest
    cdef object __weakref__
    cdef bint given  # some of the arrays were not allocated for it
    # The arrays as launches pass them on: valid as long as the arrays above live.
    cdef View metadata_view
    cdef View work_count_view
    cdef View qsplit_view
    cdef View split_counts_view
    cdef View split_entries_view
    # Zero, data NULL, where there is no walk plan.
    cdef View walk_blocks_view
    cdef View walk_counts_view
    cdef View walk_flags_view
    cdef View rest_indices_view

    cdef void set_walk_plan(
        self, object walk_blocks, const View* blocks_view, object walk_counts, const View* counts_view,
        object walk_flags, const View* flags_view, object rest_indices, const View* rest_view,
    )
    cdef void set_csr(self, int batch, int total_rows, object digest)
    cdef int check_in_place(self) except -1


cdef Schedule make_schedule(
    object scheduler_metadata, const View* metadata_view, object work_count, const View* work_count_view,
    object qsplit_indices, const View* qsplit_view, object split_counts, const View* split_counts_view,
    object split_entries, const View* split_entries_view, int target_q_per_cta, int work_capacity,
    int qhead_per_kv,
)

# A 64-bit digest of a CSR: its sizes, k2q_row_ptr, and the entries of k2q_q_indices that are in use. Reads them back.
cdef object digest_csr(Call call, const View* row_ptr, const View* q_indices, const View* cu_seqlens_k)
