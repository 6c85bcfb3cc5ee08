"""No configuration of the attention computes an offset in 32 bits: every one runs on arrays that pretend gigabytes."""

import pytest
from large import LargeCall
from places import PARTIALS, WALKING, G, needs_simulator
from simulated import simulation

from aot.configs import DTYPE_TAGS

pytestmark = needs_simulator


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("g", G)
def test_a_forward_and_combine_reach_what_lies_gigabytes_away(arch, g, partial, temperature):
    topk = dict(zip(G, (4, 8, 16, 32, 4), strict=True))[g]
    with simulation(arch, multiprocessors=2, seed=2) as launches:
        LargeCall(g, topk=topk, partial=partial, temperature=temperature).check()
    forward, combine = launches
    tail = "-temperature" if temperature else ""
    assert forward.entry["name"] == f"fwd-bf16-g{g}-p{DTYPE_TAGS[partial]}{tail}"
    assert combine.entry["options"] == {"partial": partial, "topk": topk}


@pytest.mark.parametrize("partial", PARTIALS)
@pytest.mark.parametrize("g", G)
@pytest.mark.parametrize("walking", WALKING)
def test_a_walk_reaches_tokens_gigabytes_away(walking, g, partial):
    with simulation(walking, multiprocessors=2, seed=2):
        LargeCall(g, "walk", partial=partial).check()
