"""One public call: its arrays in and out, its context and stream, the memory that it allocates.

A public function opens one Call on its first array, reads the others through it, allocates through it, launches on
`call.stream`, and returns `buffer.finish()` of what it allocated:

    cdef View q, k
    cdef Call call = open_call("q", q_array, &q, stream)   stream: the public argument; None: the current one
    call.read("k", k_array, &k)                            raises where k is not on q's device
    check_rank("k", &k, 3)                                 the check_* helpers raise errors that name the argument
    check_dtype("k", &k, BFLOAT16)
    check_extent("k", &k, 2, 128, "head dimension")
    cdef Buffer out = call.empty(FLOAT32, 2, shape)        out.view is its View; finish() hands it to the caller
    cdef Buffer temporary = call.scratch(n_bytes)          freed in stream order when the last reference goes
    call.set_words(address, 0, count)                      a memset of 32-bit words
    call.to_host("total", &view)                           int32 values as a NumPy array; waits, not under capture
    ... launch on call.stream ...
    call.launched()                                        keeps what is held alive until the work is done
    return out.finish()

`call.on_host` says that the arrays are the host's (call.stream is then meaningless). `call.device` is None there until
`call.simulate()` gives it the simulator's device; kernels then may touch what is in `call.memory`: every array that was
read or allocated through the call or named to `call.reach(name, &view)`. A Call keeps the context of its stream current
for as long as it lives, so it must stay a local variable. A View borrows: it is valid while the array lives.
"""

from cuda.bindings cimport cydriver
from libc.stdint cimport int32_t, int64_t

from sparse_aot._core._dlpack cimport DLDevice, DLManagedTensorVersioned, Producer, View
from sparse_aot._core._driver cimport Device


cdef class Call:
    cdef Producer producer  # of the first array: allocates what the call returns
    cdef str name  # of the first array
    cdef object like  # the first array
    cdef object importer  # where the producer has no exchange API: its from_dlpack, once something is allocated
    cdef DLDevice where
    cdef readonly Device device  # None for host arrays that no kernel works on
    cdef bint on_host
    cdef object memory  # of host arrays: a sim.Memory
    cdef cydriver.CUstream stream
    cdef cydriver.CUcontext context  # of `stream`, current while the Call lives
    cdef cydriver.CUcontext home  # that of the caller's default streams
    cdef int multiprocessors  # of `context`; a kernel with a CTA for each gets so many
    cdef bint private  # made inside another call, which keeps its results: `finish` returns the Buffer
    cdef bint ordered  # `stream` is the one that the producer's allocator orders its memory by
    cdef int pushed  # contexts
    cdef list held  # owners of memory that is freed without regard to `stream`

    cdef int wait_for(self, cydriver.CUstream current) except -1
    cdef int read(self, str name, object array, View* view) except -1
    cdef Buffer empty(self, int dtype, int ndim, const int64_t* shape)
    cdef Buffer temporary(self, int dtype, int ndim, const int64_t* shape)
    cdef Buffer scratch(self, int64_t n_bytes)
    cdef object to_host(self, str name, const View* view)
    cdef int hold(self, object owner) except -1
    cdef int launched(self) except -1
    cdef int set_words(self, int64_t address, int32_t word, int64_t count) except -1
    cdef int reach(self, str name, const View* view) except -1
    cdef int simulate(self) except -1


cdef class Buffer:
    cdef View view
    cdef Call call  # until finish()
    cdef DLDevice where  # for __dlpack__, from finish() on
    cdef cydriver.CUstream stream  # likewise, and the two contexts
    cdef cydriver.CUcontext context
    cdef cydriver.CUcontext home
    cdef DLManagedTensorVersioned* managed  # from the producer's allocator, until finish()
    cdef DLManagedTensorVersioned* pooled  # from the driver's stream-ordered pool or the host's, until exported
    cdef object array  # the producer's own array, where it allocated one itself

    cdef object finish(self)
    cdef int outlive(self) except -1


cdef Call open_call(str name, object array, View* view, object stream)
