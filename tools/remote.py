#!/usr/bin/env python3
"""Builds, verifies, tests and times the package on a machine with a GPU, and collects what it printed.

    tools/remote.py user@host    from elsewhere: copies the checkout and the cubins over ssh, runs there, fetches logs
    tools/remote.py --local      on the machine itself

There, only the Cython extensions are compiled; the cubins come from ./cubins (``python -m aot build``). Needs Python
3.11, torch, Cython, cuda-bindings and pytest there, no network and no installed copy of the package. Standard library
only. Every step writes OUT/<step>.log; the exit status is 1 if a step failed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = "build/remote"  # where logs go, in the checkout
OVERLAPS = "runs:128,runs:16,runs:4,noise:15,noise:35,noise:100"
CHUNK = ["--paged", "packed", "--graph", "--q2k-pattern", "runs:128,noise:35"]
BENCHMARKS = {
    "bench-default": [],
    "bench-paged": ["--paged"],
    "bench-customer": ["--customer-case", "both"],
    "bench-overlap": ["--paged", "packed", "--q2k-pattern", OVERLAPS],
    "bench-chunks-32k": [*CHUNK, "--skv", "32768", "--sq", "128,512"],
    "bench-chunks-128k": [*CHUNK, "--skv", "131072", "--sq", "2048,8192"],
    "bench-chunk-one-head": [*CHUNK, "--skv", "131072", "--sq", "2048", "--head-kv", "1"],
    "bench-requests": [*CHUNK, "--lens", "16x512:4096"],
}
SANITIZED = [  # few launches each: a sanitizer makes a kernel up to a thousand times slower
    "tests/msa/test_attention.py::test_a_first_slot_that_sees_nothing_does_not_hide_later_keys[cuda]",
    "tests/msa/test_attention.py::test_q_may_be_a_strided_view[cuda]",
    "tests/msa/test_attention.py::test_tokens_and_page_table_rows_past_the_batch_are_padding[cuda]",
    "tests/msa/test_attention.py::test_a_temperature_lse_matches_the_reference[cuda-packed-8-16-2.5-bfloat16]",
]
IN_ONE_PROCESS = ["-o", "addopts=--strict-markers"]  # not in several, as pyproject.toml says; needs no pytest-xdist
OUR_SYMBOLS = "sparse_aot_"  # in the name of every kernel of the bundle; torch's own are not instrumented
PROFILED = ["--q2k-pattern", "sink", "--warmup", "2", "--iters", "1", "--cuda-profiler-capture"]

Command = tuple[list[str], dict[str, str]]  # arguments, additions to the environment


def build(out: Path) -> Iterator[Command]:
    yield [sys.executable, "setup.py", "build_ext", "--inplace"], {}


def verify(out: Path) -> Iterator[Command]:
    yield sparse_aot("info"), {}
    yield sparse_aot("verify"), {}


def test(out: Path) -> Iterator[Command]:
    arguments = [*IN_ONE_PROCESS, "-q", "-m", "gpu", "tests", "--durations=15", f"--junitxml={out / 'test.xml'}"]
    # A kernel that hangs: say which test it was, and end.
    arguments += ["-o", "faulthandler_timeout=120", "-o", "faulthandler_exit_on_timeout=true"]
    yield [sys.executable, "-m", "pytest", *arguments], {}


def bench(out: Path) -> Iterator[Command]:
    for name, options in BENCHMARKS.items():
        files = ["--json", str(out / f"{name}.json"), "--plot", str(out / f"{name}.png")]
        yield sparse_aot("bench", *options, *files), {}


def sanitize(out: Path) -> Iterator[Command]:
    for tool in ("memcheck", "racecheck", "synccheck"):
        sanitizer = ["compute-sanitizer", "--tool", tool, "--kernel-name", f"kernel_substring={OUR_SYMBOLS}"]
        # cuda-bindings probes the driver for entry points that an older one does not have: no error of ours.
        sanitizer += ["--report-api-errors", "no", "--error-exitcode", "1", "--print-limit", "20"]
        # One allocation a tensor, so that memcheck sees where each ends.
        yield (
            [*sanitizer, sys.executable, "-m", "pytest", *IN_ONE_PROCESS, "-q", *SANITIZED],
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )


def profile(out: Path) -> Iterator[Command]:
    report = str(out / "profile.ncu-rep")
    capture = ["ncu", "--set", "detailed", "--clock-control", "none", "--profile-from-start", "off", "-f", "-o", report]
    yield [*capture, *sparse_aot("bench", *PROFILED)], {}
    yield ["ncu", "--import", report, "--page", "details"], {}


def record(out: Path) -> Iterator[Command]:
    yield [sys.executable, "tools/record.py", str(out / "record.npz")], {}


STEPS = {step.__name__: step for step in (build, verify, test, bench, sanitize, profile, record)}
DEFAULT_STEPS = ["build", "verify", "test", "bench"]


def sparse_aot(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from sparse_aot.cli import main; sys.exit(main())", *arguments]


# --------------------------------------------------------------------------------------------------- on the machine


def run_local(steps: list[str], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    summary = []
    for name in steps:
        start = time.monotonic()
        status = run_step(name, out)
        summary.append((name, status, time.monotonic() - start))
        if status and name == "build":
            break
    print("\nstep       status   seconds")
    for name, status, seconds in summary:
        print(f"{name:10} {'ok' if status == 0 else f'rc {status}':8} {seconds:7.1f}")
    return int(any(status for _, status, _ in summary))


def run_step(name: str, out: Path) -> int:
    """The commands of a step, one after the other; the first non-zero status among them."""
    failed = 0
    with (out / f"{name}.log").open("wb") as log:
        for command, extra in STEPS[name](out):
            echo(log, f"\n$ {shlex.join([*(f'{key}={value}' for key, value in extra.items()), *command])}\n".encode())
            if shutil.which(command[0]) is None:
                echo(log, f"{command[0]} is not installed\n".encode())
                failed = failed or 127
                continue
            environment = os.environ | extra | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for line in process.stdout:
                echo(log, line)
            failed = failed or process.wait()
    return failed


def echo(log, line: bytes) -> None:
    log.write(line)
    log.flush()
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


# ------------------------------------------------------------------------------------------------------ from elsewhere


def run_remote(host: str, directory: str, python: str, steps: list[str], out: Path) -> int:
    """Copies the tree, runs this script there with ``--local``, and brings its output folder back."""
    there = shlex.quote(directory)
    print(f"copying {ROOT} to {host}:{directory}", flush=True)
    pipe(["tar", "-cz", "--null", "-T", "-"], ["ssh", host, f"mkdir -p {there} && tar -xz -C {there}"], files())
    script = shlex.join([python, "tools/remote.py", "--local", "--out", OUT, "--steps", ",".join(steps)])
    status = subprocess.run(["ssh", host, f"cd {there} && rm -rf {OUT} && {script}"]).returncode
    out.mkdir(parents=True, exist_ok=True)
    pipe(["ssh", host, f"tar -cz -C {there}/{OUT} ."], ["tar", "-xz", "-C", str(out)])
    print(f"logs are in {out}")
    return status


def files() -> bytes:
    """The checkout's own files and the cubins, zero-terminated, relative to its root."""
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(list_files, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    names = [name for name in listed.split(b"\0") if name and (ROOT / os.fsdecode(name)).is_file()]
    cubins = [os.fsencode(path.relative_to(ROOT)) for path in sorted((ROOT / "cubins").rglob("*")) if path.is_file()]
    return b"\0".join(dict.fromkeys([*names, *cubins]))


def pipe(producer: list[str], consumer: list[str], stdin: bytes | None = None) -> None:
    """``producer | consumer``, both of which must succeed."""
    source = subprocess.Popen(
        producer, cwd=ROOT, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, stdout=subprocess.PIPE
    )
    sink = subprocess.Popen(consumer, stdin=source.stdout)
    source.stdout.close()
    if stdin is not None:
        source.stdin.write(stdin)
        source.stdin.close()
    for process, command in ((source, producer), (sink, consumer)):
        if process.wait():
            raise SystemExit(f"{shlex.join(command)} failed with status {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("host", nargs="?", help="what ssh takes: user@host")
    where.add_argument("--local", action="store_true", help="run on this machine")
    parser.add_argument("--steps", default=",".join(DEFAULT_STEPS), help=f"of {','.join(STEPS)} (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / OUT, help="folder for logs (default: %(default)s)")
    parser.add_argument("--directory", default="sparse_aot", help="folder on the host (default: %(default)s)")
    parser.add_argument("--python", default="python3", help="Python on the host (default: %(default)s)")
    options = parser.parse_args()
    steps = options.steps.split(",")
    if unknown := [step for step in steps if step not in STEPS]:
        parser.error(f"--steps: {', '.join(unknown)} not among {', '.join(STEPS)}")
    if options.local:
        return run_local(steps, options.out.resolve())
    return run_remote(options.host, options.directory, options.python, steps, options.out.resolve())


if __name__ == "__main__":
    sys.exit(main())
