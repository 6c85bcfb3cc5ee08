"""SPARSE_AOT_LOG=1 and SPARSE_AOT_NVTX=1, which are read when the package is imported: each test is a process."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from places import needs_simulator
from stub_driver import library_folder, run_python, stub_environment, write_bundle

ON_STUB = """
import sys
from calls import Call
call = Call()
print("before the call", file=sys.stderr)
"""
ON_HOST = "from host_calls import *; csr = build(); attend(*csr)"
NVTX = """
#include <stdio.h>
#include <stdlib.h>
static void say(const char *text) {
  FILE *log = fopen(getenv("NVTX_LOG"), "a");
  fprintf(log, "%s\\n", text);
  fclose(log);
}
int nvtxRangePushA(const char *name) { say(name); return 0; }
int nvtxRangePop(void) { say("pop"); return 0; }
"""


def lines_on_stub(code, **environment):
    with tempfile.TemporaryDirectory() as folder:
        stub = stub_environment(folder, write_bundle(Path(folder) / "bundle"))
        text = run_python(ON_STUB + code, LD_LIBRARY_PATH=str(library_folder()), **stub, **environment).stderr
    return text.partition("before the call\n")[2].splitlines()


@pytest.fixture(scope="module")
def nvtx(tmp_path_factory):
    """The folder of a library that writes down the ranges."""
    folder = tmp_path_factory.mktemp("nvtx")
    (folder / "nvtx.c").write_text(NVTX)
    library = folder / "libnvtx3interop.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "nvtx.c"], check=True)
    return folder


@pytest.mark.parametrize(
    "code, remark",
    [
        ("call.run()", "walks what the walk plan lists, the rest block-outer"),
        (
            "call.run(schedule=None)",
            "no schedule given, so it is made here; block-outer, the schedule has no walk plan",
        ),
        ("call.run(q=call.arguments['q'][:, :4])", "block-outer, the walk plan is for qhead_per_kv=4"),
    ],
    ids=["walk plan", "no schedule", "another G"],
)
def test_a_line_a_call_names_kernels_grids_and_traversal(code, remark):
    (line,) = lines_on_stub(code, SPARSE_AOT_LOG="1", PYTHONWARNINGS="ignore")
    assert line.startswith("sparse_aot: sparse_atten_func: sm_90a/")
    assert f"; {remark}" in line
    group = 2 if "q=" in code else 4
    assert (
        f"sm_90a/fwd-bf16-g{group}-pbfloat16 on cuda:0 grid 132, sm_90a/combine-pbfloat16-topk4 on cuda:0 grid" in line
    )
    assert ("schedule_fill on cuda:0" in line) == ("schedule=None" in code), "what the call launched for itself"


def test_a_call_that_fails_has_its_line_and_ends():
    code = "try: call.run(causal=True, seqused_k=1)\nexcept TypeError: call.run()"
    failed, worked = lines_on_stub(code, SPARSE_AOT_LOG="1")
    assert failed == "sparse_aot: sparse_atten_func: nothing launched"
    assert worked.count("fwd") == 1


@needs_simulator
def test_host_code_and_the_simulator_are_named():
    text = run_python(ON_HOST, SPARSE_AOT_LOG="1").stderr
    build, attend = (line for line in text.splitlines() if line.startswith("sparse_aot: "))
    assert build == "sparse_aot: build_k2q_csr: nothing launched; compiled host code, the arrays are on the host"
    assert "sm_90a/fwd-bf16-g2-pbf16 on the simulator grid 8, " in attend


def test_ranges_of_public_calls_open_and_close(nvtx, tmp_path):
    code = "call.run(schedule=None)"
    with tempfile.TemporaryDirectory() as folder:
        stub = stub_environment(folder, write_bundle(Path(folder) / "bundle"))
        stub |= {"SPARSE_AOT_NVTX": "1", "NVTX_LOG": str(tmp_path / "log")}
        done = run_python(ON_STUB + code, LD_LIBRARY_PATH=f"{library_folder()}:{nvtx}", **stub)
    assert "sparse_aot:" not in done.stderr
    assert (tmp_path / "log").read_text().splitlines() == [
        "sparse_aot.build_k2q_csr",
        "pop",
        "sparse_aot.sparse_atten_func",
        "sparse_aot.prepare_sparse_fwd_schedule_and_split",
        "pop",
        "pop",
    ]


def test_without_the_library_of_ranges_one_line_says_so():
    code = """
import ctypes, numpy
from cuda.bindings import driver
def none(*arguments): raise OSError
ctypes.CDLL = none
import sparse_aot
"""
    warned = [line for line in run_python(code, SPARSE_AOT_NVTX="1").stderr.splitlines() if "Warning" in line]
    assert len(warned) == 1 and "SPARSE_AOT_NVTX=1: no ranges" in warned[0] and "nvidia-nvtx" in warned[0]


def test_without_being_asked_for_calls_say_nothing():
    assert lines_on_stub("call.run()") == []
