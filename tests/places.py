"""Where a property is tested: the kernels of each architecture in the simulator, and a CUDA device.

A test that takes the fixture ``place`` states its property once and runs in each: on arrays of ``place.device``, in the
context that the fixture has opened. ``axes`` gives each place a matrix of its own, for what a device does in a
millisecond takes the simulator a second. What only one place can show has tests of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import BLOCK, Case, Reference, assert_lse_close, assert_out_close

from aot.configs import ARCHS
from sparse_aot import build_k2q_csr, sim, sparse_atten_func
from sparse_aot.msa._csr_host import walk_rule

ROOT = Path(__file__).resolve().parent.parent
G = (1, 2, 4, 8, 16)
TOPK = (4, 8, 16, 32)
PARTIALS = ("float32", "bfloat16")
SEEDS = (0, 1, 2)  # of each kind: when asynchronous operations take effect is mixed, at once, or as late as possible
WALKING = ("sm_90a", "sm_100f")  # architectures whose forward walks where the plan asks for it


@dataclass(frozen=True)
class Place:
    """``arch``: of the kernels that the simulator runs; None: a CUDA device, with whatever it has."""

    device: str
    arch: str | None = None

    @contextlib.contextmanager
    def opened(self, **options) -> Iterator[None]:
        """Calls run here, in the simulator with these fields of ``sim.options``; None leaves one as it comes."""
        if self.arch is None:
            yield
            return
        given = {name: value for name, value in options.items() if value is not None}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sim, "options", sim.Options(**{"arch": self.arch, "multiprocessors": 3} | given))
            yield

    def seeds(self) -> Iterator[None]:
        """Once in every kind of interleaving that the simulator has; on a device once, in the one that comes."""
        for seed in SEEDS if self.arch else (0,):
            if self.arch:
                sim.options.seed = seed
            yield

    def choose(self, sim, cuda):
        """A size: in the simulator, and on a device."""
        return sim if self.arch else cuda

    @property
    def traversals(self) -> tuple[str, ...]:
        """What the forward can be made to do here."""
        walks = self.arch in WALKING if self.arch else torch.cuda.get_device_capability() == (9, 0)
        return ("csr", "walk", "mixed") if walks else ("csr",)


HOST = Place("cpu", ARCHS[0])  # where no kernel makes CSR and schedule, if it is opened without csr=True
ON_DEVICE = (pytest.mark.gpu, pytest.mark.xdist_group("gpu"))  # one worker has the device to itself
PLACES = [
    *(pytest.param(Place("cpu", arch), id=f"sim-{arch}") for arch in ARCHS),
    pytest.param(Place("cuda"), marks=ON_DEVICE, id="cuda"),
]
needs_simulator = pytest.mark.usefixtures("simulator")

Axes = Mapping[str, Iterable[Any]]


def axes(sim: Axes | list[Axes], cuda: Axes | list[Axes], archs: tuple[str, ...] = ARCHS):
    """Parametrise a test by ``place`` and, in each, by the product of its axes, or of each of a list of them.

    archs: of the simulator's places. An axis that a place does not have is None there.
    """

    def products(wanted):
        for one in [wanted] if isinstance(wanted, Mapping) else wanted:
            for values in itertools.product(*one.values()):
                yield dict(zip(one, values, strict=True))

    simulated, on_device = list(products(sim)), list(products(cuda))
    names = list(dict.fromkeys(name for values in (*simulated, *on_device) for name in values))
    parameters = [
        pytest.param(
            *place.values,
            *(values.get(name) for name in names),
            marks=place.marks,
            id="-".join([place.id, *(str(values[name]) for name in names if name in values)]),
        )
        for place in PLACES
        if place.values[0].arch in (None, *archs)
        for values in (simulated if place.values[0].arch else on_device)
    ]
    return pytest.mark.parametrize(["place", *names], parameters, indirect=["place"])


# The pipeline -------------------------------------------------------------------------------------------------------


# What makes the walk plan walk nothing, everything, what pays, or of each group what more than half of it selects; for
# any number of groups: (cost, gain, groups) of ``walk_rule``.
RULES = {"csr": (9, 0, 0), "walk": (0, 0, 0), None: (None, None, 0), "mixed": (4, 0, 0)}


@contextlib.contextmanager
def planned(traversal: str | None) -> Iterator[None]:
    """Schedules that are made meanwhile have a plan for a traversal; None: what the selection asks for."""
    before = walk_rule(*RULES[traversal])
    try:
        yield
    finally:
        walk_rule(*before)


def build(case: Case, traversal: str | None = None, **changes):
    """CSR and schedule, without a host read: (k2q_row_ptr, k2q_q_indices, schedule)."""
    options = {
        "total_k": case.total_k,
        "max_seqlen_k": case.max_seqlen_k,
        "max_seqlen_q": case.max_seqlen_q,
        "total_rows": case.total_rows,
        "qhead_per_kv": case.qhead_per_kv,
        "return_schedule": True,
    }
    with planned(traversal):
        return build_k2q_csr(case.q2k, case.cu_seqlens_q, case.cu_seqlens_k, BLOCK, **options | changes)


def without_digest(schedule):
    """The same schedule, for a CSR that was changed since: as on a device, where nobody looks."""
    if schedule.csr_digest is None:
        return schedule
    restore, state = schedule.__reduce__()
    return restore(*state[:-1], None)


def attend(case: Case, plan, temperature: float | None = None, **options):
    """``sparse_atten_func`` on what ``build`` returned; with a temperature, (out, lse, lse_temperature)."""
    row_ptr, q_indices, schedule = plan
    defaults = {**case.arguments, "return_softmax_lse": True, "schedule": schedule}
    if temperature is not None:
        defaults |= {"return_temperature_lse": True, "lse_temperature_scale": temperature}
    return sparse_atten_func(case.q, case.k, case.v, row_ptr, q_indices, case.topk, **defaults | options)


def run(case: Case, traversal: str | None = None, *, change=None, **options):
    """The whole pipeline, in a traversal or in the one that the selection asks for: what ``attend`` returns.

    change: called with what ``build`` returned, to change it in place.
    """
    plan = build(case, traversal)
    if change is not None:
        change(*plan)
        plan = (*plan[:2], without_digest(plan[2]))
    return attend(case, plan, **options)


def assert_close(results, want: Reference) -> None:
    """(out, lse) or (out, lse, lse_temperature) are what the reference gives."""
    out, lse, *lse_temperature = results
    assert_out_close(out, want)
    assert_lse_close(lse, want.lse)
    for got in lse_temperature:
        assert_lse_close(got, want.lse_temperature)


def check(case: Case, traversal: str | None = None, tokens=None, temperature: float | None = None, **options):
    """The results of ``run``, which agree with the reference, for all tokens or only for ``tokens``."""
    results = run(case, traversal, temperature=temperature, **options)
    want = case.reference(tokens, lse_temperature_scale=temperature or 1.0)
    assert_close(results if tokens is None else [result[tokens] for result in results], want)
    return results
