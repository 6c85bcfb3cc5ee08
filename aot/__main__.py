"""``python -m aot list`` shows the configuration space, ``python -m aot build`` compiles it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from aot import build
from aot.configs import ARCHS, configurations


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m aot", description="Compile the kernels ahead of time.")
    commands = parser.add_subparsers(dest="command", required=True)

    listing = commands.add_parser("list", help="show the configurations")
    listing.add_argument("--arch", action="append", choices=ARCHS, default=[], help="only this architecture")
    listing.add_argument("--json", action="store_true", help="print JSON")

    building = commands.add_parser(
        "build",
        help="compile the configurations into a bundle, and their PTX into its ptx.zip",
        description="Compile the configurations into a bundle, and their PTX into its ptx.zip. With --arch or --only a "
        "bundle that is there already keeps its other configurations; where their source has changed since, the build "
        "refuses. Files that no build put there stay. After an interrupt, a build goes on where the last one was.",
    )
    building.add_argument("--arch", action="append", choices=ARCHS, default=[], help="only this one (repeatable)")
    building.add_argument("--only", metavar="GLOB", default="*", help="only configurations with a matching name")
    building.add_argument("-j", "--jobs", type=int, metavar="N", help="worker processes (default: one a core)")
    building.add_argument("--out", type=Path, metavar="DIR", default=build.DEFAULT_OUT, help="default: %(default)s")

    options = parser.parse_args(arguments)
    return build.run_command(lambda: _list(options) if options.command == "list" else _build(options))


def _list(options: argparse.Namespace) -> int:
    selected = build.select(configurations(), options.arch)
    if options.json:
        fields = ("name", "arch", "operation", "options")
        print(json.dumps([{field: getattr(item, field) for field in fields} for item in selected], indent=1))
    else:
        for configuration in selected:
            print(configuration.path)
    return 0


def _build(options: argparse.Namespace) -> int:
    space = configurations()
    selected = build.complete(build.select(space, options.arch, options.only), space, options.out)
    summary = build.build(selected, options.out, jobs=options.jobs, ptx=True)
    print(f"{options.out}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
