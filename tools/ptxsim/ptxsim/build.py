"""Compiles the libraries of this package. In a checkout their first use does it when a source is newer; a wheel carries
them compiled."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Library:
    """A shared library of this package: its file, and the directory of its sources, which a wheel lacks."""

    path: Path
    directory: Path

    def sources(self, pattern: str = "*.cpp") -> list[Path]:
        return sorted(self.directory.glob(pattern))

    def is_current(self) -> bool:
        """Whether it is there and newer than every source."""
        if not self.path.exists():
            return False
        built = self.path.stat().st_mtime
        return all(source.stat().st_mtime <= built for source in self.sources() + self.sources("*.h"))


ENGINE = Library(HERE / "_engine.so", HERE / "src")
RUNTIME = Library(HERE / "host" / "_runtime.so", HERE / "host")  # what `ptxsim run` puts in the place of CUDA
LIBRARIES = (ENGINE, RUNTIME)

# No contraction and no fast math: `mul` followed by `add` must round twice, as the hardware does.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


def build(library: Library = ENGINE, jobs: int = os.cpu_count() or 1) -> Path:
    """Compile a library if it is out of date, and return its path. Safe to call from several processes.

    ImportError: there is no compiler.
    """
    if library.is_current():
        return library.path
    with open(HERE / ".build.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.is_current():
            return library.path
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            raise ImportError(f"ptxsim: no C++ compiler {compiler} to build {library.path.name} with")
        print(f"ptxsim: compiling {library.path.name}, once", file=sys.stderr)
        machine = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
        with tempfile.TemporaryDirectory(dir=HERE, prefix=".build-") as directory:

            def compile_one(source: Path) -> str:
                target = f"{directory}/{source.stem}.o"
                subprocess.run([compiler, *FLAGS, *machine, "-c", str(source), "-o", target], check=True)
                return target

            linked = f"{directory}/{library.path.name}"
            try:
                with ThreadPoolExecutor(jobs) as pool:
                    objects = list(pool.map(compile_one, library.sources()))
                subprocess.run([compiler, "-shared", *objects, "-o", linked], check=True)
            except subprocess.CalledProcessError as error:
                raise RuntimeError(
                    f"ptxsim: the C++ compiler {compiler} did not build {library.path}: {error}"
                ) from error
            os.replace(linked, library.path)
    return library.path
