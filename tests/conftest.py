"""Tests run in several processes at once, a core each (pytest-xdist): then torch keeps to one core too."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
