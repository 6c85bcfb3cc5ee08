"""Mutants that change nothing that may be relied on, and why.

A mutant is named by the kernel, the edit and its number among the edit's mutants, which a failing test prints.
"""

from __future__ import annotations

import re

from mutants.edits import Edit, Mutant

# (what a kernel's name begins with, what an edit's name begins with, the instruction) -> for any number of mutants.
RULES = [
    (
        r"csr_|walk_plan|radix_|schedule_", r".*offset cut", r"mul\.wide\.[su]32\s+%rd\d+, %r\d+, [48];",
        "an index of fewer than 2^29: of an entry of a head (2^24 tokens of 32 blocks), a row, a sequence or a digit",
    ),
]  # fmt: skip

NUMBERED: dict[tuple[str, str], dict[int, str]] = {}


def reason(kernel: str, edit: Edit, mutant: Mutant) -> str | None:
    """Why a mutant changes nothing; None: it does."""
    for of, edits, instruction, why in RULES:
        if re.match(of, kernel) and re.match(edits, edit.name) and re.match(instruction, mutant.before):
            return why
    return NUMBERED.get((kernel, edit.name), {}).get(mutant.number)
