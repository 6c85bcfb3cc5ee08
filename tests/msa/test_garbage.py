"""No value on the device can make a kernel write out of bounds, fault or hang.

Each scenario overwrites one input with garbage, runs the pipeline into guarded buffers, and then runs a clean case. A
fault would poison the CUDA context and a hang would stop everything, so they all run in one child process, and a
scenario that the child did not finish has failed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

TIMEOUT_S = 150
INPUTS = ("q2k", "cu_seqlens_q", "cu_seqlens_k", "page_table", "seqused_k", "row_ptr", "q_indices")
WALK_ARRAYS = ("walk_blocks", "walk_counts", "walk_totals")
SCHEDULE_ARRAYS = (
    "scheduler_metadata", "work_count", "qsplit_indices", "split_counts", "split_entries", *WALK_ARRAYS,
)  # fmt: skip
WRONG_SIZES = ("total_rows too small", "total_rows too large")
KINDS = ("random", "huge", "negative", "near")
SCENARIOS = [f"{target}: {kind}" for target in (*INPUTS, *SCHEDULE_ARRAYS) for kind in KINDS]
SCENARIOS += [f"{target}: hint" for target in WRONG_SIZES]


def scramble(tensor, kind):
    """Overwrites int32 values in place, halves where they are int64; ``near`` shifts some values slightly."""
    tensor = tensor.view(torch.int32)
    if kind == "random":
        tensor.random_(-(2**31), 2**31 - 1)
    elif kind == "huge":
        tensor.fill_(2**31 - 1)
    elif kind == "negative":
        tensor.random_(-(2**31), -1)
    else:
        shift = torch.randint(-300, 300, tensor.shape, device="cuda", dtype=torch.int32)
        tensor.add_(shift * (torch.rand(tensor.shape, device="cuda") < 0.3))


def run_scenario(scenario, layout):
    from pipeline import Guarded, attend, build
    from reference import make_case

    case = make_case(
        lens_q=[300, 0, 150], lens_k=[1500, 200, 640], qhead_per_kv=8, topk=8, layout=layout, causal=True, trim=True,
        poison=False, seed=3, device="cuda",
    )  # fmt: skip
    target, kind = scenario.split(": ")
    if hasattr(case, target):
        if getattr(case, target) is None:  # a flat cache has no page table
            return
        scramble(getattr(case, target), kind)
    rows = {"total_rows too small": 3, "total_rows too large": case.total_rows + 500}.get(target, case.total_rows)
    row_ptr, q_indices, schedule = build(case, total_rows=rows)
    if target == "row_ptr":
        scramble(row_ptr, kind)
    elif target == "q_indices":
        scramble(q_indices, kind)
    elif target in SCHEDULE_ARRAYS:
        if target in WALK_ARRAYS:
            schedule.walk_totals.copy_(torch.tensor([0, 1]))  # the forward walks
        scramble(getattr(schedule, target), kind)
    total_q, heads = case.q.shape[:2]
    for with_schedule in (schedule, None):
        out, lse = Guarded((total_q, heads, 128), torch.bfloat16), Guarded((total_q, heads), torch.float32)
        attend(case, (row_ptr, q_indices, with_schedule), out=out.tensor, lse=lse.tensor, partial_dtype="bfloat16")
        torch.cuda.synchronize()
        out.assert_intact()
        lse.assert_intact()


def child():
    from pipeline import check
    from reference import make_case

    clean = make_case(lens_q=[100, 20], lens_k=[900, 300], layout="interleaved", causal=True, device="cuda")
    for scenario in SCENARIOS:
        for layout in ("flat", "paged"):
            run_scenario(scenario, layout)
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
    return Path(log).read_text().splitlines(), errors


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_garbage_in_an_input_cannot_write_out_of_bounds_fault_or_hang(scenario, finished):
    done, errors = finished
    if scenario not in done:
        first = SCENARIOS[len(done)]
        pytest.fail(errors if scenario == first else f"not reached: {first!r} stopped the process")


if __name__ == "__main__":
    child()
