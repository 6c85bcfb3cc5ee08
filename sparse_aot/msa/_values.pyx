"""The family of kernels of block-sparse attention; see the ``.pxd``."""

from libc.string cimport memset

from sparse_aot._core._kernel cimport Family, register_family


cdef list _slots():
    cdef Values values
    memset(&values, 0, sizeof(values))
    return list(<dict>values)


register_family(
    Family(
        _slots(),
        ["q_map", "k_map", "v_map"],
        {"q": "pointer", "q_stride_token": "int64", "batch": "int32", "softmax_scale": "float32"},
    ),
    (
        "fwd",
        "combine",
        "csr_rows",
        "csr_keys",
        "csr_row_ptr",
        "csr_collect",
        "csr_split",
        "chunk_csr",
        "walk_plan",
        "radix_count",
        "radix_scan",
        "radix_scatter",
        "schedule_count",
        "schedule_fill",
    ),
)
