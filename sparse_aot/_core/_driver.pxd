"""The CUDA driver: errors, devices, streams. Every driver call of the package is checked by `check`.

    check(cydriver.cuInit(0), "cuInit")          raises CudaError with the driver's name for the error
    device = get_device(ordinal)                 cached; initialises CUDA and retains the primary context
    context = enter(device, &pushed)             a context of the device is current; leave(pushed) undoes it
    with nogil: result = cydriver.cuXyz(...)     driver calls that may block run without the GIL
"""

from cuda.bindings cimport cydriver


cdef extern from *:
    """
    #include "cuda.h"
    typedef enum cudaError_enum cudaError_enum; /* cydriver names the enum as C++ would */
    """


cdef int check(cydriver.CUresult result, str what) except -1

# cuInit; CudaError also where there is no driver library, or one that is too old for the package.
cdef int initialise() except -1


cdef class Device:
    cdef readonly int ordinal
    cdef readonly str name
    cdef readonly tuple capability  # (major, minor)
    cdef readonly int multiprocessors
    cdef readonly str simulated  # the architecture that the simulator stands in for; None for a CUDA device
    cdef cydriver.CUdevice handle
    cdef cydriver.CUcontext context  # the primary context, retained for the life of the process
    cdef cydriver.CUstream lasting  # see lasting_stream


cdef Device get_device(int ordinal)

# The context of the device to work in: the current one where it is the device's, a green context among them, else the
# primary one. It is made current; `pushed` counts the contexts that `leave` has to pop.
cdef cydriver.CUcontext enter(Device device, int* pushed) except NULL
cdef int push(cydriver.CUcontext context, int* pushed) except -1  # unless it is current
cdef void leave(int pushed) noexcept

# The multiprocessors that work in a context of the device can use.
cdef int multiprocessors_of(Device device, cydriver.CUcontext context) except -1

# The device that host arrays are on for as long as the simulator runs kernels on them: see sparse_aot/sim.py.
cdef Device simulated_device(str arch, int multiprocessors)

# The handle of `stream=`: an int or an object with `__cuda_stream__`. 0 becomes the legacy default stream's own handle.
cdef cydriver.CUstream stream_handle(object stream) except? NULL

# The context of a stream. The default streams have none of their own: theirs is `home`.
cdef cydriver.CUcontext context_of(cydriver.CUstream stream, cydriver.CUcontext home) except NULL

cdef bint is_capturing(cydriver.CUstream stream) except -1

# A stream in the device's primary context that is never destroyed, for what has to be ordered after a call whose own
# stream or context may be gone by then.
cdef cydriver.CUstream lasting_stream(Device device) except NULL

# Records an event, a new one, on a stream of the context.
cdef cydriver.CUevent record_event(cydriver.CUstream stream, cydriver.CUcontext context) except NULL

# Work submitted to `later` from now on runs after what `earlier` holds now. Each stream comes with its context.
cdef int order_streams(
    cydriver.CUstream earlier, cydriver.CUcontext earlier_context, cydriver.CUstream later,
    cydriver.CUcontext later_context,
) except -1
