"""ptxsim is a tool beside the package: make it, aot and the reference importable whatever the working directory."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for path in (ROOT, ROOT / "tools" / "ptxsim", ROOT / "tests"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

from aot.configs import ARCHS  # noqa: E402


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


def pytest_collection_modifyitems(items):
    """The first simulated call of a process warns; test_host_arrays.py says how often."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::sparse_aot.sim.SimulationWarning"))
