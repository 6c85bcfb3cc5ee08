"""Serves what a program's compiled host code asks of CUDA: loads libraries, launches kernels, encodes tensor maps."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import SimulationError, Statistics, Stream, encode_tiled
from ..build import RUNTIME, build
from . import tensor_map
from .cubin import register_counts
from .memory import DeviceMemory
from .source import Library, calling_line

SUCCESS, INVALID_VALUE, LAUNCH_FAILURE = 0, 1, 719  # cudaError_t
CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 4, 6  # cudaLaunchAttributeID
POINTER, INT = ctypes.c_void_p, ctypes.c_int
UINT32S, UINT64S = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_uint64)

_LOAD = ctypes.CFUNCTYPE(POINTER, POINTER)
_LAUNCH = ctypes.CFUNCTYPE(INT, POINTER, ctypes.c_char_p, POINTER, ctypes.POINTER(POINTER))
_ENCODE = ctypes.CFUNCTYPE(
    INT, POINTER, INT, ctypes.c_uint32, POINTER, UINT64S, UINT64S, UINT32S, UINT32S, INT, INT, INT
)
_ATTRIBUTE = ctypes.CFUNCTYPE(INT, INT)


class _Host(ctypes.Structure):
    _fields_ = [("load", _LOAD), ("launch", _LAUNCH), ("encode_tiled", _ENCODE), ("attribute", _ATTRIBUTE)]


class _Attribute(ctypes.Structure):  # cudaLaunchAttribute
    _fields_ = [("id", ctypes.c_uint32), ("_", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _Configuration(ctypes.Structure):  # cudaLaunchConfig_t
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


@dataclass(frozen=True)
class Launch:
    """A launch that ran to its end."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    shared_bytes: int
    statistics: Statistics

    def __str__(self) -> str:
        shape = f"grid {_times(self.grid)}, block {_times(self.block)}"
        if self.cluster != (1, 1, 1):
            shape += f", cluster {_times(self.cluster)}"
        count = self.statistics.thread_instructions
        return f"{short(self.kernel)}: {shape}: {count:,} thread instructions, {self.statistics.seconds:.2f} s"


def _times(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def short(kernel: str) -> str:
    """A kernel's name as a person can read it: the DSL adds to it what its arguments are."""
    name = kernel.removeprefix("kernel_cutlass_")
    return name if len(name) <= 60 else f"{name[:57]}..."


@dataclass
class Launches:
    """The launches of a program. A failure is reported where it happens and kept; the program sees CUDA's error.

    memory: its ``buffers`` are those that there are now; its ``operations`` count what torch did with any.
    attribute: the device's, by cudaDeviceAttr, or -1. options: of ``Module.launch``. tolerated: checks that are
    reported, whereupon the launch runs again without them. ptx_directory: where the PTX of every library is written.
    """

    memory: DeviceMemory
    attribute: Callable[[int], int]
    options: dict
    tolerated: tuple[str, ...] = ()
    ptx_directory: Path | None = None
    done: list[Launch] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts: dict[bytes, str] = {}  # cubin -> its PTX
        self._libraries: list[Library] = []
        self._encoded: set[bytes] = set()  # tensor maps of the simulator
        self._stream, self._operations = Stream(), 0
        self._off: dict[tuple[int, str], list[str]] = {}  # (library, kernel) -> tolerated checks that it broke
        functions = (_LOAD(self._load), _LAUNCH(self._launch), _ENCODE(self._encode), _ATTRIBUTE(self.attribute))
        self._host = _Host(*functions)

    def serve(self) -> Path:
        """Take the calls of the library whose path is returned. It comes first where the process looks up a name."""
        path = build(RUNTIME)
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL).ptxsim_serve(ctypes.byref(self._host))
        return path

    def know(self, cubin: bytes, ptx: str) -> None:
        """From now on a library that holds this cubin can be loaded."""
        if cubin not in self._texts and self.ptx_directory:
            (self.ptx_directory / f"{len(self._texts)}.ptx").write_text(ptx)
        self._texts[cubin] = ptx

    def _fail(self, what: str, error: BaseException) -> None:
        self.failures.append(error)
        known = isinstance(error, SimulationError)
        print(f"ptxsim: {what}: {error if known else repr(error)}", file=sys.stderr, flush=True)

    def _load(self, image: int) -> int:
        try:
            # A fat binary: the size of what follows its header of 16 bytes is in the header's second half.
            size = 16 + ctypes.c_uint64.from_address(image + 8).value
            binary = ctypes.string_at(image, size)
            known = next((cubin for cubin in self._texts if cubin in binary), None)
            if known is None:
                raise SimulationError("it was not compiled by the DSL in this process: its PTX is not known")
            self._libraries.append(Library(self._texts[known], register_counts(known)))
            return len(self._libraries)
        except BaseException as error:
            self._fail("a library was not loaded", error)
            return 0

    def _launch(self, library: int, kernel: bytes, configuration: int, arguments) -> int:
        name = kernel.decode()
        try:
            module = self._libraries[library - 1].module
            config = _Configuration.from_address(configuration)
            attributes = {a.id: a.value for a in config.attributes[: config.attribute_count]}
            cluster = tuple(attributes[CLUSTER_DIMENSION][:3]) if CLUSTER_DIMENSION in attributes else (1, 1, 1)
            layout = module.kernels[name]
            params = bytearray(max((offset + size for offset, size in layout), default=0))
            for argument, (offset, size) in zip(arguments, layout, strict=False):
                given = ctypes.string_at(argument, size)
                if size == tensor_map.BYTES and given not in self._encoded:
                    given = tensor_map.from_hardware(given)
                params[offset : offset + size] = given
            shape = {"grid": tuple(config.grid), "block": tuple(config.block), "cluster": cluster}
            buffers = [(address, size, text) for address, (size, text) in self.memory.buffers.items()]
            if self._operations != self.memory.operations:  # they come after all launches before them
                self._stream, self._operations = Stream(), self.memory.operations
            options = {
                "smem": config.shared_bytes,
                "params": bytes(params),
                "memory": buffers,
                "registers": self._libraries[library - 1].registers.get(name, 0),
                "dependent": attributes.get(PROGRAMMATIC_SERIALIZATION, [0])[0] != 0,
            }
            statistics = self._run(library, name, **shape, **options)
            self.done.append(Launch(name, **shape, shared_bytes=config.shared_bytes, statistics=statistics))
            print(f"ptxsim: {self.done[-1]}", file=sys.stderr, flush=True)
            return SUCCESS
        except SimulationError as error:
            self._fail(f"{short(name)}, launched at {calling_line()}, was stopped", self._placed(library, error))
            return LAUNCH_FAILURE
        except BaseException as error:
            self._fail(f"{short(name)} was not launched", error)
            return LAUNCH_FAILURE

    def _placed(self, library: int, error: SimulationError) -> SimulationError:
        return SimulationError(self._libraries[library - 1].with_places(str(error)))

    def _run(self, library: int, kernel: str, **given) -> Statistics:
        """Launch; where a check that is tolerated stops it, again from the same memory, without the check.

        Asynchronous operations take effect at once then: a program that does not wait for them relies on that.
        """
        off = self._off.setdefault((library, kernel), [])
        saved = [ctypes.string_at(address, size) for address, size, _ in given["memory"]] if self.tolerated else []
        while True:
            options = {**self.options, "off": [*self.options["off"], *off], "stream": self._stream}
            if off:
                options["seed"] += 1 - options["seed"] % 3
            try:
                return self._libraries[library - 1].module.launch(kernel, **given, **options)
            except SimulationError as error:
                check = str(error).partition(":")[0]
                if check not in self.tolerated or check in off:
                    raise
                print(
                    f"ptxsim: {short(kernel)}, tolerated: {self._placed(library, error)}", file=sys.stderr, flush=True
                )
                off.append(check)
                for (address, size, _), before in zip(given["memory"], saved, strict=True):
                    ctypes.memmove(address, before, size)
                self._stream = Stream()

    def _encode(self, target, data_type, rank, address, extents, strides, box, steps, interleave, swizzle, fill) -> int:
        try:
            encoded = encode_tiled(
                data_type,
                address or 0,
                extents[:rank],
                strides[: rank - 1],
                box[:rank],
                element_strides=steps[:rank],
                interleave=interleave,
                swizzle=swizzle,
                oob_fill=fill,
            )
            self._encoded.add(encoded)
            ctypes.memmove(target, encoded, len(encoded))
            return SUCCESS
        except BaseException as error:
            self._fail("a tensor map was not encoded", error)
            return INVALID_VALUE
