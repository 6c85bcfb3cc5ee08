"""Everything here needs a CUDA device: marked ``gpu``, and skipped where there is none."""

import os
from pathlib import Path

import pytest
from places import ON_DEVICE

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX shares the device with torch here

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _on_a_device(cuda_device):
    pass


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            for mark in ON_DEVICE:
                item.add_marker(mark)
