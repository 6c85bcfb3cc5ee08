"""No value in an array of a call can make a kernel write out of bounds, fault or hang.

Each scenario overwrites one input with garbage and runs the pipeline into guarded buffers. The simulator checks the
bounds of every access besides. On a device a fault would poison the CUDA context and a hang would stop everything, so
there all of them run in one child process, each followed by a clean case, and one that the child did not finish has
failed.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from guarded import Guarded
from places import PARTIALS, G, Place, attend, axes, build, check, run, without_digest
from reference import make_case

TIMEOUT_S = 150
INPUTS = ("q2k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k", "row_ptr", "q_indices")
WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_flags", "rest_indices")
SCHEDULE_ARRAYS = (
    "scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries", *WALK_ARRAYS,
)  # fmt: skip
WRONG_SIZES = ("total_rows too small", "total_rows too large")
KINDS = ("random", "huge", "negative", "near")
SCENARIOS = [f"{target}: {kind}" for target in (*INPUTS, *SCHEDULE_ARRAYS) for kind in KINDS]
SCENARIOS += [f"{target}: hint" for target in WRONG_SIZES]
REFUSED_ON_HOST = ("cu_seqlens_q", "cu_seqlens_k", "total_rows too small")  # host code looks at what is on the host
SIMULATED = [scenario for scenario in SCENARIOS if not scenario.startswith(REFUSED_ON_HOST)]


def case_of(place, lens_q, lens_k, **options):
    options = {"layout": "paged"} | options
    return make_case(lens_q=lens_q, lens_k=lens_k, causal=True, trim=True, device=place.device, **options)


def scramble(tensor, kind):
    """Overwrites int32 values in place; ``near`` shifts some values slightly."""
    if kind == "random":
        tensor.random_(-(2**31), 2**31 - 1)
    elif kind == "huge":
        tensor.fill_(2**31 - 1)
    elif kind == "negative":
        tensor.random_(-(2**31), -1)
    else:
        shift = torch.randint(-300, 300, tensor.shape, device=tensor.device, dtype=torch.int32)
        tensor.add_(shift * (torch.rand(tensor.shape, device=tensor.device) < 0.3))


def run_scenario(place, scenario, layout):
    torch.manual_seed(0)
    if place.arch is None:
        shape = {"lens_q": [300, 0, 150], "lens_k": [1500, 200, 640], "qhead_per_kv": 8, "topk": 8}
    else:
        shape = {"lens_q": [9, 0, 5], "lens_k": [300, 90, 140], "qhead_per_kv": 2, "topk": 4}
    case = case_of(place, **shape, layout=layout, poison=False, seed=3)
    target, kind = scenario.split(": ")
    if hasattr(case, target):
        if getattr(case, target) is None:  # a flat cache has no page table
            return
        scramble(getattr(case, target), kind)
    rows = {"total_rows too small": 3, "total_rows too large": case.total_rows + 500}.get(target, case.total_rows)
    traversal = "mixed" if target in WALK_ARRAYS and "mixed" in place.traversals else None
    row_ptr, q_indices, schedule = build(case, traversal, total_rows=rows)
    if target == "row_ptr":
        scramble(row_ptr, kind)
    elif target == "q_indices":
        scramble(q_indices, kind)
    elif target in SCHEDULE_ARRAYS:
        if getattr(schedule, target) is None:  # an architecture that does not walk
            return
        scramble(getattr(schedule, target), kind)
    for with_schedule in (without_digest(schedule), None):
        out = Guarded(case.q.shape, torch.bfloat16, place.device)
        lse = Guarded(case.q.shape[:2], torch.float32, place.device)
        attend(case, (row_ptr, q_indices, with_schedule), out=out.tensor, lse=lse.tensor, partial_dtype="bfloat16")
        if place.arch is None:
            torch.cuda.synchronize()
        out.assert_intact()
        lse.assert_intact()


def child():
    place = Place("cuda")
    clean = make_case(lens_q=[100, 20], lens_k=[900, 300], layout="interleaved", causal=True, device="cuda")
    for scenario in SCENARIOS:
        for layout in ("flat", "paged"):
            run_scenario(place, scenario, layout)
        check(clean)
        print(scenario, flush=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Scenarios that the child finished, and what it wrote to stderr."""
    log = tmp_path_factory.mktemp("garbage") / "stdout"
    paths = os.pathsep.join(sys.path)
    with log.open("w") as stdout:
        process = subprocess.Popen(
            [sys.executable, __file__], stdout=stdout, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )  # fmt: skip
        try:
            errors = process.communicate(timeout=TIMEOUT_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            errors = f"still running after {TIMEOUT_S} s\n" + process.communicate()[1]
    return log.read_text().splitlines(), errors


@axes(sim={"scenario": SIMULATED}, cuda={"scenario": SCENARIOS})
def test_garbage_in_an_input_cannot_write_out_of_bounds_fault_or_hang(place, scenario, request):
    if place.arch is None:
        done, errors = request.getfixturevalue("finished")
        if scenario not in done:
            first = SCENARIOS[len(done)]
            pytest.fail(errors if scenario == first else f"not reached: {first!r} stopped the process")
        return
    with place.opened(csr=True):
        run_scenario(place, scenario, "paged")


# Several arrays at once, in the simulator --------------------------------------------------------------------------

LENS = [37, 0, 70], [300, 90, 513]
WORDS = (-(2**31), -7, -1, 0, 1, 127, 128, (1 << 24) - 1, 1 << 24, 2**31 - 1)


def corrupt(array, share, rng):
    """Overwrite some of the elements."""
    at = rng.random(array.shape) < share
    array[torch.from_numpy(at)] = torch.from_numpy(rng.choice(WORDS, at.sum())).to(array.dtype)


@pytest.fixture
def simulated(arch):
    return Place("cpu", arch)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_a_schedule_and_lengths_faults_or_hangs(simulated, seed, g):
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(row_ptr, 0.05, rng)
        corrupt(schedule.scheduler_metadata, 0.1, rng)
        corrupt(schedule.qsplit_indices, 0.2, rng)
        corrupt(schedule.split_counts, 0.2, rng)
        corrupt(schedule.split_entries, 0.2, rng)
        corrupt(schedule.work_count, seed % 2, rng)
        corrupt(case.cu_seqlens_q, 0.3, rng)
        corrupt(case.cu_seqlens_k, 0.3, rng)

    case = case_of(simulated, *LENS, qhead_per_kv=g)
    corrupt(case.page_table, 0.3, rng)
    corrupt(case.seqused_k, 0.3, rng)
    # Items that name one partial twice: two CTAs write it, or one while its bulk copy still does.
    with simulated.opened(seed=seed, off=("race", "async_early")):
        run(case, change=change, partial_dtype=PARTIALS[seed % 2], temperature=0.7)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_a_walk_plan_faults_or_hangs(simulated, seed, g):
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(schedule.walk_blocks, 0.1, rng)
        corrupt(schedule.walk_counts, 0.1, rng)
        corrupt(schedule.rest_indices, 0.3, rng)
        corrupt(schedule.split_entries, 0.2, rng)
        corrupt(schedule.walk_flags, seed % 2, rng)
        corrupt(case.cu_seqlens_q, 0.3, rng)

    if "walk" not in simulated.traversals:
        pytest.skip("its forward does not walk")
    case = case_of(simulated, *LENS, qhead_per_kv=g)
    corrupt(case.page_table, 0.3, rng)
    with simulated.opened(seed=seed):
        run(case, ("walk", "mixed")[seed % 2], change=change, partial_dtype=PARTIALS[seed % 2], temperature=0.7)


@pytest.mark.parametrize("seed, g", [*enumerate(G)])
def test_no_garbage_in_a_csr_faults_or_hangs(simulated, seed, g):
    """Kernels make the schedule, too."""
    rng = np.random.default_rng(seed)

    def change(row_ptr, q_indices, schedule):
        corrupt(row_ptr, 0.05, rng)
        corrupt(q_indices, 0.2, rng)

    case = case_of(simulated, *LENS, qhead_per_kv=g, layout="flat")
    with simulated.opened(csr=True, seed=seed):
        run(case, change=change, schedule=None, partial_dtype=PARTIALS[seed % 2])


if __name__ == "__main__":
    child()
