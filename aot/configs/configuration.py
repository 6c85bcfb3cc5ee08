"""One compiled kernel, and what holds for all of them."""

from __future__ import annotations

from dataclasses import dataclass

Scalar = str | int | float | bool

ARCHS = ("sm_90a", "sm_100f")

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
