"""The configuration space: the one place that enumerates which kernels the bundle holds, a module a family.

Plain data: nothing here imports the DSL or a kernel's module, so listing is quick and needs no DSL.
"""

from __future__ import annotations

from aot.configs import msa
from aot.configs.configuration import ARCHS, DTYPE_TAGS, SPILL_REASONS, Configuration

__all__ = ["ARCHS", "DTYPE_TAGS", "SPILL_REASONS", "Configuration", "configurations"]


def configurations() -> list[Configuration]:
    """Every configuration of the bundle, in a fixed order."""
    return [*msa.configurations()]
