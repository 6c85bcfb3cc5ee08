"""What public calls do, for those who run a service: a line a call (SPARSE_AOT_LOG=1), a range a call (..._NVTX=1).

    cdef Trace trace = begin("sparse_atten_func") if tracing else None   a local variable: it ends with the function
    if tracing:
        note("no schedule given")                                        of this thread's call that is under way

Kernels note their launches themselves. What a public function calls of another one becomes part of its own line.
"""


cdef bint tracing  # whether either is on; all that a call pays where neither is


cdef class Trace:
    cdef str name
    cdef bint nested
    cdef list launches
    cdef list remarks


cdef Trace begin(str name)
cdef int note(str remark) except -1
cdef int note_launch(str kernel, unsigned int grid, str device) except -1
