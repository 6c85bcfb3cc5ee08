"""The fixture ``place``, and the modules beside the tests, whatever the working directory."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent
for path in (ROOT, ROOT / "tools" / "ptxsim", HERE):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

if "PYTEST_XDIST_WORKER" in os.environ:  # tests run in several processes, a core each: torch keeps to one core too
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

from places import PLACES  # noqa: E402


@pytest.fixture(params=PLACES)
def place(request):
    """Each place in which a property must hold, with calls going there; see ``places.py``."""
    with request.param.opened():
        yield request.param


def pytest_collection_modifyitems(items):
    """The first simulated call of a process warns; tests/ptxsim/test_host_arrays.py says how often."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore::sparse_aot.sim.SimulationWarning"))
