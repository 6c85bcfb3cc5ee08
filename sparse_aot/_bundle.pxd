"""The kernels of the bundle: verified loading, TMA descriptors, launching.

A launch sequence registers the parameters that it packs, once, at import; gets its kernel and launches it:

    register_signature("combine", (("partial_out", "pointer"), ..., ("total_q", "int32")))    kinds as in the manifest

    cdef Kernel kernel = get_kernel(call.device, "combine", {"partial": "bfloat16", "topk": 16})     first use loads
    cdef void* params[16]                      params[i] = &value of parameter i, in the signature's order
    kernel.launch(call, work, params)          grid = ceil(work / work_per_cta), or one CTA a multiprocessor of the call

get_kernel builds a dict key: where host time counts, keep the Kernel in a dict of your own keyed by an int. To release
the GIL once around several launches, call `enqueue` and hand a result that is not CUDA_SUCCESS to `failed`.
A context of the device must be current, as it is while a Call lives. Kernels belong to no context: one runs in that of
the stream that it is launched on.

    encode_tensor_map(&map, kernel.maps[0], ...)   maps[i] is the format of the i-th tensor_map parameter

On a call of host arrays the kernel runs in the simulator instead, before it returns; maps are then the simulator's:

    kernel.simulate(call, work, params)
"""

from cuda.bindings cimport cydriver
from libc.stdint cimport int64_t, uint32_t, uint64_t

from sparse_aot._dlpack cimport Call
from sparse_aot._driver cimport Device


cdef enum:
    MAX_TENSOR_MAPS = 4
    MAX_TENSOR_RANK = 5


# What the kernel fixes of a TMA descriptor.
cdef struct MapFormat:
    uint32_t dtype  # CUtensorMapDataType
    uint32_t swizzle  # CUtensorMapSwizzle
    uint32_t rank
    uint32_t simulated  # encoded for the simulator, not for the driver
    uint32_t box[MAX_TENSOR_RANK]


cdef class Kernel:
    cdef readonly str name
    cdef readonly Device device
    cdef dict entry  # of the manifest
    cdef cydriver.CUfunction function  # a CUkernel, which the driver's launches take as it is
    cdef unsigned int threads
    cdef unsigned int smem_bytes
    cdef int64_t work_per_cta
    cdef bint pdl
    cdef bint walks
    cdef MapFormat[MAX_TENSOR_MAPS] maps

    cdef unsigned int grid(self, Call call, int64_t work) noexcept nogil
    cdef int launch(self, Call call, int64_t work, void** params) except -1
    cdef cydriver.CUresult enqueue(
        self, Call call, int64_t work, void** params
    ) except? cydriver.CUDA_ERROR_NOT_FOUND nogil
    cdef int simulate(self, Call call, int64_t work, void** params) except -1
    cdef int trace(self, Call call, int64_t work) except -1
    cdef int failed(self, Call call, cydriver.CUresult result, int64_t work) except -1


cdef int register_signature(str operation, tuple signature) except -1
cdef Kernel get_kernel(Device device, str operation, dict options)

# dims has format.rank entries, innermost first, in elements; strides has rank - 1, in bytes, of dims 1 and up.
cdef int encode_tensor_map(
    cydriver.CUtensorMap* out, const MapFormat* format, void* address, const uint64_t* dims, const uint64_t* strides,
    str name,
) except -1
