"""Where tests run, and the modules beside them, whatever the working directory.

aot/       the build: configurations, cache, bundle, lock
package/   what is installed: wheels, stubs, command line, benchmark, tools
launcher/  the run time on a driver that records what it is asked: parameters, errors, contexts, the manifest
msa/       block-sparse attention: what its kernels give, in every place of places.py; CSR and schedule
sim/       calls on host arrays: options, types, what the simulator reports
mutants/   what is done to the PTX of kernels, and the calls that must notice it; msa/test_mutants.py tries it
gpu/       what only a device shows: sizes, streams, graphs, contexts, frameworks, recorded bits
"""

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

import torch  # noqa: E402
from places import PLACES  # noqa: E402

from aot.configs import ARCHS  # noqa: E402
from sparse_aot.msa._csr_host import walk_rule  # noqa: E402

walk_rule(groups=0)  # small selections have a walk plan, too


@pytest.fixture(scope="session")
def simulator():
    """The simulator can be imported; its engine is compiled where that is out of date."""
    try:
        import ptxsim  # noqa: F401
    except ImportError as error:
        pytest.skip(f"no simulator: {error}")


@pytest.fixture(scope="session")
def cuda_device():
    """There is one."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(params=PLACES)
def place(request):
    """Each place in which a property must hold, with calls going there; see ``places.py``."""
    request.getfixturevalue("simulator" if request.param.arch else "cuda_device")
    with request.param.opened():
        yield request.param


@pytest.fixture(params=ARCHS)
def arch(request, simulator):
    """Each architecture, for what only the simulator can show."""
    return request.param


def pytest_collection_modifyitems(items):
    """The first simulated call of a process warns; sim/test_host_arrays.py says how often."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore::sparse_aot.sim.SimulationWarning"))
