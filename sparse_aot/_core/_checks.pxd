"""Checks of arguments: errors that name the argument, what it got and what it takes.

    check_rank("k", &k, 3)
    check_dtype("k", &k, BFLOAT16)
    check_extent("k", &k, 2, 128, "head dimension")
"""

from libc.stdint cimport int64_t

from sparse_aot._core._dlpack cimport View


cdef int64_t integer(str name, object value, int64_t low, int64_t high) except? -1
cdef bint boolean(str name, object value) except? -1
cdef int check_rank(str name, const View* view, int ndim) except -1
cdef int check_dtype(str name, const View* view, int dtype) except -1
cdef int check_extent(str name, const View* view, int dim, int64_t extent, str meaning) except -1
cdef int check_contiguous(str name, const View* view) except -1
cdef int check_last_dim_contiguous(str name, const View* view) except -1
cdef int check_alignment(str name, const View* view, int n_bytes) except -1
cdef int check_writable(str name, const View* view) except -1
cdef str dtype_name(int dtype)
cdef str shape_text(const View* view)
cdef int64_t element_count(const View* view) noexcept nogil
cdef str name_of_dtype(str name, object dtype)
cdef float positive(str name, object value) except? -1
cdef int check_int32(str name, const View* view, int ndim) except -1
cdef int check_steps(str name, const View* view, int n_dims, int64_t multiple) except -1
cdef int check_choice(str name, object value, tuple choices) except -1
