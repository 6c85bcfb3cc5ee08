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
import sys

import numpy

from cpython.pycapsule cimport PyCapsule_IsValid, PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF
from cuda.bindings cimport cydriver
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from sparse_aot._core._checks cimport dtype_name, element_count
from sparse_aot._core._dlpack cimport (
    BFLOAT16,
    CPU,
    CUDA,
    FLOAT32,
    MAX_RANK,
    UINT8,
    DLManagedTensor,
    DLTensor,
    device_of,
    export_capsule,
    fill_view,
    producer_of,
    read_capsule,
    read_exchange,
    read_numpy,
    where_text,
)
from sparse_aot._core._driver cimport (
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
    cdef Producer producer = producer_of(array)
    cdef void* current = NULL
    cdef bint known = producer.api is not NULL  # whether the producer's current stream is known
    call.producer = producer
    call.name = name
    call.like = array
    if known:
        read_exchange(name, producer, array, view)
        call.where = view.device
    else:
        call.where = device_of(name, array)
    if call.where.device_type == CPU:
        call.on_host = call.ordered = True
        call.memory = sim.Memory()
        if stream is not None:
            stream_handle(stream)
        if known:
            call.reach(name, view)
        else:
            call.read(name, array, view)
        return call
    if call.where.device_type != CUDA:
        raise ValueError(f"{name}: expected an array on a CUDA device or on the host, got {where_text(call.where)}")

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
        raise ValueError(f"stream: expected one of cuda:{call.device.ordinal}, got one of cuda:{handle}")
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
        producer = producer_of(array)
        if producer.api is not NULL:
            read_exchange(name, producer, array, view)
        else:
            view.device = device_of(name, array)
        if view.device.device_type != self.where.device_type or view.device.device_id != self.where.device_id:
            raise ValueError(
                f"{name}: expected an array on {where_text(self.where)}, like the first "
                f"argument, got one on {where_text(view.device)}"
            )
        if producer.api is NULL:
            if producer.root == "numpy":
                read_numpy(name, array, view)
            else:
                capsule = export_capsule(name, array, None if self.on_host else <uintptr_t>self.stream)
                read_capsule(name, capsule, view)
                if producer.root != "cupy":  # it may be all that owns the memory
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
            fill_view("result", &buffer.managed.dl_tensor, &buffer.view)
        elif self.producer.root == "numpy":
            buffer.array = numpy.empty(tuple([shape[dim] for dim in range(ndim)]), dtype=dtype_name(dtype))
            read_numpy("result", buffer.array, &buffer.view)
        elif self.producer.root == "cupy":
            buffer.array = _cupy_empty(self, tuple([shape[dim] for dim in range(ndim)]), dtype_name(dtype))
            read_capsule("result", export_capsule("result", buffer.array, -1), &buffer.view)
        else:
            buffer.pooled = _allocate(self, &prototype)
            fill_view("result", &buffer.pooled.dl_tensor, &buffer.view)
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
        fill_view("scratch", &buffer.pooled.dl_tensor, &buffer.view)
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
        if self.on_host or self.held is None or is_capturing(stream):
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
