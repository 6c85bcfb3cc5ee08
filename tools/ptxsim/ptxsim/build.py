"""Compiles the engine. Importing ptxsim from a checkout does it when a source is newer; a wheel carries it compiled."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "src").glob("*.cpp"))
HEADERS = sorted((HERE / "src").glob("*.h"))
LIBRARY = HERE / "_engine.so"

# No contraction and no fast math: `mul` followed by `add` must round twice, as the hardware does.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


def is_current() -> bool:
    """Whether the library is there and newer than every source."""
    if not LIBRARY.exists():
        return False
    built = LIBRARY.stat().st_mtime
    return all(source.stat().st_mtime <= built for source in SOURCES + HEADERS)


def build(jobs: int = os.cpu_count() or 1) -> Path:
    """Compile the engine if it is out of date, and return its path. Safe to call from several processes.

    ImportError: there is no compiler.
    """
    if is_current():
        return LIBRARY
    with open(HERE / ".build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current():
            return LIBRARY
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ImportError(f"ptxsim: no C++ compiler {compiler} to build the engine with")
        print("ptxsim: compiling the simulator's engine, once", file=sys.stderr)
        machine = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
        with tempfile.TemporaryDirectory(dir=HERE, prefix=".build-") as directory:

            def compile_one(source: Path) -> str:
                target = f"{directory}/{source.stem}.o"
                subprocess.run([compiler, *FLAGS, *machine, "-c", str(source), "-o", target], check=True)
                return target

            linked = f"{directory}/{LIBRARY.name}"
            try:
                with ThreadPoolExecutor(jobs) as pool:
                    objects = list(pool.map(compile_one, SOURCES))
                subprocess.run([compiler, "-shared", *objects, "-o", linked], check=True)
            except subprocess.CalledProcessError as error:
                raise RuntimeError(f"ptxsim: the C++ compiler {compiler} did not build the engine: {error}") from error
            os.replace(linked, LIBRARY)
    return LIBRARY
