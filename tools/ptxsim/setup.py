"""The wheel of the simulator: its engine compiled, and the PTX of the bundle's kernels.

``SPARSE_AOT_BUILD_ARCHS`` and ``SPARSE_AOT_BUILD_ONLY`` restrict the kernels, as they do for the package itself.
"""

import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class BuildPy(build_py):
    """Also compiles the engine and the kernels."""

    def run(self):
        super().run()
        sys.path[:0] = [str(ROOT), str(HERE)]
        from ptxsim.build import build as build_engine

        from aot.build import PTX, build, select_from_environment

        target = Path(self.build_lib, "ptxsim")
        shutil.copy2(build_engine(), target)
        with tempfile.TemporaryDirectory() as directory:
            print(f"PTX: {build(select_from_environment(), Path(directory), ptx=True)}")
            shutil.copy2(Path(directory, PTX), target)


class Wheel(bdist_wheel):
    """For any Python of this platform: the engine is bound by ctypes."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class BinaryDistribution(Distribution):
    def has_ext_modules(self):
        return True


if __name__ == "__main__":  # the build's worker processes import this file anew
    setup(
        version=tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
        distclass=BinaryDistribution,
        cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    )
