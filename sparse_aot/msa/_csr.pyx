"""build_k2q_csr and prepare_sparse_fwd_schedule_and_split: host arrays go to compiled loops, CUDA arrays to kernels."""

import os
import re

from libc.stdint cimport int32_t, int64_t, uintptr_t

from sparse_aot._core._call cimport Buffer, Call, open_call
from sparse_aot._core._checks cimport (
    boolean,
    check_alignment,
    check_choice,
    check_contiguous,
    check_dtype,
    check_extent,
    check_last_dim_contiguous,
    check_rank,
    check_writable,
    integer,
    shape_text,
)
from sparse_aot._core._dlpack cimport INT32, View
from sparse_aot._core._driver cimport is_capturing
from sparse_aot._core._kernel cimport Kernel, get_kernel
from sparse_aot._core._overlap cimport check_apart
from sparse_aot._core._trace cimport Trace, begin, note, tracing
from sparse_aot.msa._csr_host cimport (
    BLOCK,
    TOKEN_BITS,
    WALK_CAP,
    Arrays,
    Plan,
    Rows,
    Shape,
    build_csr,
    check_csr,
    check_cu_seqlens,
    count_rows,
    fill_schedule,
    fill_walk_plan,
    number_rows,
    plan_schedule,
    plan_walk,
    split_csr,
)
from sparse_aot.msa._schedule cimport Schedule, digest_csr, make_schedule
from sparse_aot.msa._values cimport Values

from sparse_aot import sim
from sparse_aot._core.bundle import get_bundle


cdef bint _validate = os.environ.get("SPARSE_AOT_VALIDATE") == "1"

cdef enum:
    MAX_ROWS = 1 << 26
    MAX_HEADS = 4096
    MAX_PARTS = 11  # of launch_build without a schedule
    # What a CTA covers: entries (smxx_sort.py, smxx_csr.py), rows (CsrRowPtr, smxx_schedule.py), digits (RadixScan).
    ENTRY_TILE = 4096
    ROW_TILE = 256
    SCAN_DIGITS = 32
    MAX_DIGIT_BITS = 11
    # What ChunkCsr (smxx_chunk.py) takes, in place of all kernels up to ScheduleFill.
    CHUNK_CTAS = 8  # of a KV head
    CHUNK_TOKENS = 2048
    CHUNK_ROWS = 3584
    CHUNK_SEQUENCES = 256


# The kernels ----------------------------------------------------------------------------------------------------------

cdef class Operation:
    """A kernel of the launch sequence, as it is loaded for each device."""

    cdef str name
    cdef dict kernels  # (device ordinal, topk) -> Kernel

    def __init__(self, str name):
        self.name = name
        self.kernels = {}

    cdef int launch(self, Call call, Values* values, int64_t work, int topk=0) except -1:
        """``topk`` 0: the operation has no such option."""
        cdef Kernel kernel
        key = (call.device.ordinal, topk)
        kernel = <Kernel>self.kernels.get(key)
        if kernel is None:
            kernel = get_kernel(call.device, self.name, {"topk": topk} if topk else {})
            self.kernels[key] = kernel
        return kernel.launch(call, work, <int64_t*>values, NULL)


cdef Operation CHUNK_CSR = Operation("chunk_csr")
cdef Operation CSR_ROWS = Operation("csr_rows")
cdef Operation CSR_KEYS = Operation("csr_keys")
cdef Operation WALK_PLAN = Operation("walk_plan")
cdef Operation CSR_ROW_PTR = Operation("csr_row_ptr")
cdef Operation CSR_COLLECT = Operation("csr_collect")
cdef Operation CSR_SPLIT = Operation("csr_split")
cdef Operation RADIX_COUNT = Operation("radix_count")
cdef Operation RADIX_SCAN = Operation("radix_scan")
cdef Operation RADIX_SCATTER = Operation("radix_scatter")
cdef Operation SCHEDULE_COUNT = Operation("schedule_count")
cdef Operation SCHEDULE_FILL = Operation("schedule_fill")


cdef class Scratch:
    """The scratch arrays of a call in one allocation: add every part, then allocate."""

    cdef Buffer buffer
    cdef int64_t n_bytes
    cdef int count
    cdef int64_t* parts[MAX_PARTS]

    cdef void add(self, int64_t* part, int64_t count) noexcept:
        """``allocate`` writes the address of ``count`` int32 to ``part``."""
        part[0] = self.n_bytes
        self.parts[self.count] = part
        self.count += 1
        self.n_bytes += (count * <int64_t>sizeof(int32_t) + 255) & ~255

    cdef int allocate(self, Call call) except -1:
        cdef int i
        self.buffer = call.scratch(self.n_bytes)
        for i in range(self.count):
            self.parts[i][0] += <int64_t>self.buffer.view.data
        return 0


cdef int64_t ceil_div(int64_t a, int64_t b) noexcept:
    return (a + b - 1) // b


cdef int bit_length(int64_t value) noexcept:
    cdef int bits = 0
    while value >> bits:
        bits += 1
    return bits


# Launch sequences. What each kernel does is in aot/kernels/msa/smxx_*.py. -

cdef void set_shape(Values* v, const Shape* shape) noexcept:
    v.total_q = shape.total_q
    v.topk = shape.topk
    v.head_kv = shape.head_kv
    v.batch = shape.batch
    v.total_rows = shape.total_rows
    v.size = shape.size


cdef void add_rows(Scratch scratch, Values* v, const Shape* shape) noexcept:
    scratch.add(&v.row_of, shape.total_rows)
    scratch.add(&v.sequence_base, shape.batch)
    scratch.add(&v.row_sequence, shape.total_rows)
    scratch.add(&v.row_block, shape.total_rows)


cdef bint _chunks = True


def take_chunks(bint taken):
    """Whether ChunkCsr takes what it can, for measurements and tests; what it was."""
    global _chunks
    before = _chunks
    _chunks = taken
    return before


cdef bint is_chunk(const Shape* shape) noexcept:
    """Whether ChunkCsr takes a selection: one with room in its shared memory."""
    return (
        _chunks and shape.total_q <= CHUNK_TOKENS and shape.total_rows <= CHUNK_ROWS and shape.batch <= CHUNK_SEQUENCES
    )


cdef int launch_chunk(Call call, Values* v, const Shape* shape, const Plan* plan) except -1:
    """The launches of build_k2q_csr for a chunk; ``plan`` NULL: no schedule."""
    cdef Scratch scratch = Scratch()
    cdef int64_t buckets = 1 if plan is NULL else plan.buckets
    cdef bint walks = plan is not NULL and plan.groups > 0
    scratch.add(&v.row_sequence, shape.total_rows)
    scratch.add(&v.row_block, shape.total_rows)
    scratch.add(&v.counts, shape.head_kv * ceil_div(shape.total_rows, ROW_TILE) * buckets)
    scratch.add(&v.totals, shape.head_kv * buckets)
    if plan is NULL:
        scratch.add(&v.qsplit_indices, <int64_t>shape.head_kv * shape.size)
        scratch.add(&v.split_counts, <int64_t>shape.total_q * shape.head_kv)
        scratch.add(&v.split_entries, <int64_t>shape.head_kv * shape.size)
    if walks:
        scratch.add(&v.head_flags, shape.head_kv)
    scratch.allocate(call)

    set_shape(v, shape)
    if plan is NULL:  # all are in one bucket, and an item has any number of entries
        v.target_log2 = v.bucket_shift = TOKEN_BITS
        v.buckets = 1
    else:
        set_schedule(v, shape, plan)
    if walks:
        set_walk(v, plan)
    else:
        v.walk_blocks = v.head_flags = 0
    CHUNK_CSR.launch(call, v, shape.head_kv * CHUNK_CTAS, shape.topk)
    if plan is not NULL:
        SCHEDULE_FILL.launch(call, v, shape.head_kv * v.tiles)
    return 0


cdef int launch_build(Call call, Values* v, const Shape* shape, const Plan* plan) except -1:
    """All launches of build_k2q_csr; ``plan`` NULL: no schedule."""
    cdef Scratch scratch = Scratch()
    cdef int64_t entries = <int64_t>shape.head_kv * shape.size
    cdef int64_t tiles = ceil_div(shape.size, ENTRY_TILE)
    cdef int64_t work = shape.head_kv * tiles
    cdef int key_bits = bit_length(shape.total_rows)  # the key of a dropped entry is total_rows
    cdef int passes = <int>ceil_div(key_bits, MAX_DIGIT_BITS)
    cdef int bits = <int>ceil_div(key_bits, passes) if passes else 0
    cdef int64_t digits = <int64_t>1 << bits
    cdef int64_t counts = work * digits
    cdef int64_t totals = shape.head_kv * digits
    cdef int64_t[2] keys, values
    cdef int p
    if entries == 0 or shape.total_rows == 0:
        call.set_words(v.row_ptr, 0, <int64_t>shape.head_kv * (shape.total_rows + 1))
        call.set_words(v.q_indices, -1, entries)
        if plan is not NULL:
            call.set_words(v.qsplit_indices, -1, entries)
            call.set_words(v.split_counts, 0, <int64_t>shape.total_q * shape.head_kv)
            call.set_words(v.split_entries, -1, entries)
            call.set_words(v.work_count, 0, 1)
            if plan.groups:
                call.set_words(v.walk_counts, 0, <int64_t>shape.head_kv * plan.groups)
                call.set_words(v.walk_flags, 0, 2)
                call.set_words(v.walk_flags + 8, 1, 1)
                call.set_words(v.rest_indices, -1, entries)
        return 0
    if is_chunk(shape):
        return launch_chunk(call, v, shape, plan)
    add_rows(scratch, v, shape)
    scratch.add(&keys[0], entries)
    scratch.add(&keys[1], entries)
    scratch.add(&values[0], entries)
    if plan is NULL:
        scratch.add(&v.qsplit_indices, entries)
        scratch.add(&v.split_counts, <int64_t>shape.total_q * shape.head_kv)
    else:
        counts = max(counts, schedule_counts(shape, plan))
        totals = max(totals, <int64_t>shape.head_kv * plan.buckets)
    scratch.add(&v.counts, counts)
    scratch.add(&v.totals, totals)
    scratch.allocate(call)

    set_shape(v, shape)
    CSR_ROWS.launch(call, v, 1)
    # The passes alternate between two arrays each for keys and values; the last values written are the qsplit words.
    values[1] = v.qsplit_indices
    if passes % 2 == 0:
        values[0], values[1] = values[1], values[0]
    v.keys = keys[0]
    v.values = values[0]
    v.tiles = tiles
    v.bits = bits
    v.digits = digits
    CSR_KEYS.launch(call, v, work, shape.topk)
    if plan is not NULL and plan.groups:
        set_walk(v, plan)
        WALK_PLAN.launch(call, v, shape.head_kv * v.groups)
    for p in range(passes):
        v.shift = p * bits
        v.keys = v.keys_in = keys[p % 2]
        v.keys_out = keys[1 - p % 2]
        v.values_in = values[p % 2]
        v.values_out = values[1 - p % 2]
        v.indices_out = v.q_indices if p == passes - 1 else 0
        v.entries_out = v.split_entries if p == passes - 1 else 0
        v.rest_out = v.rest_indices if p == passes - 1 else 0
        if p > 0:
            RADIX_COUNT.launch(call, v, work)
        RADIX_SCAN.launch(call, v, shape.head_kv * ceil_div(digits, SCAN_DIGITS))
        RADIX_SCATTER.launch(call, v, work)
    v.keys = v.keys_out
    v.tiles = ceil_div(<int64_t>shape.total_rows + 1, ROW_TILE)
    CSR_ROW_PTR.launch(call, v, shape.head_kv * v.tiles)
    if plan is not NULL:
        launch_schedule(call, v, shape, plan)
    return 0


cdef int launch_split(Call call, Values* v, const Shape* shape, const Plan* plan) except -1:
    """All launches of prepare_sparse_fwd_schedule_and_split."""
    cdef Scratch scratch = Scratch()
    cdef int64_t entries = <int64_t>shape.head_kv * shape.size
    call.set_words(v.split_counts, 0, <int64_t>shape.total_q * shape.head_kv)
    if entries == 0 or shape.total_rows == 0:
        call.set_words(v.qsplit_indices, -1, entries)
        call.set_words(v.split_entries, -1, entries)
        call.set_words(v.work_count, 0, 1)
        return 0
    add_rows(scratch, v, shape)
    scratch.add(&v.counts, schedule_counts(shape, plan))
    scratch.add(&v.totals, <int64_t>shape.head_kv * plan.buckets)
    scratch.allocate(call)

    set_shape(v, shape)
    v.tiles = ceil_div(shape.size, ENTRY_TILE)
    CSR_COLLECT.launch(call, v, shape.head_kv * v.tiles)
    CSR_SPLIT.launch(call, v, shape.head_kv * v.tiles, shape.topk)
    CSR_ROWS.launch(call, v, 1)
    return launch_schedule(call, v, shape, plan)


cdef int64_t schedule_counts(const Shape* shape, const Plan* plan) noexcept:
    return shape.head_kv * ceil_div(shape.total_rows, ROW_TILE) * plan.buckets


cdef void set_schedule(Values* v, const Shape* shape, const Plan* plan) noexcept:
    v.tiles = ceil_div(shape.total_rows, ROW_TILE)
    v.target_log2 = plan.target_log2
    v.bucket_shift = plan.bucket_shift
    v.buckets = v.digits = plan.buckets
    v.bits = bit_length(plan.buckets - 1)
    v.work_capacity = plan.capacity


cdef void set_walk(Values* v, const Plan* plan) noexcept:
    v.groups = plan.groups
    v.tokens_per_group = plan.tokens_per_group
    v.walk_cost = plan.walk_cost
    v.walk_gain = plan.walk_gain


cdef int launch_schedule(Call call, Values* v, const Shape* shape, const Plan* plan) except -1:
    set_schedule(v, shape, plan)
    v.head_flags = 0  # the walk plan's flags are there
    SCHEDULE_COUNT.launch(call, v, shape.head_kv * v.tiles)
    RADIX_SCAN.launch(call, v, shape.head_kv * ceil_div(plan.buckets, SCAN_DIGITS))
    SCHEDULE_FILL.launch(call, v, shape.head_kv * v.tiles)
    return 0


# The same on the host. ------------------------------------------------------------------------------------------------

cdef int run_host(Call call, Values* v, const Shape* shape, const Plan* plan, bint from_csr) except -1:
    """build_k2q_csr (``plan`` NULL: no schedule), or with ``from_csr`` prepare_sparse_fwd_schedule_and_split."""
    cdef Scratch scratch = Scratch()
    cdef int64_t counters
    cdef Rows rows
    cdef Arrays arrays
    add_rows(scratch, v, shape)
    scratch.add(&counters, <int64_t>shape.total_rows + 1)
    if plan is NULL:
        scratch.add(&v.qsplit_indices, <int64_t>shape.head_kv * shape.size)
        scratch.add(&v.split_counts, <int64_t>shape.total_q * shape.head_kv)
    scratch.allocate(call)
    rows.row_of = <int32_t*>v.row_of
    rows.sequence_base = <int32_t*>v.sequence_base
    rows.row_sequence = <int32_t*>v.row_sequence
    rows.row_block = <int32_t*>v.row_block
    arrays.row_ptr = <int32_t*>v.row_ptr
    arrays.q_indices = <int32_t*>v.q_indices
    arrays.qsplit_indices = <int32_t*>v.qsplit_indices
    arrays.split_counts = <int32_t*>v.split_counts
    arrays.split_entries = <int32_t*>v.split_entries
    arrays.scheduler_metadata = <int32_t*>v.scheduler_metadata
    arrays.work_count = <int32_t*>v.work_count
    arrays.walk_blocks = <int32_t*>v.walk_blocks
    arrays.walk_counts = <int32_t*>v.walk_counts
    arrays.walk_flags = <int32_t*>v.walk_flags
    arrays.rest_indices = <int32_t*>v.rest_indices
    if from_csr:
        check_csr(shape, &arrays)
    with nogil:
        number_rows(<int32_t*>v.cu_seqlens_k, shape, &rows, <int32_t*>counters)
        if from_csr:
            split_csr(shape, &arrays)
        else:
            build_csr(
                <int32_t*>v.q2k_indices, v.q2k_stride_head, v.q2k_stride_token, <int32_t*>v.cu_seqlens_q,
                <int32_t*>v.cu_seqlens_k, shape, &rows, &arrays, <int32_t*>counters,
            )
        if plan is not NULL:
            fill_schedule(shape, plan, &rows, &arrays)
            if plan.groups:
                fill_walk_plan(shape, plan, &rows, &arrays)
    return 0


# Arguments ------------------------------------------------------------------------------------------------------------

cdef int read_int32(Call call, str name, object array, View* view, int ndim) except -1:
    """Read an int32 array that must be contiguous."""
    call.read(name, array, view)
    check_rank(name, view, ndim)
    check_dtype(name, view, INT32)
    check_alignment(name, view, 4)
    return check_contiguous(name, view)


cdef int read_entries(Call call, str name, object array, View* view, const Shape* shape) except -1:
    """Read an int32 array of one element for each CSR entry."""
    read_int32(call, name, array, view, 2)
    check_extent(name, view, 0, shape.head_kv, "head_kv")
    return check_extent(name, view, 1, shape.size, "total_q * topk")


cdef int read_cu_seqlens(
    Call call, object array_q, object array_k, View* cu_q, View* cu_k, Shape* shape, Values* v
) except -1:
    read_int32(call, "cu_seqlens_q", array_q, cu_q, 1)
    shape.batch = <int32_t>integer("cu_seqlens_q: the number of elements less one", cu_q.shape[0] - 1, 1, MAX_ROWS)
    read_int32(call, "cu_seqlens_k", array_k, cu_k, 1)
    check_extent("cu_seqlens_k", cu_k, 0, <int64_t>shape.batch + 1, "as in cu_seqlens_q")
    v.cu_seqlens_q = <int64_t>cu_q.data
    v.cu_seqlens_k = <int64_t>cu_k.data
    return 0


cdef int set_sizes(Shape* shape, int64_t head_kv, int64_t total_q, int64_t topk) except -1:
    shape.head_kv = <int32_t>integer("head_kv (dimension 0 of q2k_indices or k2q_row_ptr)", head_kv, 1, MAX_HEADS)
    shape.total_q = <int32_t>integer("total_q", total_q, 0, (1 << TOKEN_BITS) - 1)
    check_choice("topk", topk, (4, 8, 16, 32))
    shape.topk = <int32_t>topk
    shape.size = shape.total_q * shape.topk
    return 0


cdef str order_of(const View* q2k):
    return f"q2k_indices: expected [Hkv, total_q, topk], got shape {shape_text(q2k)}"


cdef int read_selection(const View* view, Shape* shape) except -1:
    """Check q2k_indices and take the sizes from it."""
    check_rank("q2k_indices", view, 3)
    check_dtype("q2k_indices", view, INT32)
    check_alignment("q2k_indices", view, 4)
    check_last_dim_contiguous("q2k_indices", view)
    if view.shape[2] not in (4, 8, 16, 32):
        raise NotImplementedError(f"{order_of(view)}; topk: supported are 4, 8, 16, 32")
    if not 1 <= view.shape[0] <= MAX_HEADS:
        raise ValueError(f"{order_of(view)}; Hkv: expected from 1 to {MAX_HEADS}")
    if view.shape[1] >= 1 << TOKEN_BITS:
        raise ValueError(f"{order_of(view)}; total_q: expected from 0 to {(1 << TOKEN_BITS) - 1}")
    return set_sizes(shape, view.shape[0], view.shape[1], view.shape[2])


cdef int check_order(const View* q2k, int32_t tokens) except -1:
    """A selection without room for the tokens of cu_seqlens_q may have them in another dimension."""
    if tokens > q2k.shape[1] and (tokens == q2k.shape[0] or tokens == q2k.shape[2]):
        raise ValueError(f"{order_of(q2k)} with the {tokens} tokens of cu_seqlens_q in another dimension")
    return 0


cdef int resolve_rows(
    Call call, const View* q2k, const View* cu_q, const View* cu_k, Shape* shape, object total_rows, int64_t total_k
) except -1:
    """Set ``shape.total_rows``; check the values in cu_seqlens, for a device only with SPARSE_AOT_VALIDATE=1.

    ``q2k`` NULL: of a CSR.
    """
    cdef bint validate = call.on_host or (_validate and not is_capturing(call.stream))
    cdef const int32_t* cu_seqlens_q = <int32_t*>cu_q.data
    cdef const int32_t* cu_seqlens_k = <int32_t*>cu_k.data
    cdef int64_t live
    if not call.on_host:
        if total_rows is None and is_capturing(call.stream):
            raise ValueError("total_rows: expected an integer under graph capture, got None, which needs a host read")
        if total_rows is None or validate:
            copy_k = call.to_host("cu_seqlens_k", cu_k)
            cu_seqlens_k = <int32_t*><uintptr_t>copy_k.ctypes.data
        if validate:
            copy_q = call.to_host("cu_seqlens_q", cu_q)
            cu_seqlens_q = <int32_t*><uintptr_t>copy_q.ctypes.data
    if validate:
        if q2k is not NULL:
            check_order(q2k, cu_seqlens_q[shape.batch])
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, shape.batch, shape.total_q, "total_q")
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, shape.batch, total_k, "total_k")
    if total_rows is None or validate:
        live = count_rows(cu_seqlens_k, shape.batch)
        if total_rows is None:
            total_rows = live
        elif total_rows < live:
            raise ValueError(f"total_rows: expected at least {live}, the blocks in cu_seqlens_k, got {total_rows}")
    shape.total_rows = <int32_t>integer("total_rows", total_rows, 0, MAX_ROWS)
    return 0


# Public ---------------------------------------------------------------------------------------------------------------

def build_k2q_csr(
    q2k_indices, cu_seqlens_q, cu_seqlens_k, blk_kv=BLOCK, *, total_k, max_seqlen_k=None, max_seqlen_q=None,
    total_rows=None, qhead_per_kv=1, return_schedule=False, stream=None,
):
    """The reverse map of a block selection: for each block of keys, the query tokens that selected it.

    A CSR row is one block of 128 keys of one sequence. Rows are numbered with the block number outermost and the
    sequence innermost. Block numbers that the token's sequence does not have are dropped; one that a token names twice
    counts once. The result is the same on every run, and for host arrays, which compiled host code takes, bit for bit.

    Args:
        q2k_indices: int32 ``[Hkv, total_q, topk]``, sequence-local block numbers, -1 = nothing; topk is 4, 8, 16 or 32,
            total_q < 2^24. The last dimension is contiguous, the others have any strides.
        cu_seqlens_q: int32 ``[B + 1]``, contiguous. Tokens past ``cu_seqlens_q[B]`` belong to no sequence.
        cu_seqlens_k: int32 ``[B + 1]``, contiguous.
        blk_kv: keys a block; 128.
        total_k: upper bound of ``cu_seqlens_k[B]``; 0 with ``total_rows`` says nothing.
        max_seqlen_k, max_seqlen_q: accepted as hints; nothing is sized by them.
        total_rows: the number of rows, the sum of ``ceil(len_k / 128)`` over the sequences. A larger number gives empty
            rows at the end; a smaller one is an error for host arrays and drops the rows past it on a device. None:
            read from ``cu_seqlens_k``, which waits for the stream and is refused while it is being captured.
        qhead_per_kv: query heads a KV head, 1, 2, 4, 8 or 16; the schedule depends on it.
        return_schedule: whether to make a schedule too, with a walk plan where the forward may walk.
        stream: CUDA stream, an int handle or an object with ``__cuda_stream__``; None: the producer's current stream.

    Returns:
        ``(k2q_row_ptr, k2q_q_indices)`` or ``(k2q_row_ptr, k2q_q_indices, schedule)``. ``k2q_row_ptr`` is int32
        ``[Hkv, total_rows + 1]``; ``k2q_q_indices`` is int32 ``[Hkv, total_q * topk]``, token numbers ascending within
        a row, -1 in the unused tail. See ``Schedule`` for its arrays.

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument, by name. The values of ``cu_seqlens`` are checked
            for host arrays, and for device arrays where ``SPARSE_AOT_VALIDATE=1`` is in the environment at import and
            the stream is not being captured.
        CudaError: a driver call failed.
    """
    cdef View view, cu_q, cu_k
    cdef Values v
    cdef Shape shape
    cdef Plan plan
    cdef Plan* planned = NULL
    cdef Buffer metadata, work_count, qsplit, split_counts, split_entries
    cdef Buffer walk_blocks, walk_counts, walk_flags, rest_indices
    cdef Schedule schedule
    cdef int64_t[2] extents
    cdef Trace trace = begin("build_k2q_csr") if tracing else None
    cdef Call call = open_call("q2k_indices", q2k_indices, &view, stream)
    if call.on_host and sim.options.csr:
        call.simulate()
    read_selection(&view, &shape)
    v.q2k_indices = <int64_t>view.data
    v.q2k_stride_head = view.strides[0]
    v.q2k_stride_token = view.strides[1]
    read_cu_seqlens(call, cu_seqlens_q, cu_seqlens_k, &cu_q, &cu_k, &shape, &v)
    check_choice("blk_kv", blk_kv, (BLOCK,))
    check_choice("qhead_per_kv", qhead_per_kv, (1, 2, 4, 8, 16))
    for name, hint in (("max_seqlen_k", max_seqlen_k), ("max_seqlen_q", max_seqlen_q)):
        if hint is not None:
            integer(name, hint, 0, 0x7FFFFFFF)
    cdef bint scheduled = boolean("return_schedule", return_schedule)
    most_keys = integer("total_k", total_k, 0, 0x7FFFFFFF)
    if total_rows is not None:
        integer("total_rows", total_rows, 0, MAX_ROWS)
        most_keys = most_keys or 0x7FFFFFFF
    resolve_rows(call, &view, &cu_q, &cu_k, &shape, total_rows, most_keys)

    extents = [shape.head_kv, <int64_t>shape.total_rows + 1]
    cdef Buffer row_ptr = call.empty(INT32, 2, extents)
    extents[1] = shape.size
    cdef Buffer q_indices = call.empty(INT32, 2, extents)
    v.row_ptr = <int64_t>row_ptr.view.data
    v.q_indices = <int64_t>q_indices.view.data
    v.split_entries = v.walk_flags = v.rest_indices = 0
    if scheduled:
        planned = &plan
        plan_schedule(&shape, qhead_per_kv, planned)
        plan_walk(&shape, qhead_per_kv, architecture_of(call), planned)
        qsplit = call.empty(INT32, 2, extents)
        extents = [shape.total_q, shape.head_kv]
        split_counts = call.empty(INT32, 2, extents)
        metadata, work_count, split_entries = empty_schedule(call, &shape, planned)
        v.qsplit_indices = <int64_t>qsplit.view.data
        v.split_counts = <int64_t>split_counts.view.data
        v.split_entries = <int64_t>split_entries.view.data
        v.scheduler_metadata = <int64_t>metadata.view.data
        v.work_count = <int64_t>work_count.view.data
        if plan.groups:
            walk_blocks, walk_counts, walk_flags, rest_indices = empty_walk_plan(call, &shape, planned)
            v.walk_blocks = <int64_t>walk_blocks.view.data
            v.walk_counts = <int64_t>walk_counts.view.data
            v.walk_flags = <int64_t>walk_flags.view.data
            v.rest_indices = <int64_t>rest_indices.view.data

    if call.device is None:
        if tracing:
            note("compiled host code, the arrays are on the host")
        run_host(call, &v, &shape, planned, False)
    else:
        launch_build(call, &v, &shape, planned)
        call.launched()
    if not scheduled:
        return row_ptr.finish(), q_indices.finish()
    schedule = make_schedule(
        metadata.finish(), &metadata.view, work_count.finish(), &work_count.view, qsplit.finish(), &qsplit.view,
        split_counts.finish(), &split_counts.view, split_entries.finish(), &split_entries.view, 1 << plan.target_log2,
        plan.capacity, qhead_per_kv,
    )
    schedule.set_csr(shape.batch, shape.total_rows, digest_of(call, &row_ptr.view, &q_indices.view, &cu_k))
    if plan.groups:
        schedule.set_walk_plan(
            walk_blocks.finish(), &walk_blocks.view, walk_counts.finish(), &walk_counts.view, walk_flags.finish(),
            &walk_flags.view, rest_indices.finish(), &rest_indices.view,
        )
    return row_ptr.finish(), q_indices.finish(), schedule


def prepare_sparse_fwd_schedule_and_split(
    *, k2q_row_ptr, k2q_q_indices, k2q_qsplit_indices, split_counts, cu_seqlens_q, cu_seqlens_k, total_q,
    max_seqlen_q=None, topk, head_kv, qhead_per_kv, blk_kv, device, enabled, stream=None,
):
    """The schedule of a given CSR, as ``build_k2q_csr(..., return_schedule=True)`` makes it, but without a walk plan.

    Args:
        k2q_row_ptr: int32 ``[Hkv, total_rows + 1]``, as ``build_k2q_csr`` returns it.
        k2q_q_indices: int32 ``[Hkv, total_q * topk]``, likewise.
        k2q_qsplit_indices: int32 ``[Hkv, total_q * topk]``, written: token in bits 0-23, split slot in bits 24-31; -1
            in the unused tail.
        split_counts: int32 ``[total_q, Hkv]``, written.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``.
        total_q: query tokens, < 2^24.
        max_seqlen_q: accepted as a hint; nothing is sized by it.
        topk: 4, 8, 16 or 32.
        head_kv: KV heads.
        qhead_per_kv: query heads a KV head, 1, 2, 4, 8 or 16.
        blk_kv: keys a block; 128.
        device: where the arrays are, a name or an object whose name says it; only checked not to contradict them. May
            be None.
        enabled: False: nothing is written and a disabled schedule is returned.
        stream: as for ``build_k2q_csr``.

    All arrays are contiguous and on one device, or all on the host.

    Returns:
        A ``Schedule`` whose ``qsplit_indices`` and ``split_counts`` are the given arrays.

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument, by name; values as in ``build_k2q_csr``, and for
            host arrays those of the CSR.
        CudaError: a driver call failed.
    """
    cdef View rows_view, indices_view, qsplit_view, split_view, cu_q, cu_k
    cdef (View*)[4] others
    cdef int i
    cdef Values v
    cdef Shape shape
    cdef Plan plan
    cdef Buffer metadata, work_count, split_entries
    cdef Schedule schedule
    cdef Trace trace = begin("prepare_sparse_fwd_schedule_and_split") if tracing else None
    cdef Call call = open_call("k2q_row_ptr", k2q_row_ptr, &rows_view, stream)
    call.private = isinstance(split_counts, Buffer)  # of the attention, which makes a schedule for itself
    if call.on_host and sim.options.csr:
        call.simulate()
    check_rank("k2q_row_ptr", &rows_view, 2)
    check_dtype("k2q_row_ptr", &rows_view, INT32)
    check_alignment("k2q_row_ptr", &rows_view, 4)
    check_contiguous("k2q_row_ptr", &rows_view)
    set_sizes(&shape, integer("head_kv", head_kv, 1, MAX_HEADS), integer("total_q", total_q, 0, (1 << TOKEN_BITS) - 1),
              integer("topk", topk, 4, 32))
    check_extent("k2q_row_ptr", &rows_view, 0, shape.head_kv, "head_kv")
    integer("k2q_row_ptr: dimension 1 less one, the number of rows", rows_view.shape[1] - 1, 0, MAX_ROWS)
    read_entries(call, "k2q_q_indices", k2q_q_indices, &indices_view, &shape)
    read_entries(call, "k2q_qsplit_indices", k2q_qsplit_indices, &qsplit_view, &shape)
    read_int32(call, "split_counts", split_counts, &split_view, 2)
    check_extent("split_counts", &split_view, 0, shape.total_q, "total_q")
    check_extent("split_counts", &split_view, 1, shape.head_kv, "head_kv")
    check_writable("k2q_qsplit_indices", &qsplit_view)
    check_writable("split_counts", &split_view)
    read_cu_seqlens(call, cu_seqlens_q, cu_seqlens_k, &cu_q, &cu_k, &shape, &v)
    others = [&rows_view, &indices_view, &cu_q, &cu_k]
    for i, name in enumerate(("k2q_row_ptr", "k2q_q_indices", "cu_seqlens_q", "cu_seqlens_k")):
        check_apart("k2q_qsplit_indices", &qsplit_view, name, others[i])
        check_apart("split_counts", &split_view, name, others[i])
    check_apart("k2q_qsplit_indices", &qsplit_view, "split_counts", &split_view)
    check_choice("blk_kv", blk_kv, (BLOCK,))
    check_choice("qhead_per_kv", qhead_per_kv, (1, 2, 4, 8, 16))
    if max_seqlen_q is not None:
        integer("max_seqlen_q", max_seqlen_q, 0, 0x7FFFFFFF)
    check_device(device, call)
    if not boolean("enabled", enabled):
        return Schedule.__new__(Schedule)

    resolve_rows(call, NULL, &cu_q, &cu_k, &shape, rows_view.shape[1] - 1, 0x7FFFFFFF)
    plan_schedule(&shape, qhead_per_kv, &plan)
    metadata, work_count, split_entries = empty_schedule(call, &shape, &plan)
    v.row_ptr = <int64_t>rows_view.data
    v.q_indices = <int64_t>indices_view.data
    v.qsplit_indices = <int64_t>qsplit_view.data
    v.split_counts = <int64_t>split_view.data
    v.split_entries = <int64_t>split_entries.view.data
    v.scheduler_metadata = <int64_t>metadata.view.data
    v.work_count = <int64_t>work_count.view.data
    v.walk_flags = 0
    if call.device is None:
        if tracing:
            note("compiled host code, the arrays are on the host")
        run_host(call, &v, &shape, &plan, True)
    else:
        launch_split(call, &v, &shape, &plan)
        call.launched()
    schedule = make_schedule(
        metadata.finish(), &metadata.view, work_count.finish(), &work_count.view, k2q_qsplit_indices, &qsplit_view,
        split_counts, &split_view, split_entries.finish(), &split_entries.view, 1 << plan.target_log2, plan.capacity,
        qhead_per_kv,
    )
    schedule.set_csr(shape.batch, shape.total_rows, digest_of(call, &rows_view, &indices_view, &cu_k))
    schedule.given = True
    return schedule


cdef object digest_of(Call call, const View* row_ptr, const View* q_indices, const View* cu_seqlens_k):
    """The digest of a CSR; None where it would take a read-back that is not asked for, or not possible."""
    if call.on_host or (_validate and not is_capturing(call.stream)):
        return digest_csr(call, row_ptr, q_indices, cu_seqlens_k)
    return None


cdef tuple empty_schedule(Call call, const Shape* shape, const Plan* plan):
    """(scheduler_metadata, work_count, split_entries)"""
    cdef int64_t[3] extents
    extents = [plan.capacity, 6, 0]
    metadata = call.empty(INT32, 2, extents)
    extents[0] = 1
    work_count = call.empty(INT32, 1, extents)
    extents = [shape.head_kv, shape.total_q, shape.topk]
    return metadata, work_count, call.empty(INT32, 3, extents)


cdef tuple empty_walk_plan(Call call, const Shape* shape, const Plan* plan):
    """(walk_blocks, walk_counts, walk_flags, rest_indices)"""
    cdef int64_t three = 3
    cdef int64_t[2] entries = [shape.head_kv, shape.size]
    cdef int64_t[4] extents = [shape.head_kv, plan.groups, WALK_CAP, plan.walk_columns]
    return (
        call.empty(INT32, 4, extents), call.empty(INT32, 2, extents), call.empty(INT32, 1, &three),
        call.empty(INT32, 2, entries),
    )


cdef str architecture_of(Call call):
    """Of the kernels that will use the schedule; None: the bundle has none for the device."""
    return sim.options.arch if call.device is None else get_bundle().architecture(call.device)


cdef int check_device(object device, Call call) except -1:
    if device is None:
        return 0
    kind = str(device).lower()
    number = re.search(r"\d+", kind)  # cuda:1, <CUDA Device 1>
    if call.on_host:
        wrong = "cuda" in kind or "gpu" in kind
    else:
        wrong = "cpu" in kind or number is not None and int(number.group()) != call.device.ordinal
    if wrong:
        where = "the host" if call.on_host else repr(call.device)
        raise ValueError(f"device: expected that of the arrays, {where}, got {device!r}")
    return 0
