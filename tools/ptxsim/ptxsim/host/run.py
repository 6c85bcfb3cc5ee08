"""`python -m ptxsim run`: runs a CuTe DSL program on a machine without a GPU, its kernels in the simulator."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .. import CHECKS

if TYPE_CHECKING:
    from .launches import Launches
    from .memory import DeviceMemory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("program", metavar="PROGRAM.py", type=Path)
    parser.add_argument("--arch", default="sm_100a", help="what it compiles for and runs on (default: %(default)s)")
    parser.add_argument("--off", action="append", default=[], choices=CHECKS, metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument(
        "--tolerate",
        action="append",
        default=[],
        choices=CHECKS,
        metavar="CHECK",
        help="report what the check stops, and run that launch again without it, asynchronous operations at once",
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the interleaving (default: %(default)s)")
    parser.add_argument(
        "--resident", type=int, default=8, metavar="N", help="multiprocessors, each with one CTA (default: %(default)s)"
    )
    parser.add_argument("--accuracy", choices=["exact", "chip"], default="exact", help="see Module.launch")
    parser.add_argument("--ptx", type=Path, metavar="DIR", help="write the PTX of the program's kernels there")


def prepare(arguments: argparse.Namespace, directory: str) -> tuple[Launches, DeviceMemory]:
    """Put into place what stands in for CUDA, before the program imports anything."""
    settings = {"ARCH": arguments.arch, "KEEP": "ptx,cubin", "LINEINFO": "1", "DUMP_DIR": directory}
    for dsl in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
        os.environ.update({f"{dsl}_{name}": value for name, value in settings.items()})

    from . import device as devices
    from .launches import Launches
    from .memory import DeviceMemory

    device = devices.Device(arguments.arch, arguments.resident)
    memory = DeviceMemory()
    options = {name: getattr(arguments, name) for name in ("seed", "off", "resident", "accuracy")}
    launches = Launches(memory, device.attribute, options, tuple(arguments.tolerate), arguments.ptx)
    devices.install_torch(device)
    devices.install_bindings(device)
    devices.install_dsl(device, launches)
    return launches, memory


def run_program(program: Path, arguments: list[str], launches: Launches) -> bool:
    """Whether it ended well. Its traceback is printed where it did not."""
    sys.argv = [str(program), *arguments]
    sys.path.insert(0, str(program.resolve().parent))
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return not end.code
    except Exception as error:
        from cutlass.base_dsl.common import DSLCudaRuntimeError

        if not (launches.failures and isinstance(error, DSLCudaRuntimeError)):  # else it has been reported
            frames = error.__traceback__
            while frames and frames.tb_frame.f_code.co_filename != str(program):
                frames = frames.tb_next
            traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return False
    return True


def main(arguments: argparse.Namespace, program_arguments: list[str]) -> int:
    for package in ("torch", "cutlass", "elftools"):
        if importlib.util.find_spec(package) is None:
            print(f"ptxsim run: the program's environment has no {package}", file=sys.stderr)
            return 2
    if arguments.ptx:
        arguments.ptx.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ptxsim-") as directory:
        launches, memory = prepare(arguments, directory)
        with memory:
            ended_well = run_program(arguments.program, program_arguments, launches)
    count = sum(launch.statistics.thread_instructions for launch in launches.done)
    outcome = f"{len(launches.failures)} stopped" if launches.failures else "none stopped"
    print(f"ptxsim: {len(launches.done)} launches, {count:,} thread instructions, {outcome}", file=sys.stderr)
    return 0 if ended_well and not launches.failures else 1
