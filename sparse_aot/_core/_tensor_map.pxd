"""TMA descriptors.

    cdef MapFormat format = map_format(described, simulated)       once, from the manifest
    encode_tensor_map(&map, &format, address, dims, strides, "k")  for each call; encoded ones are cached

dims has format.rank entries, innermost first, in elements; strides has rank - 1, in bytes, of dims 1 and up.
"""

from cuda.bindings cimport cydriver
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    MAX_TENSOR_RANK = 5


# What the kernel fixes of a TMA descriptor.
cdef struct MapFormat:
    uint32_t dtype  # CUtensorMapDataType
    uint32_t swizzle  # CUtensorMapSwizzle
    uint32_t rank
    uint32_t simulated  # encoded for the simulator, not for the driver
    uint32_t box[MAX_TENSOR_RANK]


cdef MapFormat map_format(dict described, bint simulated) except *
cdef int encode_tensor_map(
    cydriver.CUtensorMap* out, const MapFormat* format, void* address, const uint64_t* dims, const uint64_t* strides,
    str name,
) except -1
