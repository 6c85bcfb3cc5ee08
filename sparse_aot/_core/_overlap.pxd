"""Whether arrays have bytes in common, exactly: views that interleave in one buffer do not.

    check_apart("out", &out, "q", &q)      raises, naming both, where writing `out` would change `q`
    check_no_overlap_within("out", &out)   raises where two elements of `out`, whose strides are positive, have
                                           a byte in common

Where an array is compared with many, its bounds are taken once, and most need no more:

    cdef Bounds bounds = bounds_of(&out)
    if meets(&bounds, &q):
        check_apart("out", &out, "q", &q)
"""

from libc.stdint cimport int64_t

from sparse_aot._core._dlpack cimport View


# The first and the last byte of an array; last < first: it has none.
cdef struct Bounds:
    int64_t first
    int64_t last


cdef inline Bounds bounds_of(const View* view) noexcept nogil:
    cdef int dim
    cdef int64_t reach
    cdef int64_t size = (view.dtype & 0xFF) >> 3
    cdef Bounds bounds
    bounds.first = <int64_t>view.data
    bounds.last = bounds.first + size - 1
    for dim in range(view.ndim):
        if view.shape[dim] == 0:
            bounds.last = bounds.first - 1
            return bounds
        reach = (view.shape[dim] - 1) * view.strides[dim] * size
        if reach < 0:
            bounds.first += reach
        else:
            bounds.last += reach
    return bounds


cdef inline bint meets(const Bounds* bounds, const View* other) noexcept nogil:
    cdef Bounds others = bounds_of(other)
    return bounds.first <= others.last and others.first <= bounds.last


cdef int check_apart(str name, const View* written, str other_name, const View* other) except -1
cdef int check_no_overlap_within(str name, const View* view) except -1
