"""Block-sparse attention kernels, compiled ahead of time and launched from Cython.

Importing this needs no GPU, no driver and no array framework; a kernel is loaded on its first use on a device.
"""

from sparse_aot import sim

try:
    from sparse_aot.msa import Schedule, build_k2q_csr, prepare_sparse_fwd_schedule_and_split, sparse_atten_func
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("sparse_aot."):
        raise
    raise ImportError(
        f"{__path__[0]} has the sources of sparse_aot without its compiled extensions, and comes before an installed "
        "package where Python starts in that checkout: start elsewhere, or `pip install -e .` there"
    ) from None
from sparse_aot._core._driver import CudaError
from sparse_aot._core._kernel import preload
from sparse_aot._core.bundle import BundleError

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
