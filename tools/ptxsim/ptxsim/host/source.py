"""Where in the program something is from."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cutlass
import torch

from .. import load

# Directories whose lines are not the program's.
LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, cutlass.__file__, __file__))


def calling_line() -> str:
    """The line of the program that is being executed: the innermost that is not of a library."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith((*LIBRARIES, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "an unknown place"


class Library:
    """PTX with line information: the module, loaded without it, and where in the program each PTX line is from.

    registers: by kernel, those that the assembler gave each thread.
    """

    def __init__(self, ptx: str, registers: dict[str, int]) -> None:
        self.registers = registers
        lines = ptx.split("\n")
        files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.M))
        self._places: list[str] = []
        place = ""
        for number, line in enumerate(lines):
            if match := re.match(r"\s*\.(?:loc\s+(\d+)\s+(\d+)|file\b)", line):
                lines[number] = ""
                place = f"{Path(files[match[1]]).name}:{match[2]}" if match[1] in files else place
            self._places.append(place)
        self.module = load("\n".join(lines))

    def with_places(self, report: str) -> str:
        """A report of the simulator, with the program's line behind every PTX line."""

        def place(match: re.Match) -> str:
            number = int(match[1])
            known = self._places[number - 1] if number <= len(self._places) else ""
            return f"{match[0]} ({known})" if known else match[0]

        return re.sub(r"PTX line (\d+)", place, report)
