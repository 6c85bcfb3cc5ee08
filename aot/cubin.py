"""What a cubin says about its kernel, read from the ELF: nothing here comes from the kernel's source.

The facts are in NVIDIA's ``.nv.info`` sections: one for the whole file, one for each kernel. Both are sequences of
attributes: a byte for the format, a byte for the attribute, then either two bytes of value or a 16-bit size and as
many bytes. All numbers are little-endian.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from elftools.elf.elffile import ELFFile

_FORMAT_SIZED = 4  # every other format holds its value in the two bytes after the attribute

_REQNTID = 0x10
_MIN_STACK_SIZE = 0x12
_KPARAM_INFO = 0x17
_REGCOUNT = 0x2F

_RESERVED_SMEM = 1024  # the system's own, at the start of every block's shared memory; the ELF counts it as static


@dataclass(frozen=True)
class Cubin:
    """One kernel's compiled facts; sizes and offsets in bytes.

    ``params`` are (offset, size) in the order of the parameters, the offset counted from the first parameter.
    ``threads`` is the block size that the kernel was compiled for. ``stack_bytes`` is the local memory of a thread,
    where the compiler puts spilled registers (and arrays that it cannot keep in registers, which is no better).
    """

    symbol: str
    params: tuple[tuple[int, int], ...]
    threads: int
    registers: int
    stack_bytes: int
    static_smem_bytes: int


def read_cubin(data: bytes) -> Cubin:
    """Read the facts of the one kernel in ``data``; ValueError where it does not hold exactly one."""
    elf = ELFFile(io.BytesIO(data))
    sections = {section.name: section for section in elf.iter_sections()}
    functions = {
        symbol.name: index
        for index, symbol in enumerate(sections[".symtab"].iter_symbols())
        if (symbol["st_info"]["type"], symbol["st_info"]["bind"]) == ("STT_FUNC", "STB_GLOBAL")
    }
    if len(functions) != 1:
        raise ValueError(f"the cubin holds {len(functions)} kernels, expected one: {list(functions)}")
    ((symbol, index),) = functions.items()

    of_kernel = list(_attributes(sections[f".nv.info.{symbol}"].data()))
    of_functions = [
        (attribute, struct.unpack("<II", value))
        for attribute, value in _attributes(sections[".nv.info"].data())
        if len(value) == 8  # the function's index in the symbol table, then the value
    ]
    of_function = {attribute: value for attribute, (function, value) in of_functions if function == index}
    shared = sections.get(f".nv.shared.{symbol}")
    return Cubin(
        symbol=symbol,
        params=_params(value for attribute, value in of_kernel if attribute == _KPARAM_INFO),
        threads=prod(struct.unpack("<3I", dict(of_kernel)[_REQNTID])),
        registers=of_function[_REGCOUNT],
        stack_bytes=of_function[_MIN_STACK_SIZE],
        static_smem_bytes=shared["sh_size"] - _RESERVED_SMEM if shared else 0,
    )


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """The (attribute, value) pairs of an ``.nv.info`` section."""
    at = 0
    while at < len(info):
        form, attribute, short = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield attribute, info[at : at + short]
            at += short
        else:
            yield attribute, short.to_bytes(2, "little")


def _params(infos: Iterator[bytes]) -> tuple[tuple[int, int], ...]:
    """(offset, size) by ordinal. The size is in the top 14 bits of the last word."""
    by_ordinal = {}
    for info in infos:
        _, ordinal, offset, packed = struct.unpack("<IHHI", info)
        by_ordinal[ordinal] = (offset, packed >> 18)
    return tuple(by_ordinal[ordinal] for ordinal in range(len(by_ordinal)))
