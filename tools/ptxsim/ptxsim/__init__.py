"""ptxsim: runs the PTX of our kernels on the host, functionally, with checks. See README.md in this directory.

module = ptxsim.load(ptx_text)
module.launch(grid=4, block=128, params=[x, y, np.int32(n)], memory=[x, y])
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .build import build

__all__ = ["CHECKS", "Module", "SimulationError", "Statistics", "Stream", "encode_tiled", "load"]


class SimulationError(RuntimeError):
    """The run was stopped: by a check, by an instruction that is not known, or by an impossible launch."""


class _Buffer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64), ("name", ctypes.c_char_p)]


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("params", ctypes.c_char_p),
        ("param_bytes", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("checks", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("max_steps", ctypes.c_uint64),
        ("chip_accuracy", ctypes.c_uint32),
        ("stop", ctypes.POINTER(ctypes.c_uint32)),
        ("stream", ctypes.c_void_p),
        ("dependent", ctypes.c_uint32),
    ]


class _Statistics(ctypes.Structure):
    _fields_ = [("warp_instructions", ctypes.c_uint64), ("thread_instructions", ctypes.c_uint64)]


_engine = ctypes.CDLL(str(build()))
_engine.ptxsim_check_name.restype = ctypes.c_char_p
_engine.ptxsim_unload.argtypes = [ctypes.c_void_p]
_engine.ptxsim_new_stream.restype = ctypes.c_void_p
_engine.ptxsim_delete_stream.argtypes = [ctypes.c_void_p]


def _check_names() -> tuple[str, ...]:
    names = []
    while name := _engine.ptxsim_check_name(len(names)):
        names.append(name.decode())
    return tuple(names)


CHECKS: tuple[str, ...] = _check_names()


def _call(function: Any, *args: Any) -> None:
    error = ctypes.create_string_buffer(16384)
    if function(*args, error, ctypes.c_size_t(len(error))):
        raise SimulationError(error.value.decode(errors="replace"))


def _interruptibly(stop: ctypes.c_uint32, run: Callable[[], None]) -> None:
    """``run()`` where Ctrl-C can reach it: in a thread of its own, which ends soon after ``stop`` is set."""
    if threading.current_thread() is not threading.main_thread():
        return run()
    with ThreadPoolExecutor(1) as worker:
        running = worker.submit(run)
        try:
            return running.result()
        except KeyboardInterrupt:
            stop.value = 1
            raise


@dataclass(frozen=True)
class Statistics:
    """What a launch executed. A warp instruction counts once, a thread instruction once for every active lane."""

    warp_instructions: int
    thread_instructions: int
    seconds: float
    lines: frozenset[int]  # PTX lines whose instruction some lane executed

    @property
    def instructions_per_second(self) -> float:
        """Thread instructions a second."""
        return self.thread_instructions / self.seconds if self.seconds else 0.0


def _dim3(value: int | Sequence[int]) -> tuple[int, int, int]:
    dims = (value,) if isinstance(value, int) else tuple(value)
    return (*dims, *(1,) * (3 - len(dims)))


def _buffer(number: int, array: Any) -> _Buffer:
    if isinstance(array, tuple):
        address, size, name = array
        return _Buffer(address, size, name.encode())
    return _Buffer(*_span(array), f"buffer {number}".encode())


def _span(array: Any) -> tuple[int, int]:
    """Host address and size in bytes of an array: its whole span, whatever its strides."""
    if not isinstance(array, np.ndarray):
        if hasattr(array, "untyped_storage"):  # a torch tensor of any dtype
            storage = array.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
        array = np.asarray(array)
    low, high = np.lib.array_utils.byte_bounds(array) if hasattr(np.lib, "array_utils") else np.byte_bounds(array)
    return low, high - low


def _pack(params: Iterable[Any], layout: Sequence[tuple[int, int]], kernel: str) -> bytes:
    values = list(params)
    if len(values) != len(layout):
        raise SimulationError(f"kernel {kernel} takes {len(layout)} parameters, not {len(values)}")
    packed = bytearray(max((offset + size for offset, size in layout), default=0))
    for i, (value, (offset, size)) in enumerate(zip(values, layout, strict=True)):
        if value is None:
            raw = bytes(8)
        elif isinstance(value, (bytes, bytearray)):
            raw = bytes(value)
        elif isinstance(value, np.generic):
            raw = value.tobytes()
        elif isinstance(value, int):
            raw = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        elif isinstance(value, float):
            raw = np.float64(value).tobytes() if size == 8 else np.float32(value).tobytes()
        elif hasattr(value, "data_ptr"):
            raw = int(value.data_ptr()).to_bytes(8, "little")
        else:
            raw = int(value.__array_interface__["data"][0]).to_bytes(8, "little")
        if len(raw) != size:
            raise SimulationError(f"parameter {i} of kernel {kernel} has {size} bytes, not {len(raw)}")
        packed[offset : offset + size] = raw
    return bytes(packed)


class Stream:
    """What launches leave behind for those after them, which may be `dependent`: see ``Module.launch``."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p(_engine.ptxsim_new_stream())
        weakref.finalize(self, _engine.ptxsim_delete_stream, self._handle)


class Module:
    """PTX text, parsed. ``kernels`` maps each kernel's name to its parameters' (offset, bytes)."""

    def __init__(self, text: str) -> None:
        self._handle = ctypes.c_void_p()
        self._lines = text.count("\n") + 2
        _call(_engine.ptxsim_load, text.encode(), ctypes.byref(self._handle))
        weakref.finalize(self, _engine.ptxsim_unload, self._handle)
        description = ctypes.create_string_buffer(1 << 20)
        _call(_engine.ptxsim_describe, self._handle, description, ctypes.c_size_t(len(description)))
        self.kernels: dict[str, list[tuple[int, int]]] = {}
        layout: list[tuple[int, int]] = []
        for line in description.value.decode().splitlines():
            first, second = line.split()
            if first == "kernel":
                layout = self.kernels[second] = []
            else:
                layout.append((int(first), int(second)))

    def launch(
        self,
        kernel: str | None = None,
        *,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        cluster: int | Sequence[int] = 1,
        smem: int = 0,
        params: bytes | Iterable[Any] = (),
        memory: Iterable[Any] = (),
        seed: int = 0,
        checks: Iterable[str] | None = None,
        off: Iterable[str] = (),
        resident: int = 8,
        max_steps: int = 0,
        stream: Stream | None = None,
        dependent: bool = False,
        accuracy: str = "exact",
        registers: int = 0,
    ) -> Statistics:
        """Run a kernel to its end.

        kernel: its name; may be left out when the module has one only.
        smem: bytes of dynamic shared memory.
        params: the parameter bytes, or one value a parameter: arrays (their address), None (a null pointer), NumPy
            scalars, int, float, or bytes (a tensor map).
        memory: every array that the kernel may touch, or (address, bytes, name); accesses outside are errors.
        seed: chooses the interleaving of warps and the moments at which asynchronous operations take effect.
        checks: names of the checks to make (default: all, see CHECKS); off: names to leave out.
        resident: how many CTAs run at the same time. max_steps: stop after so many warp instructions; 0: never.
        stream: launches of one stream follow one another; the checks know what earlier ones wrote and read.
        dependent: launched with programmatic stream serialisation, so that nothing of the launch before it may be
            relied on until ``griddepcontrol.wait``.
        accuracy: "exact" computes approximate functions and the sums of tensor cores as well as the host can; "chip"
            gives the former errors up to what the PTX ISA documents, and forms the latter as Hopper's mma and wgmma do.
        registers: those that each thread starts with, where the kernel has no .maxnreg; 0: as many as there are.

        Raises SimulationError with kernel, PTX line, CTA, warp, lane and address.
        """
        if kernel is None:
            if len(self.kernels) != 1:
                raise SimulationError(f"the module has {len(self.kernels)} kernels: name one")
            kernel = next(iter(self.kernels))
        if kernel not in self.kernels:
            raise SimulationError(f"no kernel named {kernel}")
        if not isinstance(params, (bytes, bytearray)):
            params = _pack(params, self.kernels[kernel], kernel)
        names = (set(CHECKS) if checks is None else set(checks)) - set(off)
        if accuracy not in ("exact", "chip"):
            raise ValueError(f"accuracy is exact or chip, not {accuracy}")
        if unknown := (names | set(off)) - set(CHECKS):
            raise ValueError(f"no checks named {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
        arrays = list(memory)
        buffers = (_Buffer * len(arrays))(*(_buffer(i, array) for i, array in enumerate(arrays)))
        stop = ctypes.c_uint32(0)
        arguments = _Arguments(
            grid=_dim3(grid),
            block=_dim3(block),
            cluster=_dim3(cluster),
            dynamic_shared=smem,
            registers=registers,
            params=bytes(params),
            param_bytes=len(params),
            seed=seed,
            checks=sum(1 << CHECKS.index(name) for name in names),
            resident=resident,
            max_steps=max_steps,
            chip_accuracy=accuracy == "chip",
            stop=ctypes.pointer(stop),
            stream=stream._handle if stream else None,
            dependent=dependent,
        )
        statistics = _Statistics()
        lines = ctypes.create_string_buffer(self._lines)
        start = time.perf_counter()
        _interruptibly(
            stop,
            functools.partial(
                _call,
                _engine.ptxsim_launch,
                self._handle,
                kernel.encode(),
                ctypes.byref(arguments),
                buffers,
                ctypes.c_size_t(len(arrays)),
                ctypes.byref(statistics),
                lines,
                ctypes.c_size_t(len(lines)),
            ),
        )
        seconds = time.perf_counter() - start
        executed = frozenset(line for line, was in enumerate(lines.raw) if was)
        return Statistics(statistics.warp_instructions, statistics.thread_instructions, seconds, executed)


def load(ptx: str | Path) -> Module:
    """Parse PTX text, or the file that a Path names."""
    return Module(ptx.read_text() if isinstance(ptx, Path) else ptx)


def encode_tiled(
    data_type: int,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    element_strides: Sequence[int] | None = None,
    interleave: int = 0,
    swizzle: int = 0,
    oob_fill: int = 0,
) -> bytes:
    """A tensor map for the simulator: 128 bytes from the arguments of ``cuTensorMapEncodeTiled``.

    data_type, interleave, swizzle and oob_fill are the driver's enumeration values; extents and box are in elements,
    innermost first; strides are in bytes, of every dimension but the innermost.
    """
    rank = len(extents)
    if len(box) != rank or len(strides) != rank - 1:
        raise ValueError(
            f"rank {rank} takes {rank} box extents and {rank - 1} strides, not {len(box)} and {len(strides)}"
        )
    encoded = ctypes.create_string_buffer(128)
    steps = list(element_strides or [1] * rank)
    _call(
        _engine.ptxsim_encode_tiled,
        encoded,
        data_type,
        rank,
        ctypes.c_uint64(address),
        (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * max(1, rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*steps),
        interleave,
        swizzle,
        oob_fill,
    )
    return encoded.raw
