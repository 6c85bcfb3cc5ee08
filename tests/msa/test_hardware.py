"""Simulator and hardware agree: the results that ``tools/record.py`` kept of an H200, element by element.

They may differ by the order of float32 sums in the tensor cores and by the approximate exponential (2 ulp of float32),
which now and then rounds a probability, or a partial result, to the other neighbour in bfloat16.
"""

import numpy as np
import pytest
import torch
from places import needs_simulator
from simulated import simulation

from aot.configs import DTYPE_TAGS
from tools.record import RECORD, cases, results

pytestmark = needs_simulator


def bfloat16(bits):
    return torch.from_numpy(bits).view(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("name, case", [*cases()], ids=[name for name, _ in cases()])
def test_the_simulator_agrees_with_an_h200(name, case):
    recorded = np.load(RECORD)
    with simulation("sm_90a") as launches:
        simulated = results(**case, device="cpu")
    tags = [DTYPE_TAGS[partial] for partial in case["partial_dtypes"]]
    forwards = {f"sm_90a/fwd-bf16-g{case['g']}-p{tag}{tail}" for tag in tags for tail in ("", "-temperature")}
    assert forwards <= {launch.path for launch in launches}
    for lse in ("lse", "lse_temperature"):
        np.testing.assert_allclose(simulated[lse], recorded[f"{name}/{lse}"], rtol=1e-6, atol=2e-6)
    got, want = bfloat16(simulated["out"]), bfloat16(recorded[f"{name}/out"])
    differing = simulated["out"] != recorded[f"{name}/out"]
    assert differing.mean() < 0.01
    np.testing.assert_allclose(got, want, rtol=2**-7, atol=2**-8)
