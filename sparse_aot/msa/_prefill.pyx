"""Block-sparse attention, prefill: validation, workspace and the launches of one call (forward, combine)."""

import os
import warnings

from cuda.bindings cimport cydriver
from libc.math cimport sqrt
from libc.stdint cimport int32_t, int64_t, uint64_t, uintptr_t
from libc.string cimport memset

from sparse_aot._core._call cimport Buffer, Call, open_call
from sparse_aot._core._checks cimport (
    boolean,
    check_alignment,
    check_contiguous,
    check_dtype,
    check_extent,
    check_int32,
    check_rank,
    check_steps,
    check_writable,
    dtype_name,
    element_count,
    integer,
    name_of_dtype,
    positive,
)
from sparse_aot._core._dlpack cimport BFLOAT16, FLOAT32, INT32, View
from sparse_aot._core._driver cimport check, is_capturing
from sparse_aot._core._kernel cimport Kernel, get_kernel
from sparse_aot._core._overlap cimport Bounds, bounds_of, check_apart, check_no_overlap_within, meets
from sparse_aot._core._trace cimport Trace, begin, note, tracing
from sparse_aot.msa._kv cimport (
    HEAD_DIM,
    KeysValues,
    check_kv_batch,
    check_tiles,
    encode_kv,
    encode_queries,
    heads_per_kv,
    read_kv,
    set_kv,
)
from sparse_aot.msa._schedule cimport Schedule, digest_csr
from sparse_aot.msa._values cimport N_TENSOR_MAPS, Values, set_float32

from sparse_aot.msa._csr import prepare_sparse_fwd_schedule_and_split
from sparse_aot.msa.validate import check_schedule, check_walk_plan, validate_attention


cdef enum:
    BLK_KV = 128
    MAX_TOTAL_Q = 1 << 24  # a token number has 24 bits in qsplit_indices
    WORKSPACE_ALIGNMENT = 256
    COUNTERS = 2  # of work items, and of groups that walk

cdef tuple TOPK = (4, 8, 16, 32)

# (dtype of q, dtype of k and v) -> the (qk_dtype, pv_dtype) that it is computed in, the default first.
cdef dict MMA_DTYPES = {
    (BFLOAT16, BFLOAT16): (("bfloat16", "bfloat16"),),
}
cdef dict PARTIAL_DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16}

cdef bint _warned_of_g = False
cdef bint _validate = os.environ.get("SPARSE_AOT_VALIDATE") == "1"


# Arguments ------------------------------------------------------------------------------------------------------------

# What one call works on, once it is known to be right.
cdef struct Problem:
    View q
    KeysValues kv
    View row_ptr
    View q_indices
    View cu_seqlens_q
    View cu_seqlens_k
    View out
    View lse  # data NULL: not wanted
    View lse_temperature  # likewise
    int32_t batch
    int32_t total_q
    int32_t head_kv
    int32_t g
    int32_t topk
    int32_t causal
    float softmax_scale
    float lse_temperature_scale


cdef tuple _mma_dtypes(const View* q, const View* k, object qk_dtype, object pv_dtype):
    choices = MMA_DTYPES.get((q.dtype, k.dtype))
    if choices is None:
        supported = ", ".join(f"{dtype_name(q_dtype)} / {dtype_name(kv_dtype)}" for q_dtype, kv_dtype in MMA_DTYPES)
        raise NotImplementedError(
            f"q, k: no kernels for q of {dtype_name(q.dtype)} with k and v of {dtype_name(k.dtype)}; supported: "
            f"{supported}"
        )
    if qk_dtype is None and pv_dtype is None:
        return choices[0]
    wanted = (
        choices[0][0] if qk_dtype is None else name_of_dtype("qk_dtype", qk_dtype),
        choices[0][1] if pv_dtype is None else name_of_dtype("pv_dtype", pv_dtype),
    )
    if wanted not in choices:
        supported = ", ".join(f"{qk} / {pv}" for qk, pv in choices)
        raise NotImplementedError(
            f"qk_dtype, pv_dtype: got {wanted[0]} / {wanted[1]}; q of {dtype_name(q.dtype)} with k and v of "
            f"{dtype_name(k.dtype)} is computed in {supported}"
        )
    return wanted


cdef str _partial_dtype(object partial_dtype):
    name = name_of_dtype("partial_dtype", partial_dtype)
    if name not in PARTIAL_DTYPES:
        raise NotImplementedError(f"partial_dtype: got {name!r}; supported: {', '.join(PARTIAL_DTYPES)}")
    return name


cdef int _read_problem(
    Call call, Problem* p, object k, object v, object k2q_row_ptr, object k2q_q_indices, object cu_seqlens_q,
    object cu_seqlens_k, object page_table, object seqused_k, int topk,
) except -1:
    """Read the arrays that every call has (q is read already) and check each, and all against each other."""
    check_rank("q", &p.q, 3)
    check_tiles("q", &p.q)
    read_kv(call, &p.kv, k, v, page_table, seqused_k)
    call.read("k2q_row_ptr", k2q_row_ptr, &p.row_ptr)
    call.read("k2q_q_indices", k2q_q_indices, &p.q_indices)
    call.read("cu_seqlens_q", cu_seqlens_q, &p.cu_seqlens_q)
    call.read("cu_seqlens_k", cu_seqlens_k, &p.cu_seqlens_k)

    if p.q.shape[0] >= MAX_TOTAL_Q:
        raise ValueError(f"q: expected fewer than {MAX_TOTAL_Q} tokens, got {p.q.shape[0]}")
    p.topk = topk
    p.total_q = p.q.shape[0]
    p.head_kv = p.kv.head_kv
    p.g = heads_per_kv(&p.q, &p.kv)

    check_int32("k2q_row_ptr", &p.row_ptr, 2)
    check_extent("k2q_row_ptr", &p.row_ptr, 0, p.head_kv, "KV heads: dimension 0 of q2k_indices [Hkv, total_q, topk]")
    if p.row_ptr.shape[1] == 0:
        raise ValueError("k2q_row_ptr: expected [Hkv, total_rows + 1], got 0 in dimension 1")
    check_contiguous("k2q_row_ptr", &p.row_ptr)
    check_int32("k2q_q_indices", &p.q_indices, 2)
    check_extent("k2q_q_indices", &p.q_indices, 0, p.head_kv, "KV heads")
    check_extent("k2q_q_indices", &p.q_indices, 1, <int64_t>p.total_q * topk, "total_q * topk")
    check_contiguous("k2q_q_indices", &p.q_indices)

    check_int32("cu_seqlens_q", &p.cu_seqlens_q, 1)
    check_contiguous("cu_seqlens_q", &p.cu_seqlens_q)
    if p.cu_seqlens_q.shape[0] < 2:
        raise ValueError(f"cu_seqlens_q: expected B + 1 >= 2 elements, got {p.cu_seqlens_q.shape[0]}")
    p.batch = p.cu_seqlens_q.shape[0] - 1
    check_int32("cu_seqlens_k", &p.cu_seqlens_k, 1)
    check_extent("cu_seqlens_k", &p.cu_seqlens_k, 0, p.batch + 1, "B + 1 of cu_seqlens_q")
    check_contiguous("cu_seqlens_k", &p.cu_seqlens_k)
    check_kv_batch(&p.kv, p.batch)
    return 0


cdef int _refuse_scales(const View* k, object q_scale, object k_scale, object v_scale) except -1:
    for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise NotImplementedError(f"{name}: expected None with {dtype_name(k.dtype)} storage, got {scale!r}")
    return 0


cdef int _read_out(Call call, Problem* p, object out) except -1:
    call.read("out", out, &p.out)
    check_rank("out", &p.out, 3)
    check_dtype("out", &p.out, BFLOAT16)
    check_extent("out", &p.out, 0, p.total_q, "total_q")
    check_extent("out", &p.out, 1, p.q.shape[1], "Hq")
    check_tiles("out", &p.out)
    return check_writable("out", &p.out)


cdef int _read_lse(Call call, Problem* p, object lse) except -1:
    call.read("lse", lse, &p.lse)
    check_rank("lse", &p.lse, 2)
    check_dtype("lse", &p.lse, FLOAT32)
    check_extent("lse", &p.lse, 0, p.total_q, "total_q")
    check_extent("lse", &p.lse, 1, p.q.shape[1], "Hq")
    check_alignment("lse", &p.lse, 4)
    check_steps("lse", &p.lse, 2, 1)
    return check_writable("lse", &p.lse)


cdef inline int _apart(str name, const View* view, const Bounds* bounds, str other_name, const View* other) except -1:
    return check_apart(name, view, other_name, other) if meets(bounds, other) else 0


cdef int _check_apart(str name, const View* view, Problem* p, Schedule schedule) except -1:
    """What a call writes has no byte of what it reads, and no byte twice."""
    cdef Bounds bounds = bounds_of(view)
    check_no_overlap_within(name, view)
    _apart(name, view, &bounds, "q", &p.q)
    _apart(name, view, &bounds, "k", &p.kv.k)
    _apart(name, view, &bounds, "v", &p.kv.v)
    _apart(name, view, &bounds, "k2q_row_ptr", &p.row_ptr)
    _apart(name, view, &bounds, "k2q_q_indices", &p.q_indices)
    _apart(name, view, &bounds, "cu_seqlens_q", &p.cu_seqlens_q)
    _apart(name, view, &bounds, "cu_seqlens_k", &p.cu_seqlens_k)
    if p.kv.page_table.data is not NULL:
        _apart(name, view, &bounds, "page_table", &p.kv.page_table)
    if p.kv.seqused_k.data is not NULL:
        _apart(name, view, &bounds, "seqused_k", &p.kv.seqused_k)
    if schedule is None:
        return 0
    _apart(name, view, &bounds, "schedule.scheduler_metadata", &schedule.metadata_view)
    _apart(name, view, &bounds, "schedule.work_count", &schedule.work_count_view)
    _apart(name, view, &bounds, "schedule.qsplit_indices", &schedule.qsplit_view)
    _apart(name, view, &bounds, "schedule.split_counts", &schedule.split_counts_view)
    _apart(name, view, &bounds, "schedule.split_entries", &schedule.split_entries_view)
    if schedule.walk_flags is not None:
        _apart(name, view, &bounds, "schedule.walk_blocks", &schedule.walk_blocks_view)
        _apart(name, view, &bounds, "schedule.walk_counts", &schedule.walk_counts_view)
        _apart(name, view, &bounds, "schedule.walk_flags", &schedule.walk_flags_view)
        _apart(name, view, &bounds, "schedule.rest_indices", &schedule.rest_indices_view)
    return 0


cdef int _check_schedule(Problem* p, Schedule schedule) except -1:
    cdef const View* view = &schedule.qsplit_view
    if view.device.device_type != p.q.device.device_type or view.device.device_id != p.q.device.device_id:
        raise ValueError("schedule: expected one whose arrays are on q's device")
    check_extent("schedule.qsplit_indices", view, 0, p.head_kv, "KV heads")
    check_extent("schedule.qsplit_indices", view, 1, p.q_indices.shape[1], "total_q * topk")
    check_extent("schedule.split_counts", &schedule.split_counts_view, 0, p.total_q, "total_q")
    check_extent("schedule.split_counts", &schedule.split_counts_view, 1, p.head_kv, "KV heads")
    check_extent("schedule.split_entries", &schedule.split_entries_view, 2, p.topk, "topk")
    if schedule.total_rows != p.row_ptr.shape[1] - 1 or schedule.batch != p.batch:
        raise ValueError(
            f"schedule: expected one for a CSR of {p.row_ptr.shape[1] - 1} rows and {p.batch} sequences, got one for "
            f"{schedule.total_rows} rows and {schedule.batch} sequences"
        )
    return schedule.check_in_place()


cdef int _warn_of_g(const Problem* p, Schedule schedule) except -1:
    """Said once in a process: the schedule was made for another number of query heads, most often for none given."""
    global _warned_of_g
    if not _warned_of_g:
        _warned_of_g = True
        warnings.warn(
            f"schedule: made with qhead_per_kv={schedule.qhead_per_kv}, but q has {p.g} query heads a KV head. The "
            "results are right; it takes longer, in items of another size and without a walk: pass "
            f"qhead_per_kv={p.g} where the schedule is made",
            RuntimeWarning,
            stacklevel=1,
        )
    return 0


cdef int _validate_values(Call call, Problem* p, object max_seqlen_q, object max_seqlen_k) except -1:
    """SPARSE_AOT_VALIDATE=1: what can only be known by reading the arrays."""
    validate_attention(
        total_q=p.total_q,
        topk=p.topk,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        kv_shape=tuple([p.kv.k.shape[dim] for dim in range(p.kv.k.ndim)]),
        cu_seqlens_q=call.to_host("cu_seqlens_q", &p.cu_seqlens_q),
        cu_seqlens_k=call.to_host("cu_seqlens_k", &p.cu_seqlens_k),
        k2q_row_ptr=call.to_host("k2q_row_ptr", &p.row_ptr),
        k2q_q_indices=call.to_host("k2q_q_indices", &p.q_indices),
        page_table=call.to_host("page_table", &p.kv.page_table) if p.kv.page_table.ndim else None,
        seqused_k=call.to_host("seqused_k", &p.kv.seqused_k) if p.kv.seqused_k.ndim else None,
    )
    return 0


cdef int _validate_schedule(Call call, Problem* p, Schedule schedule) except -1:
    """That a schedule is of this CSR: by its digest and, with SPARSE_AOT_VALIDATE=1, by all that it says."""
    cdef View entries = p.q_indices  # split_entries, which are contiguous, in two dimensions
    cdef View elements
    if schedule.csr_digest is not None and schedule.csr_digest != digest_csr(
        call, &p.row_ptr, &p.q_indices, &p.cu_seqlens_k
    ):
        raise ValueError("schedule: expected one for this k2q_row_ptr and k2q_q_indices, got one for another CSR")
    if not _validate:
        return 0
    entries.data = schedule.split_entries_view.data
    check_schedule(
        cu_seqlens_k=call.to_host("cu_seqlens_k", &p.cu_seqlens_k),
        cu_seqlens_q=call.to_host("cu_seqlens_q", &p.cu_seqlens_q),
        k2q_row_ptr=call.to_host("k2q_row_ptr", &p.row_ptr),
        k2q_q_indices=call.to_host("k2q_q_indices", &p.q_indices),
        metadata=call.to_host("schedule.scheduler_metadata", &schedule.metadata_view),
        work_count=call.to_host("schedule.work_count", &schedule.work_count_view),
        qsplit_indices=call.to_host("schedule.qsplit_indices", &schedule.qsplit_view),
        split_counts=call.to_host("schedule.split_counts", &schedule.split_counts_view),
        split_entries=call.to_host("schedule.split_entries", &entries).reshape(p.head_kv, p.total_q, p.topk),
    )
    if schedule.walk_flags is not None:
        elements = schedule.walk_blocks_view  # contiguous, in two dimensions
        elements.ndim = 2
        elements.shape[0] = element_count(&schedule.walk_blocks_view) // schedule.walk_blocks_view.shape[3]
        elements.shape[1] = elements.strides[0] = schedule.walk_blocks_view.shape[3]
        elements.strides[1] = 1
        shape = [schedule.walk_blocks_view.shape[dim] for dim in range(4)]
        check_walk_plan(
            qhead_per_kv=schedule.qhead_per_kv,
            cu_seqlens_k=call.to_host("cu_seqlens_k", &p.cu_seqlens_k),
            k2q_row_ptr=call.to_host("k2q_row_ptr", &p.row_ptr),
            k2q_q_indices=call.to_host("k2q_q_indices", &p.q_indices),
            split_entries=call.to_host("schedule.split_entries", &entries).reshape(p.head_kv, p.total_q, p.topk),
            walk_blocks=call.to_host("schedule.walk_blocks", &elements).reshape(shape),
            walk_counts=call.to_host("schedule.walk_counts", &schedule.walk_counts_view),
            walk_flags=call.to_host("schedule.walk_flags", &schedule.walk_flags_view),
            rest_indices=call.to_host("schedule.rest_indices", &schedule.rest_indices_view),
        )
    return 0


cdef Schedule _make_schedule(
    Call call, Problem* p, object k2q_row_ptr, object k2q_q_indices, object cu_seqlens_q, object cu_seqlens_k,
    object max_seqlen_q, object stream,
):
    """The schedule of a call that was given none."""
    cdef int64_t[2] counts_shape = [p.total_q, p.head_kv]
    cdef Buffer qsplit_indices = call.temporary(INT32, 2, p.q_indices.shape)
    cdef Buffer split_counts = call.temporary(INT32, 2, counts_shape)
    if not call.ordered and is_capturing(call.stream):
        raise ValueError(
            "schedule: expected one under graph capture on a stream that is not the current one of q's framework"
        )
    schedule = prepare_sparse_fwd_schedule_and_split(
        k2q_row_ptr=k2q_row_ptr,
        k2q_q_indices=k2q_q_indices,
        k2q_qsplit_indices=qsplit_indices,
        split_counts=split_counts,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        total_q=p.total_q,
        max_seqlen_q=max_seqlen_q,
        topk=p.topk,
        head_kv=p.head_kv,
        qhead_per_kv=p.g,
        blk_kv=BLK_KV,
        device=None,
        enabled=True,
        stream=stream,
    )
    qsplit_indices.outlive()
    split_counts.outlive()
    if not call.ordered:
        call.hold(schedule)
    return schedule


# Launches -------------------------------------------------------------------------------------------------------------

cdef dict _forward_kernels = {}  # device, partial dtype, G and temperature in one int -> Kernel
cdef dict _combine_kernels = {}  # device, partial dtype and topk in one int -> Kernel


cdef Kernel _forward_kernel(Call call, Problem* p, tuple mma, str partial, bint temperature):
    cdef uint64_t stored = PARTIAL_DTYPES[partial]
    cdef uint64_t key = ((<uint64_t>call.device.ordinal << 16 | stored) << 5 | p.g) << 1 | temperature
    kernel = _forward_kernels.get(key)
    if kernel is None:
        kernel = _forward_kernels[key] = get_kernel(
            call.device,
            "fwd",
            {
                "q": dtype_name(p.q.dtype),
                "kv": dtype_name(p.kv.k.dtype),
                "qk": mma[0],
                "pv": mma[1],
                "g": p.g,
                "partial": partial,
                "temperature": temperature,
            },
        )
    return <Kernel>kernel


cdef Kernel _combine_kernel(Call call, Problem* p, str partial):
    cdef uint64_t stored = PARTIAL_DTYPES[partial]
    cdef uint64_t key = (<uint64_t>call.device.ordinal << 16 | stored) << 6 | p.topk
    kernel = _combine_kernels.get(key)
    if kernel is None:
        kernel = _combine_kernels[key] = get_kernel(call.device, "combine", {"partial": partial, "topk": p.topk})
    return <Kernel>kernel


cdef inline size_t _aligned(size_t n_bytes) noexcept:
    return (n_bytes + WORKSPACE_ALIGNMENT - 1) // WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT


cdef int _reach_schedule(Call call, Schedule schedule) except -1:
    call.reach("schedule.scheduler_metadata", &schedule.metadata_view)
    call.reach("schedule.work_count", &schedule.work_count_view)
    call.reach("schedule.qsplit_indices", &schedule.qsplit_view)
    call.reach("schedule.split_counts", &schedule.split_counts_view)
    call.reach("schedule.split_entries", &schedule.split_entries_view)
    call.reach("schedule.walk_blocks", &schedule.walk_blocks_view)
    call.reach("schedule.walk_counts", &schedule.walk_counts_view)
    call.reach("schedule.walk_flags", &schedule.walk_flags_view)
    return call.reach("schedule.rest_indices", &schedule.rest_indices_view)


cdef int _note_traversal(Schedule schedule, bint walks, bint planned) except -1:
    if planned:
        return note("walks what the walk plan lists, the rest block-outer")
    if not walks:
        return note("block-outer, this kernel has no walk")
    if schedule.walk_flags is None:
        return note("block-outer, the schedule has no walk plan: build_k2q_csr makes one where there are enough tokens")
    return note(f"block-outer, the walk plan is for qhead_per_kv={schedule.qhead_per_kv}")


cdef int _set_values(Values* v, const Problem* p, Schedule schedule) except -1:
    """What the kernels are told of the arguments and the schedule."""
    memset(v, 0, sizeof(v[0]))
    v.q = <int64_t>p.q.data
    v.q_stride_token = p.q.strides[0]
    v.q_stride_head = p.q.strides[1]
    set_kv(v, &p.kv)
    v.cu_seqlens_q = <int64_t>p.cu_seqlens_q.data
    v.cu_seqlens_k = <int64_t>p.cu_seqlens_k.data
    v.row_ptr = <int64_t>p.row_ptr.data
    v.out = <int64_t>p.out.data
    v.out_stride_token = p.out.strides[0]
    v.out_stride_head = p.out.strides[1]
    v.lse = <int64_t>p.lse.data
    v.lse_stride_token = p.lse.strides[0]
    v.lse_stride_head = p.lse.strides[1]
    v.lse_temperature = <int64_t>p.lse_temperature.data
    v.batch = p.batch
    v.total_q = p.total_q
    v.head_kv = p.head_kv
    v.qhead_per_kv = p.g
    v.topk = p.topk
    v.total_rows = p.row_ptr.shape[1] - 1
    v.causal = p.causal
    set_float32(&v.softmax_scale, p.softmax_scale)
    set_float32(&v.lse_temperature_scale, p.lse_temperature_scale)

    v.scheduler_metadata = <int64_t>schedule.metadata_view.data
    v.work_count = <int64_t>schedule.work_count_view.data
    v.entry_words = <int64_t>schedule.qsplit_view.data
    v.split_counts = <int64_t>schedule.split_counts_view.data
    v.split_entries = <int64_t>schedule.split_entries_view.data
    v.work_capacity = schedule.work_capacity
    v.head_partials = <int64_t>p.total_q * p.topk
    return 0


cdef int _plan_walk(Call call, const Problem* p, Values* v, Schedule schedule, Kernel forward) except -1:
    """Let the forward walk where the schedule's plan is for this G; whether it does is decided on the device."""
    cdef bint walks = forward.takes("walk_flags")
    if schedule.qhead_per_kv != p.g:
        _warn_of_g(p, schedule)
    elif walks and schedule.walk_flags is not None:
        v.walk_blocks = <int64_t>schedule.walk_blocks_view.data
        v.walk_counts = <int64_t>schedule.walk_counts_view.data
        v.walk_flags = <int64_t>schedule.walk_flags_view.data
        v.entry_words = <int64_t>schedule.rest_indices_view.data
        v.groups = schedule.walk_counts_view.shape[1]
        v.head_partials += p.total_q  # what a token's walk leaves to be merged
    if tracing:
        _note_traversal(schedule, walks, v.walk_flags != 0)
    return 0


cdef Buffer _take_workspace(Call call, const Problem* p, Values* v, int partial_bytes):
    """What lies between the kernels of a call: partial results, ``head_partials`` entries a KV head, and counters."""
    cdef size_t rows = <size_t>v.head_partials * p.head_kv * p.g
    cdef size_t out_bytes = _aligned(rows * HEAD_DIM * partial_bytes)
    cdef size_t lse_bytes = _aligned(rows * 4)
    cdef size_t lse_count = 1 if p.lse_temperature.data is NULL else 2
    cdef Buffer workspace = call.scratch(
        out_bytes + lse_count * lse_bytes + COUNTERS * 4 + WORKSPACE_ALIGNMENT - 1
    )
    v.partial_out = <int64_t>_aligned(<uintptr_t>workspace.view.data)
    v.partial_lse = v.partial_out + out_bytes
    v.partial_lse_temperature = v.partial_lse + lse_bytes if lse_count == 2 else 0
    v.work_counter = v.partial_lse + lse_count * lse_bytes
    return workspace


cdef int _launch(Call call, Problem* p, Schedule schedule, tuple mma, str partial) except -1:
    cdef bint temperature = p.lse_temperature.data is not NULL
    # Without a key, or without a selected block, there is nothing to compute: combine is given split counts of 0.
    cdef bint has_work = p.kv.k.shape[0] > 0 and schedule.work_capacity > 0
    cdef Kernel combine = _combine_kernel(call, p, partial)
    cdef Kernel forward = None
    cdef Buffer workspace
    cdef Values v
    cdef cydriver.CUtensorMap[N_TENSOR_MAPS] maps
    cdef int64_t combine_work = <int64_t>p.total_q * p.head_kv * p.g
    cdef cydriver.CUresult memset_result = cydriver.CUDA_SUCCESS
    cdef cydriver.CUresult forward_result = cydriver.CUDA_SUCCESS
    cdef cydriver.CUresult combine_result = cydriver.CUDA_SUCCESS
    _set_values(&v, p, schedule)
    if has_work:
        forward = _forward_kernel(call, p, mma, partial, temperature)
        encode_queries(maps, forward, &p.q, p.g)
        encode_kv(maps, forward, &p.kv)
        _plan_walk(call, p, &v, schedule, forward)
    workspace = _take_workspace(call, p, &v, 4 if PARTIAL_DTYPES[partial] == FLOAT32 else 2)
    if not has_work:
        v.split_counts = v.partial_lse
        call.set_words(v.split_counts, 0, <int64_t>p.total_q * p.head_kv)
        if tracing:
            note("no keys or no selected blocks, so combine alone")
    if call.on_host:
        _reach_schedule(call, schedule)
        if has_work:
            call.set_words(v.work_counter, 0, COUNTERS)
            forward.simulate(call, 0, <int64_t*>&v, maps)
        return combine.simulate(call, combine_work, <int64_t*>&v, maps)
    with nogil:
        if has_work:
            memset_result = cydriver.cuMemsetD32Async(
                <cydriver.CUdeviceptr>v.work_counter, 0, COUNTERS, call.stream
            )
            if memset_result == cydriver.CUDA_SUCCESS:
                forward_result = forward.enqueue(call, 0, <int64_t*>&v, maps)
        if memset_result == cydriver.CUDA_SUCCESS and forward_result == cydriver.CUDA_SUCCESS:
            combine_result = combine.enqueue(call, combine_work, <int64_t*>&v, maps)
    if memset_result != cydriver.CUDA_SUCCESS:
        check(memset_result, f"cuMemsetD32Async of the work counter of {forward.name}")
    if forward_result != cydriver.CUDA_SUCCESS:
        forward.failed(call, forward_result, 0)
    if combine_result != cydriver.CUDA_SUCCESS:
        combine.failed(call, combine_result, combine_work)
    return call.launched()


# The public function --------------------------------------------------------------------------------------------------

def sparse_atten_func(
    q,
    k,
    v,
    k2q_row_ptr,
    k2q_q_indices,
    topk=None,
    *,
    topK=None,
    blk_kv=128,
    causal=False,
    softmax_scale=None,
    lse_temperature_scale=1.0,
    return_temperature_lse=False,
    partial_dtype="bfloat16",
    return_softmax_lse=False,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    seqused_k=None,
    schedule=None,
    qk_dtype=None,
    pv_dtype=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    usable_SM_count=None,
    out=None,
    lse=None,
    stream=None,
):
    """Block-sparse attention over variable-length sequences, flat or paged.

    Every query token attends, for each KV head, to the keys of its selected blocks of 128 keys; all ``G = Hq / Hkv``
    query heads of a KV head share the selection. Scores are ``softmax_scale * q . k``. Key ``j`` of a sequence is
    visible to query ``i`` if ``j < len_k`` and, when ``causal``, ``j <= i + len_k - len_q``. A row that sees nothing
    gives out 0 and lse -inf.

    Arrays are any objects on one CUDA device that speak DLPack. On host arrays the same kernels run in a simulator, for
    trying and testing, where it is installed (``sparse_aot.sim``). Nothing is read back from the device: token numbers,
    page numbers and lengths that are out of range are ignored (host code of CSR and schedule checks them;
    ``SPARSE_AOT_VALIDATE=1`` in the environment at import makes them errors, but for those that have a meaning: query
    rows past ``cu_seqlens_q[B]``, pages of -1, lengths in ``seqused_k`` below 0 or past a flat sequence's own keys).
    Forward only: results carry no gradient.

    Args:
        q: bfloat16 ``[total_q, Hq, 128]``, ``total_q < 2**24``; any 16-byte aligned strides, last dimension contiguous.
        k, v: bfloat16, flat ``[total_k, Hkv, 128]`` or, with ``page_table``, paged ``[num_pages, Hkv, 128, 128]``; any
            16-byte aligned strides (views of an interleaved cache are read in place), last dimension contiguous.
            ``G`` in 1, 2, 4, 8, 16.
        k2q_row_ptr: int32 ``[Hkv, total_rows + 1]``, from ``build_k2q_csr``.
        k2q_q_indices: int32 ``[Hkv, total_q * topk]``, likewise.
        topk: selected blocks of a (token, KV head): 4, 8, 16 or 32. ``topK`` is another name for it.
        blk_kv: keys of a block: 128.
        causal: bottom-right aligned causal mask.
        softmax_scale: positive; None is ``1 / sqrt(128)``.
        lse_temperature_scale: positive; the divisor of the scores in ``lse_temperature``.
        return_temperature_lse: also return ``lse_temperature``, and ``lse``.
        partial_dtype: how the partial outputs of a row's splits are stored, "float32" or "bfloat16".
        return_softmax_lse: also return ``lse``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, where each sequence starts.
        max_seqlen_q, max_seqlen_k: the longest sequence, in tokens; only hints for sizes, None is as good.
        page_table: int32 ``[B, max_pages]``, last dimension contiguous: the pages of each sequence.
        seqused_k: int32 ``[B]``: keys in use, instead of the lengths in ``cu_seqlens_k``.
        schedule: from ``build_k2q_csr(..., return_schedule=True)`` or ``prepare_sparse_fwd_schedule_and_split``, for
            this CSR: on host arrays another one is an error, on a device with ``SPARSE_AOT_VALIDATE=1``. None makes one
            inside the call.
        qk_dtype, pv_dtype: the dtypes of the two products; None is the default for the storage ("bfloat16").
        q_scale, k_scale, v_scale: belong to fp8 storage; must be None for bfloat16.
        usable_SM_count: at most so many multiprocessors work on the forward, whose CTAs stay on theirs; an integer from
            1, None is all that the CUDA context has. The merge of splits, a short kernel of many CTAs, is not bound by
            it; a green context bounds both. The result has the same bits.
        out: bfloat16 ``[total_q, Hq, 128]`` to write into; 16-byte aligned strides, last dimension contiguous. It may
            be a view of a buffer that holds other arguments too, but has no byte of them; nor has lse.
        lse: float32 ``[total_q, Hq]`` to write into, any positive strides.
        stream: CUDA stream to work on, an int handle or an object with ``__cuda_stream__``; None is the current stream
            of q's framework. Arrays that the call returns are allocated in that framework's current stream: keep them
            until the work on another ``stream`` is done. The work is done in the CUDA context of the stream; that of a
            default stream is the current context where it belongs to q's device (a green context among them), else the
            device's primary one.

    Returns:
        ``out``, bfloat16 ``[total_q, Hq, 128]``; with ``return_softmax_lse`` ``(out, lse)``, lse float32
        ``[total_q, Hq]``, the natural logarithm of the sum of exponentials of the scores; with
        ``return_temperature_lse`` ``(out, lse, lse_temperature)``, the last of scores / ``lse_temperature_scale``
        (``lse`` itself at scale 1).

    Raises:
        TypeError, ValueError: an argument is not as above; the message names it.
        NotImplementedError: no kernel for the dtypes, ``G``, ``topk``, ``blk_kv`` or device; host arrays without the
            simulator.
        CudaError: the driver refused; the message has its name for the error, the kernel and the launch.
        BundleError: the kernel's file, or its PTX for the simulator, is damaged or missing.
        sparse_aot.sim.SimulationError: a kernel did on host arrays what the simulator checks for.
    """
    cdef Problem p
    cdef Buffer new_out = None
    cdef Buffer new_lse = None
    cdef Buffer new_lse_temperature = None
    cdef bint returns_lse = boolean("return_softmax_lse", return_softmax_lse)
    cdef bint returns_temperature = boolean("return_temperature_lse", return_temperature_lse)
    cdef bint wants_lse = returns_lse or returns_temperature or lse is not None
    cdef Schedule given = None  # an enabled one
    cdef int n_topk
    if topK is not None:
        if topk is not None:
            raise TypeError("topk: expected one number, got topK too, which is another name for it")
        topk = topK
    elif topk is None:
        raise TypeError("topk: missing; expected the number of selected blocks of a (token, KV head)")
    n_topk = integer("topk", topk, 1, 1 << 20)
    memset(&p, 0, sizeof(p))
    cdef Trace trace = begin("sparse_atten_func") if tracing else None
    cdef Call call = open_call("q", q, &p.q, stream)
    if call.on_host:
        call.simulate()
    if usable_SM_count is not None:
        call.multiprocessors = min(call.multiprocessors, integer("usable_SM_count", usable_SM_count, 1, 0x7FFFFFFF))
    if n_topk not in TOPK:
        raise NotImplementedError(f"topk: got {n_topk}; supported: {', '.join(map(str, TOPK))}")
    if integer("blk_kv", blk_kv, 1, 1 << 20) != BLK_KV:
        raise NotImplementedError(f"blk_kv: got {blk_kv}; supported: {BLK_KV}")
    if max_seqlen_q is not None:
        integer("max_seqlen_q", max_seqlen_q, 0, 0x7FFFFFFF)
    if max_seqlen_k is not None:
        integer("max_seqlen_k", max_seqlen_k, 0, 0x7FFFFFFF)
    if schedule is not None:
        if not isinstance(schedule, Schedule):
            raise TypeError(f"schedule: expected a Schedule or None, got {type(schedule).__name__}")
        if (<Schedule>schedule).enabled:
            given = <Schedule>schedule
    p.causal = boolean("causal", causal)
    p.softmax_scale = 1.0 / sqrt(<double>HEAD_DIM)
    if softmax_scale is not None:
        p.softmax_scale = positive("softmax_scale", softmax_scale)
    p.lse_temperature_scale = positive("lse_temperature_scale", lse_temperature_scale)
    partial = _partial_dtype(partial_dtype)
    _read_problem(
        call, &p, k, v, k2q_row_ptr, k2q_q_indices, cu_seqlens_q, cu_seqlens_k, page_table, seqused_k, n_topk
    )
    mma = _mma_dtypes(&p.q, &p.kv.k, qk_dtype, pv_dtype)
    if q_scale is not None or k_scale is not None or v_scale is not None:
        _refuse_scales(&p.kv.k, q_scale, k_scale, v_scale)
    if out is not None:
        _read_out(call, &p, out)
    if lse is not None:
        _read_lse(call, &p, lse)
    if given is not None:
        _check_schedule(&p, given)
    if out is not None:
        _check_apart("out", &p.out, &p, given)
    if lse is not None:
        _check_apart("lse", &p.lse, &p, given)
        if out is not None:
            check_apart("lse", &p.lse, "out", &p.out)
    if _validate:
        _validate_values(call, &p, max_seqlen_q, max_seqlen_k)
    if given is not None and (_validate or call.on_host):
        _validate_schedule(call, &p, given)

    if out is None:
        new_out = call.empty(BFLOAT16, 3, p.q.shape)
        p.out = new_out.view
    if lse is None and wants_lse:
        new_lse = call.empty(FLOAT32, 2, p.q.shape)
        p.lse = new_lse.view
    if returns_temperature and p.lse_temperature_scale != 1.0:
        # combine writes both with the same strides.
        check_contiguous("lse", &p.lse)
        new_lse_temperature = call.empty(FLOAT32, 2, p.q.shape)
        p.lse_temperature = new_lse_temperature.view
    if p.total_q:
        if given is None:
            if tracing:
                note("no schedule given, so it is made here")
            given = _make_schedule(
                call, &p, k2q_row_ptr, k2q_q_indices, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, stream
            )
        _launch(call, &p, given, mma, partial)
    elif tracing:
        note("no queries")

    if new_out is not None:
        out = new_out.finish()
    if not (returns_lse or returns_temperature):
        return out
    if new_lse is not None:
        lse = new_lse.finish()
    if not returns_temperature:
        return out, lse
    return out, lse, lse if new_lse_temperature is None else new_lse_temperature.finish()
