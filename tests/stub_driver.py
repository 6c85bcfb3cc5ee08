"""Runs tests against a stub libcuda.so.1 (stub/libcuda.c) that records what the launcher asks of the driver.

A test marked ``@on_stub`` runs in another process, where that library is the driver. There, ``torch_on_cuda`` makes
torch tensors pass for CUDA tensors through the C exchange API, and ``DeviceArray`` is an array type with ``__dlpack__``
alone.
"""

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import multiprocessing
import os
import struct
import subprocess
import sys
import tempfile
import traceback
from importlib import metadata
from pathlib import Path

import numpy as np

from aot import build

TESTS = Path(__file__).resolve().parent
REAL_BUNDLE = TESTS.parent / "cubins"
HEADS_PER_KV = (1, 2, 4, 8, 16)
TOPK = (4, 8, 16, 32)
PARTIAL_DTYPES = ("float32", "bfloat16")
MULTIPROCESSORS = 132
LEGACY_STREAM = 1

POINTER, INT32, INT64, FLOAT32 = ("pointer", "<Q"), ("int32", "<i"), ("int64", "<q"), ("float32", "<f")
TENSOR_MAP = ("tensor_map", "<16Q")
_KINDS = {kind: (kind, form) for kind, form in (POINTER, INT32, INT64, FLOAT32)}
FORWARD_PARAMS = {
    "q_map": TENSOR_MAP,
    "k_map": TENSOR_MAP,
    "v_map": TENSOR_MAP,
    "q": POINTER,
    "row_ptr": POINTER,
    "qsplit_indices": POINTER,
    "scheduler_metadata": POINTER,
    "work_count": POINTER,
    "work_counter": POINTER,
    "cu_seqlens_q": POINTER,
    "cu_seqlens_k": POINTER,
    "seqused_k": POINTER,
    "page_table": POINTER,
    "walk_blocks": POINTER,
    "walk_counts": POINTER,
    "walk_flags": POINTER,
    "partial_out": POINTER,
    "partial_lse": POINTER,
    "partial_lse_temperature": POINTER,
    "out": POINTER,
    "lse": POINTER,
    "lse_temperature": POINTER,
    "q_stride_token": INT64,
    "q_stride_head": INT64,
    "out_stride_token": INT64,
    "out_stride_head": INT64,
    "lse_stride_token": INT64,
    "lse_stride_head": INT64,
    "page_table_stride": INT64,
    "max_pages": INT32,
    "kv_extent": INT32,
    "batch": INT32,
    "total_q": INT32,
    "head_kv": INT32,
    "total_rows": INT32,
    "topk": INT32,
    "work_capacity": INT32,
    "causal": INT32,
    "softmax_scale": FLOAT32,
    "lse_temperature_scale": FLOAT32,
}
COMBINE_PARAMS = {
    "partial_out": POINTER,
    "partial_lse": POINTER,
    "partial_lse_temperature": POINTER,
    "split_counts": POINTER,
    "split_entries": POINTER,
    "walk_flags": POINTER,
    "out": POINTER,
    "lse": POINTER,
    "lse_temperature": POINTER,
    "out_stride_token": INT64,
    "out_stride_head": INT64,
    "lse_stride_token": INT64,
    "lse_stride_head": INT64,
    "total_q": INT32,
    "head_kv": INT32,
    "qhead_per_kv": INT32,
}


# ----------------------------------------------------------------------------------------------------------- a bundle


def write_bundle(folder):
    """A bundle in which every cubin is a few bytes: the forward for sm_90a, everything else for both architectures.

    What forward and combine take is written down here; of the other kernels it is what they really take.
    """
    folder = Path(folder)
    entries = []
    for g in HEADS_PER_KV:
        for partial in PARTIAL_DTYPES:
            for temperature in (False, True):
                name = f"fwd-bf16-g{g}-p{partial}" + ("-temperature" if temperature else "")
                options = {"q": "bfloat16", "kv": "bfloat16", "qk": "bfloat16", "pv": "bfloat16"}
                options |= {"g": g, "partial": partial, "temperature": temperature}
                rows = min(g, 8)
                boxes = {"q_map": [64, rows, 2, g // rows, 1], "k_map": [64, 128, 2, 1, 1], "v_map": [64, 128, 2, 1, 1]}
                # Tensor maps are aligned in the constant bank, whose parameters start 16 bytes past a multiple of 64.
                entry = _entry(folder, "sm_90a", name, "fwd", options, FORWARD_PARAMS, 48, boxes)
                facts = {"threads": 512, "smem_bytes": 220000, "work_per_cta": 0, "cluster": 1, "pdl": False}
                entries.append(entry | facts)
    for arch in ("sm_90a", "sm_100f"):
        for partial in PARTIAL_DTYPES:
            for topk in TOPK:
                options = {"partial": partial, "topk": topk}
                entry = _entry(
                    folder, arch, f"combine-p{partial}-topk{topk}", "combine", options, COMBINE_PARAMS, 0, {}
                )
                entries.append(entry | {"threads": 128, "smem_bytes": 0, "work_per_cta": 8, "cluster": 1, "pdl": True})
        for operation, (params, attributes) in _other_kernels().items():
            for options in ({}, *({"topk": topk} for topk in TOPK)):
                name = operation + "".join(f"-topk{topk}" for topk in options.values())
                entry = _entry(folder, arch, name, operation, options, params, 0, {})
                entries.append(entry | attributes | {"threads": 256, "smem_bytes": 0, "work_per_cta": 1})
    write_manifest(folder, entries)
    return folder


def _other_kernels():
    """Operation -> (parameters, launch attributes) of its kernels in this checkout's bundle; no forward or combine."""
    entries = json.loads((REAL_BUNDLE / "manifest.json").read_text())["configurations"]
    return {
        entry["operation"]: (
            {param["name"]: _KINDS[param["kind"]] for param in entry["params"]},
            {name: entry[name] for name in ("cluster", "pdl")},
        )
        for entry in entries
        if entry["operation"] not in ("fwd", "combine")
    }


def _entry(folder, arch, name, operation, options, params, offset, boxes):
    file = folder / arch / f"{name}.cubin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"\x7fELF" + name.encode())
    listed = []
    for param, (kind, form) in params.items():
        size = struct.calcsize(form)
        offset = -(-offset // min(size, 8)) * min(size, 8)
        listed.append({"name": param, "kind": kind, "offset": offset, "size": size})
        if kind == "tensor_map":
            listed[-1]["tensor_map"] = {"dtype": "bfloat16", "box": boxes[param], "swizzle": 128}
        offset += size
    return {
        "name": name,
        "arch": arch,
        "operation": operation,
        "options": options,
        "file": f"{arch}/{name}.cubin",
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "size": file.stat().st_size,
        "symbol": f"kernel_{arch}_{name}",
        "params": listed,
    }


def write_manifest(folder, entries):
    manifest = {"schema": build.SCHEMA, "package_version": "0", "dsl_version": "0", "configurations": entries}
    manifest["digest"] = build.digest(manifest)
    (Path(folder) / "manifest.json").write_text(json.dumps(manifest))


def read_manifest(folder):
    return json.loads((Path(folder) / "manifest.json").read_text())["configurations"]


def write_layouts(folder, path):
    """What the stub's cuKernelGetParamInfo reports: what the bundle's manifest says."""
    lines = []
    for entry in read_manifest(folder):
        pairs = [f"{param['offset']}:{param['size']}" for param in entry["params"]]
        lines.append(" ".join([entry["symbol"], *pairs]))
    Path(path).write_text("\n".join(lines) + "\n")


# ---------------------------------------------------------------------------------------------------------- processes


@functools.cache
def library_folder():
    """The folder of the compiled stub."""
    folder = Path(tempfile.mkdtemp(prefix="stub-libcuda-"))
    (cuda_h,) = (file for file in metadata.files("nvidia-cuda-runtime") if file.name == "cuda.h")
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{cuda_h.locate().parent}"]
    command += [
        "-Wl,-soname,libcuda.so.1",
        "-o",
        folder / "libcuda.so.1",
        TESTS / "stub" / "libcuda.c",
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True)
    return folder


def stub_environment(folder, bundle):
    """Environment variables for a process with the stub, whose bundle is ``bundle``."""
    write_layouts(bundle, Path(folder) / "layouts")
    return {
        "SPARSE_AOT_CUBINS": str(bundle),
        "STUB_LAYOUTS": str(Path(folder) / "layouts"),
        "STUB_LOG": str(Path(folder) / "log"),
    }


def run_python(code, **environment):
    """Run ``code`` in a process of its own that finds what this one does, its tests among it, to a good end."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


@functools.cache
def _process(purpose):
    """A process of one worker whose driver is the stub. ``purpose``: "shared", "to fork", "validate"."""
    saved = dict(os.environ)
    os.environ["LD_LIBRARY_PATH"] = str(library_folder())  # inherited when the worker starts
    os.environ["SPARSE_AOT_VALIDATE"] = str(int(purpose == "validate"))
    try:
        executor = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        executor.submit(os.getpid).result()
    finally:
        os.environ.clear()
        os.environ.update(saved)
    return executor


@functools.cache
def _shared_environment():
    folder = Path(tempfile.mkdtemp(prefix="stub-run-"))
    return stub_environment(folder, write_bundle(folder / "bundle"))


def on_stub(test=None, *, fresh=False, real=False, validate=False):
    """A test that runs in a process with the stub: a shared one, or with ``fresh`` one that has not used CUDA yet.

    ``real``: fresh, and with the bundle of this checkout instead of a made one. ``validate``: shared, and with
    SPARSE_AOT_VALIDATE=1.
    """
    if test is None:
        return functools.partial(on_stub, fresh=fresh, real=real, validate=validate)

    @functools.wraps(test)
    def outside(**kwargs):
        place = test.__module__, test.__name__, kwargs
        if not (fresh or real):
            process = _process("validate" if validate else "shared")
            return process.submit(_inside, *place, _shared_environment()).result()
        with tempfile.TemporaryDirectory(prefix="stub-run-") as folder:
            bundle = REAL_BUNDLE if real else write_bundle(Path(folder) / "bundle")
            return _process("to fork").submit(_inside_fork, *place, stub_environment(folder, bundle)).result()

    outside.__signature__ = inspect.signature(test)
    outside.inside = test
    return outside


def _inside(module, name, kwargs, environment):
    os.environ.update(environment)
    clear_log()
    getattr(importlib.import_module(module), name).inside(**kwargs)


def _inside_fork(module, name, kwargs, environment):
    """``_inside`` in a child of this process, which only ever imports."""
    importlib.import_module(module)
    torch_on_cuda()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _inside(module, name, kwargs, environment)
        except BaseException:
            os.write(writer, traceback.format_exc().encode()[-4096:])
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        problem = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert not problem and status == 0, problem or f"the process ended with {status}"


# --------------------------------------------------------------------------------------------- inside such a process


@contextlib.contextmanager
def failing(function, code):
    """The driver's ``function`` fails with the error ``code``."""
    os.environ["STUB_FAIL"] = f"{function}={code}"
    try:
        yield
    finally:
        del os.environ["STUB_FAIL"]


_descriptors = {}  # number -> the call that encoded it; the launcher keeps descriptors from test to test


def clear_log():
    _descriptors.update((call["number"], call) for call in recorded("cuTensorMapEncodeTiled"))
    Path(os.environ["STUB_LOG"]).unlink(missing_ok=True)


def recorded(call=None):
    """The driver's calls so far, of one kind or all."""
    path = Path(os.environ["STUB_LOG"])
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if call is None or line["call"] == call]


def launches():
    """The launches so far, with ``operation``, ``name`` and the parameters as numbers by name."""
    entries = {entry["symbol"]: entry for entry in read_manifest(os.environ["SPARSE_AOT_CUBINS"])}
    forms = dict((POINTER, INT32, INT64, FLOAT32, TENSOR_MAP))
    found = []
    for launch in recorded("launch"):
        entry = entries[launch["symbol"]]
        values = {}
        for param, text in zip(entry["params"], launch["params"], strict=True):
            value = struct.unpack(forms[param["kind"]], bytes.fromhex(text))
            values[param["name"]] = value if len(value) > 1 else value[0]
        found.append(launch | {"operation": entry["operation"], "name": entry["name"], "params": values})
    return found


def descriptor(tensor_map):
    """The recorded call that encoded the descriptor with these bytes."""
    now = {call["number"]: call for call in recorded("cuTensorMapEncodeTiled")}
    return (_descriptors | now)[tensor_map[1]]


def api_pointers():
    """``PyCapsule_GetPointer`` and ``PyCapsule_New`` with their types set."""
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return api.PyCapsule_GetPointer, api.PyCapsule_New


@functools.cache
def torch_on_cuda():
    """torch, with an exchange API that says of host tensors that they are on cuda:0."""
    import torch

    get, new = api_pointers()
    library = ctypes.CDLL("libcuda.so.1")
    library.stub_exchange_api.restype = ctypes.c_void_p
    library.stub_exchange_api.argtypes = [ctypes.c_void_p]
    name = b"dlpack_exchange_api"
    host = get(torch.Tensor.__dlpack_c_exchange_api__, name)
    torch.Tensor.__dlpack_c_exchange_api__ = new(library.stub_exchange_api(host), name, None)
    return torch


def set_current_stream(handle):
    """What the exchange API of ``torch_on_cuda`` reports as the current stream."""
    ctypes.CDLL("libcuda.so.1").stub_set_current_stream(ctypes.c_void_p(handle))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DeviceArray:
    """An array that passes for a CUDA array through ``__dlpack__`` alone; bfloat16 is held as int16 in ``host``."""

    def __init__(self, host, bfloat16=False, device=(2, 0)):
        self.host = host
        self.bfloat16 = bfloat16
        self.device = device
        self.streams = []  # that __dlpack__ was given

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        capsule = self.host.__dlpack__()
        self.pass_for_cuda(api_pointers()[0](capsule, b"dltensor"))
        return capsule

    def pass_for_cuda(self, address):
        tensor = _DLTensor.from_address(address)
        tensor.device_type, tensor.device_id = self.device
        if self.bfloat16:
            tensor.code = 4


class VersionedArray(DeviceArray):
    """One that is exported as DLPack 1.x says, with flags."""

    def __dlpack__(self, *, stream=None, max_version=None, copy=None):
        assert max_version[0] == 1 and copy is False
        capsule = self.host.__dlpack__(max_version=(1, 0))
        self.pass_for_cuda(api_pointers()[0](capsule, b"dltensor_versioned") + 32)
        return capsule


class PlainArray(DeviceArray):
    """One that nothing makes: its module has no ``from_dlpack``."""

    __module__ = "nowhere"


class ImmutableArray(DeviceArray):
    """One of a framework whose arrays are never written, though it exports them as any other."""

    __module__ = "jaxlib._jax"  # that of jax.Array's implementation


def from_dlpack(source):
    """What the launcher finds as DeviceArray's importer; makes int32 of int64, as JAX does."""
    get, _ = api_pointers()
    capsule = source.__dlpack__(stream=2, max_version=None)
    tensor = _DLTensor.from_address(get(capsule, b"dltensor"))
    shape = tuple(tensor.shape[dim] for dim in range(tensor.ndim))
    dtypes = {(4, 16): np.int16, (2, 32): np.float32, (0, 32): np.int32, (0, 64): np.int64}
    dtype = np.dtype(dtypes[tensor.code, tensor.bits])
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    buffer = (ctypes.c_char * n_bytes).from_address(tensor.data)
    host = np.frombuffer(buffer, dtype).reshape(shape)
    if dtype == np.int64:
        return DeviceArray(host.astype(np.int32), device=source.__dlpack_device__())
    array = DeviceArray(host, tensor.code == 4, source.__dlpack_device__())
    array.capsule = capsule
    return array
