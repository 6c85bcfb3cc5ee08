"""Block-sparse attention: every prefill, what merges its splits, and what prepares it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from aot.configs.configuration import ARCHS, DTYPE_TAGS, Configuration

HEADS_PER_KV = (1, 2, 4, 8, 16)
TOPK = (4, 8, 16, 32)
PARTIAL_DTYPES = ("float32", "bfloat16")


def configurations() -> Iterator[Configuration]:
    """Every configuration of the family, in a fixed order."""
    yield from _forward()
    yield from _combine()
    yield from _csr_and_schedule()


_FORWARD = {
    "sm_90a": "aot.kernels.msa.sm90_prefill:PrefillSm90",
    "sm_100f": "aot.kernels.msa.sm100_prefill:PrefillSm100",
}

# Architectures whose forward walks where the schedule's plan asks for it, and the query rows of a group there.
_WALK_ROWS = {"sm_90a": 128, "sm_100f": 256}


def _forward() -> Iterator[Configuration]:
    for arch, g, partial, temperature in product(_FORWARD, HEADS_PER_KV, PARTIAL_DTYPES, (False, True)):
        options = {
            "q": "bfloat16",
            "kv": "bfloat16",
            "qk": "bfloat16",
            "pv": "bfloat16",
            "g": g,
            "partial": partial,
            "temperature": temperature,
        }
        yield Configuration(
            operation="fwd",
            arch=arch,
            name=f"fwd-bf16-g{g}-p{DTYPE_TAGS[partial]}" + ("-temperature" if temperature else ""),
            options=options,
            factory=_FORWARD[arch],
            arguments=options,
        )


def _combine() -> Iterator[Configuration]:
    for arch in ARCHS:
        for partial in PARTIAL_DTYPES:
            for topk in TOPK:
                options = {"partial": partial, "topk": topk}
                yield Configuration(
                    operation="combine",
                    arch=arch,
                    name=f"combine-p{DTYPE_TAGS[partial]}-topk{topk}",
                    options=options,
                    factory="aot.kernels.msa.smxx_combine:Combine",
                    arguments=options | {"walk_rows": _WALK_ROWS[arch]},
                )


# The kernels of CSR and schedule: operation -> (class, whether topk changes the code).
_CSR_AND_SCHEDULE = {
    "csr_rows": ("aot.kernels.msa.smxx_csr:CsrRows", False),
    "csr_keys": ("aot.kernels.msa.smxx_csr:CsrKeys", True),
    "csr_row_ptr": ("aot.kernels.msa.smxx_csr:CsrRowPtr", False),
    "csr_collect": ("aot.kernels.msa.smxx_csr:CsrCollect", False),
    "csr_split": ("aot.kernels.msa.smxx_csr:CsrSplit", True),
    "walk_plan": ("aot.kernels.msa.smxx_walk_plan:WalkPlan", False),
    "radix_count": ("aot.kernels.msa.smxx_sort:RadixCount", False),
    "radix_scan": ("aot.kernels.msa.smxx_sort:RadixScan", False),
    "radix_scatter": ("aot.kernels.msa.smxx_sort:RadixScatter", False),
    "schedule_count": ("aot.kernels.msa.smxx_schedule:ScheduleCount", False),
    "schedule_fill": ("aot.kernels.msa.smxx_schedule:ScheduleFill", False),
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
