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
        walk_blocks: int32 ``[Hkv, groups, 128, 2 + W]``. The walk plan, which only ``build_k2q_csr`` makes (else its
            arrays are None), has for each KV head and group of T = 128 / G consecutive packed query tokens the
            union of the blocks that they select, ascending by CSR row: sequence, block, W = ceil(T / 32) words. Bit
            ``t % 32`` of word ``t / 32`` is set where token ``group * T + t`` selects the block. Rows past the count
            are 0.
        walk_counts: int32 ``[Hkv, groups]``, the number of blocks in the union; 129 where they are more than 128: those
            groups have no blocks here.
        walk_totals: int64 ``[2]``: the sum of ``walk_counts``, a group with more than 128 blocks counting as 2^40, and
            the sum of ``split_counts``. The forward decides by them whether it walks the unions. A copy
            where the arrays' type is made by its own ``from_dlpack``: JAX has no int64 unless told to.
        target_q_per_cta: the most entries of one item.
        work_capacity: the number of rows of ``scheduler_metadata``.
    """

    cdef void set_walk_plan(
        self, object walk_blocks, const View* blocks_view, object walk_counts, const View* counts_view,
        object walk_totals, const View* totals_view, object totals_memory,
    ):
        self.walk_blocks = walk_blocks
        self.walk_counts = walk_counts
        self.walk_totals = walk_totals
        self.walk_blocks_view = blocks_view[0]
        self.walk_counts_view = counts_view[0]
        self.walk_totals_view = totals_view[0]
        self.walk_totals_memory = totals_memory

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
