"""Runs public CuTe DSL programs in the simulator, by `ptxsim run`: their own host code, reference and tolerance.

    validate.py --cutlass DIR [--flash-attention DIR] [--quack DIR]

DIR is a checkout; `public/programs.toml` lists the programs. flash-attention needs quack's too, and both need
apache-tvm-ffi and einops beside torch and the CuTe DSL. The exit status is 0 if every program did what the list says.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import re
import shlex
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PUBLIC = HERE / "public"
EXAMPLES = "examples/python/CuTeDSL"  # in NVIDIA/cutlass
FORKSERVER = multiprocessing.get_context("forkserver")
TABLE = "| program | arch | result |"
TOLERATED = re.compile(r"^ptxsim: .*, tolerated: (\w+): ", re.M)
STOPPED = re.compile(r"was stopped: (.*)|^ptxsim: (a library was not loaded.*)", re.M)


@dataclass(frozen=True)
class Program:
    repository: str
    folder: str
    arch: str
    file: str
    arguments: str = ""
    needs: tuple[str, ...] = ()
    lacks: str = ""
    flags: dict[str, str] = field(default_factory=dict)  # check -> the section that is broken, and how

    @property
    def path(self) -> str:
        return "/".join(filter(None, (self.folder, self.file)))

    def __str__(self) -> str:
        return " ".join(filter(None, (self.path, self.arguments)))


def read_programs(groups: list[dict]) -> list[Program]:
    return [
        Program(**{k: v for k, v in group.items() if k != "programs"}, **p)
        for group in groups
        for p in group["programs"]
    ]


def run_ptxsim(command: list[str], searched: list[str], log: str) -> None:
    """`python -m ptxsim` in this process, which a server forked that has torch imported: most of a small run's time."""
    target = os.open(log, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.path[:0] = searched
    sys.argv = ["ptxsim", *command]
    from ptxsim.__main__ import main

    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class Outcome:
    """Of a run: "passes", or what stopped it or went wrong."""

    text: str
    instructions: int
    output: str

    @property
    def passes(self) -> bool:
        return self.text == "passes"


@dataclass(frozen=True)
class Runner:
    """checkouts: repository -> its directory. habits: checks that may stop any. timeout: seconds a run may take."""

    checkouts: dict[str, Path]
    habits: dict[str, str]
    seed: int
    timeout: int
    logs: Path | None

    def can_run(self, program: Program) -> bool:
        return {*program.needs, program.repository} - {"ours"} <= self.checkouts.keys()

    def run(self, program: Program) -> Outcome:
        roots = {**self.checkouts, "ours": PUBLIC, "cutlass": self.checkouts["cutlass"] / EXAMPLES}
        examples = [roots["cutlass"] / part for part in ("", "cute", "experimental")]
        searched = [str(path) for path in (HERE, *self.checkouts.values(), *examples)]
        command = ["run", "--arch", program.arch, "--seed", str(self.seed)]
        command += [part for check in {**program.flags, **self.habits} for part in ("--tolerate", check)]
        command += [str(roots[program.repository] / program.path), "--", *shlex.split(program.arguments)]
        with tempfile.NamedTemporaryFile("w+") as log:
            process = FORKSERVER.Process(target=run_ptxsim, args=(command, searched, log.name))
            process.start()
            process.join(self.timeout)
            status = process.exitcode
            if status is None:
                process.kill()
                process.join()
            output = log.read()
        counts = re.findall(r"^ptxsim: \d+ launches, ([\d,]+) thread instructions", output, re.M)
        instructions = int(counts[-1].replace(",", "")) if counts else 0
        if status == 0:
            text = "passes" if instructions else "launched nothing"
        elif match := STOPPED.search(output):
            text = (match[1] or match[2]).strip()
        elif status is None:
            text = f"not done after {self.timeout} s"
        elif status < 0:
            text = f"ended by signal {-status}"
        else:
            lines = [line for line in output.splitlines() if line.strip() and not line.startswith("ptxsim: ")]
            text = f"fails: {lines[-1].strip() if lines else f'exit status {status}'}"
        return Outcome(text, instructions, f"$ python -m ptxsim {shlex.join(command)}\n{output}")

    def validate(self, program: Program) -> tuple[bool, str, str]:
        """(it did what the list says, what it did, seconds and instructions)."""
        start = time.perf_counter()
        outcome = self.run(program)
        if self.logs:
            name = re.sub(r"\W+", "-", f"{program.arch} {program}")[:150]
            (self.logs / f"{name}.log").write_text(outcome.output)
        broken = list(dict.fromkeys(TOLERATED.findall(outcome.output)))
        flags = [f"flagged by `{check}`, {program.flags[check]}" for check in broken if check in program.flags]
        habits = ", ".join(f"`{check}`" for check in broken if check not in program.flags)
        result = "; ".join([*flags, outcome.text] if not (flags and outcome.passes) else flags)
        result += f" but for {habits}" if habits else ""
        if program.lacks:
            result = f"lacks: {result}"
        cost = f"{outcome.instructions / 1e6:.1f} M instructions, {time.perf_counter() - start:.0f} s"
        as_listed = program.lacks in outcome.text if program.lacks else outcome.passes or bool(program.flags)
        return as_listed and program.flags.keys() <= {*broken}, result, cost


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cutlass", type=Path, required=True, metavar="DIR", help="checkout of NVIDIA/cutlass")
    parser.add_argument("--flash-attention", type=Path, metavar="DIR", help="checkout of Dao-AILab/flash-attention")
    parser.add_argument("--quack", type=Path, metavar="DIR", help="checkout of Dao-AILab/quack")
    parser.add_argument("--only", action="append", metavar="GLOB", help="programs whose path and arguments match any")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="programs at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=int, default=600, metavar="SECONDS", help="of a run (default: %(default)s)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="page of Markdown whose table the outcomes replace")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="write what each program printed there")
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name.replace("-", "_")) for name in ("cutlass", "flash-attention", "quack")}
    checkouts = {name: directory.resolve() for name, directory in given.items() if directory}
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
    os.environ.update(PYTHONWARNINGS="ignore", OMP_NUM_THREADS="1")  # of the server and its children
    FORKSERVER.set_forkserver_preload(["torch"])
    public = tomllib.loads((PUBLIC / "programs.toml").read_text())
    runner = Runner(checkouts, public["habits"], arguments.seed, arguments.timeout, arguments.logs)
    programs = [
        p
        for p in read_programs(public["group"])
        if runner.can_run(p) and any(fnmatch.fnmatch(str(p), glob) for glob in arguments.only or ["*"])
    ]
    rows, unexpected = [], 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for program, (expected, result, cost) in zip(programs, pool.map(runner.validate, programs), strict=True):
            unexpected += not expected
            print(f"{'ok  ' if expected else 'FAIL'} {program.arch:7} {program}: {result} ({cost})", flush=True)
            rows.append(f"| `{program}` | {program.arch} | {result} |")
    print(f"{len(programs)} programs, {unexpected} not as listed")
    if arguments.table:
        text = arguments.table.read_text().partition(TABLE)[0]
        arguments.table.write_text("\n".join([text + TABLE, "| --- | --- | --- |", *rows]) + "\n")
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
