"""Kernels on host arrays: they run in ptxsim, a functional simulator of the kernels' PTX. For trying and for testing.

The public functions take host arrays (NumPy, torch, JAX on the CPU, ...) as they take those of a CUDA device:
parameters, descriptors and grids are made by the same code, and the PTX is what the cubins of the bundle were assembled
from. A small call takes a fraction of a second, and what a GPU does not check is checked: every access to global,
shared and tensor memory, races, and the order of asynchronous copies and products (``ptxsim.CHECKS``). A violation
raises ``SimulationError``. CSR and schedule of host arrays are compiled host code unless ``options.csr`` says
otherwise.

Simulator and PTX come with the distribution ``sparse-aot-sim``, which ``pip install ./tools/ptxsim`` builds in a
checkout; there they are ``tools/ptxsim`` and ``cubins/ptx.zip``. Nothing of it is loaded for arrays on a CUDA device.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path

PTX = "ptx.zip"
INSTALLATION = "`pip install ./tools/ptxsim` in a checkout of sparse_aot installs it"
CHECKOUT = Path(__file__).resolve().parents[1] / "tools" / "ptxsim"  # where a checkout has the package ptxsim


class OptionError(ValueError):
    """A field of ``options`` has a value that it cannot have."""


class SimulationWarning(UserWarning):
    """Said once in a process: kernels run in the simulator."""


@dataclass(slots=True)
class Options:
    """What simulated calls do; change the fields of ``sparse_aot.sim.options``.

    Attributes:
        arch: the architecture whose kernels run; at first ``SPARSE_AOT_SIM_ARCH`` of the environment, else "sm_90a".
        csr: whether the kernels of CSR and schedule run too, instead of host code with the same results, which also
            checks values; at first whether ``SPARSE_AOT_SIM_CSR`` is 1.
        seed: chooses the interleaving of warps and when asynchronous operations take effect; at first
            ``SPARSE_AOT_SIM_SEED``, else 0.
        multiprocessors: of the device, and so the CTAs of a persistent kernel.
        off: names of checks to leave out.
        max_steps: a kernel that executes more warp instructions raises SimulationError; 0: never.
    """

    arch: str = "sm_90a"
    csr: bool = False
    seed: int = 0
    multiprocessors: int = 8
    off: tuple[str, ...] = ()
    max_steps: int = 0

    @classmethod
    def from_environment(cls):
        """The options that the environment asks for; their values are checked when they are used."""
        seed = os.environ.get("SPARSE_AOT_SIM_SEED") or "0"
        with contextlib.suppress(ValueError):
            seed = int(seed)
        return cls(
            arch=os.environ.get("SPARSE_AOT_SIM_ARCH") or cls().arch,
            csr=os.environ.get("SPARSE_AOT_SIM_CSR") == "1",
            seed=seed,
        )

    def check(self):
        """Raise OptionError, which names the field, where one has a value that it cannot have."""
        if not isinstance(self.arch, str):
            raise OptionError(f"sim.options.arch: expected the name of an architecture, got {self.arch!r}")
        if isinstance(self.off, str):
            raise OptionError(f"sim.options.off: expected a tuple of names, got {self.off!r}")
        for name, low, high in (("seed", 0, 2**64 - 1), ("multiprocessors", 1, 1024), ("max_steps", 0, 2**64 - 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                source = " (SPARSE_AOT_SIM_SEED sets it at first)" if name == "seed" else ""
                raise OptionError(
                    f"sim.options.{name}: expected an integer from {low} to {high}, got {value!r}{source}"
                )


options = Options.from_environment()
modules = {}  # "arch/name" of a configuration -> its ptxsim.Module
_lock = threading.RLock()
_ptxsim = None  # the simulator, once it is needed
_said = False


def __getattr__(name):
    if name == "SimulationError" and find_simulator() is not None:
        return _ptxsim.SimulationError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    """(architecture, multiprocessors) of the device to simulate. Says once that it is one."""
    global _said
    if find_simulator() is None:
        raise NotImplementedError(
            "arrays on the host: kernels run on CUDA devices, or in the simulator, which is not installed: "
            f"{INSTALLATION}"
        )
    options.check()
    if not _said:
        warnings.warn(
            f"the arrays are on the host, so kernels of {options.arch} run in a simulator, which is for trying and "
            "testing only",
            SimulationWarning,
            stacklevel=2,
        )
        _said = True
    return options.arch, options.multiprocessors


def find_ptx(bundle):
    """The archive with the PTX of a bundle: beside the manifest, where a build in a checkout puts it, or in the wheel
    of the simulator; None where there is neither."""
    spec = importlib.util.find_spec("ptxsim")
    folders = [bundle.folder, *map(Path, spec.submodule_search_locations if spec else ())]
    return next((folder / PTX for folder in folders if (folder / PTX).is_file()), None)


def _name(entry):
    return f"{entry['arch']}/{entry['name']}"


def read_ptx(bundle, entry):
    """The PTX that the cubin of a configuration was assembled from; raises BundleError where there is none."""
    import zipfile  # not at the top: calls on a device have no use for it

    from sparse_aot._core.bundle import BundleError

    name = _name(entry)
    path = find_ptx(bundle)
    if path is None:
        raise BundleError(
            f"{bundle.folder / PTX}: no PTX for the simulator; `python -m aot build` writes it, and the wheel "
            "sparse-aot-sim carries that of the package's own bundle"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            text = archive.read(f"{name}.ptx")
    except Exception as error:  # a damaged archive raises errors of every module that has a part in reading it
        raise BundleError(f"{path}: no PTX of {name}: {error}") from error
    if hashlib.sha256(text).hexdigest() != entry.get("ptx_sha256"):
        raise BundleError(f"{path}: the PTX of {name} is not what {bundle.folder / entry['file']} was assembled from")
    return text.decode()


def load(bundle, entry):
    """The module of a configuration's PTX, parsed on its first use; raises BundleError where it is not the cubin's."""
    from sparse_aot._core.bundle import BundleError

    name = _name(entry)
    if name in modules:
        return modules[name]
    module = find_simulator().load(read_ptx(bundle, entry))
    sizes = [size for _, size in module.kernels.get(entry["symbol"], ())]
    listed = [param["size"] for param in entry["params"]]
    if sizes != listed:  # their offsets differ: in PTX they start at 0
        raise BundleError(f"{name}: the PTX has parameters of sizes {sizes}, the manifest has {listed}")
    modules[name] = module
    return module


class Memory(list):
    """What the kernels of one call may touch, (address, bytes, name) each, and the stream that they are launched in."""

    @functools.cached_property
    def stream(self):
        return find_simulator().Stream()


def run(entry, grid, params, memory):
    """Run a kernel to its end, on the bytes of each parameter and a ``Memory``; see ``ptxsim.Module.launch``."""
    from sparse_aot._core.bundle import get_bundle

    return load(get_bundle(), entry).launch(
        entry["symbol"],
        grid=grid,
        block=entry["threads"],
        cluster=(entry["cluster"], 1, 1),
        smem=entry["smem_bytes"],
        params=params,
        memory=memory,
        seed=options.seed,
        off=options.off,
        max_steps=options.max_steps,
        stream=memory.stream,
        dependent=entry["pdl"],
        registers=entry["registers"],
    )


def encode_tiled(data_type, address, extents, strides, box, *, swizzle):
    """The simulator's ``cuTensorMapEncodeTiled``."""
    return _ptxsim.encode_tiled(data_type, address, extents, strides, box, swizzle=swizzle)
