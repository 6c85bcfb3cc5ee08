"""How many registers the assembler gave the kernels of a cubin: `setmaxnreg` starts from them."""

from __future__ import annotations

import io
import struct

from elftools.elf.elffile import ELFFile

REGISTER_COUNT = 0x2F  # the attribute's number
SIZED = 4  # the format whose value has a size; every other has two bytes


def register_counts(cubin: bytes) -> dict[str, int]:
    """By kernel, of each thread at its start: attributes of ``.nv.info``, which name functions by symbol."""
    elf = ELFFile(io.BytesIO(cubin))
    section, symbols = elf.get_section_by_name(".nv.info"), elf.get_section_by_name(".symtab")
    info = section.data() if section else b""
    counts, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if attribute == REGISTER_COUNT:
            symbol, registers = struct.unpack_from("<II", info, at + 4)
            counts[symbols.get_symbol(symbol).name] = registers
        at += 4 + (size if form == SIZED else 0)
    return counts
