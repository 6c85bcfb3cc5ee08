"""Block-sparse attention kernels, compiled ahead of time and launched from Cython.

Importing this needs no GPU, no driver and no array framework; a kernel is loaded on its first use on a device.
"""

from sparse_aot import sim

try:
    from sparse_aot._attention import sparse_atten_func
except ModuleNotFoundError as error:
    if error.name != "sparse_aot._attention":
        raise
    raise ImportError(
        f"{__path__[0]} has the sources of sparse_aot without its compiled extensions, and comes before an installed "
        "package where Python starts in that checkout: start elsewhere, or `pip install -e .` there"
    ) from None
from sparse_aot._bundle import BundleError, preload
from sparse_aot._csr import build_k2q_csr, prepare_sparse_fwd_schedule_and_split
from sparse_aot._driver import CudaError
from sparse_aot._schedule import Schedule

__all__ = [
    "BundleError",
    "CudaError",
    "Schedule",
    "__version__",
    "build_k2q_csr",
    "preload",
    "prepare_sparse_fwd_schedule_and_split",
    "sim",
    "sparse_atten_func",
]


def __getattr__(name):
    if name == "__version__":
        from importlib.metadata import version

        return version("sparse_aot")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
