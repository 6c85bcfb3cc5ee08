"""Our own kernels in the simulator, through the public functions: what was launched, and changed kernels."""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

import pytest
from places import Place

from sparse_aot import sim
from sparse_aot._core.bundle import get_bundle

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100f",)
ATTENTION = ("fwd", "combine")  # the operations of sparse_atten_func; the others make CSR and schedule


@dataclass(frozen=True)
class Launch:
    """A launch that ran to its end: the configuration's entry in the manifest, CTAs, and what was executed."""

    entry: dict[str, Any]
    grid: int
    statistics: Any  # ptxsim.Statistics

    @property
    def operation(self) -> str:
        return self.entry["operation"]

    @property
    def path(self) -> str:
        """The configuration's name in ``sim.modules``."""
        return f"{self.entry['arch']}/{self.entry['name']}"


@contextlib.contextmanager
def recorded():
    """The list of the simulated launches of what is called."""
    launches = []
    run_to_the_end = sim.run

    def run(entry, grid, params, memory):
        statistics = run_to_the_end(entry, grid, params, memory)
        launches.append(Launch(entry, grid, statistics))
        return statistics

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim, "run", run)
        yield launches


@contextlib.contextmanager
def simulation(arch, **options):
    """Calls go to the place of an architecture, as ``Place.opened`` has it; yields the list of their launches."""
    with Place("cpu", arch).opened(**options), recorded() as launches:
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
        patch.setitem(sim.modules, path, sim.find_simulator().load(text))
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
