"""The CUDA driver: errors, devices, streams. Every driver call of the package is checked by `check`.

    check(cydriver.cuInit(0), "cuInit")          raises CudaError with the driver's name for the error
    device = get_device(ordinal)                 cached; initialises CUDA and retains the primary context
    with nogil: result = cydriver.cuXyz(...)     driver calls that may block run without the GIL
"""

from cuda.bindings cimport cydriver


cdef extern from *:
    """
    #include "cuda.h"
    typedef enum cudaError_enum cudaError_enum; /* cydriver names the enum as C++ would */
    """


cdef int check(cydriver.CUresult result, str what) except -1

# cuInit; CudaError also where there is no driver library.
cdef int initialise() except -1


cdef class Device:
    cdef readonly int ordinal
    cdef readonly str name
    cdef readonly tuple capability  # (major, minor)
    cdef readonly int multiprocessors
    cdef readonly str simulated  # the architecture that the simulator stands in for; None for a CUDA device
    cdef cydriver.CUcontext context  # the primary context, retained for the life of the process


cdef Device get_device(int ordinal)

# The device that host arrays are on for as long as the simulator runs kernels on them: see sparse_aot/sim.py.
cdef Device simulated_device(str arch, int multiprocessors)

# The handle of `stream=`: an int or an object with `__cuda_stream__`. 0 becomes the legacy default stream's own handle.
cdef cydriver.CUstream stream_handle(object stream) except? NULL

cdef bint is_capturing(cydriver.CUstream stream) except -1

# Work submitted to `later` from now on runs after what `earlier` holds now.
cdef int order_streams(cydriver.CUstream earlier, cydriver.CUstream later) except -1
