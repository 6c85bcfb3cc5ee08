"""Host arrays of any type go to the simulator, as its options say, and the user is told."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from places import SEEDS, attend, build, check, run
from reference import make_case
from simulated import simulation

from sparse_aot import sim

ml_dtypes = pytest.importorskip("ml_dtypes")
ROOT = Path(__file__).resolve().parents[2]


def small_case(layout="flat"):
    return make_case(lens_q=[40, 9], lens_k=[300, 200], topk=4, layout=layout, trim=True, causal=True)


class Foreign:
    """An array of a type that only speaks DLPack, and whose namespace has ``from_dlpack``, as JAX's does."""

    def __init__(self, exporter):
        self.tensor = torch.from_dlpack(exporter)
        self.shape = self.tensor.shape

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=Foreign)


def to_numpy(tensor):
    bfloat16 = tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if bfloat16 else tensor.numpy()


def from_numpy(array):
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if bfloat16 else torch.from_numpy(array)


# name -> (type, from torch, to torch)
TYPES = {
    "NumPy": (np.ndarray, to_numpy, from_numpy),
    "DLPack": (Foreign, Foreign, lambda array: array.tensor),
}


def results(case):
    """Every array that the functions return, by name; of the schedule's items only those that exist."""
    plan = build(case)
    out, lse, lse_temperature = attend(case, plan, temperature=0.7, partial_dtype="bfloat16")
    names = ("qsplit_indices", "split_counts", "split_entries", "walk_counts", "walk_flags", "rest_indices")
    return {
        "k2q_row_ptr": plan[0],
        "k2q_q_indices": plan[1],
        "scheduler_metadata": plan[2].scheduler_metadata,
        "work_count": plan[2].work_count,
        **{name: getattr(plan[2], name) for name in names if getattr(plan[2], name) is not None},
        "out": out,
        "lse": lse,
        "lse_temperature": lse_temperature,
    }


@pytest.mark.parametrize("csr", [False, True], ids=["host CSR", "simulated CSR"])
@pytest.mark.parametrize("kind", TYPES)
def test_arrays_of_all_types_give_the_same_bits(arch, kind, csr):
    case = small_case("interleaved")
    array_type, convert, convert_back = TYPES[kind]
    arrays = {field.name: getattr(case, field.name) for field in fields(case)}
    arrays = {name: convert(array) for name, array in arrays.items() if isinstance(array, torch.Tensor)}
    with simulation(arch, csr=csr):
        want = results(case)
        found = results(replace(case, **arrays))
    assert {type(array) for array in found.values()} == {array_type}
    got = {name: convert_back(array) for name, array in found.items()}
    for items in (want, got):
        items["scheduler_metadata"] = items["scheduler_metadata"][: items["work_count"][0]]
    for name, array in want.items():
        assert got[name].dtype == array.dtype and torch.equal(got[name], array), name


def test_the_types_of_a_call_may_differ(arch):
    """Results are of the type of the first array."""
    case = small_case()
    mixed = replace(case, k=to_numpy(case.k), cu_seqlens_q=to_numpy(case.cu_seqlens_q), q2k=Foreign(case.q2k))
    with simulation(arch):
        want = results(case)
        got = results(mixed)
    assert type(got["k2q_row_ptr"]) is Foreign and torch.equal(got["k2q_row_ptr"].tensor, want["k2q_row_ptr"])
    assert torch.equal(got["out"], want["out"])


@pytest.mark.parametrize("csr", [False, True], ids=["host CSR", "simulated CSR"])
def test_the_first_simulated_call_warns_and_no_other(arch, csr):
    """Whatever the filters are; host code is no reason to warn."""
    code = """
import numpy as np
from sparse_aot import build_k2q_csr
q2k, cu_seqlens = np.zeros((1, 20, 4), np.int32), np.array([0, 20], np.int32)
for _ in range(3):
    build_k2q_csr(q2k, cu_seqlens, cu_seqlens, total_k=20, return_schedule=True)
build_k2q_csr(q2k, cu_seqlens, cu_seqlens, total_k=20)
"""
    environment = {"PYTHONPATH": str(ROOT), "SPARSE_AOT_SIM_ARCH": arch, "SPARSE_AOT_SIM_CSR": str(int(csr))}
    command = [sys.executable, "-W", "always", "-c", code]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    warnings = [line for line in process.stderr.splitlines() if "SimulationWarning" in line]
    assert len(warnings) == csr
    assert all("the arrays are on the host" in warning and arch in warning for warning in warnings)


def test_the_options_reach_every_launch(arch):
    case = small_case()

    def launches_of(**options):
        with simulation(arch, **options) as launches:
            run(case)
        return launches

    runs = [launches_of(multiprocessors=ctas, seed=seed) for ctas, seed in ((2, 0), (2, 0), (2, 1), (5, 0))]
    steps = [[launch.statistics.warp_instructions for launch in launches] for launches in runs]
    assert steps[0] == steps[1] and steps[0][0] != steps[2][0]
    assert [launches[0].grid for launches in runs] == [2, 2, 2, 5]
    assert {launch.entry["arch"] for launches in runs for launch in launches} == {arch}
    with pytest.raises(sim.SimulationError, match="stopped after"):
        launches_of(max_steps=1000)
    with pytest.raises(ValueError, match="no checks named sloth"):
        launches_of(off=("sloth",))


def test_results_depend_on_neither_seed_nor_multiprocessors(arch):
    case = small_case()
    with simulation(arch):
        want = check(case, temperature=0.7)
    for seed, ctas in zip(SEEDS, (1, 2, 16), strict=True):
        with simulation(arch, seed=seed, multiprocessors=ctas):
            got = run(case, temperature=0.7)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
