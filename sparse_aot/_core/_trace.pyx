"""What public calls do, for those who run a service; see the ``.pxd``."""

import ctypes
import importlib.util
import os
import sys
import threading
import warnings
from pathlib import Path


_NVTX = ("libnvtx3interop.so.1", "libnvToolsExt.so.1")  # its names with CUDA 13, and before

_thread = threading.local()  # trace: (launches, remarks) of the outermost call that is under way


def _find_nvtx():
    """NVTX's C library: where the dynamic linker finds it, else in a wheel of NVIDIA's; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    roots = map(Path, spec.submodule_search_locations if spec else ())
    in_wheels = [path for root in roots for name in _NVTX for path in root.glob(f"*/lib/{name}")]
    for path in (*_NVTX, *in_wheels):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    warnings.warn(
        f"SPARSE_AOT_NVTX=1: no ranges, neither {' nor '.join(_NVTX)} is there; the wheel nvidia-nvtx has it",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


cdef bint _logs = os.environ.get("SPARSE_AOT_LOG") == "1"
cdef object _nvtx = _find_nvtx() if os.environ.get("SPARSE_AOT_NVTX") == "1" else None

tracing = _logs or _nvtx is not None


cdef class Trace:
    """One public call, from ``begin`` until its function ends, by a return or by an error."""

    def __dealloc__(self):
        if _nvtx is not None:
            _nvtx.nvtxRangePop()
        if self.nested:
            return
        _thread.trace = None
        if _logs and sys.stderr is not None:
            parts = [", ".join(self.launches) or "nothing launched", *self.remarks]
            sys.stderr.write(f"sparse_aot: {self.name}: {'; '.join(parts)}\n")


cdef Trace begin(str name):
    cdef Trace trace = Trace.__new__(Trace)
    under_way = getattr(_thread, "trace", None)
    trace.nested = under_way is not None
    trace.name = name
    trace.launches, trace.remarks = under_way or ([], [])
    if not trace.nested:
        _thread.trace = trace.launches, trace.remarks
    if _nvtx is not None:
        _nvtx.nvtxRangePushA(f"sparse_aot.{name}".encode())
    return trace


cdef int note(str remark) except -1:
    _thread.trace[1].append(remark)
    return 0


cdef int note_launch(str kernel, unsigned int grid, str device) except -1:
    under_way = getattr(_thread, "trace", None)
    if under_way is not None:
        under_way[0].append(f"{kernel} on {device} grid {grid}")
    return 0
