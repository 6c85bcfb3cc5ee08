"""The command line: info, verify, demo, bench."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from places import needs_simulator
from stub_driver import REAL_BUNDLE, library_folder, read_manifest, write_bundle, write_manifest

import sparse_aot
from sparse_aot import cli

pytestmark = pytest.mark.skipif(not (REAL_BUNDLE / "manifest.json").exists(), reason="no bundle built")


def run(*argv, **environment):
    """(exit status, standard output, standard error) of a process without a GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(
        [sys.executable, "-m", "sparse_aot.cli", *argv], capture_output=True, text=True, env=environment
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def bundle(tmp_path):
    """A copy of three of the checkout's cubins."""
    entries = [entry for entry in read_manifest(REAL_BUNDLE) if entry["operation"] == "combine"][:3]
    for entry in entries:
        (tmp_path / entry["file"]).parent.mkdir(exist_ok=True)
        shutil.copy(REAL_BUNDLE / entry["file"], tmp_path / entry["file"])
    write_manifest(tmp_path, entries)
    return tmp_path


def test_info_lists_versions_configurations_and_devices():
    status, out, _ = run("info", "--json")
    info = json.loads(out)
    assert status == 0 and info["devices"] == [] and info["simulator"] is True
    assert info["bundle"]["architectures"] == ["sm_100f", "sm_90a"]
    assert "sm_90a/fwd-bf16-g16-pbf16" in info["bundle"]["configurations"]
    status, out, _ = run("info")
    assert status == 0 and "fwd-bf16-g16-pbf16" in out and "no CUDA device" in out


def test_info_names_the_devices_and_the_architecture_that_they_take(bundle):
    log = bundle / "log"
    for capability, arch in (("9.0", "sm_90a"), ("8.0", None)):
        status, out, _ = run("info", "--json", **stub(bundle, STUB_LOG=str(log), STUB_CAPABILITY=capability))
        device = json.loads(out)["devices"][1]
        assert (status, device["name"], device["compute_capability"]) == (0, "Stub GPU", capability)
        assert device["architecture"] == arch
    assert "cuInit" in log.read_text() and "cuDevicePrimaryCtxRetain" not in log.read_text()


def stub(folder, **environment):
    """Environment variables for a process whose driver is the stub, with the bundle in a folder."""
    return {"LD_LIBRARY_PATH": str(library_folder()), "SPARSE_AOT_CUBINS": str(folder), **environment}


# environment of the stub -> what the error says
BROKEN_DRIVERS = {
    "too old": ({"STUB_VERSION": "12040"}, "the driver is too old: it is for CUDA 12.4"),
    "mismatched": ({"STUB_FAIL": "cuInit=803"}, "driver for CUDA 13.0 .*: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    "incomplete": ({"STUB_LACKS": "cuInit"}, "functions are missing in libcuda.so.1: .*cuInit"),
    "of another kind": (None, r"the driver cannot be used: .*libcuda.so.1: (invalid ELF header|file too short)"),
}


@pytest.mark.parametrize("driver", BROKEN_DRIVERS)
def test_a_driver_that_cannot_be_used_fails_the_tools_and_is_named_with_what_is_needed(bundle, tmp_path, driver):
    settings, message = BROKEN_DRIVERS[driver]
    environment = stub(bundle, **(settings or {}))
    if settings is None:
        (tmp_path / "libcuda.so.1").write_text("no library" * 100)
        environment["LD_LIBRARY_PATH"] = str(tmp_path)
    for command in (["info"], ["info", "--json"], ["demo"]):
        status, out, err = run(*command, **environment)
        assert status == 1 and re.search(message, err) and "CUDA 13.0 or later" in err, err
        assert "Traceback" not in err and "attention" not in out
    info = json.loads(run("info", "--json", **environment)[1])
    assert info["devices"] == [] and re.search(message, info["cuda_error"]) and info["bundle"]["configurations"]


def test_info_prints_the_drivers_version(bundle):
    status, out, _ = run("info", **stub(bundle))
    assert status == 0 and "driver: for CUDA 13.0\n" in out
    assert json.loads(run("info", "--json", **stub(bundle))[1])["driver_version"] == "13.0"
    status, out, _ = run("info", **stub(bundle, STUB_FAIL="cuInit=100"))  # a driver without a device is no fault
    assert status == 0 and "driver: for CUDA 13.0\n" in out and "no CUDA device" in out


def test_verify_passes_on_what_was_built():
    status, out, _ = run("verify")
    assert status == 0 and "0 damaged" in out


@pytest.mark.parametrize("damage", ["byte", "missing", "offset", "symbol", "box"])
def test_verify_names_a_damaged_file(bundle, damage):
    entries = read_manifest(bundle)
    damaged = bundle / entries[1]["file"]
    if damage == "byte":
        data = bytearray(damaged.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
    elif damage == "missing":
        damaged.unlink()
    elif damage == "offset":
        entries[1]["params"][2]["offset"] += 8
    elif damage == "box":
        entries[1] = next(entry for entry in read_manifest(REAL_BUNDLE) if entry["operation"] == "fwd")
        damaged = bundle / entries[1]["file"]
        shutil.copy(REAL_BUNDLE / entries[1]["file"], damaged)
        entries[1]["params"][0]["tensor_map"]["box"] = [1] * 9
    else:
        entries[1]["symbol"] = "other"
    write_manifest(bundle, entries)
    status, out, err = run("verify", SPARSE_AOT_CUBINS=str(bundle))
    assert status == 1 and "3 cubins, 1 damaged" in out
    assert err.startswith(str(damaged))


def test_no_bundle_is_an_error_that_says_how_to_make_one(tmp_path):
    for command in ("info", "verify", "demo"):
        status, _, err = run(command, SPARSE_AOT_CUBINS=str(tmp_path))
        assert status == 1 and str(tmp_path / "manifest.json") in err and "aot build" in err


@needs_simulator
def test_demo_runs_all_of_it_on_the_host_with_attention_in_the_simulator_for_each_architecture():
    status, out, err = run("demo")
    assert status == 0 and not err, err
    assert "hashes and layouts right" in out and "equal to brute force" in out
    errors = re.findall(r"^attention: (\w+), \w+ arrays, largest error (\S+) against float32", out, re.MULTILINE)
    assert [arch for arch, _ in errors] == ["sm_100f", "sm_90a"]
    assert all(0 < float(error) < 0.05 for _, error in errors)


def test_demo_fails_on_a_damaged_bundle(tmp_path):
    status, _, err = run("demo", SPARSE_AOT_CUBINS=str(write_bundle(tmp_path)))
    assert status == 1 and ".cubin" in err


def test_info_and_verify_name_a_manifest_that_is_none(tmp_path):
    manifest = tmp_path / "manifest.json"
    for text in ("[]", '{"schema": 1}', '{"schema": 2}'):
        manifest.write_text(text)
        for command in ("info", "verify", "demo"):
            status, _, err = run(command, SPARSE_AOT_CUBINS=str(tmp_path))
            assert status == 1 and err.startswith(f"sparse-aot: {manifest}: expected")


@pytest.mark.parametrize("simulator", [True, False])
def test_demo_says_why_a_device_runs_no_attention_and_fails_where_nothing_else_can(monkeypatch, capsys, simulator):
    from sparse_aot import demo, sim

    def run_simulated_only(*arguments):
        if arguments[-2:] == (None, None):  # as find_framework gives them below
            raise NotImplementedError("cuda:0 (Old GPU): no kernels for it")
        return 0.01

    monkeypatch.setattr(demo._driver, "device_count", lambda: 1)
    monkeypatch.setattr(demo._driver, "describe_devices", lambda: ["cuda:0"])
    monkeypatch.setattr(demo, "find_framework", lambda: (None, None, "torch"))
    monkeypatch.setattr(demo, "check_attention", run_simulated_only)
    monkeypatch.setattr(sim, "is_installed", lambda: simulator)
    monkeypatch.setattr(sim.options, "arch", "sm_90a")
    assert demo.run_demo() == (0 if simulator else 1)
    said = capsys.readouterr().out
    assert "not run, cuda:0 (Old GPU): no kernels for it" in said
    assert ("attention: sm_90a, NumPy arrays" in said) == simulator


def test_demo_without_a_device_and_the_simulator_fails_and_says_how_to_get_it(monkeypatch, capsys):
    from sparse_aot import demo, sim

    monkeypatch.setattr(demo._driver, "device_count", lambda: 0)
    monkeypatch.setattr(sim, "is_installed", lambda: False)
    assert demo.run_demo() == 1
    assert "attention: not run" in (said := capsys.readouterr().out) and "pip install ./tools/ptxsim" in said


def test_bench_gets_the_rest_of_the_command_line(monkeypatch):
    from sparse_aot import bench

    monkeypatch.setattr(bench, "main", lambda argv: argv)
    assert cli.main(["bench", "--paged", "--help", "--json", "x"]) == ["--paged", "--help", "--json", "x"]


def test_version_is_that_of_the_project():
    status, out, _ = run("--version")
    assert (status, out) == (0, f"sparse_aot {sparse_aot.__version__}\n")


@pytest.mark.parametrize("command", [["info"], ["info", "--json"], ["verify"]])
def test_a_command_ends_quietly_where_its_reader_does(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "sparse_aot.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.parametrize("seed", ["abc", "-1", "9" * 20, "9" * 5000, "0.5"])
def test_a_bad_seed_in_the_environment_is_one_line_that_names_the_variable(seed):
    status, _, err = run("demo", SPARSE_AOT_SIM_SEED=seed)
    (line,) = err.splitlines()
    assert status == 1
    assert line.startswith("sparse-aot: sim.options.seed: expected an integer from 0 to")
    assert "SPARSE_AOT_SIM_SEED" in line


def test_unknown_options_are_refused():
    for argv in (["verify", "--fast"], ["other"], []):
        status, _, err = run(*argv)
        assert status == 2 and "sparse-aot" in err


@pytest.mark.parametrize("redirection, status", [("> /dev/full", 1), (">&-", 0)])
def test_an_output_that_cannot_be_written_is_no_traceback(redirection, status):
    command = f"{sys.executable} -m sparse_aot.cli verify {redirection}"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == status
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == status
