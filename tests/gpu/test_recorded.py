"""The results that ``tools/record.py`` kept of an H200 come out again, bit for bit."""

import numpy as np
import pytest
import torch

from tools.record import RECORD, cases, results


@pytest.mark.skipif(torch.cuda.is_available() and "H200" not in torch.cuda.get_device_name(), reason="not an H200")
@pytest.mark.parametrize("name, case", [*cases()], ids=[name for name, _ in cases()])
def test_the_device_gives_the_recorded_bits(name, case):
    recorded = np.load(RECORD)
    for result, array in results(**case).items():
        np.testing.assert_array_equal(array.view(np.uint8), recorded[f"{name}/{result}"].view(np.uint8))
