"""`python -m ptxsim run` on small programs of our own, which `programs/` has."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
needs_dsl = pytest.mark.skipif(
    not all(importlib.util.find_spec(package) for package in ("torch", "cutlass")),
    reason="programs need torch and the CuTe DSL",
)


def ptxsim(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "ptxsim", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def run(program, *arguments):
    return ptxsim("run", TESTS / "programs" / program, *arguments)


def line_of(program, text):
    """ "program:line" of the only line that has the text."""
    lines = (TESTS / "programs" / program).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line)
    return f"{program}:{number}"


def stopped_by(check, result):
    assert result.returncode == 1, result.stderr
    assert f"was stopped: {check}: " in result.stderr
    assert "1 stopped" in result.stderr.splitlines()[-1]
    return result.stderr


@needs_dsl
def test_a_program_runs_with_its_own_arguments_and_its_launches_are_listed():
    result = run("add.py", "--size", "3", "--arch", "sm_90a", "--", "--seed", "7")
    assert result.returncode == 0, result.stderr
    assert "arguments: --size 3 --seed 7" in result.stdout
    assert "grid 8x1x1, block 128x1x1" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("ptxsim: 1 launches, ")


@needs_dsl
def test_the_report_of_an_overrun_names_the_tensor_and_the_line_of_the_program():
    report = stopped_by("global_bounds", run("add.py", "--overrun"))
    assert "float32[1000] of add.py:" in report
    assert f"({line_of('add.py', 'c[i] =')})" in report
    assert f"launched at {line_of('add.py', 'run(from_dlpack')}" in report


@needs_dsl
def test_a_tensor_that_stayed_on_the_host_is_out_of_a_kernels_bounds():
    stopped_by("global_bounds", run("add.py", "--host"))


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_tensor_maps_and_barriers_serve_a_program(arch, tmp_path):
    result = run("tile.py", "--arch", arch, "--ptx", tmp_path)
    assert result.returncode == 0, result.stderr
    assert f".target {arch}" in (tmp_path / "0.ptx").read_text()


@needs_dsl
def test_a_read_before_the_copy_is_complete_stops_the_program():
    report = stopped_by("async_early", run("tile.py", "--no-wait"))
    assert f"({line_of('tile.py', 'target[row, thread] =')})" in report


@needs_dsl
def test_with_the_check_off_the_program_sees_what_it_read_too_early():
    result = run("tile.py", "--no-wait", "--seed", "2", "--off", "async_early", "--off", "uninitialized")
    assert result.returncode == 1
    assert "AssertionError" in result.stderr
    assert "none stopped" in result.stderr.splitlines()[-1]


@needs_dsl
def test_a_check_that_is_tolerated_is_reported_and_the_program_runs_on():
    result = run("tile.py", "--no-wait", "--seed", "1", "--tolerate", "async_early")  # seed 1: copies are done at once
    assert result.returncode == 0, result.stderr
    assert "tolerated: async_early: " in result.stderr
    assert result.stderr.splitlines()[-1].startswith("ptxsim: 1 launches, ")


@needs_dsl
def test_a_program_that_fails_without_a_launch_fails(tmp_path):
    program = tmp_path / "fails.py"
    program.write_text("import sys\nsys.exit('no')\n")
    result = ptxsim("run", program)
    assert (result.returncode, result.stderr.splitlines()[0]) == (1, "no")


def test_an_unknown_check_is_refused():
    result = ptxsim("run", "x.py", "--off", "nothing")
    assert result.returncode == 2
    assert "invalid choice: 'nothing'" in result.stderr


def test_the_simulator_alone_loads_nothing_of_it():
    code = "import sys, ptxsim; assert not {'ptxsim.host', 'torch', 'cutlass', 'cuda'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
