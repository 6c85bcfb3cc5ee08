"""The hardware's tensor maps: the DSL's host code packs most of them itself, without asking the driver."""

from __future__ import annotations

from .. import encode_tiled

BYTES = 128
VERSION = 2  # of the format, in its bits 64 to 67
TFLOAT32, TFLOAT32_BIT = 11, 80  # of the format's float32
# The format's data types to CUtensorMapDataType.
TYPES = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7, 8: 10, 9: 8, 10: 9, 11: 13, 12: 14, 13: 15}


def from_hardware(raw: bytes) -> bytes:
    """The simulator's tensor map for the hardware's; other bytes come back as they are."""
    bits = int.from_bytes(raw[:64], "little")

    def field(at: int, width: int) -> int:
        return bits >> at & (1 << width) - 1

    rank, data_type = field(68, 3) + 1, field(71, 4)
    if field(64, 4) != VERSION or field(0, 64) == 0 or rank > 5 or data_type not in TYPES:
        return raw
    return encode_tiled(
        TFLOAT32 if field(TFLOAT32_BIT, 1) else TYPES[data_type],
        field(0, 64),
        [field(256 + 32 * d, 32) + 1 for d in range(rank)],
        # In 16 bytes: 32 bits each, and then 4 more of each.
        [field(96 + 32 * d, 32) << 4 | field(224 + 4 * d, 4) << 36 for d in range(rank - 1)],
        [field(440 + 8 * d, 8) + 1 for d in range(rank)],
        element_strides=[field(416 + 3 * d, 3) + 1 for d in range(rank)],
        interleave=field(75, 2),
        swizzle=field(77, 2),
        oob_fill=field(79, 1),
    )
