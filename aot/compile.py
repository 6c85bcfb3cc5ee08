"""Compile one configuration; runs in the build's worker processes, the only ones that import the DSL."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aot.configs import Configuration
    from aot.kernel import Kernel


SYMBOL_PREFIX = "sparse_aot_"  # of every kernel: profilers and sanitizers tell ours by it


@dataclass(frozen=True)
class Compiled:
    """A configuration's cubin and PTX, and what its kernel class says about launching it, as JSON values."""

    cubin: bytes
    ptx: bytes
    launch: dict[str, Any]


class CompileError(Exception):
    """The DSL could not compile a configuration; the message holds its traceback."""


def isolate() -> None:
    """Drop the environment variables that change what the DSL generates: a build depends on the source alone."""
    for name in [name for name in os.environ if name.startswith("CUTE_DSL_")]:
        del os.environ[name]


def make_kernel(configuration: Configuration) -> Kernel:
    """The configuration's kernel; imports its module, and with it the DSL."""
    module, _, kernel_class = configuration.factory.partition(":")
    return getattr(importlib.import_module(module), kernel_class)(**configuration.arguments)


def compile_configuration(configuration: Configuration) -> Compiled:
    """Compile in this process.

    CompileError where that fails, whatever the DSL raised (it does not always pickle), and where the kernel takes
    parameters that it never reads.
    """
    try:
        kernel = make_kernel(configuration)
        with tempfile.TemporaryDirectory(prefix="sparse_aot-") as directory:
            dump_dir = Path(directory)
            symbol = SYMBOL_PREFIX + configuration.path.replace("/", "_").replace("-", "_")
            kernel.compile(symbol, configuration.arch, dump_dir)
            (cubin,) = dump_dir.glob("*.cubin")
            (ptx,) = dump_dir.glob("*.ptx")
            compiled = Compiled(cubin.read_bytes(), ptx.read_bytes(), _launch(kernel))
    except Exception:
        raise CompileError(f"{configuration.path} does not compile\n{traceback.format_exc()}") from None
    if unread := unread_parameters(compiled.ptx.decode(), list(kernel.parameters)):
        raise CompileError(f"{configuration.path}: the kernel never reads its parameters {', '.join(unread)}")
    return compiled


def unread_parameters(ptx: str, names: list[str]) -> list[str]:
    """Of a kernel's parameters, in order, those that its code never mentions."""
    _, _, code = ptx[ptx.index(".entry") :].partition("{")
    read = {int(number) for number in re.findall(r"_param_(\d+)\b", code)}
    return [name for number, name in enumerate(names) if number not in read]


def _launch(kernel: Kernel) -> dict[str, Any]:
    return {
        "params": [_param(name, kind) for name, kind in kernel.parameters.items()],
        "threads": kernel.threads,
        "smem_bytes": kernel.smem_bytes,
        "work_per_cta": kernel.work_per_cta,
        "cluster": kernel.cluster,
        "pdl": kernel.pdl,
    }


def _param(name: str, kind: Any) -> dict[str, Any]:
    from aot.kernel import SCALARS, TensorMap

    if kind in SCALARS:
        return {"name": name, "kind": SCALARS[kind]}
    param = {"name": name, "kind": kind.kind}
    if isinstance(kind, TensorMap):
        param["tensor_map"] = kind.describe()
    return param
