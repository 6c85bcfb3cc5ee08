"""`python -m ptxsim run PROGRAM.py [its arguments] [options]`."""

import argparse
import sys

from .host import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ptxsim", allow_abbrev=False)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "run",
        help="run a CuTe DSL program on a machine without a GPU",
        description=run.__doc__,
        epilog="What is not an option of this command is the program's, and so is everything behind a '--'.",
        allow_abbrev=False,
    )
    run.add_arguments(command)
    line = sys.argv[1:]
    end = line.index("--") if "--" in line else len(line)
    arguments, rest = parser.parse_known_args(line[:end])
    return run.main(arguments, rest + line[end + 1 :])


if __name__ == "__main__":
    sys.exit(main())
