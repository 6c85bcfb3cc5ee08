"""Our own kernels in the simulator, through the public functions: options, what was launched, and changed kernels."""

import contextlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import ptxsim
import pytest
import torch
from reference import Case, assert_lse_close, assert_out_close

from sparse_aot import _csr_host, build_k2q_csr, sim, sparse_atten_func
from sparse_aot._bundle import get_bundle

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100f",)
WALKING = HOPPER  # architectures whose forward walks where the plan asks for it
SEEDS = (0, 1, 2)  # of each kind: when asynchronous operations take effect is mixed, at once, or as late as possible
G = (1, 2, 4, 8, 16)
TOPK = (4, 8, 16, 32)
PARTIALS = ("float32", "bfloat16")
ATTENTION = ("fwd", "combine")  # the operations of sparse_atten_func; the others make CSR and schedule


@dataclass(frozen=True)
class Launch:
    """A launch that ran to its end: the configuration's entry in the manifest, CTAs, and what was executed."""

    entry: dict[str, Any]
    grid: int
    statistics: ptxsim.Statistics

    @property
    def operation(self) -> str:
        return self.entry["operation"]

    @property
    def path(self) -> str:
        """The configuration's name in ``sim.modules``."""
        return f"{self.entry['arch']}/{self.entry['name']}"


@contextlib.contextmanager
def simulation(**options):
    """Calls under these fields of ``sim.options``, the others as they come; yields the list of their launches."""
    launches = []
    run_to_the_end = sim.run

    def run(entry, grid, params, memory):
        statistics = run_to_the_end(entry, grid, params, memory)
        launches.append(Launch(entry, grid, statistics))
        return statistics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "options", sim.Options(**options))
        patch.setattr(sim, "run", run)
        yield launches


def ptx(path: str) -> str:
    """The PTX of a configuration, as simulated calls run it."""
    (entry,) = (entry for entry in get_bundle().configurations if f"{entry['arch']}/{entry['name']}" == path)
    return sim.read_ptx(get_bundle(), entry)


def mutants(text: str, lines, pattern: str, replacement):
    """``text`` with one match of ``pattern`` replaced, for each match that begins in one of ``lines``.

    replacement: a template, or a function of the match, which gives None to leave it alone.
    """
    for match in re.finditer(pattern, text):
        if text.count("\n", 0, match.start()) + 1 not in lines:
            continue
        changed = replacement(match) if callable(replacement) else match.expand(replacement)
        if changed is not None:
            yield text[: match.start()] + changed + text[match.end() :]


def further(distance):
    """A replacement that adds to the offset of an address."""
    return lambda match: f"{match[1]}+{int(match[2] or 0) + distance}"


def believing(launch: Launch, parameter: str, value: int) -> str:
    """The PTX of a kernel that takes an int32 parameter for ``value``, whatever it is given."""
    number = [param["name"] for param in launch.entry["params"]].index(parameter)
    load = rf"ld\.param\.b32(\s+%r\d+), \[\w+_param_{number}\];"
    text, count = re.subn(load, rf"mov.b32\1, {value};", ptx(launch.path))
    assert count
    return text


@contextlib.contextmanager
def replaced(path: str, text: str):
    """Calls run ``text`` for a configuration."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sim.modules, path, ptxsim.load(text))
        yield


@contextlib.contextmanager
def changed_maps(change):
    """``change(number, arguments)`` may change those of ``sim.encode_tiled`` for each tensor map of a call: q, k, v."""
    encode, made = sim.encode_tiled, []

    def encode_tiled(data_type, address, extents, strides, box, *, swizzle):
        arguments = {"extents": extents, "strides": strides, "box": box, "swizzle": swizzle}
        change(len(made) % 3, arguments)
        made.append(arguments)
        return encode(data_type, address, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "encode_tiled", encode_tiled)
        yield


class Attention(NamedTuple):
    """What a call gave, None for what it was not asked for, and its launches: forward and combine."""

    out: torch.Tensor
    lse: torch.Tensor
    lse_temperature: torch.Tensor | None
    launches: list[Launch]


def build(case: Case):
    """(k2q_row_ptr, k2q_q_indices, schedule), by ``options.csr`` of the simulation."""
    return build_k2q_csr(
        case.q2k,
        case.cu_seqlens_q,
        case.cu_seqlens_k,
        total_k=case.total_k,
        qhead_per_kv=case.qhead_per_kv,
        return_schedule=True,
    )


def attend(case: Case, plan, partial="float32", temperature=None, **options):
    """(out, lse, lse_temperature) for what ``build`` returned."""
    row_ptr, q_indices, schedule = plan
    defaults = {
        **case.arguments,
        "partial_dtype": partial,
        "return_softmax_lse": True,
        "return_temperature_lse": temperature is not None,
        "lse_temperature_scale": temperature or 1.0,
        "schedule": schedule,
    }
    results = sparse_atten_func(case.q, case.k, case.v, row_ptr, q_indices, case.topk, **defaults | options)
    return results if temperature is not None else (*results, None)


def without_digest(schedule):
    """The same schedule, for a CSR that was changed since: as on a device, where nobody looks."""
    restore, state = schedule.__reduce__()
    return restore(*state[:-1], None)


def attention(
    case: Case, arch, *, partial="float32", temperature=None, ctas=3, walks=None, change=None, call=None, **options
) -> Attention:
    """Build and attend.

    temperature: None: no ``lse_temperature``. ctas: multiprocessors. walks: whether the plan must ask the forward to
    walk; None: either. change: called with what ``build`` returned, to change it in place. call: further arguments of
    ``sparse_atten_func``. options: of ``sim.options``.
    """
    with simulation(arch=arch, multiprocessors=ctas, **options) as launches:
        plan = build(case)
        if walks is not None:
            assert _csr_host.walks(*plan[2].walk_totals, 128 // case.qhead_per_kv) == walks
        if change is not None:
            change(*plan)
            plan = (*plan[:2], without_digest(plan[2]))
        return Attention(*attend(case, plan, partial, temperature, **call or {}), launches)


def check(case: Case, arch, *, temperature=None, **options) -> Attention:
    """``attention``, which must give what the reference gives."""
    got = attention(case, arch, temperature=temperature, **options)
    want = case.reference(lse_temperature_scale=temperature or 1.0)
    assert_lse_close(got.lse, want.lse)
    assert_out_close(got.out, want)
    if temperature is not None:
        assert_lse_close(got.lse_temperature, want.lse_temperature)
    return got
