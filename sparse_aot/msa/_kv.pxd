"""Queries and the cache of keys and values, as prefill and decode take them: read, checked, described to the kernels.

    cdef KeysValues kv
    read_kv(call, &kv, k, v, page_table, seqused_k)    page_table None: flat; seqused_k None: lengths are elsewhere
    check_kv_batch(&kv, batch)                         the tables against the number of sequences
    g = heads_per_kv(&q, &kv)
    set_kv(&values, &kv)                               the kernels' parameters
    encode_queries(maps, kernel, &q, g)                the tensor maps that the kernel takes
    encode_kv(maps, kernel, &kv)
"""

from cuda.bindings cimport cydriver
from libc.stdint cimport int32_t

from sparse_aot._core._call cimport Call
from sparse_aot._core._dlpack cimport View
from sparse_aot._core._kernel cimport Kernel
from sparse_aot.msa._values cimport Values


cdef enum:
    HEAD_DIM = 128
    PAGE = 128  # keys of a page, and of a block


cdef struct KeysValues:
    View k  # [total_k, Hkv, 128]; paged [num_pages, Hkv, 128, 128]
    View v
    bint paged
    View page_table  # where it is paged
    View seqused_k  # data NULL: not given
    int32_t head_kv


cdef int check_tiles(str name, const View* view) except -1
cdef int read_kv(Call call, KeysValues* kv, object k, object v, object page_table, object seqused_k) except -1
cdef int check_kv_batch(const KeysValues* kv, int32_t batch) except -1
cdef int32_t heads_per_kv(const View* q, const KeysValues* kv) except -1
cdef void set_kv(Values* values, const KeysValues* kv) noexcept
cdef int encode_queries(cydriver.CUtensorMap* maps, Kernel kernel, const View* q, int32_t g) except -1
cdef int encode_kv(cydriver.CUtensorMap* maps, Kernel kernel, const KeysValues* kv) except -1
