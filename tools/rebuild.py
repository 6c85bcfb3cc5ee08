"""Rebuild every cubin from source, without the cache, and compare with the tracked ``cubins/MANIFEST.lock``.

Prints for each configuration whether it is identical, changed, new (not in the lock) or gone (only in the lock), the
same of the manifest, which says how each is launched, and exits with 1 if any is not identical or the DSL is another
version. ``--update`` rewrites the lock instead. The lock holds a cubin's SHA-256 a line, so ``sha256sum -c
MANIFEST.lock`` in ``cubins/`` checks a built bundle against it; its header has the manifest's own ``digest``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from aot.build import MANIFEST, build, run_command  # noqa: E402
from aot.configs import configurations  # noqa: E402

LOCK = ROOT / "cubins" / "MANIFEST.lock"
DSL = "nvidia-cutlass-dsl"


@dataclass(frozen=True)
class Lock:
    """The DSL's version, the manifest's digest, and the SHA-256 of each cubin by its file, relative to the bundle."""

    dsl_version: str = "none"
    digest: str = "none"
    hashes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Lock:
        lines = text.splitlines()
        header = dict(line.removeprefix("# ").rsplit(" ", 1) for line in lines if line.startswith("# "))
        hashes = dict(reversed(line.split("  ", 1)) for line in lines if not line.startswith("# "))
        return cls(header.get(DSL, "none"), header.get(MANIFEST, "none"), hashes)

    def __str__(self) -> str:
        lines = [f"{digest}  {file}" for file, digest in sorted(self.hashes.items())]
        return "\n".join([f"# {DSL} {self.dsl_version}", f"# {MANIFEST} {self.digest}", *lines]) + "\n"


def rebuild(jobs: int | None) -> Lock:
    """Compile every configuration and return the lock of the result."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "cubins")
        build(configurations(), out, jobs=jobs, cache_directory=Path(directory, "cache"))
        manifest = json.loads((out / MANIFEST).read_bytes())
    hashes = {entry["file"]: entry["sha256"] for entry in manifest["configurations"]}
    return Lock(manifest["dsl_version"], manifest["digest"], hashes)


def compare(tracked: Lock, built: Lock) -> dict[str, str]:
    """By file, the manifest's last: identical, changed, new or gone."""
    report = {}
    for file in sorted(tracked.hashes.keys() | built.hashes.keys()):
        if file not in tracked.hashes:
            report[file] = "new"
        elif file not in built.hashes:
            report[file] = "gone"
        else:
            report[file] = "identical" if tracked.hashes[file] == built.hashes[file] else "changed"
    report[MANIFEST] = "identical" if tracked.digest == built.digest else "changed"
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="rewrite the lock to match the source")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="worker processes (default: one a core)")
    options = parser.parse_args(arguments)
    return run_command(lambda: check(options.jobs, options.update))


def check(jobs: int | None, update: bool) -> int:
    """Rebuild, report, and update the lock or compare with it; returns the exit status."""
    tracked = Lock.parse(LOCK.read_text()) if LOCK.exists() else Lock()
    built = rebuild(jobs)
    report = compare(tracked, built)
    for file, status in report.items():
        print(f"{status:9}  {file}")
    if tracked.dsl_version != built.dsl_version:
        print(f"{DSL}: the lock has {tracked.dsl_version}, this is {built.dsl_version}")
    if update:
        LOCK.parent.mkdir(exist_ok=True)
        LOCK.write_text(str(built))
        return 0
    return 0 if tracked == built else 1


if __name__ == "__main__":
    sys.exit(main())
