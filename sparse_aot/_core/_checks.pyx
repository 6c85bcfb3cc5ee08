"""Checks of arguments: errors that name the argument, what it got and what it takes."""

import operator

import numpy

from libc.math cimport isfinite
from libc.stdint cimport uintptr_t

from sparse_aot._core._dlpack cimport BFLOAT16, FLOAT16, FLOAT32, FLOAT8_E4M3FN, INT32, INT64, UINT8


cdef dict _DTYPE_NAMES = {
    INT32: "int32",
    INT64: "int64",
    UINT8: "uint8",
    FLOAT16: "float16",
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    FLOAT8_E4M3FN: "float8_e4m3fn",
}
cdef dict _CODE_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}


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


cdef str name_of_dtype(str name, object dtype):
    """The name of a dtype given by name or by any object whose name ends in one."""
    if isinstance(dtype, str):
        return dtype
    found = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    if not isinstance(found, str):
        raise TypeError(f"{name}: expected the name of a dtype, got {dtype!r}")
    return found.rpartition(".")[2]


cdef float positive(str name, object value) except? -1:
    cdef float number
    try:
        number = value
    except OverflowError:
        number = float("inf")
    except TypeError:
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}") from None
    if not (isfinite(number) and number > 0.0):  # as the kernels get it: in float32
        raise ValueError(f"{name}: expected a positive finite number, got {value}")
    return number


cdef int check_int32(str name, const View* view, int ndim) except -1:
    check_rank(name, view, ndim)
    check_dtype(name, view, INT32)
    return check_alignment(name, view, 4)


cdef int check_steps(str name, const View* view, int n_dims, int64_t multiple) except -1:
    """The strides of the first ``n_dims`` dimensions; that of a dimension of one element says nothing."""
    cdef int dim
    for dim in range(n_dims if element_count(view) else 0):
        if view.shape[dim] > 1 and (view.strides[dim] <= 0 or view.strides[dim] % multiple):
            raise ValueError(
                f"{name}: expected a positive stride that is a multiple of {multiple} elements in dimension {dim}, got "
                f"{view.strides[dim]}"
            )
    return 0


cdef int check_choice(str name, object value, tuple choices) except -1:
    if integer(name, value, 0, 1 << 20) not in choices:
        raise NotImplementedError(f"{name}: got {value!r}; supported: {', '.join(map(str, choices))}")
    return 0
