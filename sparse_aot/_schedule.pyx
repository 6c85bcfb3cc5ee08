"""The schedule object that the CSR functions return and the attention takes."""


cdef class Schedule:
    """How the work of a block-sparse attention is split into items, one CTA each.

    Made by ``build_k2q_csr(..., return_schedule=True)`` and ``prepare_sparse_fwd_schedule_and_split``; valid for any
    number of calls with the same CSR. The arrays are of the type of that function's arguments and on their device.

    Attributes:
        enabled: False: there is no schedule here (the arrays are None), the attention makes its own.
        scheduler_metadata: int32 ``[work_capacity, 6]``; a row is an item: KV head, CSR row, first entry within the
            row, number of entries, sequence, block. Only the first ``work_count`` rows mean anything.
        work_count: int32 ``[1]``, the number of items.
        qsplit_indices: int32 ``[Hkv, total_q * topk]``: for each CSR entry the query token in bits 0-23 and its split
            slot in bits 24-31.
        split_counts: int32 ``[total_q, Hkv]``: the number of distinct valid blocks of a query token.
        split_entries: int32 ``[Hkv, total_q, topk]``: for each split slot of a query token its CSR entry, counted from
            0 within the KV head; -1 in the slots past ``split_counts``.
        target_q_per_cta: the most entries of one item.
        work_capacity: the number of rows of ``scheduler_metadata``.
    """

    def __repr__(self):
        if not self.enabled:
            return "Schedule(enabled=False)"
        return f"Schedule(work_capacity={self.work_capacity}, target_q_per_cta={self.target_q_per_cta})"


cdef Schedule make_schedule(
    object scheduler_metadata, const View* metadata_view, object work_count, const View* work_count_view,
    object qsplit_indices, const View* qsplit_view, object split_counts, const View* split_counts_view,
    object split_entries, const View* split_entries_view, int target_q_per_cta, int work_capacity,
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
    schedule.metadata_view = metadata_view[0]
    schedule.work_count_view = work_count_view[0]
    schedule.qsplit_view = qsplit_view[0]
    schedule.split_counts_view = split_counts_view[0]
    schedule.split_entries_view = split_entries_view[0]
    return schedule
