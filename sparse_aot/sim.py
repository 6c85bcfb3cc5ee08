"""Kernels on host arrays: they run in ptxsim, a functional simulator of the kernels' PTX. For trying and for testing.

The public functions take host arrays (NumPy, torch, JAX on the CPU, ...) as they take those of a CUDA device:
parameters, descriptors and grids are made by the same code, and the PTX is what the cubins of the bundle were assembled
from. It takes seconds where a GPU takes microseconds, and checks what a GPU does not: every access to global, shared
and tensor memory, races, and the order of asynchronous copies and products (``ptxsim.CHECKS``); a violation raises
``ptxsim.SimulationError``. CSR and schedule of host arrays are compiled host code unless ``options.csr`` says
otherwise.

Simulator and PTX come with the distribution ``sparse-aot-sim``, the extra ``sparse-aot[sim]``; in a checkout they are
``tools/ptxsim`` and ``cubins/ptx.zip``. Nothing of it is loaded for arrays on a CUDA device.
"""

import hashlib
import importlib.util
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

PTX = "ptx.zip"
CHECKOUT = Path(__file__).resolve().parents[1] / "tools" / "ptxsim"  # where a checkout has the package ptxsim


@dataclass
class Options:
    """What simulated calls do; change the fields of ``sparse_aot.sim.options``.

    Attributes:
        arch: the architecture whose kernels run; at first ``SPARSE_AOT_SIM_ARCH`` of the environment, else "sm_90a".
        csr: whether the kernels of CSR and schedule run too, instead of host code with the same results; at first
            whether ``SPARSE_AOT_SIM_CSR`` is 1.
        seed: chooses the interleaving of warps and when asynchronous operations take effect; at first
            ``SPARSE_AOT_SIM_SEED``, else 0.
        multiprocessors: of the device, and so the CTAs of a persistent kernel.
        off: names of checks to leave out.
        max_steps: stop a kernel after so many warp instructions; 0: never.
    """

    arch: str = "sm_90a"
    csr: bool = False
    seed: int = 0
    multiprocessors: int = 8
    off: tuple[str, ...] = ()
    max_steps: int = 0

    @classmethod
    def from_environment(cls):
        """The options that the environment asks for."""
        found = cls()
        found.arch = os.environ.get("SPARSE_AOT_SIM_ARCH") or found.arch
        found.csr = os.environ.get("SPARSE_AOT_SIM_CSR") == "1"
        found.seed = int(os.environ.get("SPARSE_AOT_SIM_SEED") or found.seed)
        return found


options = Options.from_environment()
modules = {}  # "arch/name" of a configuration -> its ptxsim.Module
_lock = threading.RLock()
_ptxsim = None  # the simulator, once it is needed
_said = False


def is_installed():
    """Whether there is a simulator, without loading it."""
    return CHECKOUT.is_dir() or importlib.util.find_spec("ptxsim") is not None


def find_simulator():
    """The module ``ptxsim``, of the checkout that this package is in or installed; None where there is none.

    In a checkout its engine is compiled first if its sources are newer, which takes a minute.
    """
    global _ptxsim
    with _lock:
        if _ptxsim is None and is_installed():
            if CHECKOUT.is_dir():
                sys.path.insert(0, str(CHECKOUT))
            try:
                import ptxsim
            finally:
                if CHECKOUT.is_dir():
                    sys.path.remove(str(CHECKOUT))
            _ptxsim = ptxsim
        return _ptxsim


def choose_device():
    """(architecture, multiprocessors) of the device to simulate."""
    if find_simulator() is None:
        raise NotImplementedError(
            "arrays on the host: kernels run on CUDA devices, or in the simulator, which is not installed: "
            "pip install 'sparse-aot[sim]'"
        )
    return options.arch, options.multiprocessors


def read_ptx(bundle, entry):
    """The PTX that the cubin of a configuration was assembled from; raises BundleError where there is none."""
    import zipfile  # not at the top: calls on a device have no use for it

    from sparse_aot._bundle import BundleError

    name = f"{entry['arch']}/{entry['name']}"
    # A build in a checkout puts it beside the manifest; a wheel of the simulator carries it in the package.
    path = bundle.folder / PTX
    if not path.is_file():
        path = Path(find_simulator().__file__).parent / PTX
    try:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(f"{name}.ptx")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise BundleError(f"{path}: no PTX of {name}: {error}") from error
    if hashlib.sha256(text).hexdigest() != entry.get("ptx_sha256"):
        raise BundleError(f"{path}: the PTX of {name} is not what {bundle.folder / entry['file']} was assembled from")
    return text.decode()


def load(bundle, entry):
    """Parse the PTX of a configuration, if that was not done before; raises BundleError where it is not the cubin's."""
    from sparse_aot._bundle import BundleError

    name = f"{entry['arch']}/{entry['name']}"
    if name in modules:
        return
    module = find_simulator().load(read_ptx(bundle, entry))
    sizes = [size for _, size in module.kernels.get(entry["symbol"], ())]
    listed = [param["size"] for param in entry["params"]]
    if sizes != listed:  # their offsets differ: in PTX they start at 0
        raise BundleError(f"{name}: the PTX has parameters of sizes {sizes}, the manifest has {listed}")
    modules[name] = module


def run(entry, grid, params, memory):
    """Run a kernel to its end, on the bytes of each parameter; see ``ptxsim.Module.launch``. Says once what it does."""
    from sparse_aot._bundle import get_bundle

    global _said
    if not _said:
        _said = True
        warnings.warn(
            f"sparse_aot: the arrays are on the host, so kernels of {entry['arch']} run in a simulator, which is for "
            "trying and testing only",
            stacklevel=2,
        )
    load(get_bundle(), entry)
    return modules[f"{entry['arch']}/{entry['name']}"].launch(
        entry["symbol"],
        grid=grid,
        block=entry["threads"],
        smem=entry["smem_bytes"],
        params=params,
        memory=memory,
        seed=options.seed,
        off=options.off,
        max_steps=options.max_steps,
    )


def encode_tiled(data_type, address, extents, strides, box, *, swizzle):
    """The simulator's ``cuTensorMapEncodeTiled``."""
    return _ptxsim.encode_tiled(data_type, address, extents, strides, box, swizzle=swizzle)
