"""The schedule object that the CSR functions return and the attention takes."""

from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t

from sparse_aot._core._call cimport open_call
from sparse_aot._core._checks cimport check_alignment, check_contiguous, check_dtype, check_rank
from sparse_aot._core._dlpack cimport CPU, INT32
from sparse_aot.msa._csr_host cimport BLOCK


cdef class Schedule:
    """How the work of a block-sparse attention is split into items, one CTA each.

    Made by ``build_k2q_csr(..., return_schedule=True)`` and ``prepare_sparse_fwd_schedule_and_split``; valid for any
    number of calls with the same CSR. The arrays are of the type of that function's arguments and on their device.

    A schedule can be weakly referenced, copied (what is copied never changes, so the copy is the schedule itself),
    and deep-copied and pickled where its arrays can.

    Attributes:
        enabled: False: there is no schedule here (the arrays are None), the attention makes its own.
        scheduler_metadata: int32 ``[work_capacity, 6]``; a row is an item: KV head, CSR row, first entry within the
            row, number of entries, sequence, block. Only the first ``work_count`` rows mean anything.
        work_count: int32 ``[1]``, the number of items.
        qsplit_indices: int32 ``[Hkv, total_q * topk]``: for each CSR entry the query token in bits 0-23 and its split
            slot in bits 24-31.
        split_counts: int32 ``[total_q, Hkv]``: the number of distinct valid blocks of a query token.
        split_entries: int32 ``[Hkv, total_q, topk]``: for each split slot of a query token its CSR entry, counted from
            0 within the KV head, plus 2^30 where its group walks it; -1 in the slots past ``split_counts``.
        walk_blocks: int32 ``[Hkv, groups, 128, 2 + W]``. The walk plan, which ``build_k2q_csr`` makes where the forward
            of the architecture walks and there are enough groups (else its arrays are None), has for each KV head and
            group of T = 128 / G consecutive packed query tokens the blocks that the group walks, ascending by CSR row:
            sequence, block, W = ceil(T / 32) words. Bit ``t % 32`` of word ``t / 32`` is set where token
            ``group * T + t`` selects the block. Only the first ``walk_counts`` rows mean anything.
        walk_counts: int32 ``[Hkv, groups]``, the number of blocks that the group walks, plus 2^30 where it leaves none
            of its entries to the CSR's order.
        walk_flags: int32 ``[3]``, 1 or 0: whether any group walks, whether any entry is left to the CSR's order, whether
            any group has no 2^30 in ``walk_counts``.
        rest_indices: int32 ``[Hkv, total_q * topk]``: ``k2q_q_indices`` with -1 for the entries that are walked.
        target_q_per_cta: the most entries of one item.
        work_capacity: the number of rows of ``scheduler_metadata``.
        qhead_per_kv: the query heads a KV head that it was made for; with another number it is right, but slow.
        total_rows, batch: the rows of the CSR, and the sequences, that it was made for.
        csr_digest: a 64-bit digest of the CSR that it was made for and of the blocks of its sequences, which the attention compares with that of the CSR
            it is given: on host arrays always, on a device, where it takes a read-back, with ``SPARSE_AOT_VALIDATE=1``.
            None where it was not computed: on a device without that variable, or under graph capture.
    """

    cdef void set_walk_plan(
        self, object walk_blocks, const View* blocks_view, object walk_counts, const View* counts_view,
        object walk_flags, const View* flags_view, object rest_indices, const View* rest_view,
    ):
        self.walk_blocks = walk_blocks
        self.walk_counts = walk_counts
        self.walk_flags = walk_flags
        self.rest_indices = rest_indices
        self.walk_blocks_view = blocks_view[0]
        self.walk_counts_view = counts_view[0]
        self.walk_flags_view = flags_view[0]
        self.rest_indices_view = rest_view[0]

    cdef void set_csr(self, int batch, int total_rows, object digest):
        self.batch = batch
        self.total_rows = total_rows
        self.csr_digest = digest

    cdef int check_in_place(self) except -1:
        """Raise where an array was resized in place since: its memory may be gone."""
        if not self.given and self.metadata_view.device.device_type != CPU:
            return 0  # what a device's allocators made for us cannot be resized
        check_in_place("schedule.scheduler_metadata", self.scheduler_metadata, &self.metadata_view)
        check_in_place("schedule.work_count", self.work_count, &self.work_count_view)
        check_in_place("schedule.qsplit_indices", self.qsplit_indices, &self.qsplit_view)
        check_in_place("schedule.split_counts", self.split_counts, &self.split_counts_view)
        check_in_place("schedule.split_entries", self.split_entries, &self.split_entries_view)
        if self.walk_flags is not None:
            check_in_place("schedule.walk_blocks", self.walk_blocks, &self.walk_blocks_view)
            check_in_place("schedule.walk_counts", self.walk_counts, &self.walk_counts_view)
            check_in_place("schedule.walk_flags", self.walk_flags, &self.walk_flags_view)
            check_in_place("schedule.rest_indices", self.rest_indices, &self.rest_indices_view)
        return 0

    def __repr__(self):
        if not self.enabled:
            return "Schedule(enabled=False)"
        return f"Schedule(work_capacity={self.work_capacity}, target_q_per_cta={self.target_q_per_cta})"

    def __copy__(self):
        return self

    def __reduce__(self):
        if not self.enabled:
            return Schedule, ()
        names = list(_ARRAYS)[: 5 if self.walk_flags is None else 9]
        return _restore, (
            [getattr(self, name) for name in names], self.target_q_per_cta, self.qhead_per_kv, self.batch,
            self.total_rows, self.csr_digest,
        )


cdef dict _ARRAYS = {  # attribute -> rank, all int32; the walk plan's last
    "scheduler_metadata": 2,
    "work_count": 1,
    "qsplit_indices": 2,
    "split_counts": 2,
    "split_entries": 3,
    "walk_blocks": 4,
    "walk_counts": 2,
    "walk_flags": 1,
    "rest_indices": 2,
}


def _restore(arrays, target_q_per_cta, qhead_per_kv, batch, total_rows, csr_digest):
    """A copy, or what was pickled; reads the arrays anew."""
    cdef View[9] views
    cdef int i
    cdef Call call = open_call("scheduler_metadata", arrays[0], &views[0], None)
    for i, (name, array) in enumerate(zip(_ARRAYS, arrays)):
        call.read(name, array, &views[i])
        check_rank(name, &views[i], _ARRAYS[name])
        check_dtype(name, &views[i], INT32)
        check_alignment(name, &views[i], 4)
        check_contiguous(name, &views[i])
    call.launched()
    cdef Schedule schedule = make_schedule(
        arrays[0], &views[0], arrays[1], &views[1], arrays[2], &views[2], arrays[3], &views[3], arrays[4], &views[4],
        target_q_per_cta, views[0].shape[0], qhead_per_kv,
    )
    if len(arrays) == 9:
        schedule.set_walk_plan(
            arrays[5], &views[5], arrays[6], &views[6], arrays[7], &views[7], arrays[8], &views[8]
        )
    schedule.set_csr(batch, total_rows, csr_digest)
    schedule.given = True
    return schedule


cdef Schedule make_schedule(
    object scheduler_metadata, const View* metadata_view, object work_count, const View* work_count_view,
    object qsplit_indices, const View* qsplit_view, object split_counts, const View* split_counts_view,
    object split_entries, const View* split_entries_view, int target_q_per_cta, int work_capacity, int qhead_per_kv,
):
    cdef Schedule schedule = Schedule.__new__(Schedule)
    schedule.enabled = True
    schedule.scheduler_metadata = scheduler_metadata
    schedule.work_count = work_count
    schedule.qsplit_indices = qsplit_indices
    schedule.split_counts = split_counts
    schedule.split_entries = split_entries
    schedule.target_q_per_cta = target_q_per_cta
    schedule.work_capacity = work_capacity
    schedule.qhead_per_kv = qhead_per_kv
    schedule.metadata_view = metadata_view[0]
    schedule.work_count_view = work_count_view[0]
    schedule.qsplit_view = qsplit_view[0]
    schedule.split_counts_view = split_counts_view[0]
    schedule.split_entries_view = split_entries_view[0]
    return schedule


cdef inline uint64_t _mix(uint64_t digest, uint64_t word) noexcept nogil:
    digest = (digest ^ word) * 0x9E3779B97F4A7C15ULL
    return digest ^ digest >> 29


cdef uint64_t _digest(
    const int32_t* row_ptr, const int32_t* q_indices, const int32_t* cu_seqlens_k, int64_t head_kv, int64_t total_rows,
    int64_t size, int64_t batch,
) noexcept nogil:
    cdef int64_t head, i
    cdef uint64_t digest = _mix(_mix(_mix(0, head_kv), total_rows), size)
    for i in range(batch):  # which sequence and block a row is
        digest = _mix(digest, <uint64_t>((<int64_t>cu_seqlens_k[i + 1] - cu_seqlens_k[i] + BLOCK - 1) // BLOCK))
    for head in range(head_kv):
        for i in range(total_rows + 1):
            digest = _mix(digest, <uint64_t>row_ptr[i])
        for i in range(min(<int64_t>row_ptr[total_rows], size)):  # a value that nobody has checked
            digest = _mix(digest, <uint64_t>q_indices[i])
        row_ptr += total_rows + 1
        q_indices += size
    return digest


cdef object digest_csr(Call call, const View* row_ptr, const View* q_indices, const View* cu_seqlens_k):
    rows = call.to_host("k2q_row_ptr", row_ptr)
    entries = call.to_host("k2q_q_indices", q_indices)
    lengths = call.to_host("cu_seqlens_k", cu_seqlens_k)
    return _digest(
        <int32_t*><uintptr_t>rows.ctypes.data, <int32_t*><uintptr_t>entries.ctypes.data,
        <int32_t*><uintptr_t>lengths.ctypes.data, row_ptr.shape[0], row_ptr.shape[1] - 1, q_indices.shape[1],
        cu_seqlens_k.shape[0] - 1,
    )
