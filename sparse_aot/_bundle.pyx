"""The kernels of the bundle: finding it, verified loading, TMA descriptors, launching."""

import hashlib
import itertools
import json
import os
import pathlib
import re
import threading

from cuda.bindings cimport cydriver
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcmp, memcpy, memset

from sparse_aot._dlpack cimport integer
from sparse_aot._driver cimport check, enter, get_device, initialise, leave
from sparse_aot._trace cimport note_launch, tracing

from sparse_aot import sim


SCHEMA = 2
_SIZES = {"pointer": 8, "int32": 4, "int64": 8, "float32": 4, "tensor_map": 128}
_TENSOR_MAP_DTYPES = {
    "bfloat16": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    "float8e4m3fn": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    "uint8": <int>cydriver.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
# What is used of a manifest's objects, with the type of each value.
_MANIFEST = {"package_version": str, "dsl_version": str, "configurations": list, "digest": str}
_CONFIGURATION = {
    "name": str, "arch": str, "operation": str, "options": dict, "file": str, "sha256": str, "size": int, "symbol": str,
    "params": list, "threads": int, "smem_bytes": int, "work_per_cta": int, "pdl": bool,
    "walks": bool,
}
_LIMITS = {"size": (1, 2**31 - 1), "threads": (1, 1024), "smem_bytes": (0, 227 * 1024), "work_per_cta": (0, 2**31 - 1)}
_FILE = re.compile(r"([A-Za-z0-9_][\w.-]*/)*[A-Za-z0-9_][\w.-]*", re.ASCII)  # below the bundle's folder
_PARAM = {"name": str, "kind": str, "offset": int, "size": int}
_TENSOR_MAP = {"dtype": str, "swizzle": int, "box": list}
_SWIZZLES = {
    0: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_32B,
    64: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_64B,
    128: <int>cydriver.CU_TENSOR_MAP_SWIZZLE_128B,
}


class BundleError(RuntimeError):
    """The bundle is missing, damaged, or not what this launcher was built for. The message names the file."""


# The manifest ---------------------------------------------------------------------------------------------------------

SIGNATURES = {}  # what the launcher packs: operation -> ((name, kind), ...)


cdef int register_signature(str operation, tuple signature) except -1:
    SIGNATURES[operation] = signature
    return 0


def find_bundle():
    """The folder that holds ``manifest.json``.

    ``SPARSE_AOT_CUBINS`` where it is set, else the installed package's own ``cubins``, else the one beside the package
    in a source checkout.
    """
    package = pathlib.Path(__file__).resolve().parent
    override = os.environ.get("SPARSE_AOT_CUBINS")
    folders = [pathlib.Path(override)] if override else [package / "cubins", package.parent / "cubins"]
    for folder in folders:
        if (folder / "manifest.json").is_file():
            return folder
    looked = " or ".join(str(folder / "manifest.json") for folder in folders)
    raise BundleError(f"no bundle of kernels: {looked} does not exist; `python -m aot build` writes it")


class Bundle:
    """A manifest and the cubins beside it.

    Attributes:
        folder: where ``manifest.json`` is.
        manifest: its contents.
        architectures: the architectures in it, sorted.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        path = self.folder / "manifest.json"
        try:
            self.manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BundleError(f"{path}: not readable as a manifest: {error}") from error
        schema = self.manifest.get("schema") if isinstance(self.manifest, dict) else None
        if schema != SCHEMA:
            raise BundleError(
                f"{path}: expected manifest schema {SCHEMA}, got {schema!r}: another version of sparse_aot built it; "
                "`python -m aot build` builds it anew"
            )
        _check_fields(path, self.manifest, _MANIFEST)
        if _digest(self.manifest) != self.manifest["digest"]:
            raise BundleError(f"{path}: changed since it was built: its contents do not have the digest that it gives")
        if not self.configurations:
            raise BundleError(f"{path}: expected at least one configuration, got none")
        for number, entry in enumerate(self.configurations):
            where = f"{path}: configuration {number}"
            _check_fields(where, entry, _CONFIGURATION)
            if not all(isinstance(value, (str, int, float)) for value in entry["options"].values()):
                raise BundleError(f"{where}: expected options to be names and numbers, got {entry['options']!r}")
            for name, (low, high) in _LIMITS.items():
                if not low <= entry[name] <= high:
                    raise BundleError(f"{where}: expected {name} from {low} to {high}, got {entry[name]}")
            if not _FILE.fullmatch(entry["file"]):
                raise BundleError(f"{where}: expected file to be a path below the bundle's folder, got {entry['file']!r}")
            for param in entry["params"]:
                _check_fields(f"{where}: parameter", param, _PARAM)
                if param["kind"] == "tensor_map":
                    _check_fields(f"{where}: tensor_map of {param['name']}", param.get("tensor_map"), _TENSOR_MAP)
        self._index = {
            _key(entry["arch"], entry["operation"], entry["options"]): entry for entry in self.configurations
        }
        self.architectures = sorted({entry["arch"] for entry in self.configurations})

    @property
    def configurations(self):
        return self.manifest["configurations"]

    def architecture(self, device):
        """The architecture in the bundle that runs on a device, or None."""
        arch = _architecture(device.capability) if device.simulated is None else device.simulated
        return arch if arch in self.architectures else None

    def find(self, device, operation, options):
        """The configuration for ``device``; ``NotImplementedError`` where the bundle has none."""
        arch = self.architecture(device)
        if arch is None:
            raise self.unsupported(device)
        entry = self._index.get(_key(arch, operation, options))
        if entry is None:
            archs = sorted({entry["arch"] for entry in self.configurations if entry["operation"] == operation})
            raise NotImplementedError(
                f"{device!r}: no {operation} kernel with {options} for {arch}; the bundle has {operation} kernels for "
                f"{', '.join(archs) or 'no architecture'}"
            )
        return entry

    def unsupported(self, device):
        """The error for a device that no architecture in the bundle runs on."""
        return NotImplementedError(
            f"{device!r}: no kernels for it, the bundle has {', '.join(self.architectures) or 'no architecture'}"
        )

    def read(self, entry):
        """The verified cubin of a configuration, as bytes."""
        path = self.folder / entry["file"]
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}") from error
        digest = hashlib.sha256(cubin).hexdigest()
        if len(cubin) != entry["size"] or digest != entry["sha256"]:
            raise BundleError(
                f"{path}: {len(cubin)} bytes with SHA-256 {digest}, the manifest has {entry['size']} with "
                f"{entry['sha256']}"
            )
        if cubin[:4] != b"\x7fELF":  # the driver would compile PTX
            raise BundleError(f"{path}: not a cubin")
        return cubin

    def check_layout(self, entry):
        """Raise unless the parameters in the manifest are what the launcher packs for the operation."""
        path = self.folder / entry["file"]
        if entry["operation"] not in SIGNATURES:
            raise BundleError(f"{path}: this launcher has no operation {entry['operation']}")
        expected = [(name, kind, _SIZES[kind]) for name, kind in SIGNATURES[entry["operation"]]]
        found = [(param["name"], param["kind"], param["size"]) for param in entry["params"]]
        for got, want in itertools.zip_longest(found, expected):
            if got != want:
                raise BundleError(f"{path}: parameter layout: the manifest has {got}, the launcher packs {want}")
        for param in entry["params"]:
            if param["kind"] == "tensor_map" and not _is_encodable(param["tensor_map"]):
                raise BundleError(
                    f"{path}: parameter {param['name']}: this launcher does not encode {param['tensor_map']}"
                )


def _digest(manifest):
    """The SHA-256 of everything in a manifest but its own ``digest``, as the build computes it."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_fields(where, found, fields):
    if not isinstance(found, dict):
        raise BundleError(f"{where}: expected an object, got {found!r}")
    for name, kind in fields.items():
        if type(found.get(name)) is not kind:  # a bool is no number here
            raise BundleError(f"{where}: expected {name} to be of type {kind.__name__}, got {found.get(name)!r}")


def _is_encodable(described):
    return (
        described["dtype"] in _TENSOR_MAP_DTYPES
        and described["swizzle"] in _SWIZZLES
        and 1 <= len(described["box"]) <= MAX_TENSOR_RANK
        and all(isinstance(extent, int) and 1 <= extent <= 256 for extent in described["box"])
    )


def _key(arch, operation, options):
    return arch, operation, frozenset(options.items())


def _architecture(capability):
    """The architecture whose cubins run on a compute capability, or None."""
    if capability == (9, 0):
        return "sm_90a"
    if capability[0] == 10 and capability != (10, 1):  # 10.1 is an old name of 11.0, another family
        return "sm_100f"
    return None


cdef object _bundle = None
_lock = threading.RLock()


def get_bundle():
    """The bundle of this process, read on first use."""
    global _bundle
    with _lock:
        if _bundle is None:
            _bundle = Bundle(find_bundle())
        return _bundle


# Loading --------------------------------------------------------------------------------------------------------------

cdef dict _kernels = {}  # (ordinal, operation, options) -> Kernel
cdef dict _loaded = {}  # path of a cubin -> its CUkernel, for every device and context of the process


cdef Kernel get_kernel(Device device, str operation, dict options):
    key = _key(device.ordinal, operation, options)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _load(get_bundle(), get_bundle().find(device, operation, options), device)
    return <Kernel>kernel


def preload(device=None):
    """Load every kernel of the bundle that runs on a device, so that no later call does.

    Args:
        device: the CUDA device's number; None is the calling thread's current device, or 0 where it has none.

    Returns:
        The number of kernels loaded, those loaded before included.

    Raises:
        TypeError, ValueError: ``device`` is not a number that a device can have.
        NotImplementedError: the bundle has no kernels for the device.
        BundleError: a cubin is damaged or its parameters are not what the launcher packs; the message names the file.
        CudaError: the driver refused, or there is none.
    """
    cdef cydriver.CUcontext context = NULL
    cdef cydriver.CUdevice current = 0
    if device is not None:
        integer("device", device, 0, 0x7FFFFFFF)
    initialise()
    if device is None:
        check(cydriver.cuCtxGetCurrent(&context), "cuCtxGetCurrent")
        if context is not NULL:
            check(cydriver.cuCtxGetDevice(&current), "cuCtxGetDevice")
        device = current
    cdef Device target = get_device(device)
    cdef int pushed = 0
    bundle = get_bundle()
    arch = bundle.architecture(target)
    entries = [entry for entry in bundle.configurations if entry["arch"] == arch]
    if not entries:
        raise bundle.unsupported(target)
    enter(target, &pushed)
    try:
        for entry in entries:
            get_kernel(target, entry["operation"], entry["options"])
    finally:
        leave(pushed)
    return len(entries)


cdef Kernel _load(object bundle, dict entry, Device device):
    cdef cydriver.CUstreamCaptureMode mode = cydriver.CU_STREAM_CAPTURE_MODE_RELAXED
    cdef Kernel kernel
    bundle.check_layout(entry)
    kernel = _describe(entry, device)
    if device.simulated is not None:  # its first launch loads the PTX
        return kernel
    # Another stream of this thread may be under capture, which forbids what loading does unless the thread is relaxed.
    check(cydriver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode")
    try:
        _load_driver_kernel(bundle, kernel)
    finally:
        cydriver.cuThreadExchangeStreamCaptureMode(&mode)
    return kernel


cdef int _load_driver_kernel(object bundle, Kernel kernel) except -1:
    """Set ``kernel.function``; the code is on the device, in the current context, afterwards."""
    cdef cydriver.CUkernel handle
    cdef cydriver.CUfunction function
    path = str(bundle.folder / kernel.entry["file"])
    where = f"{path} on {kernel.device!r}"
    if path not in _loaded:
        _loaded[path] = _load_verified(path, kernel.entry, bundle.read(kernel.entry), where)
    handle = <cydriver.CUkernel><uintptr_t>_loaded[path]
    if kernel.smem_bytes:
        check(
            cydriver.cuKernelSetAttribute(
                cydriver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, <int>kernel.smem_bytes, handle,
                kernel.device.handle,
            ),
            f"cuKernelSetAttribute({kernel.smem_bytes} bytes of shared memory) of {where}",
        )
    check(cydriver.cuKernelGetFunction(&function, handle), f"cuKernelGetFunction of {where}")
    check(cydriver.cuFuncLoad(function), f"cuFuncLoad of {where}")
    kernel.function = <cydriver.CUfunction>handle
    return 0


cdef uintptr_t _load_verified(str path, dict entry, bytes cubin, str where) except 0:
    """The CUkernel of a cubin, whose parameters are those in the manifest."""
    cdef cydriver.CUlibrary library
    cdef const char* image = cubin
    check(
        cydriver.cuLibraryLoadData(&library, image, NULL, NULL, 0, NULL, NULL, 0), f"cuLibraryLoadData of {where}"
    )
    try:
        return _kernel_of(library, path, entry, where)
    except BaseException:
        cydriver.cuLibraryUnload(library)
        raise


cdef uintptr_t _kernel_of(cydriver.CUlibrary library, str path, dict entry, str where) except 0:
    cdef cydriver.CUkernel kernel
    cdef size_t offset = 0
    cdef size_t size = 0
    cdef size_t index
    symbol = entry["symbol"].encode()
    check(cydriver.cuLibraryGetKernel(&kernel, library, symbol), f"cuLibraryGetKernel of {where}")
    for index, param in enumerate(entry["params"]):
        check(
            cydriver.cuKernelGetParamInfo(kernel, index, &offset, &size),
            f"cuKernelGetParamInfo of parameter {index} ({param['name']}) of {where}",
        )
        if (offset, size) != (param["offset"], param["size"]):
            raise BundleError(
                f"{path}: parameter {param['name']}: the driver reports {size} bytes at offset {offset}, the manifest "
                f"has {param['size']} at {param['offset']}"
            )
    if cydriver.cuKernelGetParamInfo(kernel, len(entry["params"]), &offset, &size) == cydriver.CUDA_SUCCESS:
        raise BundleError(f"{path}: the driver reports more parameters than the {len(entry['params'])} in the manifest")
    return <uintptr_t>kernel


cdef Kernel _describe(dict entry, Device device):
    """A kernel by its manifest entry alone, before a driver has loaded it."""
    cdef Kernel kernel = Kernel.__new__(Kernel)
    cdef int n_maps = 0
    kernel.entry = entry
    kernel.name = f"{entry['arch']}/{entry['name']}"
    kernel.device = device
    kernel.threads = entry["threads"]
    kernel.smem_bytes = entry["smem_bytes"]
    kernel.work_per_cta = entry["work_per_cta"]
    kernel.pdl = entry["pdl"]
    kernel.walks = entry["walks"]
    for param in entry["params"]:
        if param["kind"] == "tensor_map":
            kernel.maps[n_maps] = _map_format(param["tensor_map"], device)
            n_maps += 1
    return kernel


cdef MapFormat _map_format(dict described, Device device) except *:
    cdef MapFormat format
    format.simulated = device.simulated is not None
    format.dtype = _TENSOR_MAP_DTYPES[described["dtype"]]
    format.swizzle = _SWIZZLES[described["swizzle"]]
    format.rank = len(described["box"])
    memset(format.box, 0, sizeof(format.box))
    for dim, extent in enumerate(described["box"]):
        format.box[dim] = extent
    return format


# Launching ------------------------------------------------------------------------------------------------------------

cdef class Kernel:
    """One kernel, loaded on one device; or, on a simulated device, its PTX."""

    cdef unsigned int grid(self, Call call, int64_t work) noexcept nogil:
        if self.work_per_cta == 0:
            return call.multiprocessors
        return <unsigned int>((work + self.work_per_cta - 1) // self.work_per_cta)

    cdef cydriver.CUresult enqueue(
        self, Call call, int64_t work, void** params
    ) except? cydriver.CUDA_ERROR_NOT_FOUND nogil:
        cdef cydriver.CUlaunchConfig config
        cdef cydriver.CUlaunchAttribute attribute
        if tracing:
            with gil:
                self.trace(call, work)
        if not self.pdl:
            return cydriver.cuLaunchKernel(
                self.function, self.grid(call, work), 1, 1, self.threads, 1, 1, self.smem_bytes, call.stream, params, NULL
            )
        memset(&config, 0, sizeof(config))
        memset(&attribute, 0, sizeof(attribute))
        config.gridDimX = self.grid(call, work)
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = self.threads
        config.sharedMemBytes = self.smem_bytes
        config.hStream = call.stream
        config.attrs = &attribute
        config.numAttrs = 1
        attribute.id = cydriver.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return cydriver.cuLaunchKernelEx(&config, self.function, params, NULL)

    cdef int launch(self, Call call, int64_t work, void** params) except -1:
        cdef cydriver.CUresult result
        with nogil:
            result = self.enqueue(call, work, params)
        if result != cydriver.CUDA_SUCCESS:
            self.failed(call, result, work)
        return 0

    cdef int simulate(self, Call call, int64_t work, void** params) except -1:
        cdef size_t i, size
        if tracing:
            self.trace(call, work)
        values = []
        for i, param in enumerate(self.entry["params"]):
            size = param["size"]
            values.append((<const char*>params[i])[:size])
        sim.run(self.entry, self.grid(call, work), values, call.memory)
        return 0

    cdef int trace(self, Call call, int64_t work) except -1:
        device = "the simulator" if self.device.simulated is not None else f"cuda:{self.device.ordinal}"
        return note_launch(self.name, self.grid(call, work), device)

    cdef int failed(self, Call call, cydriver.CUresult result, int64_t work) except -1:
        return check(
            result,
            f"launch of {self.name} on {self.device!r} (grid {self.grid(call, work)}, {self.threads} threads, "
            f"{self.smem_bytes} bytes of shared memory)",
        )


# TMA descriptors ------------------------------------------------------------------------------------------------------

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
