"""What pyproject.toml cannot say: the Cython extensions, and the cubins, which are compiled with the package.

``SPARSE_AOT_BUILD_ARCHS`` (comma-separated) and ``SPARSE_AOT_BUILD_ONLY`` (a glob over configuration names) restrict
the bundle. A wheel carries it in ``sparse_aot/cubins``; an editable install puts it into the checkout's ``cubins``,
with the PTX for the simulator, which users get as a wheel of its own (``tools/ptxsim/setup.py``).
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
BUILT = r"\.so$|__pycache__|\.egg-info|/build/|/\."  # what a build leaves in the source folders
CORES = len(os.sched_getaffinity(0))


class BuildPy(build_py):
    """Also compiles the cubins."""

    def run(self):
        super().run()
        sys.path.insert(0, str(ROOT))
        from aot.build import build, select_from_environment

        out = ROOT / "cubins" if self.editable_mode else Path(self.build_lib, "sparse_aot", "cubins")
        print(f"cubins: {build(select_from_environment(), out, ptx=self.editable_mode)}")


class SourceDistribution(sdist):
    """Packs what git tracks, or in an unpacked source distribution all that it came with; and setuptools' metadata."""

    def make_release_tree(self, base_dir, files):
        metadata_files = [file for file in files if ".egg-info/" in file]
        super().make_release_tree(base_dir, [*source_files(), *metadata_files])


def source_files():
    """Files that git tracks; without git, those under the folders that have sources, less what builds leave there."""
    listed = None
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE).stdout
    if listed:
        files = map(os.fsdecode, listed.split(b"\0"))
    else:  # no checkout, or one that git is not there for or refuses
        names = ("*.toml", "*.md", "setup.py", "LICENSE", "cubins/MANIFEST.lock")
        names += tuple(f"{folder}/**/*" for folder in ("aot", "docs", "sparse_aot", "tests", "tools"))
        found = (path.relative_to(ROOT).as_posix() for name in names for path in ROOT.glob(name))
        files = (file for file in found if not re.search(BUILT, file))
    return sorted(file for file in files if (ROOT / file).is_file())


def extensions():
    (cuda_h,) = (file for file in metadata.files("nvidia-cuda-runtime") if file.name == "cuda.h")
    # cuda-bindings' declarations include this header too, for functions that nothing here calls; only a toolkit has it.
    headers = ROOT / "build" / "include"
    headers.mkdir(parents=True, exist_ok=True)
    (headers / "cudaProfiler.h").touch()
    return cythonize(
        [
            Extension(
                ".".join(source.with_suffix("").parts),
                [str(source)],
                include_dirs=[str(cuda_h.locate().parent), str(headers)],
                language="c++",  # cydriver's declarations are C++ from cuda-bindings 13.5 on
                # Neither symbols nor the paths of the machine that built it.
                extra_compile_args=["-g0", f"-ffile-prefix-map={ROOT}=."],
                extra_link_args=["-s"],
            )
            for source in sorted(path.relative_to(ROOT) for path in ROOT.glob("sparse_aot/**/*.pyx"))
        ],
        build_dir="build/cython",
    )


if __name__ == "__main__":  # the build's worker processes import this file anew
    setup(
        ext_modules=extensions(),
        cmdclass={"build_py": BuildPy, "sdist": SourceDistribution},
        options={"build_ext": {"parallel": CORES}},
    )
