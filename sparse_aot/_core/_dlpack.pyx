"""Reading arrays over DLPack: the C exchange API where the array's type has it, ``__dlpack__`` everywhere else.

No framework is imported. NumPy arrays of the dtypes of ml_dtypes, which NumPy does not hand out over DLPack, are read
as what they are.
"""

import numpy

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.string cimport memcmp

from sparse_aot._core._checks cimport element_count, shape_text


cdef enum:
    READ_ONLY = 1  # a flag of DLPack
    PINNED = 3  # a device type: host memory too

cdef dict _NUMPY_DTYPES = {"bfloat16": BFLOAT16, "float8_e4m3fn": FLOAT8_E4M3FN}  # those of ml_dtypes, by NumPy's name
cdef tuple _IMMUTABLE = ("jax", "jaxlib", "tensorflow")  # modules whose arrays are values; they export them as writable
cdef tuple _VERSION = (1, 3)  # the DLPack version that this file is written to


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


cdef Producer producer_of(object array):
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

cdef int fill_view(str name, const DLTensor* tensor, View* view) except -1:
    cdef int dim
    cdef int64_t stride = 1
    if tensor.ndim > MAX_RANK:
        raise ValueError(f"{name}: expected at most {MAX_RANK} dimensions, got {tensor.ndim}")
    view.data = <char*>tensor.data + tensor.byte_offset if tensor.data is not NULL else NULL
    view.device = normal(tensor.device)
    view.dtype = tensor.dtype.code << 8 | tensor.dtype.bits if tensor.dtype.lanes == 1 else -1
    view.ndim = tensor.ndim
    view.readonly = False
    for dim in range(tensor.ndim - 1, -1, -1):
        view.shape[dim] = tensor.shape[dim]
        view.strides[dim] = tensor.strides[dim] if tensor.strides is not NULL else stride
        stride *= tensor.shape[dim]
    if tensor.data is NULL and stride != 0:  # torch: a fake tensor, or one whose storage was freed
        raise ValueError(f"{name}: expected an array with memory, got none behind shape {shape_text(view)}")
    return 0


cdef object _unreadable(str name, object error):
    """The error for an array that its own type does not hand out: sparse, on no device, of another byte order."""
    reason = str(error).partition("\n")[0]  # torch appends a backtrace
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{name}: expected an array that can be read over DLPack: {reason}")


cdef int read_exchange(str name, Producer producer, object array, View* view) except -1:
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
        return fill_view(name, &tensor, view)
    try:
        fill_view(name, &managed.dl_tensor, view)
        view.readonly = managed.flags & READ_ONLY
    finally:
        managed.deleter(managed)
    return 0


cdef int read_capsule(str name, object capsule, View* view) except -1:
    """A capsule that is never renamed to "used_..." deletes its tensor itself when the last reference goes."""
    cdef DLManagedTensorVersioned* versioned
    if PyCapsule_IsValid(capsule, "dltensor_versioned"):
        versioned = <DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned")
        if versioned.version.major != 1:
            raise ValueError(f"{name}: expected DLPack version 1.x, got {versioned.version.major}")
        fill_view(name, &versioned.dl_tensor, view)
        view.readonly = versioned.flags & READ_ONLY
        return 0
    if PyCapsule_IsValid(capsule, "dltensor"):
        return fill_view(name, &(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor")).dl_tensor, view)
    raise TypeError(f"{name}: __dlpack__ returned {type(capsule).__name__}, expected a DLPack capsule")


cdef object export_capsule(str name, object array, object stream):
    try:
        try:
            return array.__dlpack__(stream=stream, max_version=_VERSION, copy=False)
        except TypeError:  # a producer older than DLPack 1.0
            return array.__dlpack__(stream=stream)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


cdef DLDevice device_of(str name, object array) except *:
    cdef DLDevice device
    try:
        device_type, device_id = array.__dlpack_device__()
        device.device_type, device.device_id = int(device_type), int(device_id)
        return normal(device)
    except AttributeError:
        raise TypeError(
            f"{name}: expected an array that speaks DLPack (__dlpack__, __dlpack_device__), got {type(array).__name__}"
        ) from None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error


cdef DLDevice normal(DLDevice device) noexcept:
    """Pinned memory is the host's, which is one device."""
    if device.device_type == CPU or device.device_type == PINNED:
        device.device_type = CPU
        device.device_id = 0
    return device


cdef str where_text(DLDevice device):
    if device.device_type == CPU:
        return "the host"
    if device.device_type == CUDA:
        return f"cuda:{device.device_id}"
    return f"DLPack device ({device.device_type}, {device.device_id})"


class _Writable:
    """The memory of a read-only NumPy array, as writable: NumPy before 2.1 does not export any other over DLPack."""

    def __init__(self, array):
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


cdef int read_numpy(str name, object array, View* view) except -1:
    """An array of a dtype of ml_dtypes goes as integers of the same size and byte order, whose strides are the same."""
    cdef int dtype = _NUMPY_DTYPES.get(array.dtype.name, 0)
    cdef bint readonly = not array.flags.writeable
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, which DLPack does not have, got a masked array")
    if dtype:
        array = array.view(numpy.dtype(f"u{array.dtype.itemsize}").newbyteorder(array.dtype.byteorder))
    if readonly:
        array = numpy.asarray(_Writable(array))
    capsule = export_capsule(name, array, None)
    read_capsule(name, capsule, view)
    view.readonly = readonly
    if dtype:
        view.dtype = dtype
    return 0


cdef int check_in_place(str name, object array, const View* view) except -1:
    """Arrays of other types than these cannot be resized in place."""
    cdef Producer producer = producer_of(array)
    cdef View now
    if producer.api is not NULL:
        read_exchange(name, producer, array, &now)
    elif producer.root == "numpy":
        read_numpy(name, array, &now)
    else:
        return 0
    if (now.data != view.data and element_count(view)) or memcmp(now.shape, view.shape, view.ndim * sizeof(int64_t)):
        raise ValueError(f"{name}: expected the memory that it had at first, it was resized or replaced since")
    return 0
