"""Arrays in and out over DLPack: the C exchange API where the array's type has it, ``__dlpack__`` everywhere else.

No framework is imported. Results are allocated by the producer of the first array: through the exchange API's
allocator, by ``numpy.empty`` or ``cupy.empty``, and for any other type (JAX) in the driver's stream-ordered pool, or in
the host's memory, handed over by the ``from_dlpack`` of the type's own module. NumPy arrays of the dtypes of ml_dtypes,
which NumPy does not hand out over DLPack, are handed out as integers and read as what they are.

Streams: the producer's current stream is what the exchange API or CuPy say it is, else the legacy default stream, which
is passed to ``__dlpack__(stream=...)`` so that the producer orders its own work before it. A `stream=` that is not the
producer's current stream first waits for the current one (where the array comes from, and where the allocator reuses
memory), unless it is being captured: what a graph depends on is the caller's to say.

Contexts: work is done in the context of its stream. A default stream is that of the current context where this belongs
to the arrays' device (a green context among them), else of the device's primary one. What outlives a call depends
neither on its context nor on its stream: both may be destroyed by then.
"""

import collections
import operator
import sys

import numpy

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF
from cuda.bindings cimport cydriver
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from sparse_aot._driver cimport (
    check,
    context_of,
    enter,
    get_device,
    is_capturing,
    lasting_stream,
    leave,
    multiprocessors_of,
    order_streams,
    push,
    record_event,
    simulated_device,
    stream_handle,
)

from sparse_aot import sim


cdef extern from "Python.h":
    void PyErr_SetString(object kind, const char* message)

cdef extern from "<stdlib.h>":
    void* aligned_alloc(size_t alignment, size_t size)


cdef enum:
    HOST_ALIGNMENT = 256  # as the driver's allocator has it
    READ_ONLY = 1  # a flag of DLPack


cdef dict _DTYPE_NAMES = {
    INT32: "int32",
    INT64: "int64",
    UINT8: "uint8",
    FLOAT16: "float16",
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    FLOAT8_E4M3FN: "float8_e4m3fn",
}
cdef dict _NUMPY_DTYPES = {"bfloat16": BFLOAT16, "float8_e4m3fn": FLOAT8_E4M3FN}  # those of ml_dtypes, by NumPy's name
cdef dict _CODE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
cdef tuple _VERSION = (1, 3)  # the DLPack version that this file is written to
cdef tuple _HOST_TYPES = (CPU, 3)  # plain and pinned host memory
cdef tuple _IMMUTABLE = ("jax", "jaxlib", "tensorflow")  # modules whose arrays are values; they export them as writable


# Producers ------------------------------------------------------------------------------------------------------------

cdef dict _producers = {}  # type -> Producer; keeps the types alive, so their addresses are not reused
cdef Producer _last_producer = None


cdef DLPackExchangeAPI* _exchange_api(object kind) except? NULL:
    cdef DLPackExchangeAPI* api
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None or not PyCapsule_IsValid(capsule, "dlpack_exchange_api"):
        return NULL
    api = <DLPackExchangeAPI*>PyCapsule_GetPointer(capsule, "dlpack_exchange_api")
    while api is not NULL and api.version.major != 1:
        api = api.prev_api
    return api


cdef Producer _producer_of(object array):
    global _last_producer
    cdef Producer producer = _last_producer
    kind = type(array)
    if producer is not None and producer.kind is kind:
        return producer
    producer = <Producer>_producers.get(kind)
    if producer is None:
        producer = Producer.__new__(Producer)
        producer.kind = kind
        producer.api = _exchange_api(kind)
        producer.root = "numpy" if issubclass(kind, numpy.ndarray) else kind.__module__.partition(".")[0]
        producer.allocates = producer.api is not NULL or producer.root in ("numpy", "cupy")
        producer.immutable = producer.root in _IMMUTABLE
        _producers[kind] = producer
    _last_producer = producer
    return producer


# Reading --------------------------------------------------------------------------------------------------------------

cdef int _fill(str name, const DLTensor* tensor, View* view) except -1:
    cdef int dim
    cdef int64_t stride = 1
    if tensor.ndim > MAX_RANK:
        raise ValueError(f"{name}: expected at most {MAX_RANK} dimensions, got {tensor.ndim}")
    view.data = <char*>tensor.data + tensor.byte_offset if tensor.data is not NULL else NULL
    view.device = tensor.device
    view.dtype = tensor.dtype.code << 8 | tensor.dtype.bits if tensor.dtype.lanes == 1 else -1
    view.ndim = tensor.ndim
    view.readonly = False
    for dim in range(tensor.ndim - 1, -1, -1):
        view.shape[dim] = tensor.shape[dim]
        view.strides[dim] = tensor.strides[dim] if tensor.strides is not NULL else stride
        stride *= tensor.shape[dim]
    if tensor.data is NULL and stride != 0:  # torch: a fake tensor, or one whose storage was freed
        raise ValueError(f"{name}: expected an array with memory, got none behind shape {shape_text(view)}")
    if tensor.device.device_type in (CPU, 3):
        view.device.device_type = CPU
        view.device.device_id = 0
    return 0


cdef object _unreadable(str name, object error):
    """The error for an array that its own type does not hand out: sparse, on no device, of another byte order."""
    reason = str(error).partition("\n")[0]  # torch appends a backtrace
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{name}: expected an array that can be read over DLPack: {reason}")


cdef int _read_exchange(str name, Producer producer, object array, View* view) except -1:
    cdef DLTensor tensor
    cdef DLManagedTensorVersioned* managed = NULL
    try:
        if producer.api.dltensor_from_py_object_no_sync is not NULL:
            producer.api.dltensor_from_py_object_no_sync(<void*>array, &tensor)
        else:
            producer.api.managed_tensor_from_py_object_no_sync(<void*>array, &managed)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error
    if managed is NULL:
        return _fill(name, &tensor, view)
    try:
        _fill(name, &managed.dl_tensor, view)
        view.readonly = managed.flags & READ_ONLY
    finally:
        managed.deleter(managed)
    return 0


cdef int _read_capsule(str name, object capsule, View* view) except -1:
    """A capsule that is never renamed to "used_..." deletes its tensor itself when the last reference goes."""
    cdef DLManagedTensorVersioned* versioned
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if versioned.version.major != 1:
            raise ValueError(f"{name}: expected DLPack version 1.x, got {versioned.version.major}")
        _fill(name, &versioned.dl_tensor, view)
        view.readonly = versioned.flags & READ_ONLY
        return 0
    if PyCapsule_IsValid(capsule, "dltensor"):
        return _fill(name, &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor, view)
    raise TypeError(f"{name}: __dlpack__ returned {type(capsule).__name__}, expected a DLPack capsule")


cdef object _export(str name, object array, object stream):
    try:
        try:
            return array.__dlpack__(stream=stream, max_version=_VERSION, copy=False)
        except TypeError:  # a producer older than DLPack 1.0
            return array.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


cdef tuple _device_of(str name, object array):
    try:
        device_type, device_id = array.__dlpack_device__()
        return int(device_type), int(device_id)
    except AttributeError:
        raise TypeError(
            f"{name}: expected an array that speaks DLPack (__dlpack__, __dlpack_device__), got {type(array).__name__}"
        ) from None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


cdef str _where(int device_type, int device_id):
    if device_type in _HOST_TYPES:
        return "the host"
    return f"cuda:{device_id}" if device_type == CUDA else f"DLPack device ({device_type}, {device_id})"


class _Writable:
    """The memory of a read-only NumPy array, as writable: NumPy before 2.1 does not export any other over DLPack."""

    def __init__(self, array):
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


cdef int _read_numpy(str name, object array, View* view) except -1:
    """An array of a dtype of ml_dtypes goes as integers of the same size and byte order, whose strides are the same."""
    cdef int dtype = _NUMPY_DTYPES.get(array.dtype.name, 0)
    cdef bint readonly = not array.flags.writeable
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, which DLPack does not have, got a masked array")
    if dtype:
        array = array.view(numpy.dtype(f"u{array.dtype.itemsize}").newbyteorder(array.dtype.byteorder))
    if readonly:
        array = numpy.asarray(_Writable(array))
    capsule = _export(name, array, None)
    _read_capsule(name, capsule, view)
    view.readonly = readonly
    if dtype:
        view.dtype = dtype
    return 0


cdef int check_in_place(str name, object array, const View* view) except -1:
    """Arrays of other types than these cannot be resized in place."""
    cdef Producer producer = _producer_of(array)
    cdef View now
    if producer.api is not NULL:
        _read_exchange(name, producer, array, &now)
    elif producer.root == "numpy":
        _read_numpy(name, array, &now)
    else:
        return 0
    if (now.data != view.data and element_count(view)) or memcmp(now.shape, view.shape, view.ndim * sizeof(int64_t)):
        raise ValueError(f"{name}: expected the memory that it had at first, it was resized or replaced since")
    return 0


# One public call ------------------------------------------------------------------------------------------------------

cdef object _retired = collections.deque()  # (event, exports) of past calls, oldest first


cdef int _release_retired() except -1:
    cdef cydriver.CUevent event
    cdef cydriver.CUstreamCaptureMode mode = cydriver.CU_STREAM_CAPTURE_MODE_RELAXED
    # A query in any other mode would break a capture that is under way.
    check(cydriver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode")
    while _retired:
        event = <cydriver.CUevent><uintptr_t>_retired[0][0]
        if cydriver.cuEventQuery(event) == cydriver.CUDA_ERROR_NOT_READY:
            break
        _retired.popleft()
        cydriver.cuEventDestroy(event)
    check(cydriver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode")
    return 0


cdef Call open_call(str name, object array, View* view, object stream):
    cdef Call call = Call.__new__(Call)
    cdef Producer producer = _producer_of(array)
    cdef void* current = NULL
    cdef bint known = producer.api is not NULL  # whether the producer's current stream is known
    call.producer = producer
    call.name = name
    call.like = array
    if known:
        _read_exchange(name, producer, array, view)
        call.where = view.device
    else:
        call.where.device_type, call.where.device_id = _device_of(name, array)
        if call.where.device_type in _HOST_TYPES:
            call.where.device_type = CPU
            call.where.device_id = 0
    if call.where.device_type == CPU:
        call.on_host = call.ordered = True
        call.memory = []
        if stream is not None:
            stream_handle(stream)
        if known:
            call.reach(name, view)
        else:
            call.read(name, array, view)
        return call
    if call.where.device_type != CUDA:
        where = _where(call.where.device_type, call.where.device_id)
        raise ValueError(f"{name}: expected an array on a CUDA device or on the host, got {where}")

    call.device = get_device(call.where.device_id)
    call.home = enter(call.device, &call.pushed)
    if known:
        producer.api.current_work_stream(CUDA, call.where.device_id, &current)
    elif producer.root == "cupy":
        known = True
        current = <void*><uintptr_t>sys.modules["cupy"].cuda.get_current_stream(call.where.device_id).ptr
    if current is NULL:
        current = <void*><uintptr_t>cydriver.CU_STREAM_LEGACY
    call.stream = <cydriver.CUstream>current
    call.ordered = known
    if stream is not None:
        call.stream = stream_handle(stream)
        if call.stream != <cydriver.CUstream>current:
            call.ordered = False
            if known and not is_capturing(call.stream):
                call.wait_for(<cydriver.CUstream>current)
    call.context = context_of(call.stream, call.home)
    if call.context != call.home:
        _enter_stream(call)
    call.multiprocessors = multiprocessors_of(call.device, call.context)
    if _retired:
        _release_retired()
    if producer.api is NULL:
        call.read(name, array, view)
    return call


cdef int _enter_stream(Call call) except -1:
    cdef cydriver.CUdevice handle = -1
    push(call.context, &call.pushed)
    check(cydriver.cuCtxGetDevice(&handle), "cuCtxGetDevice")
    if handle != call.device.handle:
        raise ValueError(f"stream: expected one of {_where(CUDA, call.device.ordinal)}, got one of {_where(CUDA, handle)}")
    return 0


cdef class Call:
    """One public call: where it works, on which stream, and who allocates its results. See the ``.pxd``."""

    def __dealloc__(self):
        leave(self.pushed)

    cdef int wait_for(self, cydriver.CUstream current) except -1:
        """Work on ``stream`` runs after what a framework's current stream holds now."""
        return order_streams(
            current, context_of(current, self.home), self.stream, context_of(self.stream, self.home)
        )

    cdef int read(self, str name, object array, View* view) except -1:
        cdef Producer producer
        cdef void* current = NULL
        if isinstance(array, Buffer):  # of a call that this one is made for
            view[0] = (<Buffer>array).view
            return self.reach(name, view) if self.on_host else 0
        producer = _producer_of(array)
        if producer.api is not NULL:
            _read_exchange(name, producer, array, view)
        else:
            device_type, device_id = _device_of(name, array)
            view.device.device_type = CPU if device_type in _HOST_TYPES else device_type
            view.device.device_id = 0 if device_type in _HOST_TYPES else device_id
        if view.device.device_type != self.where.device_type or view.device.device_id != self.where.device_id:
            raise ValueError(
                f"{name}: expected an array on {_where(self.where.device_type, self.where.device_id)}, like the first "
                f"argument, got one on {_where(view.device.device_type, view.device.device_id)}"
            )
        if producer.api is NULL:
            if producer.root == "numpy":
                _read_numpy(name, array, view)
            else:
                capsule = _export(name, array, None if self.on_host else <uintptr_t>self.stream)
                _read_capsule(name, capsule, view)
                if not self.on_host and producer.root != "cupy":
                    self.hold(capsule)
        elif producer.api is not self.producer.api and not self.on_host:
            # A second framework: its own current stream may be another one.
            producer.api.current_work_stream(CUDA, self.where.device_id, &current)
            if current is NULL:
                current = <void*><uintptr_t>cydriver.CU_STREAM_LEGACY
            if <cydriver.CUstream>current != self.stream and not is_capturing(self.stream):
                self.wait_for(<cydriver.CUstream>current)
        if producer.immutable:
            view.readonly = True
        if self.on_host:
            self.reach(name, view)
        return 0

    cdef Buffer empty(self, int dtype, int ndim, const int64_t* shape):
        """Memory for a result, allocated by the producer: C-contiguous, not initialised."""
        if self.importer is None and not self.producer.allocates and not self.private:
            self.importer = _importer(self.name, self.like, self.producer)  # before any launch: there may be none
        return self.temporary(dtype, ndim, shape)

    cdef Buffer temporary(self, int dtype, int ndim, const int64_t* shape):
        """The same for what is not returned, which needs no importer."""
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef DLTensor prototype
        buffer.call = self
        prototype.data = NULL
        prototype.device = self.where
        prototype.ndim = ndim
        prototype.dtype.code = dtype >> 8
        prototype.dtype.bits = dtype & 0xFF
        prototype.dtype.lanes = 1
        prototype.shape = <int64_t*>shape
        prototype.strides = NULL
        prototype.byte_offset = 0
        if self.producer.api is not NULL:
            self.producer.api.managed_tensor_allocator(&prototype, &buffer.managed, NULL, _set_error)
            _fill("result", &buffer.managed.dl_tensor, &buffer.view)
        elif self.producer.root == "numpy":
            buffer.array = numpy.empty(tuple([shape[dim] for dim in range(ndim)]), dtype=_DTYPE_NAMES[dtype])
            _read_numpy("result", buffer.array, &buffer.view)
        elif self.producer.root == "cupy":
            buffer.array = _cupy_empty(self, tuple([shape[dim] for dim in range(ndim)]), _DTYPE_NAMES[dtype])
            _read_capsule("result", _export("result", buffer.array, -1), &buffer.view)
        else:
            buffer.pooled = _allocate(self, &prototype)
            _fill("result", &buffer.pooled.dl_tensor, &buffer.view)
        if self.on_host:
            self.reach("scratch" if dtype == UINT8 else "result", &buffer.view)
            if self.device is not None:  # so that what a kernel fails to write shows
                # NaN; but no -1, which could be what has to be written.
                garbage = 0xFF if dtype in (BFLOAT16, FLOAT32) else 0x5A
                memset(buffer.view.data, garbage, element_count(&buffer.view) * (dtype & 0xFF) // 8)
        return buffer

    cdef Buffer scratch(self, int64_t n_bytes):
        """Bytes for the length of the call, freed in the order of its stream."""
        cdef Buffer buffer
        cdef DLTensor prototype
        if self.ordered:
            return self.temporary(UINT8, 1, &n_bytes)
        buffer = Buffer.__new__(Buffer)
        buffer.call = self
        prototype.device = self.where
        prototype.ndim = 1
        prototype.dtype.code = UINT8 >> 8
        prototype.dtype.bits = UINT8 & 0xFF
        prototype.dtype.lanes = 1
        prototype.shape = &n_bytes
        buffer.pooled = _allocate(self, &prototype)
        _fill("scratch", &buffer.pooled.dl_tensor, &buffer.view)
        return buffer

    cdef object to_host(self, str name, const View* view):
        """A copy of int32 values of one or two dimensions, the last one contiguous. Waits for the stream."""
        cdef cydriver.CUDA_MEMCPY2D copy
        cdef cydriver.CUresult result
        cdef int64_t row
        cdef int64_t rows = view.shape[0] if view.ndim == 2 else 1
        cdef size_t n_bytes = view.shape[view.ndim - 1] * 4
        cdef size_t pitch = view.strides[0] * 4 if view.ndim == 2 else n_bytes
        values = numpy.empty(tuple([view.shape[dim] for dim in range(view.ndim)]), dtype=numpy.int32)
        cdef char* target = <char*><uintptr_t>values.ctypes.data
        if element_count(view) == 0:
            return values
        if self.on_host:
            for row in range(rows):
                memcpy(target + row * n_bytes, <char*>view.data + row * pitch, n_bytes)
            return values
        if is_capturing(self.stream):
            raise ValueError(f"{name}: its values are needed on the host, which is not possible under graph capture")
        memset(&copy, 0, sizeof(copy))
        copy.srcMemoryType = cydriver.CU_MEMORYTYPE_DEVICE
        copy.srcDevice = <cydriver.CUdeviceptr>view.data
        copy.srcPitch = pitch if rows > 1 else n_bytes
        copy.dstMemoryType = cydriver.CU_MEMORYTYPE_HOST
        copy.dstHost = target
        copy.dstPitch = copy.WidthInBytes = n_bytes
        copy.Height = rows
        with nogil:
            result = cydriver.cuMemcpy2DAsync(&copy, self.stream)
            if result == cydriver.CUDA_SUCCESS:
                result = cydriver.cuStreamSynchronize(self.stream)
        check(result, f"reading {name} on {self.device!r}")
        return values

    cdef int hold(self, object owner) except -1:
        """Keep ``owner`` alive until the call's work is done, where its memory is not freed in the stream's order."""
        if self.held is None:
            self.held = []
        self.held.append(owner)
        return 0

    cdef int launched(self) except -1:
        """To be called after the last launch."""
        cdef cydriver.CUstream stream = self.stream
        if self.held is None or is_capturing(stream):
            return 0
        if self.context != self.device.context:  # an event does not outlive its context
            stream = lasting_stream(self.device)
            order_streams(self.stream, self.context, stream, self.device.context)
        _retired.append((<uintptr_t>record_event(stream, self.device.context), self.held))
        return 0

    cdef int set_words(self, int64_t address, int32_t word, int64_t count) except -1:
        """Set ``count`` 32-bit words, in the order of the stream."""
        cdef int32_t* words = <int32_t*>address
        cdef int64_t i
        if self.on_host:
            for i in range(count):
                words[i] = word
        elif count:
            check(
                cydriver.cuMemsetD32Async(<cydriver.CUdeviceptr>address, <unsigned int>word, count, self.stream),
                "cuMemsetD32Async",
            )
        return 0

    cdef int reach(self, str name, const View* view) except -1:
        """Let simulated kernels touch what lies between the first and the last element of a host array."""
        cdef int dim
        cdef int64_t step
        cdef int64_t first = 0
        cdef int64_t last = 0
        cdef int64_t size = (view.dtype & 0xFF) // 8
        if view.data is not NULL and element_count(view):
            for dim in range(view.ndim):
                step = (view.shape[dim] - 1) * view.strides[dim]
                first += min(step, 0)
                last += max(step, 0)
            self.memory.append((<uintptr_t>view.data + first * size, (last - first + 1) * size, name))
        return 0

    cdef int simulate(self) except -1:
        """Have the kernels of this call, whose arrays are on the host, run in the simulator."""
        arch, self.multiprocessors = sim.choose_device()
        self.device = simulated_device(arch, self.multiprocessors)
        return 0


# Allocation -----------------------------------------------------------------------------------------------------------

cdef void _set_error(void* context, const char* kind, const char* message) noexcept:
    PyErr_SetString(MemoryError if kind == b"MemoryError" else RuntimeError, message)


cdef object _importer(str name, object like, Producer producer):
    """The ``from_dlpack`` that makes arrays of the type of ``like``."""
    candidates = [sys.modules.get(type(like).__module__), sys.modules.get(producer.root)]
    if hasattr(like, "__array_namespace__"):
        candidates.insert(0, like.__array_namespace__())
    for module in candidates:
        if hasattr(module, "from_dlpack"):
            return module.from_dlpack
    raise TypeError(
        f"{name}: expected an array of a type that results can be made of, {producer.root} has no from_dlpack for "
        f"{type(like).__name__}"
    )


cdef object _cupy_empty(Call call, tuple shape, str dtype):
    cupy = sys.modules["cupy"]
    with cupy.cuda.Device(call.where.device_id):
        return cupy.empty(shape, dtype=numpy.dtype(dtype))


cdef struct Pooled:
    DLManagedTensorVersioned managed  # first: a pointer to it is a pointer to the whole
    DLManagedTensor legacy
    int64_t shape[MAX_RANK]
    int64_t strides[MAX_RANK]
    cydriver.CUcontext context  # NULL: host memory
    cydriver.CUstream stream


cdef void _free_pooled(DLManagedTensorVersioned* managed) noexcept nogil:
    cdef Pooled* pooled = <Pooled*>managed
    cdef cydriver.CUcontext context
    if pooled.context is NULL:
        free(managed.dl_tensor.data)
    elif managed.dl_tensor.data is not NULL and cydriver.cuCtxPushCurrent(pooled.context) == cydriver.CUDA_SUCCESS:
        cydriver.cuMemFreeAsync(<cydriver.CUdeviceptr>managed.dl_tensor.data, pooled.stream)
        cydriver.cuCtxPopCurrent(&context)
    free(pooled)


cdef void _free_legacy(DLManagedTensor* managed) noexcept nogil:
    _free_pooled(<DLManagedTensorVersioned*>managed.manager_ctx)


cdef DLManagedTensorVersioned* _allocate(Call call, const DLTensor* prototype) except NULL:
    cdef Pooled* pooled = <Pooled*>calloc(1, sizeof(Pooled))
    cdef DLTensor* tensor = &pooled.managed.dl_tensor
    cdef cydriver.CUdeviceptr pointer = 0
    cdef int dim
    cdef int64_t count = 1
    if pooled is NULL:
        raise MemoryError()
    tensor.device = prototype.device
    tensor.ndim = prototype.ndim
    tensor.dtype = prototype.dtype
    tensor.shape = pooled.shape
    tensor.strides = pooled.strides
    for dim in range(prototype.ndim - 1, -1, -1):
        pooled.shape[dim] = prototype.shape[dim]
        pooled.strides[dim] = count
        count *= prototype.shape[dim]
    pooled.managed.version.major = 1
    pooled.managed.version.minor = 0
    pooled.managed.deleter = _free_pooled
    pooled.legacy.manager_ctx = pooled
    pooled.legacy.deleter = _free_legacy
    n_bytes = (count * tensor.dtype.bits + 7) // 8
    if call.on_host:
        if count:
            padded = (n_bytes + HOST_ALIGNMENT - 1) // HOST_ALIGNMENT * HOST_ALIGNMENT
            tensor.data = aligned_alloc(HOST_ALIGNMENT, padded)
        if count and tensor.data is NULL:
            free(pooled)
            raise MemoryError()
    elif count:
        pooled.context = call.context
        pooled.stream = call.stream
        result = cydriver.cuMemAllocAsync(&pointer, n_bytes, call.stream)
        if result != cydriver.CUDA_SUCCESS:
            free(pooled)
            check(result, f"cuMemAllocAsync({n_bytes} bytes) on {call.device!r}")
        tensor.data = <void*>pointer
    pooled.legacy.dl_tensor = tensor[0]
    return &pooled.managed


cdef void _drop_versioned(object capsule) noexcept:
    cdef DLManagedTensorVersioned* managed
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        managed = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        managed.deleter(managed)


cdef void _drop_legacy(object capsule) noexcept:
    cdef DLManagedTensor* managed
    if PyCapsule_IsValid(capsule, "dltensor"):
        managed = <DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")
        managed.deleter(managed)


cdef class Buffer:
    """Memory that a call allocated. Until ``finish`` it goes back to its allocator with the last reference."""

    def __dealloc__(self):
        if self.managed is not NULL:
            self.managed.deleter(self.managed)
        if self.pooled is not NULL:
            self.pooled.deleter(self.pooled)

    cdef object finish(self):
        """The producer's array over this memory; to be called after the launches that fill it."""
        cdef DLManagedTensorVersioned* managed = self.managed
        cdef Call call = self.call
        cdef void* result = NULL
        if call.private:
            self.outlive()
            return self
        if managed is not NULL:
            self.managed = NULL
            call.producer.api.managed_tensor_to_py_object_no_sync(managed, &result)
            array = <object>result
            Py_DECREF(array)  # the cast took a reference of its own
            return array
        if self.array is not None:
            return self.array
        self.outlive()
        return call.importer(self)

    cdef int outlive(self) except -1:
        """The memory stays when the Call, which has to end with the public function, is gone: an importer keeps it, or
        this object, in a traceback for one. Its last work has been launched."""
        cdef Call call = self.call
        cdef Pooled* pooled = <Pooled*>self.pooled
        self.where = call.where
        self.stream = call.stream
        self.context = call.context
        self.home = call.home
        self.call = None
        if pooled is NULL or pooled.context is NULL or is_capturing(call.stream):
            return 0
        if call.context == call.device.context and call.stream == <cydriver.CUstream>cydriver.CU_STREAM_LEGACY:
            return 0  # neither is ever destroyed
        pooled.context = call.device.context
        pooled.stream = lasting_stream(call.device)
        return order_streams(call.stream, call.context, pooled.stream, pooled.context)

    def __dlpack_device__(self):
        return self.where.device_type, self.where.device_id

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """Hands the memory over, once, after making ``stream`` wait for the call's work."""
        cdef Pooled* pooled = <Pooled*>self.pooled
        cdef cydriver.CUstream consumer
        if pooled is NULL:
            raise BufferError("this memory has already been handed over")
        if copy or (dl_device is not None and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("this memory is handed over in place only")
        if stream != -1 and self.where.device_type != CPU:
            consumer = stream_handle(stream or 0)
            if consumer != self.stream:
                order_streams(self.stream, self.context, consumer, context_of(consumer, self.home))
        if max_version is not None and max_version[0] >= 1:
            capsule = PyCapsule_New(&pooled.managed, "dltensor_versioned", _drop_versioned)
        else:
            capsule = PyCapsule_New(&pooled.legacy, "dltensor", _drop_legacy)
        self.pooled = NULL
        return capsule


# Checks ---------------------------------------------------------------------------------------------------------------

cdef int64_t integer(str name, object value, int64_t low, int64_t high) except? -1:
    if not isinstance(value, int):
        try:
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name}: expected an integer, got {type(value).__name__}") from None
    if not low <= value <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {value}")
    return value


cdef bint boolean(str name, object value) except? -1:
    if value is False:
        return False
    if value is True:
        return True
    if not (isinstance(value, (int, numpy.bool_, numpy.integer)) and (value == 0 or value == 1)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value == 1


cdef str dtype_name(int dtype):
    if dtype in _DTYPE_NAMES:
        return _DTYPE_NAMES[dtype]
    return f"{_CODE_NAMES.get(dtype >> 8, 'DLPack type code %d bits ' % (dtype >> 8))}{dtype & 0xFF}"


cdef str shape_text(const View* view):
    return str([view.shape[dim] for dim in range(view.ndim)])


cdef int64_t element_count(const View* view) noexcept nogil:
    cdef int dim
    cdef int64_t count = 1
    for dim in range(view.ndim):
        count *= view.shape[dim]
    return count


cdef int check_rank(str name, const View* view, int ndim) except -1:
    if view.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got {view.ndim} (shape {shape_text(view)})")
    return 0


cdef int check_dtype(str name, const View* view, int dtype) except -1:
    if view.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype_name(dtype)}, got {dtype_name(view.dtype)}")
    return 0


cdef int check_extent(str name, const View* view, int dim, int64_t extent, str meaning) except -1:
    if view.shape[dim] != extent:
        raise ValueError(
            f"{name}: expected {extent} in dimension {dim} ({meaning}), got {view.shape[dim]} (shape "
            f"{shape_text(view)})"
        )
    return 0


cdef int check_contiguous(str name, const View* view) except -1:
    cdef int dim
    cdef int64_t stride = 1
    for dim in range(view.ndim - 1, -1, -1):
        if view.shape[dim] != 1 and view.strides[dim] != stride and element_count(view):
            strides = [view.strides[dim] for dim in range(view.ndim)]
            raise ValueError(f"{name}: expected a contiguous array, got strides {strides} for shape {shape_text(view)}")
        stride *= view.shape[dim]
    return 0


cdef int check_last_dim_contiguous(str name, const View* view) except -1:
    cdef int dim = view.ndim - 1
    # NumPy gives empty arrays strides of 0.
    if view.shape[dim] > 1 and view.strides[dim] != 1 and element_count(view):
        raise ValueError(f"{name}: expected a contiguous last dimension, got stride {view.strides[dim]}")
    return 0


cdef int check_writable(str name, const View* view) except -1:
    if view.readonly:
        raise ValueError(f"{name}: expected a writable array, got a read-only one")
    return 0


cdef int check_alignment(str name, const View* view, int n_bytes) except -1:
    if <uintptr_t>view.data % n_bytes:
        raise ValueError(f"{name}: expected an address aligned to {n_bytes} bytes, got {<uintptr_t>view.data:#x}")
    return 0
