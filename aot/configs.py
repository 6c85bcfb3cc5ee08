"""The configuration space: the one place that enumerates which kernels the bundle holds.

Plain data: nothing here imports the DSL or a kernel's module, so listing is quick and needs no DSL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

Scalar = str | int | float | bool

ARCHS = ("sm_90a", "sm_100f")

HEADS_PER_KV = (1, 2, 4, 8, 16)
TOPK = (4, 8, 16, 32)
PARTIAL_DTYPES = ("float32", "bfloat16")
DTYPE_TAGS = {"float32": "f32", "bfloat16": "bf16"}

# Configurations that may spill registers, by "arch/name", each with the reason why that is worth it.
SPILL_REASONS: dict[str, str] = {}


@dataclass(frozen=True)
class Configuration:
    """One compiled kernel.

    ``options`` is what the launcher finds it by, next to ``arch`` and ``operation``. ``factory`` is the kernel's class
    as ``module:Class`` and ``arguments`` what its constructor takes.
    """

    operation: str
    arch: str
    name: str
    options: dict[str, Scalar]
    factory: str
    arguments: dict[str, Scalar]

    @property
    def path(self) -> str:
        """The configuration's unique name over all architectures, ``arch/name``."""
        return f"{self.arch}/{self.name}"

    @property
    def module(self) -> str:
        """The module that defines the kernel."""
        return self.factory.partition(":")[0]

    @property
    def spill_reason(self) -> str | None:
        """Why this kernel may spill registers; None: it may not."""
        return SPILL_REASONS.get(self.path)


def configurations() -> list[Configuration]:
    """Every configuration of the bundle, in a fixed order."""
    return [*_forward(), *_combine(), *_csr_and_schedule()]


_FORWARD = {"sm_90a": "aot.kernels.sm90_fwd:ForwardSm90", "sm_100f": "aot.kernels.sm100_fwd:ForwardSm100"}


def _forward() -> Iterator[Configuration]:
    for arch, g, partial, temperature in product(_FORWARD, HEADS_PER_KV, PARTIAL_DTYPES, (False, True)):
        yield Configuration(
            operation="fwd",
            arch=arch,
            name=f"fwd-bf16-g{g}-p{DTYPE_TAGS[partial]}" + ("-temperature" if temperature else ""),
            options={
                "q": "bfloat16",
                "kv": "bfloat16",
                "qk": "bfloat16",
                "pv": "bfloat16",
                "g": g,
                "partial": partial,
                "temperature": temperature,
            },
            factory=_FORWARD[arch],
            arguments={"g": g, "partial": partial, "temperature": temperature},
        )


def _combine() -> Iterator[Configuration]:
    for arch in ARCHS:
        for partial in PARTIAL_DTYPES:
            for topk in TOPK:
                yield Configuration(
                    operation="combine",
                    arch=arch,
                    name=f"combine-p{DTYPE_TAGS[partial]}-topk{topk}",
                    options={"partial": partial, "topk": topk},
                    factory="aot.kernels.smxx_combine:Combine",
                    arguments={"partial": partial, "topk": topk},
                )


# The kernels of CSR and schedule: operation -> (class, whether topk changes the code).
_CSR_AND_SCHEDULE = {
    "csr_rows": ("aot.kernels.smxx_csr:CsrRows", False),
    "csr_keys": ("aot.kernels.smxx_csr:CsrKeys", True),
    "csr_row_ptr": ("aot.kernels.smxx_csr:CsrRowPtr", False),
    "csr_collect": ("aot.kernels.smxx_csr:CsrCollect", False),
    "csr_split": ("aot.kernels.smxx_csr:CsrSplit", True),
    "walk_plan": ("aot.kernels.smxx_walk:WalkPlan", False),
    "radix_count": ("aot.kernels.smxx_sort:RadixCount", False),
    "radix_scan": ("aot.kernels.smxx_sort:RadixScan", False),
    "radix_scatter": ("aot.kernels.smxx_sort:RadixScatter", False),
    "schedule_count": ("aot.kernels.smxx_schedule:ScheduleCount", False),
    "schedule_fill": ("aot.kernels.smxx_schedule:ScheduleFill", False),
}


def _csr_and_schedule() -> Iterator[Configuration]:
    for arch in ARCHS:
        for operation, (factory, of_topk) in _CSR_AND_SCHEDULE.items():
            for topk in TOPK if of_topk else (None,):
                options = {} if topk is None else {"topk": topk}
                yield Configuration(
                    operation=operation,
                    arch=arch,
                    name=operation.replace("_", "-") + ("" if topk is None else f"-topk{topk}"),
                    options=options,
                    factory=factory,
                    arguments=options,
                )
