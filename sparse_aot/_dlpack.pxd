"""Arrays in and out over DLPack.

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
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from sparse_aot._driver cimport Device


cdef extern from *:
    """
    #include <stdint.h>
    typedef struct { uint32_t major, minor; } DLPackVersion;
    typedef struct { int32_t device_type, device_id; } DLDevice;
    typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
    typedef struct {
      void* data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape, *strides; uint64_t byte_offset;
    } DLTensor;
    typedef struct DLManagedTensor {
      DLTensor dl_tensor; void* manager_ctx; void (*deleter)(struct DLManagedTensor*);
    } DLManagedTensor;
    typedef struct DLManagedTensorVersioned {
      DLPackVersion version; void* manager_ctx; void (*deleter)(struct DLManagedTensorVersioned*);
      uint64_t flags; DLTensor dl_tensor;
    } DLManagedTensorVersioned;
    typedef struct DLPackExchangeAPI {
      DLPackVersion version;
      struct DLPackExchangeAPI* prev_api;
      int (*managed_tensor_allocator)(DLTensor*, DLManagedTensorVersioned**, void*,
                                      void (*)(void*, const char*, const char*));
      int (*managed_tensor_from_py_object_no_sync)(void*, DLManagedTensorVersioned**);
      int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned*, void**);
      int (*dltensor_from_py_object_no_sync)(void*, DLTensor*);
      int (*current_work_stream)(int32_t, int32_t, void**);
    } DLPackExchangeAPI;
    """
    ctypedef struct DLPackVersion:
        uint32_t major
        uint32_t minor

    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id

    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor:
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DLManagedTensor:
        DLTensor dl_tensor
        void* manager_ctx
        void (*deleter)(DLManagedTensor*) noexcept nogil

    ctypedef struct DLManagedTensorVersioned:
        DLPackVersion version
        void* manager_ctx
        void (*deleter)(DLManagedTensorVersioned*) noexcept nogil
        uint64_t flags
        DLTensor dl_tensor

    ctypedef struct DLPackExchangeAPI:
        DLPackVersion version
        DLPackExchangeAPI* prev_api
        int (*managed_tensor_allocator)(
            DLTensor*, DLManagedTensorVersioned**, void*, void (*)(void*, const char*, const char*) noexcept
        ) except -1
        int (*managed_tensor_from_py_object_no_sync)(void*, DLManagedTensorVersioned**) except -1
        int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned*, void**) except -1
        int (*dltensor_from_py_object_no_sync)(void*, DLTensor*) except -1
        int (*current_work_stream)(int32_t, int32_t, void**) except -1


cdef enum:
    MAX_RANK = 5
    CPU = 1  # device types
    CUDA = 2


cdef enum DType:  # DLPack's type code << 8 | bits
    INT32 = 0x0020
    INT64 = 0x0040
    UINT8 = 0x0108
    FLOAT16 = 0x0210
    FLOAT32 = 0x0220
    BFLOAT16 = 0x0410
    FLOAT8_E4M3FN = 0x0A08


# What the package knows of an array while it works on it. Strides count elements; byte_offset is in `data` already.
cdef struct View:
    void* data
    DLDevice device
    int dtype  # DType, or any other code << 8 | bits; -1 for vector types
    int ndim
    bint readonly  # as far as its type says so
    int64_t shape[MAX_RANK]
    int64_t strides[MAX_RANK]


cdef class Producer:
    cdef object kind
    cdef DLPackExchangeAPI* api  # NULL: __dlpack__ only
    cdef str root  # the top-level module of the type
    cdef bint allocates  # makes uninitialised arrays: through `api`, or by the `empty` of NumPy or CuPy
    cdef bint immutable  # its arrays are never to be written, whatever they are exported as


cdef class Call:
    cdef Producer producer  # of the first array: allocates what the call returns
    cdef str name  # of the first array
    cdef object like  # the first array
    cdef object importer  # where the producer has no exchange API: its from_dlpack, once something is allocated
    cdef DLDevice where
    cdef readonly Device device  # None for host arrays that no kernel works on
    cdef bint on_host
    cdef list memory  # of host arrays: (address, bytes, name) each
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

# Errors that name the argument, what it got and what it takes.
cdef int64_t integer(str name, object value, int64_t low, int64_t high) except? -1
cdef bint boolean(str name, object value) except? -1
cdef int check_rank(str name, const View* view, int ndim) except -1
cdef int check_dtype(str name, const View* view, int dtype) except -1
cdef int check_extent(str name, const View* view, int dim, int64_t extent, str meaning) except -1
cdef int check_contiguous(str name, const View* view) except -1
cdef int check_last_dim_contiguous(str name, const View* view) except -1
cdef int check_alignment(str name, const View* view, int n_bytes) except -1
cdef int check_writable(str name, const View* view) except -1
# Whether an array that is kept still has the memory and shape that `view` was read with.
cdef int check_in_place(str name, object array, const View* view) except -1
cdef str dtype_name(int dtype)
cdef str shape_text(const View* view)
cdef int64_t element_count(const View* view) noexcept nogil
