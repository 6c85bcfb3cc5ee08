"""Queries and the cache of keys and values; see the ``.pxd``."""

from libc.stdint cimport INT32_MAX, int64_t, uint64_t

from sparse_aot._core._call cimport Call
from sparse_aot._core._checks cimport (
    check_alignment,
    check_contiguous,
    check_dtype,
    check_extent,
    check_int32,
    check_last_dim_contiguous,
    check_rank,
    check_steps,
)
from sparse_aot._core._kernel cimport Kernel
from sparse_aot._core._tensor_map cimport MapFormat, encode_tensor_map
from sparse_aot.msa._values cimport K_MAP, Q_MAP, V_MAP, Values


cdef tuple HEADS_PER_KV = (1, 2, 4, 8, 16)


cdef int check_tiles(str name, const View* view) except -1:
    """What TMA takes, besides rank and dtype: 16-byte aligned rows of contiguous elements."""
    check_extent(name, view, view.ndim - 1, HEAD_DIM, "head dimension")
    check_last_dim_contiguous(name, view)
    check_alignment(name, view, 16)
    return check_steps(name, view, view.ndim - 1, 8)


cdef int read_kv(Call call, KeysValues* kv, object k, object v, object page_table, object seqused_k) except -1:
    cdef int dim
    kv.paged = page_table is not None
    call.read("k", k, &kv.k)
    call.read("v", v, &kv.v)
    check_dtype("v", &kv.v, kv.k.dtype)
    if kv.k.ndim == 4 and not kv.paged:
        raise ValueError("page_table: missing; k of 4 dimensions is a paged cache [num_pages, Hkv, 128, 128]")
    check_rank("k", &kv.k, 4 if kv.paged else 3)
    if kv.paged:
        check_extent("k", &kv.k, 2, PAGE, "keys of a page")
    check_rank("v", &kv.v, kv.k.ndim)
    for dim in range(kv.k.ndim):
        check_extent("v", &kv.v, dim, kv.k.shape[dim], "as k")
    check_tiles("k", &kv.k)
    check_tiles("v", &kv.v)
    kv.head_kv = kv.k.shape[1]
    if kv.paged:
        call.read("page_table", page_table, &kv.page_table)
        check_int32("page_table", &kv.page_table, 2)
        check_last_dim_contiguous("page_table", &kv.page_table)
        check_steps("page_table", &kv.page_table, 1, 1)
    if seqused_k is not None:
        call.read("seqused_k", seqused_k, &kv.seqused_k)
        check_int32("seqused_k", &kv.seqused_k, 1)
        check_contiguous("seqused_k", &kv.seqused_k)
    return 0


cdef int check_kv_batch(const KeysValues* kv, int32_t batch) except -1:
    if kv.paged:
        check_extent("page_table", &kv.page_table, 0, batch, "B of cu_seqlens_q")
    if kv.seqused_k.ndim:
        check_extent("seqused_k", &kv.seqused_k, 0, batch, "B of cu_seqlens_q")
    return 0


cdef int32_t heads_per_kv(const View* q, const KeysValues* kv) except -1:
    if kv.head_kv == 0 or q.shape[1] % kv.head_kv:
        raise ValueError(f"q: expected a multiple of k's {kv.head_kv} heads, got {q.shape[1]} heads")
    g = q.shape[1] // kv.head_kv
    if g not in HEADS_PER_KV:
        raise NotImplementedError(
            f"q: got {g} query heads a KV head ({q.shape[1]} / {kv.head_kv}); supported: "
            f"{', '.join(map(str, HEADS_PER_KV))}"
        )
    return g


cdef void set_kv(Values* values, const KeysValues* kv) noexcept:
    values.page_table = <int64_t>kv.page_table.data
    values.page_table_stride = kv.page_table.strides[0]
    values.max_pages = kv.page_table.shape[1]
    values.seqused_k = <int64_t>kv.seqused_k.data
    values.kv_extent = min(kv.k.shape[0], <int64_t>INT32_MAX)  # pages, or tokens of a flat tensor


# Tensor maps ----------------------------------------------------------------------------------------------------------

cdef inline uint64_t _step(const View* view, int dim) noexcept:
    """A stride in bytes; that of a dimension of one element can be anything, so one that the driver takes."""
    return <uint64_t>(view.strides[dim] if view.shape[dim] > 1 else HEAD_DIM) * 2


cdef int encode_queries(cydriver.CUtensorMap* maps, Kernel kernel, const View* q, int32_t g) except -1:
    """A row of 128 elements is two halves of 64, what one swizzled line of shared memory holds."""
    cdef const MapFormat* format = &kernel.maps[<int>Q_MAP]
    cdef uint64_t rows = min(g, 8)
    cdef uint64_t head = _step(q, 1)
    cdef uint64_t[5] dims = [64, rows, 2, <uint64_t>q.shape[1] // rows, <uint64_t>q.shape[0]]
    cdef uint64_t[4] strides = [head, 128, rows * head, _step(q, 0)]
    if format.rank == 0:
        return 0
    return encode_tensor_map(&maps[<int>Q_MAP], format, q.data, dims, strides, "q")


cdef int encode_kv(cydriver.CUtensorMap* maps, Kernel kernel, const KeysValues* kv) except -1:
    _encode_keys(&maps[<int>K_MAP], &kernel.maps[<int>K_MAP], &kv.k, kv.paged, "k")
    return _encode_keys(&maps[<int>V_MAP], &kernel.maps[<int>V_MAP], &kv.v, kv.paged, "v")


cdef int _encode_keys(
    cydriver.CUtensorMap* out, const MapFormat* format, const View* view, bint paged, str name
) except -1:
    """Keys or values: a flat tensor is one page of total_k tokens."""
    cdef uint64_t tokens = view.shape[2] if paged else view.shape[0]
    cdef uint64_t pages = view.shape[0] if paged else 1
    cdef uint64_t page = _step(view, 0) if paged else HEAD_DIM * 2
    cdef uint64_t token = _step(view, 2 if paged else 0)
    cdef uint64_t[5] dims = [64, tokens, 2, <uint64_t>view.shape[1], pages]
    cdef uint64_t[4] strides = [token, 128, _step(view, 1), page]
    return encode_tensor_map(out, format, view.data, dims, strides, name)
