"""Whether arrays have bytes in common, exactly: views that interleave in one buffer do not.

    check_apart("out", &out, "q", &q)      raises, naming both, where writing `out` would change `q`
    check_no_overlap_within("out", &out)   raises where two elements of `out`, whose strides are positive, have
                                           a byte in common
"""

from sparse_aot._dlpack cimport View


cdef int check_apart(str name, const View* written, str other_name, const View* other) except -1
cdef int check_no_overlap_within(str name, const View* view) except -1
