"""Everything here needs a CUDA device: marked ``gpu``, and skipped where there is none."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the device with torch here

HERE = Path(__file__).parent


def _cuda_is_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mine = [item for item in items if HERE in item.path.parents]
    if not mine:
        return
    no_device = not _cuda_is_available()
    for item in mine:
        item.add_marker("gpu")
        item.add_marker(pytest.mark.xdist_group("gpu"))  # one worker has the device to itself
        if no_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
