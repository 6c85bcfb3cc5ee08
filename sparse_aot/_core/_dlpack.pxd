"""Reading arrays over DLPack, without importing any framework.

    cdef View view
    cdef Producer producer = producer_of(array)      how arrays of this type are read
    read_exchange("q", producer, array, &view)       where producer.api is not NULL; else read_numpy or read_capsule

Public functions read through a Call (``_call.pxd``), which also sees to device, stream and lifetime. A View borrows: it
is valid while the array lives.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


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


cdef Producer producer_of(object array)
cdef int fill_view(str name, const DLTensor* tensor, View* view) except -1
cdef int read_exchange(str name, Producer producer, object array, View* view) except -1
cdef int read_numpy(str name, object array, View* view) except -1
cdef int read_capsule(str name, object capsule, View* view) except -1
cdef object export_capsule(str name, object array, object stream)
cdef DLDevice device_of(str name, object array) except *
cdef str where_text(DLDevice device)
# Whether an array that is kept still has the memory and shape that `view` was read with.
cdef int check_in_place(str name, object array, const View* view) except -1
