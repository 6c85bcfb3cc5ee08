"""What a check of the simulator finds in one of our own kernels reaches the caller of the public functions."""

import re

import pytest
import torch
from places import needs_simulator
from places import run as attend
from reference import make_case
from selections import random_selection
from simulated import BLACKWELL, HOPPER, believing, changed_maps, further, mutants, ptx, replaced, simulation

from aot.configs import ARCHS
from sparse_aot import sim

pytestmark = needs_simulator

COUNT_BY_WARP = """{ .reg .b32 n; mov.b32 n, %tid.x; and.b32 n, n, 32; add.u32 n, n, 64;
bar.sync 0, n;
}"""
STORE_PAST_LOCAL = """{ .local .align 4 .b8 array[4]; .reg .b32 n; mov.b32 n, 0;
st.local.b32 [array+4], n;
} bar.sync 0;"""

# (check, architectures, pattern, replacement): a match of the pattern in the forward's PTX whose change it reports.
BROKEN = [
    ("shared_bounds", ARCHS, r"(st\.shared[^;\[]*\[%r\d+)(\+\d+)?", further(1 << 20)),
    ("local_bounds", ARCHS, r"bar\.sync\s+0;", STORE_PAST_LOCAL),
    ("tensor_bounds", BLACKWELL, r"(tcgen05\.ld[^;\[]*\[%r\d+)(\+\d+)?", further(512)),
    ("alignment", ARCHS, r"(ld\.global\.b32[^;\[]*\[%rd\d+)(\+\d+)?", further(2)),
    ("uninitialized", ARCHS, r"st\.shared\.b32[^;]*;", ""),
    ("race", ARCHS, r"mbarrier\.arrive\.shared", "mbarrier.arrive.relaxed.cta.shared"),
    ("async_early", ARCHS, r"cp\.async\.bulk\.wait_group[^;]*;", ""),
    ("proxy_fence", ARCHS, r"fence\.proxy\.async[^;]*;", ""),
    ("in_flight_registers", HOPPER, r"wgmma\.fence[^;]*;", ""),
    ("mbarrier", ARCHS, r"(expect_tx[^;]*), %r\d+;", r"\1, 8192;"),
    ("barrier", ARCHS, r"bar\.sync\s+0;", COUNT_BY_WARP),
    ("convergence", ARCHS, r"(shfl\.sync[^;]*), -1;", r"\1, 1;"),
    ("tensor_fence", BLACKWELL, r"tcgen05\.fence::after_thread_sync;", ""),
    ("tensor_order", BLACKWELL, r"(tcgen05\.mma[^;\[]*\[%r\d+)(\+\d+)?", further(16)),
    ("tensor_leak", BLACKWELL, r"tcgen05\.dealloc[^;]*;", ""),
    ("cta_group", BLACKWELL, r"tcgen05\.commit\.cta_group::1", "tcgen05.commit.cta_group::2"),
    ("registers", ARCHS, r"setmaxnreg\.inc", "setmaxnreg.dec"),
    ("deadlock", ARCHS, r"mbarrier\.arrive\.shared[^;]*;", ""),
]
FINAL = {"deadlock", "local_bounds", "tensor_bounds"}  # nothing can carry on from there
ELSEWHERE = {"global_bounds", "descriptor", "shared_limit"}  # the tests below
UNUSED = {"scale_factors", "cluster"}  # no kernel of ours has any


def small_case():
    return make_case(lens_q=[70, 3], lens_k=[400, 200], head_kv=1, qhead_per_kv=4, topk=4, layout="paged", causal=True)


def run(arch, change=None, **options):
    """The launches of a call."""
    with simulation(arch, multiprocessors=2, max_steps=3_000_000, **options) as launches:
        attend(small_case(), change=change, partial_dtype="bfloat16")
    return launches


def report_of(arch, **options):
    """What the simulator says of a call; None where it finds nothing."""
    try:
        run(arch, **options)
    except sim.SimulationError as stopped:
        return str(stopped)
    return None


def assert_names_the_place(report, launch, text):
    """Kernel, line, and the instruction that stands there."""
    assert f"kernel {launch.entry['symbol']}" in report
    line = int(re.search(r"PTX line (\d+)", report.partition(launch.entry["symbol"])[2])[1])
    if not report.startswith("deadlock"):
        instruction = text.splitlines()[line - 1].strip()
        assert instruction[:60] in report


def test_every_check_is_met_here():
    assert {check for check, *_ in BROKEN} | ELSEWHERE == set(sim.find_simulator().CHECKS) - UNUSED


@pytest.mark.parametrize(
    "arch, check, pattern, replacement",
    [(arch, check, *change) for check, archs, *change in BROKEN for arch in archs],
    ids=[f"{arch}-{check}" for check, archs, *_ in BROKEN for arch in archs],
)
def test_a_check_reports_what_it_finds_until_it_is_off(arch, check, pattern, replacement):
    forward = run(arch)[0]
    for text in mutants(ptx(forward.path), forward.statistics.lines, pattern, replacement):
        with replaced(forward.path, text):
            report = report_of(arch)
            if report and report.startswith(f"{check}: "):
                assert_names_the_place(report, forward, text)
                if check not in FINAL:
                    assert not (report_of(arch, off=(check,)) or "").startswith(f"{check}: ")
                return
    pytest.fail(f"no change of {pattern} is reported by {check}")


def test_a_tensor_map_of_another_rank_is_reported(arch):
    def change(number, arguments):
        for name in ("extents", "strides", "box"):
            arguments[name] = arguments[name][:-1]

    launch = run(arch)[0]
    with changed_maps(change):
        report = report_of(arch)
    assert report.startswith("descriptor: ")
    assert_names_the_place(report, launch, ptx(launch.path))


def test_more_shared_memory_than_there_is_is_reported(arch, monkeypatch):
    launch = sim.run
    monkeypatch.setattr(sim, "run", lambda entry, *rest: launch(entry | {"smem_bytes": 1 << 18}, *rest))
    assert report_of(arch).startswith("shared_limit: ")


FAR = 1 << 28
# Parameter of the forward -> (larger size, what to overwrite in the schedule so that only the size keeps the bounds).
FAR_AWAY = {
    "total_q": (1 << 24, lambda schedule: schedule.qsplit_indices.fill_((1 << 24) - 1)),
    "head_kv": (2 * FAR, lambda schedule: schedule.scheduler_metadata[:, 0].fill_(FAR)),
    "total_rows": (2 * FAR, lambda schedule: schedule.scheduler_metadata[:, 1].fill_(FAR)),
    "batch": (2 * FAR, lambda schedule: schedule.scheduler_metadata[:, 4].fill_(FAR)),
    "max_pages": (2 * FAR, lambda schedule: schedule.scheduler_metadata[:, 5].fill_(FAR)),
    "work_capacity": (2 * FAR, lambda schedule: schedule.work_count.fill_(FAR)),
}


@pytest.mark.parametrize("parameter", FAR_AWAY)
def test_indices_of_a_schedule_are_held_against_sizes(arch, parameter):
    """The kernel ignores what does not exist; the same PTX with a larger size built in reads beyond the arrays."""
    size, overwrite = FAR_AWAY[parameter]

    def change(row_ptr, q_indices, schedule):
        overwrite(schedule)

    forward = run(arch, change=change)[0]
    text = believing(forward, parameter, size)
    with replaced(forward.path, text):
        report = report_of(arch, change=change)
    assert report.startswith("global_bounds: ")
    assert_names_the_place(report, forward, text)


def test_a_page_that_does_not_exist_changes_only_who_reads_it(arch):
    case = small_case()
    with simulation(arch):
        out, lse = attend(case)
    selects = ((case.q2k[0] == 1).any(1) & (torch.arange(73) < 70))[:, None]
    case.page_table[0, 1] = 1_000_000
    with simulation(arch):
        got_out, got_lse = attend(case)
    assert selects.any() and not selects.all()
    assert torch.equal(got_lse.masked_fill(selects, 0), lse.masked_fill(selects, 0))
    assert torch.equal(got_out.masked_fill(selects[..., None], 0), out.masked_fill(selects[..., None], 0))
    assert got_out.isfinite().all()


# Operation -> a size without which it leaves its arrays even on input that is right.
SIZES = {
    "csr_rows": "total_rows",
    "csr_keys": "total_q",
    "walk_plan": "size",
    "radix_count": "size",
    "radix_scan": "tiles",
    "radix_scatter": "size",
    "csr_row_ptr": "total_rows",
    "csr_collect": "total_q",
    "csr_split": "total_q",
    "schedule_count": "total_rows",
    "schedule_fill": "size",
}


def build_and_prepare():
    selection = random_selection(1, 1, 30, 2048 * 128, 2, 8, g=16)
    built = selection.build()
    selection.prepare(k2q_row_ptr=built["k2q_row_ptr"], k2q_q_indices=built["k2q_q_indices"])


@pytest.mark.parametrize("operation", SIZES)
def test_kernels_of_csr_and_schedule_are_held_to_the_bounds(arch, operation):
    with simulation(arch, csr=True) as launches:
        build_and_prepare()
    launch = next(launch for launch in launches if launch.operation == operation)
    text = believing(launch, SIZES[operation], 1 << 20)
    with (
        replaced(launch.path, text),
        simulation(arch, csr=True, off=("race",)),  # arrays lie side by side in one buffer: it meets the next one first
        pytest.raises(sim.SimulationError, match=r"^global_bounds: ") as stopped,
    ):
        build_and_prepare()
    assert_names_the_place(str(stopped.value), launch, text)
