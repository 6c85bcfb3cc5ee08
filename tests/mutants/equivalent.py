"""Mutants that no test can notice, and why.

A mutant is named by the kernel, the edit and its number among the edit's mutants, which a failing test prints.
"""

from __future__ import annotations

import re

from mutants.edits import Edit, Mutant

ROUND = "a further round of the loop finds nothing"
EMPTY = "no launch has a batch, a head or an item of nothing"
COUNTS = "split_counts of fewer than 2^24 tokens and of 64 KV heads are 4 GiB"
COLLECTIVE = "what it orders are loads of tensor memory, which a warp's lanes do and await together"
WARPGROUP = "a warpgroup's products are complete as one, and the warp that goes on has waited for them"
LOADED = "a register waits for its own load, and a later wait of the warp, before it lets go of the memory, for all"
FEW = "fewer registers, which still hold the values of the producers: an assembler that spills is what a build refuses"
SEEN = "of -1 << n, no lower bit is set where this one is not"


def seen(first: int) -> dict[int, str]:
    """Bits of the masks of a row's sixteen columns, but the lowest, of eight masks; ``first``: the number of that."""
    return {first + 19 * mask + bit: SEEN for mask in range(8) for bit in range(1, 16)}


# (what a kernel's name begins with, what an edit's name begins with, the instruction) -> for any number of mutants.
RULES = [
    (
        r"csr_|walk_plan|radix_|schedule_", r".*offset cut", r"mul\.wide\.[su]32\s+%rd\d+, %r\d+, [48];",
        "an index of fewer than 2^29: of an entry of a head (2^24 tokens of 32 blocks), a row, a sequence or a digit",
    ),
    (r"sm_\w+ combine", r".*offset cut", r"mul\.wide\.u32\s+%rd\d+, %r\d+, 32;", "2^31 rows of q are 512 GiB"),
    (r"sm_\w+ combine", r".*offset cut", r"mul\.wide\.u32\s+%rd\d+, %r\d+, [24];", "a column of a row"),
]  # fmt: skip

NUMBERED = {
    ("sm_90a fwd g4 bfloat16", "barrier dropped"): {2: WARPGROUP},
    ("sm_100f fwd g4 bfloat16", "barrier of a warp dropped"): {6: COLLECTIVE, 10: COLLECTIVE},
    ("sm_100f fwd g4 bfloat16", "setmaxnreg: few"): {1: FEW},
    ("sm_100f fwd g1 float32", "setmaxnreg: few"): {1: FEW},
    ("sm_100f fwd g4 bfloat16", "wait for loads dropped"): {2: LOADED, 4: LOADED},
    ("sm_100f fwd g16 bfloat16 temperature", "wait for loads dropped"): {2: LOADED, 4: LOADED},
    ("sm_100f fwd g1 float32", "wait for loads dropped"): {6: LOADED, 12: LOADED},
    ("sm_100f fwd g4 bfloat16", "constant one more"): seen(170),
    ("sm_100f fwd g16 bfloat16 temperature", "constant one more"): seen(171),
    ("sm_100f fwd g1 float32", "constant one more"): seen(195),
    ("sm_100f fwd g4 bfloat16", "lt and le"): {15: EMPTY},
    ("sm_100f fwd g16 bfloat16 temperature", "lt and le"): {15: EMPTY},
    ("sm_100f fwd g1 float32", "lt and le"): {16: EMPTY},
    ("walk_plan", "lt and le"): {1: "a thread writes a word that it clears afterwards"},
    ("sm_100f combine topk8 bfloat16", "constant one more"): {12: "the bits below are 0"},
    ("walk_plan", "gt and ge"): {1: "there are more words than threads"},
    ("csr_keys", "lt and le"): {1: "clears a word that nothing reads"},
    ("csr_keys", "gt and ge"): {1: "clears a word that nothing reads", 18: "the host refuses too few rows"},
    ("csr_keys", "minimum and maximum"): {1: "cu_seqlens_q ascends"},
    ("csr_collect", "signed offset cut"): {31: COUNTS},
    ("csr_collect", "offset cut"): {31: COUNTS},
    ("csr_collect", "gt and ge"): {6: "the entry after the last one is -1"},
    ("csr_keys", "signed offset cut"): {63: COUNTS},
    ("csr_keys", "offset cut"): {63: COUNTS},
    ("csr_rows", "lt and le"): {11: ROUND},
    ("csr_rows", "gt and ge"): {13: ROUND},
    ("csr_rows", "constant one more"): {1: EMPTY},
    ("csr_rows", "constant one less"): {1: EMPTY},
    ("csr_row_ptr", "lt and le"): {1: EMPTY},
    ("csr_row_ptr", "constant one more"): {1: EMPTY},
    ("csr_row_ptr", "constant one less"): {1: EMPTY},
}

# What changes something, but nothing that the simulator sees.
COPIES = "of copies by cp.async, whose lanes each wait for their own, one fence is taken for all"
SCOPE = "an atomic of a CTA beside those of the device on the same word"
GROUPS = "where a group's union is written passes 2^32 from 2^22 groups on, which are as many CTAs"
UNSEEN = {
    ("sm_90a fwd g4 bfloat16", "proxy fence of one lane"): {2: COPIES},
    ("sm_90a fwd g4 bfloat16", "setmaxnreg: few"): {4: FEW},
    ("csr_collect", "atomic of a CTA"): {1: SCOPE, 2: SCOPE, 3: SCOPE, 4: SCOPE},
    ("walk_plan", "signed offset cut"): {16: GROUPS},
    ("walk_plan", "offset cut"): {16: GROUPS},
}


def reason(kernel: str, edit: Edit, mutant: Mutant) -> str | None:
    """Why a mutant is not noticed; None: it must be."""
    for of, edits, instruction, why in RULES:
        if re.match(of, kernel) and re.match(edits, edit.name) and re.match(instruction, mutant.before):
            return why
    key = kernel, edit.name
    return NUMBERED.get(key, {}).get(mutant.number) or UNSEEN.get(key, {}).get(mutant.number)
