"""The kernels of the bundle: verified loading, packing of parameters by name, launching.

A family of kernels has one struct of 8-byte slots, one for each parameter that any of them may have, and one array of
tensor maps. It says so once, at import; slots of a kind stand together, ``kinds`` names the first of each:

    cdef struct Values:
        int64_t q
        ...
        int64_t total_q
        ...
    register_family(Family(list(<dict>Values()), ["q_map"], {"q": "pointer", "total_q": "int32"}), ("fwd", "combine"))

When a kernel is loaded, each name in its manifest entry is resolved to a slot or a map; so kernels of one operation may
differ in what they take. A launch fills what the family has, whatever the kernel takes of it:

    cdef Kernel kernel = get_kernel(call.device, "combine", {"partial": "bfloat16", "topk": 16})     first use loads
    if kernel.takes("walk_totals"): ...
    kernel.launch(call, work, <int64_t*>&values, maps)   grid = ceil(work / work_per_cta), or one CTA a multiprocessor

The driver reads as many bytes of a slot as the parameter has. get_kernel builds a dict key: where host time counts,
keep the Kernel in a dict of your own keyed by an int. To release the GIL once around several launches, call ``enqueue``
and hand a result that is not CUDA_SUCCESS to ``failed``. On a call of host arrays ``launch`` runs the kernel in the
simulator, before it returns; maps are then the simulator's.
"""

from cuda.bindings cimport cydriver
from libc.stdint cimport int64_t

from sparse_aot._core._call cimport Call
from sparse_aot._core._driver cimport Device
from sparse_aot._core._tensor_map cimport MapFormat


cdef enum:
    MAX_PARAMS = 48
    MAX_TENSOR_MAPS = 4


cdef class Family:
    cdef dict slots  # name -> number of its slot, or ~number of its tensor map
    cdef dict kinds  # name -> kind, as manifests have it


cdef class Kernel:
    cdef readonly str name
    cdef readonly Device device
    cdef dict entry  # of the manifest
    cdef cydriver.CUfunction function  # a CUkernel, which the driver's launches take as it is
    cdef unsigned int threads
    cdef unsigned int smem_bytes
    cdef int64_t work_per_cta
    cdef unsigned int cluster
    cdef bint pdl
    cdef frozenset names  # of its parameters
    cdef int count  # of its parameters
    cdef int[MAX_PARAMS] slots
    cdef MapFormat[MAX_TENSOR_MAPS] maps  # by the family's numbers; rank 0: the kernel does not take it

    cdef unsigned int grid(self, Call call, int64_t work) noexcept nogil
    cdef bint takes(self, str name) except -1
    cdef void gather(self, const int64_t* values, cydriver.CUtensorMap* maps, void** params) noexcept nogil
    cdef int launch(self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps) except -1
    cdef cydriver.CUresult enqueue(
        self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps
    ) except? cydriver.CUDA_ERROR_NOT_FOUND nogil
    cdef int simulate(self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps) except -1
    cdef int trace(self, Call call, int64_t work) except -1
    cdef int failed(self, Call call, cydriver.CUresult result, int64_t work) except -1


cdef int register_family(Family family, tuple operations) except -1
cdef Kernel get_kernel(Device device, str operation, dict options)
