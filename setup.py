"""What pyproject.toml cannot say: the Cython extensions, and the cubins, which are compiled with the package.

``SPARSE_AOT_BUILD_ARCHS`` (comma-separated) and ``SPARSE_AOT_BUILD_ONLY`` (a glob over configuration names) restrict
the bundle. A wheel carries it in ``sparse_aot/cubins``; an editable install puts it into the checkout's ``cubins``,
with the PTX for the simulator, which users get as a wheel of its own (``tools/ptxsim/setup.py``).
"""

import os
import re
import sys
from glob import glob
from importlib import metadata
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
BUILT = r"\.so$|__pycache__|\.egg-info|/build/"  # what a build leaves in the source folders
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
    """Also packs what builds and tests the package but is not installed with it."""

    def make_release_tree(self, base_dir, files):
        extra = ["cubins/MANIFEST.lock", *glob("sparse_aot/*.p[yx]*")]
        for directory in ("aot", "docs", "tests", "tools"):
            extra += (path for path in glob(f"{directory}/**", recursive=True) if not re.search(BUILT, path))
        super().make_release_tree(base_dir, sorted({*files, *filter(os.path.isfile, extra)}))


def extensions():
    (cuda_h,) = (file for file in metadata.files("nvidia-cuda-runtime") if file.name == "cuda.h")
    # The declarations of some releases of cuda-bindings also include cudaProfiler.h, which only a toolkit has.
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
    return cythonize(
        [
            Extension(
                f"sparse_aot.{source.stem}",
                [f"sparse_aot/{source.name}"],
                include_dirs=["sparse_aot", str(cuda_h.locate().parent), str(toolkit)],
                language="c++",  # cydriver's declarations are C++ from cuda-bindings 13.5 on
            )
            for source in sorted(ROOT.glob("sparse_aot/*.pyx"))
        ],
        build_dir="build/cython",
    )


if __name__ == "__main__":  # the build's worker processes import this file anew
    setup(
        ext_modules=extensions(),
        cmdclass={"build_py": BuildPy, "sdist": SourceDistribution},
        options={"build_ext": {"parallel": CORES}},
    )
