"""The contract between a kernel class and the build.

A kernel is a small class: the constructor takes what is static and declares every launch parameter once, by name and
kind, and ``kernel`` is the device code, which reads them by these names. The build compiles it, reads the layout of the
parameters back from the cubin and writes it to the manifest; the launcher packs by name and shares no code with this
package.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cutlass.cute as cute
import cutlass.experimental.cuda as cuda
from cutlass import Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.cute.typing import AddressSpace

TensorMaps = tuple[GridConstant[cuda.TensorMap], ...]
SCALARS = {Int32: "int32", Int64: "int64", Float32: "float32"}


@dataclass(frozen=True)
class Ptr:
    """A pointer to global memory; ``align`` in bytes is what the caller guarantees."""

    dtype: type
    align: int = 4

    @property
    def kind(self) -> str:
        return "pointer"

    def fake(self) -> Any:
        return make_ptr(self.dtype, 0, AddressSpace.gmem, assumed_align=self.align)


@dataclass(frozen=True)
class TensorMap:
    """A TMA descriptor. ``box`` is in elements, innermost first; ``swizzle`` is 0, 32, 64 or 128 bytes."""

    dtype: type
    box: tuple[int, ...]
    swizzle: int = 128

    @property
    def kind(self) -> str:
        return "tensor_map"

    @property
    def bytes(self) -> int:
        """Bytes of shared memory that one copy writes, which is also its transaction count."""
        elements = 1
        for extent in self.box:
            elements *= extent
        return elements * self.dtype.width // 8

    def describe(self) -> dict[str, Any]:
        """What the launcher needs to encode the descriptor, as the manifest stores it."""
        return {"dtype": self.dtype.__name__.lower(), "box": list(self.box), "swizzle": self.swizzle}

    def create(self) -> Any:
        """A descriptor of the right type for tracing the host function, which is compiled but never run."""
        rank = len(self.box)
        return cuda.create_tensor_map_tiled(
            global_address=Int64(0),
            dtype=self.dtype,
            global_dims=list(self.box),
            global_strides=[Int64(1)] * (rank - 1),
            box_dims=list(self.box),
            swizzle=cuda.TensorMapSwizzle.from_name(f"s{self.swizzle}b" if self.swizzle else "none"),
        )


class Kernel:
    """Base of all kernels; see the module's docstring. Subclasses set these in their constructor."""

    maps: Mapping[str, TensorMap] = MappingProxyType({})  # in the manifest, a map has ``_map`` after its name
    params: Mapping[str, Any]  # a Ptr or one of SCALARS each; they come after the maps
    threads: int
    smem_bytes: int = 0
    work_per_cta: int = 0  # the grid is ceil(work / work_per_cta); 0: persistent, one CTA per multiprocessor
    min_blocks_per_mp: int = 0  # a bound for the register allocation; needed with setmaxnreg
    cluster: int = 1  # CTAs of a cluster, which the grid is a multiple of
    pdl: bool = False  # launched with programmatic stream serialization: the kernel waits for its predecessor itself

    @property
    def parameters(self) -> dict[str, Any]:
        """All launch parameters, in order, under their names in the manifest."""
        return {f"{name}_map": tensor_map for name, tensor_map in self.maps.items()} | dict(self.params)

    def kernel(self, *args: Any) -> Any:
        """The device code: a ``@cute.kernel`` of ``(self, maps: TensorMaps, p)``, or of ``(self, p)`` without maps.

        ``p`` is a named tuple: ``p.total_q`` is the parameter ``total_q``.
        """
        raise NotImplementedError

    def named(self, maps: TensorMaps) -> Any:
        """Pointers to the tensor maps by name, ``.k`` to the map ``k``; the DSL passes on a plain tuple of maps."""
        return namedtuple("Maps", self.maps)(*(tensor_map.get_ptr() for tensor_map in maps))

    @cute.jit
    def __call__(self, *args: Any) -> None:
        p = namedtuple("Params", self.params)(*args)
        maps = tuple(tensor_map.create() for tensor_map in self.maps.values())
        operands = (maps, p) if self.maps else (p,)
        self.kernel(*operands).launch(
            grid=(self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            smem=self.smem_bytes,
            min_blocks_per_mp=self.min_blocks_per_mp,
        )

    def compile(self, symbol: str, arch: str, dump_dir: Path) -> None:
        """Write the kernel's cubin and PTX for ``arch`` (``sm_90a``, ``sm_100f``) into ``dump_dir``.

        ``symbol`` is what its name there begins with, where the DSL's own would hold module and class: a kernel that
        moves keeps its cubin. The DSL's "cutlass" stays in the name: the assembler allocates registers otherwise for
        kernels that have it, and without it those of Blackwell spill.
        """
        type(self).kernel.set_name_prefix(symbol, keep_mangled_name=False)
        args = [kind.fake() if isinstance(kind, Ptr) else kind(1) for kind in self.params.values()]
        cute.compile(self, *args, options=f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {dump_dir}")
