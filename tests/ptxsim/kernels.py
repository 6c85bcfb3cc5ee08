"""Runs our own kernels, compiled by aot/kernel.py, in the simulator: arguments go by name."""

from __future__ import annotations

import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import ptxsim
import torch

BFLOAT16 = 9  # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class Simulated:
    """A kernel class of aot/kernels, its PTX loaded into the simulator."""

    def __init__(self, kernel: Any, arch: str) -> None:
        self.kernel = kernel
        with tempfile.TemporaryDirectory() as directory:
            kernel.compile(arch, Path(directory))
            (ptx,) = Path(directory).glob("*.ptx")
            self.text = ptx.read_text()
        self.module = ptxsim.load(self.text)

    def launch(self, values: dict[str, Any], *, grid: int, memory=(), module=None, **options) -> ptxsim.Statistics:
        """Launch with a value for each parameter name: an array, None, a number or an encoded tensor map.

        memory: arrays that the kernel reaches through tensor maps. module: other PTX in the place of the kernel's own.
        """
        params = []
        for name, kind in self.kernel.params.items():
            value = values[name]
            if kind.__class__ is type and isinstance(value, (int, float)):
                value = {"Int32": np.int32, "Int64": np.int64, "Float32": np.float32}[kind.__name__](value)
            params.append(value)
        arrays = [v for v in values.values() if isinstance(v, (np.ndarray, torch.Tensor))]
        return (module or self.module).launch(
            grid=grid,
            block=self.kernel.threads,
            smem=self.kernel.smem_bytes,
            params=params,
            memory=[*arrays, *memory],
            **options,
        )


@functools.cache
def simulated(factory: str, arch: str = "sm_90a", **arguments) -> Simulated:
    """``factory`` is ``module:Class`` within aot.kernels, ``arguments`` are its constructor's."""
    module, name = factory.split(":")
    return Simulated(getattr(importlib.import_module(f"aot.kernels.{module}"), name)(**arguments), arch)


def tensor_map(kind: Any, array: torch.Tensor, extents, strides) -> bytes:
    """Encodes ``kind`` (an aot.kernel.TensorMap) over bfloat16 memory; strides in bytes, of dimensions 1 and up."""
    return ptxsim.encode_tiled(
        BFLOAT16, array.data_ptr(), extents, strides, list(kind.box), swizzle=SWIZZLES[kind.swizzle]
    )
