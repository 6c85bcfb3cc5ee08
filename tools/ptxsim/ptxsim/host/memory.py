"""Device memory: torch tensors that a program puts on "cuda" stay on the host, in storages of their own.

Such a storage is aligned as a device allocation is and known to the simulator by name while it lives; what a program
keeps on the host is not, so that a kernel that is given a host pointer is stopped by ``global_bounds``.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from . import operations
from .source import calling_line

ALIGNMENT = 256
DEVICE = torch.device("cuda", 0)
DLPACK_CUDA = 2
# Where a capsule's DLTensor keeps its device type, by the capsule's name.
DLPACK_DEVICE_OFFSETS = {b"dltensor": 8, b"dltensor_versioned": 40}

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class DeviceMemory(TorchFunctionMode):
    """While it is active, "cuda" is a device: tensors on it are those whose storage is in ``buffers``."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers: dict[int, tuple[int, str]] = {}  # address -> bytes, name
        self.operations = 0  # of torch that wrote to one, or took from one to the host

    def allocate(self, size: int, what: str) -> torch.UntypedStorage:
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        block = raw[start : start + size]
        address = block.ctypes.data
        self.buffers[address] = (size, f"{what} of {calling_line()}")
        weakref.finalize(block, self.buffers.pop, address, None)  # the storage keeps the block
        return torch.from_numpy(block).untyped_storage()

    def holds(self, value: Any) -> bool:
        with torch._C.DisableTorchFunction():
            return _is_plain(value) and value.untyped_storage().data_ptr() in self.buffers

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, its storage moved to the device."""
        here = tensor.untyped_storage()
        if here.nbytes() == 0:
            return tensor
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.operations += 1
        there = self.allocate(here.nbytes(), f"{dtype}{list(tensor.shape)}")
        there.copy_(here)
        moved = torch.empty(0, dtype=tensor.dtype)
        tensor.data = moved.set_(there, tensor.storage_offset(), tensor.size(), tensor.stride())
        return tensor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.device:
            return torch.device(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        on_device = any(self.holds(x) for x in tensors)
        if on_device and function in OF_DEVICE_TENSORS:
            return OF_DEVICE_TENSORS[function](*args, **kwargs)
        if function is torch.Tensor.pin_memory:
            return args[0]
        kwargs.pop("pin_memory", None)
        targets = [x for x in tree_leaves((args, kwargs)) if _is_device(x)]
        to_device = any(_is_cuda(x) for x in targets) or function is torch.Tensor.cuda
        to_host = (bool(targets) and not to_device) or function is torch.Tensor.cpu
        if function is torch.Tensor.cuda:
            function, args, kwargs = torch.Tensor.to, (args[0], "cpu"), {}
        args, kwargs = tree_map(_on_host, (args, kwargs))
        result = operations.ON_HOST.get(function, function)(*args, **kwargs)

        inputs = {x.untyped_storage().data_ptr() for x in tensors if _is_plain(x)}

        in_place = on_device and re.fullmatch(r"[a-z].*[a-z0-9]_|__i\w+__|__setitem__", function.__name__)
        self.operations += bool(in_place or (on_device and to_host))

        def place(value: Any) -> Any:
            if not _is_plain(value):
                return value
            is_input = value.untyped_storage().data_ptr() in inputs
            if to_host:
                return value.clone() if self.holds(value) else value
            if self.holds(value) or not (to_device or (on_device and not is_input)):
                return value
            return self.bring(value.clone() if is_input else value)

        return tree_map(place, result)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor with memory."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, torch._subclasses.FakeTensor)
        and value.device.type == "cpu"
        and value.layout == torch.strided
    )


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in ("cuda", "cpu"))


def _is_cuda(value: Any) -> bool:
    return _is_device(value) and torch.device(value).type == "cuda"


def _on_host(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


def _dlpack(tensor: torch.Tensor, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
    """The tensor's capsule, which says that it lies on a CUDA device."""
    capsule = tensor.detach().__dlpack__(max_version=max_version)
    name = _capsule_name(capsule)
    address = _capsule_pointer(capsule, name) + DLPACK_DEVICE_OFFSETS[name]
    ctypes.c_int32.from_address(address).value = DLPACK_CUDA
    return capsule


OF_DEVICE_TENSORS = {
    torch.Tensor.device.__get__: lambda tensor: DEVICE,
    torch.Tensor.is_cuda.__get__: lambda tensor: True,
    torch.Tensor.is_cpu.__get__: lambda tensor: False,
    torch.Tensor.get_device: lambda tensor: DEVICE.index,
    torch.Tensor.record_stream: lambda tensor, stream: None,
    torch.Tensor.__dlpack_device__: lambda tensor: (DLPACK_CUDA, DEVICE.index),
    torch.Tensor.__dlpack__: _dlpack,
}
