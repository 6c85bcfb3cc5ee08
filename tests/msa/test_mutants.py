"""Mutations of our kernels: each must be noticed, by a check or by the numbers.

mutants/edits.py has what is done to the PTX, mutants/targets.py the kernels and the calls that look at their results,
mutants/equivalent.py what changes nothing. Here some mutants of each edit and kernel are tried; with
``SPARSE_AOT_ALL_MUTANTS=1`` all of them, and that the equivalent ones are.
"""

import os
from collections import Counter

import pytest
from mutants.edits import EDITS, NUMBERS, mutants
from mutants.equivalent import reason
from mutants.targets import TARGETS, attention
from places import needs_simulator
from simulated import ATTENTION, changed_maps

pytestmark = needs_simulator

ALL = os.environ.get("SPARSE_AOT_ALL_MUTANTS") == "1"
SAMPLE = 1  # mutants of an edit and a kernel
ALONE = [target for target in TARGETS if target.operation in (*ATTENTION, "csr_rows")]  # whose cases are all cases
# Kernels that were rewritten: their mutants are tried on demand alone, until each survivor has been looked at.
UNSWEPT = ("sm_90a fwd", "sm_90a combine", "sm_100f combine", "csr_rows", "radix_scatter", "walk_plan")
PAIRS = [(target, edit) for target in TARGETS for edit in EDITS if target.name.startswith(edit.of)]


def sample(target, edit, made):
    """The mutants that are tried, of those that change something: all, or some that are spread over the kernel."""
    count = len(made) if ALL else min(SAMPLE, len(made))
    spread = [made[i * len(made) // count] for i in range(count)]
    return [mutant for mutant in spread if not reason(target.name, edit, mutant)]


@pytest.mark.parametrize("target", ALONE, ids=lambda target: target.name)
def test_the_kernel_itself_is_not_caught(target):
    _, text, _ = target.kernel
    assert target.caught_by(text) is None


@pytest.mark.parametrize("target, edit", PAIRS, ids=[f"{target.name}-{edit.name}" for target, edit in PAIRS])
def test_no_mutant_survives(target, edit):
    if target.name.startswith(UNSWEPT) and not ALL:
        pytest.skip("not looked at since the kernel was rewritten; SPARSE_AOT_ALL_MUTANTS=1 tries it")
    _, text, lines = target.kernel
    made = [*mutants(text, lines, edit)]
    chosen = sample(target, edit, made)
    if not chosen:
        pytest.skip("what is sampled here changes nothing; SPARSE_AOT_ALL_MUTANTS=1 tries the others")
    for mutant in chosen:
        caught = target.caught_by(mutant.text, edit.seeds, edit.case)
        assert caught, f"survives: {mutant}"
        assert edit.caught_by is None or caught in edit.caught_by, f"was caught by {caught}: {mutant}"


@pytest.mark.skipif(not ALL, reason="what a mutant that changes nothing takes, all cases under all seeds, is long")
@pytest.mark.parametrize("target, edit", PAIRS, ids=[f"{target.name}-{edit.name}" for target, edit in PAIRS])
def test_what_is_said_to_change_nothing_is_not_noticed(target, edit):
    _, text, lines = target.kernel
    for mutant in mutants(text, lines, edit):
        if reason(target.name, edit, mutant):
            assert target.caught_by(mutant.text, edit.seeds, edit.case) is None, f"is noticed: {mutant}"


def test_every_edit_makes_mutants_and_every_kernel_has_many():
    made = Counter()
    for target, edit in PAIRS:
        _, text, lines = target.kernel
        number = len([*mutants(text, lines, edit)])
        made[edit.name] += number
        made[target.name] += number
    assert all(made[edit.name] for edit in EDITS) and all(made[target.name] >= 30 for target in TARGETS)


@pytest.mark.parametrize("number", range(3), ids=["q", "k", "v"])
def test_a_wrong_swizzle_of_a_tensor_map_shows_in_the_numbers(arch, number):
    def change(made, arguments):
        if made == number:
            arguments["swizzle"] = 0

    target = attention(arch, "fwd", 16)
    _, text, _ = target.kernel
    with changed_maps(change):
        assert target.caught_by(text) == NUMBERS
