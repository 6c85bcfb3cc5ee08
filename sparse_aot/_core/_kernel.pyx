"""The kernels of the bundle: verified loading per device, packing of parameters by name, launching."""

from cuda.bindings cimport cydriver
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from sparse_aot._core._checks cimport integer
from sparse_aot._core._driver cimport check, enter, get_device, initialise, leave
from sparse_aot._core._tensor_map cimport map_format
from sparse_aot._core._trace cimport note_launch, tracing

from sparse_aot import sim
from sparse_aot._core.bundle import PARAMETERS, BundleError, get_bundle, kernel_key, lock


# Families -------------------------------------------------------------------------------------------------------------

cdef dict _families = {}  # operation -> Family


cdef class Family:
    """The parameters that kernels of a family may have: see ``register_family`` in the ``.pxd``."""

    def __init__(self, list slots, list maps, dict kinds):
        kind = None
        self.slots = {}
        self.kinds = {}
        for number, name in enumerate(slots):
            kind = kinds.get(name, kind)
            self.slots[name] = number
            self.kinds[name] = kind
        for number, name in enumerate(maps):
            self.slots[name] = ~number
            self.kinds[name] = "tensor_map"


cdef int register_family(Family family, tuple operations) except -1:
    for operation in operations:
        _families[operation] = family
        PARAMETERS[operation] = family.kinds
    return 0


# Loading --------------------------------------------------------------------------------------------------------------

cdef dict _kernels = {}  # (ordinal, operation, options) -> Kernel
cdef dict _loaded = {}  # path of a cubin -> its CUkernel, for every device and context of the process


cdef Kernel get_kernel(Device device, str operation, dict options):
    key = kernel_key(device.ordinal, operation, options)
    kernel = _kernels.get(key)
    if kernel is None:
        with lock:
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
    cdef Family family = _families[entry["operation"]]
    cdef Kernel kernel = Kernel.__new__(Kernel)
    cdef int slot
    if len(entry["params"]) > MAX_PARAMS:
        raise BundleError(f"{entry['file']}: {len(entry['params'])} parameters, the launcher packs {MAX_PARAMS} at most")
    kernel.entry = entry
    kernel.name = f"{entry['arch']}/{entry['name']}"
    kernel.device = device
    kernel.threads = entry["threads"]
    kernel.smem_bytes = entry["smem_bytes"]
    kernel.work_per_cta = entry["work_per_cta"]
    kernel.cluster = entry["cluster"]
    kernel.pdl = entry["pdl"]
    kernel.names = frozenset([param["name"] for param in entry["params"]])
    memset(kernel.maps, 0, sizeof(kernel.maps))
    for param in entry["params"]:
        slot = family.slots[param["name"]]
        kernel.slots[kernel.count] = slot
        kernel.count += 1
        if slot < 0:
            kernel.maps[~slot] = map_format(param["tensor_map"], device.simulated is not None)
    return kernel


# Launching ------------------------------------------------------------------------------------------------------------

cdef class Kernel:
    """One kernel, loaded on one device; or, on a simulated device, its PTX."""

    cdef unsigned int grid(self, Call call, int64_t work) noexcept nogil:
        if self.work_per_cta == 0:
            return call.multiprocessors
        return <unsigned int>((work + self.work_per_cta - 1) // self.work_per_cta)

    cdef bint takes(self, str name) except -1:
        return name in self.names

    cdef void gather(self, const int64_t* values, cydriver.CUtensorMap* maps, void** params) noexcept nogil:
        cdef int i
        for i in range(self.count):
            params[i] = <void*>(values + self.slots[i]) if self.slots[i] >= 0 else <void*>(maps + ~self.slots[i])

    cdef cydriver.CUresult enqueue(
        self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps
    ) except? cydriver.CUDA_ERROR_NOT_FOUND nogil:
        cdef void* params[MAX_PARAMS]
        cdef cydriver.CUlaunchConfig config
        cdef cydriver.CUlaunchAttribute[2] attributes
        cdef cydriver.CUlaunchAttribute* attribute = attributes
        if tracing:
            with gil:
                self.trace(call, work)
        self.gather(values, maps, params)
        if not self.pdl and self.cluster == 1:
            return cydriver.cuLaunchKernel(
                self.function, self.grid(call, work), 1, 1, self.threads, 1, 1, self.smem_bytes, call.stream, params, NULL
            )
        memset(&config, 0, sizeof(config))
        memset(attributes, 0, sizeof(attributes))
        config.gridDimX = self.grid(call, work)
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = self.threads
        config.sharedMemBytes = self.smem_bytes
        config.hStream = call.stream
        if self.pdl:
            attribute.id = cydriver.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attribute += 1
        if self.cluster > 1:
            attribute.id = cydriver.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = self.cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attribute += 1
        config.attrs = attributes
        config.numAttrs = <unsigned int>(attribute - attributes)
        return cydriver.cuLaunchKernelEx(&config, self.function, params, NULL)

    cdef int launch(self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps) except -1:
        cdef cydriver.CUresult result
        if call.on_host:
            return self.simulate(call, work, values, maps)
        with nogil:
            result = self.enqueue(call, work, values, maps)
        if result != cydriver.CUDA_SUCCESS:
            self.failed(call, result, work)
        return 0

    cdef int simulate(self, Call call, int64_t work, const int64_t* values, cydriver.CUtensorMap* maps) except -1:
        cdef void* params[MAX_PARAMS]
        cdef size_t i, size
        if tracing:
            self.trace(call, work)
        self.gather(values, maps, params)
        packed = []
        for i, param in enumerate(self.entry["params"]):
            size = param["size"]
            packed.append((<const char*>params[i])[:size])
        sim.run(self.entry, self.grid(call, work), packed, call.memory)
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
