"""TMA descriptors: encoded by the driver, or by the simulator for its own kernels, and cached."""

from libc.string cimport memcmp, memcpy, memset

from sparse_aot._core._driver cimport check

from sparse_aot import sim


MAX_BOX_RANK = MAX_TENSOR_RANK
# What a manifest may say of a tensor map -> how the driver has it.
DTYPES = {
    "bfloat16": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "float8e4m3fn": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    "uint8": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
SWIZZLES = {
    0: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_32B,
    64: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_64B,
    128: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_128B,
}


cdef MapFormat map_format(dict described, bint simulated) except *:
    cdef MapFormat format
    memset(&format, 0, sizeof(format))
    format.simulated = simulated
    format.dtype = DTYPES[described["dtype"]]
    format.swizzle = SWIZZLES[described["swizzle"]]
    format.rank = len(described["box"])
    for dim, extent in enumerate(described["box"]):
        format.box[dim] = extent
    return format


cdef enum:
    CACHE_SETS = 64
    CACHE_WAYS = 4


cdef struct MapKey:
    uint64_t address
    uint64_t dims[MAX_TENSOR_RANK]
    uint64_t strides[MAX_TENSOR_RANK - 1]
    MapFormat format


cdef struct CachedMap:
    MapKey key
    uint64_t used  # tick of the last use; 0: empty
    uint64_t opaque[16]


# Set-associative, least recently used first out, guarded by the GIL: the layout of a descriptor never changes and it
# holds no reference, so entries can be lost and kept at will.
cdef CachedMap _cache[CACHE_SETS][CACHE_WAYS]
cdef uint64_t _tick = 0

cdef int _encode_simulated(
    cydriver.CUtensorMap* out, const MapFormat* format, void* address, const uint64_t* dims, const uint64_t* strides
) except -1:
    cdef int64_t dim
    cdef bytes encoded = sim.encode_tiled(
        format.dtype, <uint64_t>address, [dims[dim] for dim in range(format.rank)],
        [strides[dim] for dim in range(format.rank - 1)], [format.box[dim] for dim in range(format.rank)],
        swizzle=format.swizzle,
    )
    memcpy(out, <const char*>encoded, sizeof(out[0]))
    return 0


cdef int encode_tensor_map(
    cydriver.CUtensorMap* out, const MapFormat* format, void* address, const uint64_t* dims, const uint64_t* strides,
    str name,
) except -1:
    global _tick
    cdef MapKey key
    cdef const uint64_t* words = <const uint64_t*>&key
    cdef uint64_t hashed = 0
    cdef size_t index
    cdef CachedMap* entry
    cdef CachedMap* oldest
    cdef cydriver.cuuint32_t element_strides[MAX_TENSOR_RANK]
    cdef cydriver.CUresult result
    if format.simulated:
        return _encode_simulated(out, format, address, dims, strides)
    memset(&key, 0, sizeof(key))
    key.address = <uint64_t>address
    memcpy(key.dims, dims, format.rank * sizeof(uint64_t))
    memcpy(key.strides, strides, (format.rank - 1) * sizeof(uint64_t))
    key.format = format[0]
    for index in range(sizeof(MapKey) // sizeof(uint64_t)):
        hashed = (hashed ^ words[index]) * 0x9E3779B97F4A7C15ULL
        hashed ^= hashed >> 29
    oldest = entry = &_cache[hashed % CACHE_SETS][0]
    _tick += 1
    for index in range(<size_t>CACHE_WAYS):
        if entry[index].used and memcmp(&entry[index].key, &key, sizeof(key)) == 0:
            entry[index].used = _tick
            memcpy(out, entry[index].opaque, sizeof(entry[index].opaque))
            return 0
        if entry[index].used < oldest.used:
            oldest = &entry[index]
    for index in range(<size_t>MAX_TENSOR_RANK):
        element_strides[index] = 1
    result = cydriver.cuTensorMapEncodeTiled(
        out, <cydriver.CUtensorMapDataType>format.dtype, format.rank, address, <const cydriver.cuuint64_t*>dims,
        <const cydriver.cuuint64_t*>strides, format.box, element_strides, cydriver.CU_TENSOR_MAP_INTERLEAVE_NONE,
        <cydriver.CUtensorMapSwizzle>format.swizzle, cydriver.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cydriver.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result != cydriver.CUDA_SUCCESS:
        extents = [dims[dim] for dim in range(format.rank)]
        steps = [strides[dim] for dim in range(format.rank - 1)]
        boxes = [format.box[dim] for dim in range(format.rank)]
        check(
            result,
            f"cuTensorMapEncodeTiled of {name} (address {<uint64_t>address:#x}, dims {extents}, strides {steps} bytes, "
            f"box {boxes})",
        )
    memcpy(&oldest.key, &key, sizeof(key))
    memcpy(oldest.opaque, out, sizeof(oldest.opaque))
    oldest.used = _tick
    return 0
