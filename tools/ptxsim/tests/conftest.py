"""The simulator beside these tests, whatever the working directory. They are skipped where nothing can compile it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_collect_file():
    try:
        import ptxsim  # noqa: F401
    except ImportError as error:
        pytest.skip(str(error))
