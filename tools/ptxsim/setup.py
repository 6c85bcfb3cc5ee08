"""The wheel of the simulator: its engine compiled, and the PTX of the bundle's kernels.

``SPARSE_AOT_BUILD_ARCHS`` and ``SPARSE_AOT_BUILD_ONLY`` restrict the kernels, as they do for the package itself.
"""

import shutil
import sys
import tempfile
import tomllib
from email import message_from_string
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PTX = HERE / "ptxsim" / "ptx.zip"  # of a source distribution
IN_CHECKOUT = (ROOT / "aot").is_dir() and not PTX.exists()


def read_version():
    """The version of sparse_aot, whose kernels these are."""
    if IN_CHECKOUT:
        return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return message_from_string((HERE / "PKG-INFO").read_text())["Version"]


def compile_ptx(target):
    """Write the PTX of the kernels to the file ``target``."""
    sys.path.insert(0, str(ROOT))
    from aot.build import build, select_from_environment

    with tempfile.TemporaryDirectory() as directory:
        print(f"PTX: {build(select_from_environment(), Path(directory), ptx=True)}")
        shutil.copy2(Path(directory, PTX.name), target)


class BuildPy(build_py):
    """Also compiles the libraries, and in a checkout the kernels."""

    def run(self):
        super().run()
        sys.path.insert(0, str(HERE))
        from ptxsim.build import HERE as PACKAGE
        from ptxsim.build import LIBRARIES
        from ptxsim.build import build as build_library

        target = Path(self.build_lib, "ptxsim")
        for library in LIBRARIES:
            shutil.copy2(build_library(library), target / library.path.relative_to(PACKAGE))
        if IN_CHECKOUT:
            compile_ptx(target / PTX.name)


class SourceDistribution(sdist):
    """Also packs the libraries' sources, the tests and the kernels' PTX: it installs where there is no checkout."""

    def make_release_tree(self, base_dir, files):
        found = (
            path for pattern in ("ptxsim/src/*", "ptxsim/host/*.cpp", "tests/**/*.py") for path in HERE.glob(pattern)
        )
        sources = [str(path.relative_to(HERE)) for path in found]
        compiled = {"ptxsim/_engine.so", "ptxsim/host/_runtime.so"}
        super().make_release_tree(base_dir, sorted({*files, *sources} - compiled))
        if IN_CHECKOUT:
            compile_ptx(Path(base_dir, "ptxsim", PTX.name))


class Wheel(bdist_wheel):
    """For any Python of this platform: the engine is bound by ctypes."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


if __name__ == "__main__":  # the build's worker processes import this file anew
    setup(
        version=read_version(),
        distclass=BinaryDistribution,
        cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel, "sdist": SourceDistribution},
    )
