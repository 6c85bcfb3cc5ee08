"""The CUDA driver: errors, devices, streams."""

import ctypes
import operator
import threading

from cuda.bindings cimport cydriver
from libc.stdint cimport uintptr_t


class CudaError(RuntimeError):
    """A driver call failed. The message has the driver's name for the error and the call that it came from.

    Attributes:
        code: the ``CUresult`` as an int.
    """

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code

    def __reduce__(self):  # so that it can leave a worker process
        return type(self), (self.code, str(self))


cdef int check(cydriver.CUresult result, str what) except -1:
    cdef const char* name = NULL
    cdef const char* text = NULL
    if result == cydriver.CUDA_SUCCESS:
        return 0
    cydriver.cuGetErrorName(result, &name)
    cydriver.cuGetErrorString(result, &text)
    named = name.decode() if name is not NULL else f"CUDA error {<int>result}"
    described = f" ({text.decode()})" if text is not NULL else ""
    raise CudaError(<int>result, f"{what}: {named}{described}")


cdef enum:
    REQUIRED_VERSION = 13000  # of the driver, as cuDriverGetVersion has it: cuda-bindings and the cubins are for 13.0

cdef str LIBRARY = "libcuda.so.1"
cdef str NEEDED = "sparse_aot needs a driver for CUDA 13.0 or later, 580 or later by its own number"


def driver_version():
    """The CUDA version of the driver, as "13.0"; None where there is no driver library."""
    cdef int version = 0
    try:
        check(cydriver.cuDriverGetVersion(&version), "cuDriverGetVersion")
    except RuntimeError:  # cuda-bindings found no library, or not the function in it
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


cdef str _why_not_loaded():
    """What is wrong with a driver library that cuda-bindings could not use; None where there is no such library."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return None if str(error).startswith(f"{LIBRARY}: cannot open") else str(error)
    return f"functions are missing in {LIBRARY}"


cdef int initialise() except -1:
    cdef cydriver.CUresult result
    cdef int version = 0
    try:
        check(cydriver.cuDriverGetVersion(&version), "cuDriverGetVersion")
        result = cydriver.cuInit(0)
    except RuntimeError as error:  # cuda-bindings found no driver library, or not what it needs in it
        broken = _why_not_loaded()
        code = cydriver.CUDA_ERROR_SHARED_OBJECT_INIT_FAILED if broken else cydriver.CUDA_ERROR_NO_DEVICE
        what = f"the driver cannot be used: {broken}: {error}" if broken else f"no driver: {error}"
        raise CudaError(<int>code, f"cuInit: {what}; {NEEDED}") from error
    if version < REQUIRED_VERSION:
        raise CudaError(
            <int>cydriver.CUDA_ERROR_NOT_SUPPORTED, f"the driver is too old: it is for CUDA {driver_version()}; {NEEDED}"
        )
    if result == cydriver.CUDA_ERROR_NO_DEVICE:
        return check(result, "cuInit")
    return check(result, f"cuInit of the driver for CUDA {driver_version()} ({NEEDED})")


cdef dict _devices = {}
_lock = threading.Lock()


cdef class Device:
    """One CUDA device and its primary context, or what the simulator stands in for."""

    def __repr__(self):
        if self.simulated is not None:
            return f"the simulator for {self.simulated}"
        major, minor = self.capability
        return f"cuda:{self.ordinal} ({self.name}, compute capability {major}.{minor})"


cdef int _attribute(cydriver.CUdevice_attribute attribute, cydriver.CUdevice handle) except -1:
    cdef int value = 0
    check(cydriver.cuDeviceGetAttribute(&value, attribute, handle), "cuDeviceGetAttribute")
    return value


cdef Device _describe(int ordinal):
    """A device without its context."""
    cdef char name[256]
    cdef cydriver.CUdevice handle
    cdef Device device = Device.__new__(Device)
    check(cydriver.cuDeviceGet(&handle, ordinal), f"cuDeviceGet({ordinal})")
    check(cydriver.cuDeviceGetName(name, sizeof(name), handle), "cuDeviceGetName")
    device.ordinal = ordinal
    device.handle = handle
    device.name = name.decode()
    device.capability = (
        _attribute(cydriver.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle),
        _attribute(cydriver.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle),
    )
    device.multiprocessors = _attribute(cydriver.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle)
    return device


cdef Device get_device(int ordinal):
    cdef Device device = <Device>_devices.get(ordinal)
    if device is not None:
        return device
    with _lock:
        if ordinal in _devices:
            return <Device>_devices[ordinal]
        initialise()
        device = _describe(ordinal)
        check(cydriver.cuDevicePrimaryCtxRetain(&device.context, device.handle), "cuDevicePrimaryCtxRetain")
        _devices[ordinal] = device
    return device


cdef dict _simulated_devices = {}  # architecture -> Device


cdef Device simulated_device(str arch, int multiprocessors):
    cdef Device device
    with _lock:
        device = <Device>_simulated_devices.get(arch)
        if device is None:
            device = Device.__new__(Device)
            device.ordinal = -1 - len(_simulated_devices)
            device.name = "ptxsim"
            device.simulated = arch
            _simulated_devices[arch] = device
    device.multiprocessors = multiprocessors
    return device


def device_count():
    """Number of CUDA devices; 0 where there is no driver or no device. CudaError where CUDA fails for another reason."""
    cdef int count = 0
    try:
        initialise()
    except CudaError as error:
        if error.code != <int>cydriver.CUDA_ERROR_NO_DEVICE:
            raise
        return 0
    check(cydriver.cuDeviceGetCount(&count), "cuDeviceGetCount")
    return count


def describe_devices():
    """The devices that the driver sees, as ``[Device, ...]``; creates no context, which would take memory of each."""
    return [_describe(ordinal) for ordinal in range(device_count())]


# Contexts -------------------------------------------------------------------------------------------------------------

cdef int push(cydriver.CUcontext context, int* pushed) except -1:
    cdef cydriver.CUcontext current = NULL
    check(cydriver.cuCtxGetCurrent(&current), "cuCtxGetCurrent")
    if current != context:
        check(cydriver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        pushed[0] += 1
    return 0


cdef void leave(int pushed) noexcept:
    cdef cydriver.CUcontext context
    for _ in range(pushed):
        cydriver.cuCtxPopCurrent(&context)


cdef cydriver.CUcontext enter(Device device, int* pushed) except NULL:
    cdef cydriver.CUcontext current = NULL
    cdef cydriver.CUdevice handle = -1
    check(cydriver.cuCtxGetCurrent(&current), "cuCtxGetCurrent")
    if current == device.context:
        return current
    if current is not NULL:
        check(cydriver.cuCtxGetDevice(&handle), "cuCtxGetDevice")
        if handle == device.handle:
            return current
    check(cydriver.cuCtxPushCurrent(device.context), "cuCtxPushCurrent")
    pushed[0] += 1
    return device.context


cdef dict _multiprocessors = {}  # the id of a context, which no other gets after it -> its multiprocessors


cdef int multiprocessors_of(Device device, cydriver.CUcontext context) except -1:
    cdef cydriver.CUdevResource resource
    cdef unsigned long long number = 0
    if context == device.context:
        return device.multiprocessors
    check(cydriver.cuCtxGetId(context, &number), "cuCtxGetId")
    count = _multiprocessors.get(number)
    if count is None:  # the question costs as much as a tenth of a call
        check(cydriver.cuCtxGetDevResource(context, &resource, cydriver.CU_DEV_RESOURCE_TYPE_SM), "cuCtxGetDevResource")
        count = _multiprocessors[number] = resource.sm.smCount
    return count


# Streams --------------------------------------------------------------------------------------------------------------


cdef cydriver.CUstream stream_handle(object stream) except? NULL:
    cdef uintptr_t handle
    if hasattr(stream, "__cuda_stream__"):
        try:
            _, stream = stream.__cuda_stream__()
        except (TypeError, ValueError):
            raise TypeError("stream: expected __cuda_stream__() to return (version, handle)") from None
    kind = type(stream).__name__
    try:
        stream = None if isinstance(stream, bool) else operator.index(stream)
    except TypeError:
        stream = None
    if stream is None:
        raise TypeError(f"stream: expected an int handle or an object with __cuda_stream__, got {kind}")
    if not 0 <= stream < 1 << 64:
        raise ValueError(f"stream: expected a stream handle, got {stream}")
    handle = stream
    return <cydriver.CUstream>(handle if handle else <uintptr_t>cydriver.CU_STREAM_LEGACY)


cdef bint is_capturing(cydriver.CUstream stream) except -1:
    cdef cydriver.CUstreamCaptureStatus status = cydriver.CU_STREAM_CAPTURE_STATUS_NONE
    check(cydriver.cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing")
    return status != cydriver.CU_STREAM_CAPTURE_STATUS_NONE


cdef cydriver.CUcontext context_of(cydriver.CUstream stream, cydriver.CUcontext home) except NULL:
    cdef cydriver.CUcontext context = NULL
    if <uintptr_t>stream <= <uintptr_t>cydriver.CU_STREAM_PER_THREAD:
        return home
    check(cydriver.cuStreamGetCtx(stream, &context), "cuStreamGetCtx")
    return context


cdef cydriver.CUstream lasting_stream(Device device) except NULL:
    cdef cydriver.CUstreamCaptureMode mode = cydriver.CU_STREAM_CAPTURE_MODE_RELAXED
    cdef int pushed = 0
    if device.lasting is NULL:
        with _lock:
            if device.lasting is NULL:
                # Another stream of this thread may be under capture.
                check(cydriver.cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode")
                try:
                    push(device.context, &pushed)
                    check(cydriver.cuStreamCreate(&device.lasting, cydriver.CU_STREAM_NON_BLOCKING), "cuStreamCreate")
                finally:
                    leave(pushed)
                    cydriver.cuThreadExchangeStreamCaptureMode(&mode)
    return device.lasting


cdef cydriver.CUevent record_event(cydriver.CUstream stream, cydriver.CUcontext context) except NULL:
    cdef cydriver.CUevent event = NULL
    cdef int pushed = 0
    push(context, &pushed)  # an event and the stream that it is recorded on have to be of one context
    try:
        check(cydriver.cuEventCreate(&event, cydriver.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
        check(cydriver.cuEventRecord(event, stream), "cuEventRecord")
    except CudaError:
        if event is not NULL:
            cydriver.cuEventDestroy(event)
        raise
    finally:
        leave(pushed)
    return event


cdef int order_streams(
    cydriver.CUstream earlier, cydriver.CUcontext earlier_context, cydriver.CUstream later,
    cydriver.CUcontext later_context,
) except -1:
    cdef cydriver.CUevent event = record_event(earlier, earlier_context)
    cdef int pushed = 0
    try:
        push(later_context, &pushed)  # what a default stream belongs to
        check(cydriver.cuStreamWaitEvent(later, event, 0), "cuStreamWaitEvent")
    finally:
        leave(pushed)
        cydriver.cuEventDestroy(event)
    return 0
