"""How many registers the assembler gave the kernels of a cubin: `setmaxnreg` starts from them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

REGISTER_COUNT = 0x2F  # the attribute's number
SIZED = 4  # the format whose value has a size; every other has two bytes


def register_counts(cubin: bytes) -> dict[str, int]:
    """By kernel, of each thread at its start: attributes of ``.nv.info``, which name functions by symbol."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + i * entry) for i in range(count)]
    contents = [cubin[start : start + size] for _, _, _, _, start, size, _, _ in headers]
    sections = {_string(contents[names_at], header[0]): i for i, header in enumerate(headers)}
    if ".nv.info" not in sections:
        return {}
    symbols = sections[".symtab"]
    names = contents[headers[symbols][6]]
    counts = {}
    for attribute, value in _attributes(contents[sections[".nv.info"]]):
        if attribute == REGISTER_COUNT:
            symbol, registers = struct.unpack("<II", value)
            (name,) = struct.unpack_from("<I", contents[symbols], 24 * symbol)
            counts[_string(names, name)] = registers
    return counts


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, attribute, short = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            yield attribute, info[at : at + short]
            at += short
