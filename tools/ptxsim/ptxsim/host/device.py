"""What a program learns of the device: from cuda.bindings, torch.cuda and the DSL."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as driver
import cuda.bindings.runtime as runtime
import torch

ATTRIBUTES = runtime.cudaDeviceAttr
SHARED_BYTES = {8: 163 << 10, 9: 227 << 10, 10: 227 << 10}  # a CTA can have, by major; others: 99 KiB
DRIVER_VERSION = 13000
MILLISECONDS = 1.0  # between any two events: times mean nothing here


@dataclass(frozen=True)
class Device:
    """The device that is simulated. multiprocessors: one CTA runs on each."""

    arch: str
    multiprocessors: int

    @property
    def capability(self) -> tuple[int, int]:
        digits = re.fullmatch(r"sm_(\d+)[af]?", self.arch)[1]
        return int(digits[:-1]), int(digits[-1])

    @property
    def shared_bytes(self) -> int:
        return SHARED_BYTES.get(self.capability[0], 99 << 10)

    def attribute(self, attribute: int) -> int:
        """By cudaDeviceAttr, which numbers as CUdevice_attribute does; -1: not known."""
        major, minor = self.capability
        known = {
            ATTRIBUTES.cudaDevAttrComputeCapabilityMajor: major,
            ATTRIBUTES.cudaDevAttrComputeCapabilityMinor: minor,
            ATTRIBUTES.cudaDevAttrMultiProcessorCount: self.multiprocessors,
            ATTRIBUTES.cudaDevAttrMaxSharedMemoryPerBlockOptin: self.shared_bytes,
            ATTRIBUTES.cudaDevAttrMaxSharedMemoryPerMultiprocessor: self.shared_bytes + 1024,
            ATTRIBUTES.cudaDevAttrMaxThreadsPerBlock: 1024,
            ATTRIBUTES.cudaDevAttrWarpSize: 32,
            ATTRIBUTES.cudaDevAttrL2CacheSize: 32 << 20,
            ATTRIBUTES.cudaDevAttrCooperativeLaunch: 1,
        }
        return {int(key): value for key, value in known.items()}.get(int(attribute), -1)

    def max_active_clusters(self, size: int) -> int:
        return max(1, self.multiprocessors // size)


class Stream:
    """A stream; every launch is done when it returns."""

    cuda_stream = stream = stream_id = 0
    device = torch.device("cuda", 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...
    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return MILLISECONDS


def _returning(*values: Any):
    return lambda *args, **kwargs: values[0] if len(values) == 1 else values or None


def install_torch(device: Device) -> None:
    """torch.cuda, of one device."""
    properties = SimpleNamespace(
        name=f"ptxsim {device.arch}",
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.multiprocessors,
        total_memory=16 << 30,
        L2_cache_size=device.attribute(ATTRIBUTES.cudaDevAttrL2CacheSize),
        shared_memory_per_block_optin=device.shared_bytes,
        warp_size=32,
    )
    stream = Stream()
    functions = {
        "is_available": _returning(True),
        "is_initialized": _returning(True),
        "is_bf16_supported": _returning(True),
        "is_current_stream_capturing": _returning(False),
        "init": _returning(),
        "_lazy_init": _returning(),
        "device_count": _returning(1),
        "current_device": _returning(0),
        "set_device": _returning(),
        "synchronize": _returning(),
        "empty_cache": _returning(),
        "manual_seed": _returning(),
        "manual_seed_all": _returning(),
        "get_device_capability": _returning(device.capability),
        "get_device_name": _returning(properties.name),
        "get_device_properties": _returning(properties),
        "current_stream": _returning(stream),
        "default_stream": _returning(stream),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
        "Stream": Stream,
        "Event": Event,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch._C._cuda_getCurrentRawStream = _returning(stream.cuda_stream)
    # Tensors are handed over by __dlpack__ alone, where `memory` can say on what device they are.
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    del torch.Tensor.__dlpack_c_exchange_api__
    torch.utils.dlpack.to_dlpack = lambda tensor: tensor.__dlpack__()


def install_bindings(device: Device) -> None:
    """The functions of cuda.bindings that programs and the DSL call; others fail as without a driver."""
    stream, event, context = driver.CUstream(0), driver.CUevent(0), driver.CUcontext(0)
    driver_results = {
        "cuInit": (),
        "cuDriverGetVersion": (DRIVER_VERSION,),
        "cuDeviceGet": (driver.CUdevice(0),),
        "cuDeviceGetCount": (1,),
        "cuDeviceGetName": (f"ptxsim {device.arch}".encode(),),
        "cuDeviceTotalMem": (16 << 30,),
        "cuDevicePrimaryCtxRetain": (context,),
        "cuCtxCreate": (context,),
        "cuCtxDestroy": (),
        "cuCtxGetCurrent": (context,),
        "cuCtxGetDevice": (driver.CUdevice(0),),
        "cuCtxSetCurrent": (),
        "cuCtxSynchronize": (),
        "cuStreamCreate": (stream,),
        "cuStreamDestroy": (),
        "cuStreamSynchronize": (),
        "cuEventCreate": (event,),
        "cuEventRecord": (),
        "cuEventSynchronize": (),
        "cuEventElapsedTime": (MILLISECONDS,),
        "cuEventDestroy": (),
    }
    runtime_results = {
        "cudaGetDeviceCount": (1,),
        "cudaGetDevice": (0,),
        "cudaSetDevice": (),
        "cudaDeviceSynchronize": (),
        "cudaDriverGetVersion": (DRIVER_VERSION,),
        "cudaStreamCreate": (runtime.cudaStream_t(0),),
        "cudaStreamDestroy": (),
        "cudaStreamSynchronize": (),
        "cudaEventCreate": (runtime.cudaEvent_t(0),),
        "cudaEventRecord": (),
        "cudaEventSynchronize": (),
        "cudaEventElapsedTime": (MILLISECONDS,),
        "cudaEventDestroy": (),
        "cudaLibraryUnload": (),
    }
    for module, success, results, prefix in (
        (driver, driver.CUresult.CUDA_SUCCESS, driver_results, "cu"),
        (runtime, runtime.cudaError_t.cudaSuccess, runtime_results, "cuda"),
    ):
        for name, values in results.items():
            setattr(module, name, lambda *args, _result=(success, *values), **kwargs: _result)

        def attribute(number: int, _: Any, success: Any = success) -> tuple:
            return success, device.attribute(number)

        setattr(module, f"{prefix}DeviceGetAttribute", attribute)


def install_dsl(device: Device, launches: Any) -> None:
    """The DSL compiles for the device, gives the PTX of what it compiles to ``launches``, and measures no times."""
    import cutlass.cute.testing
    import cutlass.testing
    from cutlass.base_dsl.dsl import BaseDSL
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts
    from cutlass.utils.hardware_info import HardwareInfo

    # Of the libraries that compiled host code is linked with, the first that has a function answers.
    os.environ["CUTE_DSL_LIBS"] = os.pathsep.join([str(launches.serve()), get_prefix_dsl_libs("CUTE_DSL")])
    BaseDSL.get_shared_libs = lambda self: os.environ["CUTE_DSL_LIBS"].split(os.pathsep)

    read_artifacts = JitFunctionArtifacts.__post_init__

    def keep_artifacts(artifacts: JitFunctionArtifacts) -> None:
        read_artifacts(artifacts)
        if isinstance(artifacts.CUBIN, bytes):  # a path: it has no kernels
            launches.know(artifacts.CUBIN, artifacts.PTX)

    JitFunctionArtifacts.__post_init__ = keep_artifacts
    HardwareInfo.get_max_active_clusters = lambda self, size, stream=None: device.max_active_clusters(size)

    def benchmark(function, *, workspace_generator=None, kernel_arguments=None, **_: Any) -> float:
        """Runs the function if nothing has run yet; microseconds, which mean nothing."""
        if not launches.done:
            given = workspace_generator() if workspace_generator else kernel_arguments
            function(*given.args, **given.kwargs)
        return 1000 * MILLISECONDS

    cutlass.testing.benchmark = cutlass.cute.testing.benchmark = benchmark
