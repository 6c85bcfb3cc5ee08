"""Mutants that no test can notice, and why.

A mutant is named by the kernel, the edit and its number among the edit's mutants, which a failing test prints. What
names kernels, edits and instructions are regular expressions; sections are those of the PTX ISA 9.1.
"""

from __future__ import annotations

import re

from mutants.edits import Edit, Mutant

ROUND = "a further round of the loop finds nothing"
EMPTY = "no launch has a batch, a head or an item of nothing"
BELOW = "the bits below are 0"
COUNTS = "split_counts of fewer than 2^24 tokens and of 64 KV heads are 4 GiB"
COLLECTIVE = "what it orders are loads of tensor memory, which a warp's lanes do and await together"
CLEARED = "clears a word that nothing reads"
FEW_BUCKETS = "there are fewer buckets than threads"
EXPECTED = "the phase awaits lane 0's arrival, and that comes after it has said how many bytes to expect"
DIVISOR = "128 is divided by 1 at least"
SUMS = "the sums of the warps are not written again, or after a further barrier"
COMPLETES = "the thread has nothing to tell: its copy completes on the barrier itself"
WARPGROUP = "a warpgroup's products are complete as one, and the warp that goes on has waited for them"
LOADED = "a register waits for its own load (9.7.16.6.4.5), and a later wait, before the memory is let go, for all"
FENCED = "what it lets go is tensor memory, and fences of tcgen05 need no more than a relaxed arrival (9.7.16.6.4.4)"
FEW = "fewer registers, which still hold the values of the role: an assembler that spills is what a build refuses"
AHEAD = "a walk has three stages for a consumer's Q and two for K and V, and who fills them awaits both"
GATHERED = "the products let an item go when its tiles' queries, and those of the next tile, have come from these warps"
BEGUN = "the last product of an item, which the epilogue awaits, is issued by a warp that has begun the next item"
FOLLOWED = "a barrier of the CTA follows"
SEEN = "of -1 << n, no lower bit is set where this one is not"


def seen(first: int) -> dict[int, str]:
    """Bits of the masks of a row's sixteen columns, but the lowest, of eight masks; ``first``: the number of that."""
    return {first + 19 * mask + bit: SEEN for mask in range(8) for bit in range(1, 16)}


# What the names of kernel and edit and the instruction begin with, and why; of any number of mutants.
RULES = [
    (
        r"csr_|walk_plan|radix_|schedule_", r".*offset cut", r"mul\.wide\.[su]32\s+%rd\d+, %r\d+, [48];",
        "an index of fewer than 2^29: of an entry of a head (2^24 tokens of 32 blocks), a row, a sequence or a digit",
    ),
    (r"radix_scan", r".*offset cut", r"", "counts of 4 GiB are those of 2^31 entries"),
    (r"sm_\w+ combine", r".*offset cut", r"mul\.wide\.u32\s+%rd\d+, %r\d+, 4;", "one of 128 values of a row"),
    (r"sm_\w+ combine", r".*offset cut", r"mul\.wide\.u32\s+%rd\d+, %r\d+, 32;", "2^31 rows of q are 512 GiB"),
    (r"sm_\w+ combine", r".*offset cut", r"mul\.wide\.u32\s+%rd\d+, %r\d+, [24];", "a column of a row"),
]  # fmt: skip

# Kernel, edit, and why by number.
NUMBERED = [
    ("sm_90a fwd g(4|16) .*", "barrier dropped", {2: WARPGROUP}),
    ("sm_90a fwd g16 .*", "barrier of a warp dropped", {3: EXPECTED, 6: EXPECTED}),
    ("sm_90a fwd g1 .*", "barrier of a warp dropped", {3: WARPGROUP}),
    ("sm_90a fwd g1 .*", ".*offset cut", {173: "one of 128 values of a row"}),
    ("sm_90a fwd g16 .*", "arrival relaxed", {6: COMPLETES, 13: COMPLETES}),
    ("sm_90a fwd .*", "wait for an mbarrier dropped", {5: AHEAD}),
    ("sm_90a fwd .*", "arrival relaxed", {7: AHEAD}),
    ("sm_90a fwd .*", "setmaxnreg dropped", {5: FEW}),
    ("sm_90a fwd .*", "setmaxnreg: few", {4: FEW}),
    ("sm_90a fwd g1 .*|sm_100f fwd g(1|4) .*", "setmaxnreg: few", {1: FEW}),
    ("sm_100f fwd .*", "wait for an mbarrier dropped", {21: BEGUN}),
    ("sm_100f fwd .*", "arrival relaxed", {6: GATHERED, 10: FENCED}),
    ("sm_100f fwd .*", "barrier of a warp dropped", {3: GATHERED}),
    ("sm_100f fwd g4 .*", "barrier of a warp dropped", {6: COLLECTIVE, 10: COLLECTIVE}),
    ("sm_100f fwd g16 .*", "barrier of a warp dropped", {4: EXPECTED, 7: COLLECTIVE, 11: COLLECTIVE}),
    ("sm_100f fwd g1 .*", "barrier of a warp dropped", {6: COLLECTIVE, 12: COLLECTIVE}),
    ("sm_100f fwd g(4|16) .*", "wait for loads dropped", dict.fromkeys(range(2, 5), LOADED)),
    ("sm_100f fwd g1 .*", "wait for loads dropped", dict.fromkeys(range(2, 17), LOADED)),
    ("sm_100f fwd g4 .*", "constant one more", seen(170)),
    ("sm_100f fwd g16 .*", "constant one more", seen(171)),
    ("sm_100f fwd g1 .*", "constant one more", seen(195)),
    ("sm_100f fwd g(4|16) .*", "lt and le", {15: EMPTY}),
    ("sm_100f fwd g1 .*", "lt and le", {16: EMPTY}),
    ("sm_90a combine .*", "lt and le", {2: DIVISOR}),
    ("sm_90a combine topk4 .*", "constant one more", {9: BELOW}),
    ("sm_100f combine topk8 .*", "constant one more", {12: BELOW}),
    ("sm_100f combine .*", ".*offset cut", {2: "the number of a row of q: 2^32 of them are a TiB"}),
    ("walk_plan", "lt and le", {1: "a thread writes a word that it clears afterwards"}),
    ("walk_plan", "gt and ge", {1: "there are more words than threads"}),
    ("walk_plan", "constant one less", {1: "a group has a power of two of tokens, at least 8"}),
    ("radix_(count|scatter)|csr_keys|schedule_count", "lt and le|gt and ge", {1: CLEARED}),
    ("csr_keys", "gt and ge", {18: "the host refuses too few rows"}),
    ("csr_keys", "minimum and maximum", {1: "cu_seqlens_q ascends"}),
    ("csr_keys", ".*offset cut", {63: COUNTS}),
    ("csr_collect", ".*offset cut", {31: COUNTS}),
    ("csr_collect", "gt and ge", {6: "the entry after the last one is -1"}),
    ("csr_rows", "lt and le", {11: ROUND}),
    ("csr_rows", "gt and ge", {13: ROUND}),
    ("csr_rows|csr_row_ptr", "constant one (more|less)", {1: EMPTY}),
    ("csr_row_ptr", "lt and le", {1: EMPTY}),
    ("radix_scatter", "barrier of a warp dropped", {32: FOLLOWED}),
    ("schedule_fill", "barrier of a warp dropped", {2: FOLLOWED}),
    ("schedule_fill", "barrier dropped", {2: SUMS, 3: "the scan of the buckets has barriers before the rows are read"}),
    ("schedule_fill", "lt and le", {5: CLEARED, 10: FEW_BUCKETS}),
    ("schedule_count", "barrier dropped", {2: SUMS}),
    ("schedule_count", ".*offset cut", {11: "256 times the tiles of 256 rows are no more than rows"}),
    ("schedule_count", "constant one (more|less)", {1: FEW_BUCKETS}),
    ("schedule_count", "constant one less", {7: "the first warp has no use for it"}),
]

# What changes something, but nothing that the simulator sees.
GROUPS = "where a group's union is written passes 2^32 from 2^22 groups on, which are as many CTAs"
GARBAGE = "an entry past a token's count is read, and the garbage there is past all entries"
FAR = "with a temperature no walk runs on results of gigabytes, for its lse has no gaps; without, g4 and g1 do"
SPLITS = "no token of the large call has so many splits"
ROUNDS = "eight tiles of a warp are a million entries"
UNSEEN = [
    ("sm_90a fwd g16 .*", ".*offset cut", {41: FAR}),
    ("sm_90a combine topk16 .*", ".*offset cut", {38: SPLITS}),
    ("radix_scan", "gt and ge", {3: ROUNDS, 6: ROUNDS}),
    ("csr_split", "gt and ge", {2: GARBAGE, 6: GARBAGE, 9: GARBAGE, 12: GARBAGE}),
    ("walk_plan", ".*offset cut", {16: GROUPS}),
]


def reason(kernel: str, edit: Edit, mutant: Mutant) -> str | None:
    """Why a mutant is not noticed; None: it must be."""
    for of, edits, instruction, why in RULES:
        if re.match(of, kernel) and re.match(edits, edit.name) and re.match(instruction, mutant.before):
            return why
    for of, edits, reasons in (*NUMBERED, *UNSEEN):
        if mutant.number in reasons and re.fullmatch(of, kernel) and re.fullmatch(edits, edit.name):
            return reasons[mutant.number]
    return None
