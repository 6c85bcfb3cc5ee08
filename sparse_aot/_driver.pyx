"""The CUDA driver: errors, devices, streams."""

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


cdef int initialise() except -1:
    try:
        return check(cydriver.cuInit(0), "cuInit")
    except CudaError:
        raise
    except RuntimeError as error:  # cuda-bindings found no driver library
        raise CudaError(<int>cydriver.CUDA_ERROR_NO_DEVICE, f"cuInit: no driver: {error}") from error


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


cdef Device _describe(int ordinal, cydriver.CUdevice* handle):
    """A device without its context."""
    cdef char name[256]
    cdef Device device = Device.__new__(Device)
    check(cydriver.cuDeviceGet(handle, ordinal), f"cuDeviceGet({ordinal})")
    check(cydriver.cuDeviceGetName(name, sizeof(name), handle[0]), "cuDeviceGetName")
    device.ordinal = ordinal
    device.name = name.decode()
    device.capability = (
        _attribute(cydriver.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle[0]),
        _attribute(cydriver.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle[0]),
    )
    device.multiprocessors = _attribute(cydriver.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle[0])
    return device


cdef Device get_device(int ordinal):
    cdef Device device = <Device>_devices.get(ordinal)
    cdef cydriver.CUdevice handle
    if device is not None:
        return device
    with _lock:
        if ordinal in _devices:
            return <Device>_devices[ordinal]
        initialise()
        device = _describe(ordinal, &handle)
        check(cydriver.cuDevicePrimaryCtxRetain(&device.context, handle), "cuDevicePrimaryCtxRetain")
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
    """Number of CUDA devices; 0 where there is no driver or no device."""
    cdef int count = 0
    try:
        initialise()
    except CudaError:
        return 0
    check(cydriver.cuDeviceGetCount(&count), "cuDeviceGetCount")
    return count


def describe_devices():
    """The devices that the driver sees, as ``[Device, ...]``; creates no context, which would take memory of each."""
    cdef cydriver.CUdevice handle
    return [_describe(ordinal, &handle) for ordinal in range(device_count())]


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


cdef int order_streams(cydriver.CUstream earlier, cydriver.CUstream later) except -1:
    cdef cydriver.CUevent event
    check(cydriver.cuEventCreate(&event, cydriver.CU_EVENT_DISABLE_TIMING), "cuEventCreate")
    try:
        check(cydriver.cuEventRecord(event, earlier), "cuEventRecord")
        check(cydriver.cuStreamWaitEvent(later, event, 0), "cuStreamWaitEvent")
    finally:
        cydriver.cuEventDestroy(event)
    return 0
