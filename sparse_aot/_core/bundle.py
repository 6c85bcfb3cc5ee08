"""The bundle of kernels: its manifest, checked, and the verified files beside it."""

import hashlib
import json
import os
import pathlib
import re
import threading

from sparse_aot._core._tensor_map import DTYPES, MAX_BOX_RANK, SWIZZLES

SCHEMA = 2
_SIZES = {"pointer": 8, "int32": 4, "int64": 8, "float32": 4, "tensor_map": 128}
# What is used of a manifest's objects, with the type of each value.
_MANIFEST = {"package_version": str, "dsl_version": str, "configurations": list, "digest": str}
_CONFIGURATION = {
    "name": str,
    "arch": str,
    "operation": str,
    "options": dict,
    "file": str,
    "sha256": str,
    "size": int,
    "symbol": str,
    "params": list,
    "threads": int,
    "smem_bytes": int,
    "work_per_cta": int,
    "cluster": int,
    "pdl": bool,
}
_LIMITS = {
    "size": (1, 2**31 - 1),
    "threads": (1, 1024),
    "smem_bytes": (0, 227 * 1024),
    "work_per_cta": (0, 2**31 - 1),
    "cluster": (1, 8),
}
_FILE = re.compile(r"([A-Za-z0-9_][\w.-]*/)*[A-Za-z0-9_][\w.-]*", re.ASCII)  # below the bundle's folder
_PARAM = {"name": str, "kind": str, "offset": int, "size": int}
_TENSOR_MAP = {"dtype": str, "swizzle": int, "box": list}


class BundleError(RuntimeError):
    """The bundle is missing, damaged, or not what this launcher was built for. The message names the file."""


# The manifest ---------------------------------------------------------------------------------------------------------

PARAMETERS = {}  # what the launcher packs: operation -> {name: kind}; see register_family of _kernel.pxd


def find_bundle():
    """The folder that holds ``manifest.json``.

    ``SPARSE_AOT_CUBINS`` where it is set, else the installed package's own ``cubins``, else the one beside the package
    in a source checkout.
    """
    package = pathlib.Path(__file__).resolve().parents[1]
    override = os.environ.get("SPARSE_AOT_CUBINS")
    folders = [pathlib.Path(override)] if override else [package / "cubins", package.parent / "cubins"]
    for folder in folders:
        if (folder / "manifest.json").is_file():
            return folder
    looked = " or ".join(str(folder / "manifest.json") for folder in folders)
    raise BundleError(f"no bundle of kernels: {looked} does not exist; `python -m aot build` writes it")


class Bundle:
    """A manifest and the cubins beside it.

    Attributes:
        folder: where ``manifest.json`` is.
        manifest: its contents.
        architectures: the architectures in it, sorted.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        path = self.folder / "manifest.json"
        try:
            self.manifest = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise BundleError(f"{path}: not readable as a manifest: {error}") from error
        schema = self.manifest.get("schema") if isinstance(self.manifest, dict) else None
        if schema != SCHEMA:
            raise BundleError(
                f"{path}: expected manifest schema {SCHEMA}, got {schema!r}: another version of sparse_aot built it; "
                "`python -m aot build` builds it anew"
            )
        _check_fields(path, self.manifest, _MANIFEST)
        if _digest(self.manifest) != self.manifest["digest"]:
            raise BundleError(f"{path}: changed since it was built: its contents do not have the digest that it gives")
        if not self.configurations:
            raise BundleError(f"{path}: expected at least one configuration, got none")
        for number, entry in enumerate(self.configurations):
            where = f"{path}: configuration {number}"
            _check_fields(where, entry, _CONFIGURATION)
            if not all(isinstance(value, (str, int, float)) for value in entry["options"].values()):
                raise BundleError(f"{where}: expected options to be names and numbers, got {entry['options']!r}")
            for name, (low, high) in _LIMITS.items():
                if not low <= entry[name] <= high:
                    raise BundleError(f"{where}: expected {name} from {low} to {high}, got {entry[name]}")
            if not _FILE.fullmatch(entry["file"]):
                raise BundleError(
                    f"{where}: expected file to be a path below the bundle's folder, got {entry['file']!r}"
                )
            for param in entry["params"]:
                _check_fields(f"{where}: parameter", param, _PARAM)
                if param["kind"] == "tensor_map":
                    _check_fields(f"{where}: tensor_map of {param['name']}", param.get("tensor_map"), _TENSOR_MAP)
        self._index = {
            kernel_key(entry["arch"], entry["operation"], entry["options"]): entry for entry in self.configurations
        }
        self.architectures = sorted({entry["arch"] for entry in self.configurations})

    @property
    def configurations(self):
        return self.manifest["configurations"]

    def architecture(self, device):
        """The architecture in the bundle that runs on a device, or None."""
        arch = _architecture(device.capability) if device.simulated is None else device.simulated
        return arch if arch in self.architectures else None

    def find(self, device, operation, options):
        """The configuration for ``device``; ``NotImplementedError`` where the bundle has none."""
        arch = self.architecture(device)
        if arch is None:
            raise self.unsupported(device)
        entry = self._index.get(kernel_key(arch, operation, options))
        if entry is None:
            archs = sorted({entry["arch"] for entry in self.configurations if entry["operation"] == operation})
            raise NotImplementedError(
                f"{device!r}: no {operation} kernel with {options} for {arch}; the bundle has {operation} kernels for "
                f"{', '.join(archs) or 'no architecture'}"
            )
        return entry

    def unsupported(self, device):
        """The error for a device that no architecture in the bundle runs on."""
        return NotImplementedError(
            f"{device!r}: no kernels for it, the bundle has {', '.join(self.architectures) or 'no architecture'}"
        )

    def read(self, entry):
        """The verified cubin of a configuration, as bytes."""
        path = self.folder / entry["file"]
        try:
            cubin = path.read_bytes()
        except OSError as error:
            raise BundleError(f"{path}: {error.strerror}") from error
        digest = hashlib.sha256(cubin).hexdigest()
        if len(cubin) != entry["size"] or digest != entry["sha256"]:
            raise BundleError(
                f"{path}: {len(cubin)} bytes with SHA-256 {digest}, the manifest has {entry['size']} with "
                f"{entry['sha256']}"
            )
        if cubin[:4] != b"\x7fELF":  # the driver would compile PTX
            raise BundleError(f"{path}: not a cubin")
        return cubin

    def check_layout(self, entry):
        """Raise unless the launcher packs every parameter in the manifest, as what the manifest says it is."""
        path = self.folder / entry["file"]
        packed = PARAMETERS.get(entry["operation"])
        if packed is None:
            raise BundleError(f"{path}: this launcher has no operation {entry['operation']}")
        names = [param["name"] for param in entry["params"]]
        if len(set(names)) != len(names):
            raise BundleError(f"{path}: the manifest names a parameter twice: {', '.join(names)}")
        for param in entry["params"]:
            name, kind = param["name"], param["kind"]
            if packed.get(name) != kind or _SIZES[kind] != param["size"]:
                wanted = f"{packed[name]} of {_SIZES[packed[name]]} bytes" if name in packed else "nothing of that name"
                raise BundleError(
                    f"{path}: parameter {name}: the manifest has {kind} of {param['size']} bytes, the launcher packs "
                    f"{wanted}"
                )
            if kind == "tensor_map" and not _is_encodable(param["tensor_map"]):
                raise BundleError(f"{path}: parameter {name}: this launcher does not encode {param['tensor_map']}")


def _digest(manifest):
    """The SHA-256 of everything in a manifest but its own ``digest``, as the build computes it."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _check_fields(where, found, fields):
    if not isinstance(found, dict):
        raise BundleError(f"{where}: expected an object, got {found!r}")
    for name, kind in fields.items():
        if type(found.get(name)) is not kind:  # a bool is no number here
            raise BundleError(f"{where}: expected {name} to be of type {kind.__name__}, got {found.get(name)!r}")


def _is_encodable(described):
    return (
        described["dtype"] in DTYPES
        and described["swizzle"] in SWIZZLES
        and 1 <= len(described["box"]) <= MAX_BOX_RANK
        and all(isinstance(extent, int) and 1 <= extent <= 256 for extent in described["box"])
    )


def kernel_key(arch, operation, options):
    return arch, operation, frozenset(options.items())


def _architecture(capability):
    """The architecture whose cubins run on a compute capability, or None."""
    if capability == (9, 0):
        return "sm_90a"
    if capability[0] == 10 and capability != (10, 1):  # 10.1 is an old name of 11.0, another family
        return "sm_100f"
    return None


_bundle = None
lock = threading.RLock()  # of the bundle, and of what is loaded from it


def get_bundle():
    """The bundle of this process, read on first use."""
    global _bundle
    with lock:
        if _bundle is None:
            _bundle = Bundle(find_bundle())
        return _bundle
