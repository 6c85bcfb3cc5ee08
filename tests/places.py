"""Where a property is tested: the kernels of each architecture in the simulator, and a CUDA device.

A test that takes the fixture ``place`` states its property once and runs in each: on arrays of ``place.device``, in the
context that the fixture has opened. What only one place can show has tests of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from reference import BLOCK, Case, assert_lse_close, assert_out_close

from aot.configs import ARCHS
from sparse_aot import build_k2q_csr, sim, sparse_atten_func

WALKING = ("sm_90a",)  # architectures whose forward walks where the plan asks for it


@dataclass(frozen=True)
class Place:
    """``arch``: of the kernels; None: whatever the CUDA device is."""

    name: str
    device: str
    arch: str | None = None

    @contextlib.contextmanager
    def opened(self, **options) -> Iterator[None]:
        """Calls run here, in the simulator with these fields of ``sim.options``."""
        if self.arch is None:
            yield
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sim, "options", sim.Options(arch=self.arch, multiprocessors=3, **options))
            yield

    @property
    def traversals(self) -> tuple[str, ...]:
        """What the forward can be made to do here."""
        walks = self.arch in WALKING if self.arch else torch.cuda.get_device_capability() == (9, 0)
        return ("csr", "walk") if walks else ("csr",)


_no_simulator = pytest.mark.skipif(importlib.util.find_spec("ptxsim") is None, reason="the simulator is not installed")
_no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PLACES = [
    *(pytest.param(Place(f"sim {arch}", "cpu", arch), marks=_no_simulator, id=f"sim-{arch}") for arch in ARCHS),
    pytest.param(Place("cuda", "cuda"), marks=[pytest.mark.gpu, _no_device], id="cuda"),
]


def build(case: Case, **changes):
    """CSR and schedule, without a host read: (k2q_row_ptr, k2q_q_indices, schedule)."""
    options = {
        "total_k": case.total_k,
        "max_seqlen_k": case.max_seqlen_k,
        "max_seqlen_q": case.max_seqlen_q,
        "total_rows": case.total_rows,
        "qhead_per_kv": case.qhead_per_kv,
        "return_schedule": True,
    }
    return build_k2q_csr(case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, BLOCK, **options | changes)


def force(schedule, traversal: str) -> None:
    """Make the forward take a traversal, whatever the selection asks for."""
    schedule.walk_totals[0] = 0
    schedule.walk_totals[1] = int(traversal == "walk")


def attend(case: Case, plan, **options):
    """``sparse_atten_func`` on what ``build`` returned."""
    row_ptr, q_indices, schedule = plan
    defaults = {**case.arguments, "return_softmax_lse": True, "schedule": schedule}
    return sparse_atten_func(case.q, case.k, case.v, row_ptr, q_indices, case.topk, **defaults | options)


def run(case: Case, traversal: str | None = None, **options):
    """The whole pipeline, (out, lse), in a traversal or in the one that the selection asks for."""
    plan = build(case)
    if traversal is not None:
        force(plan[2], traversal)
    return attend(case, plan, **options)


def check(case: Case, traversal: str | None = None, tokens=None, **options) -> None:
    """The pipeline agrees with the reference, for all tokens or only for ``tokens``."""
    out, lse = run(case, traversal, **options)
    want = case.reference(tokens)
    assert_out_close(out if tokens is None else out[tokens], want)
    assert_lse_close(lse if tokens is None else lse[tokens], want.lse)
