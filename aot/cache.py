"""The build's cache: compiled kernels by the content of everything that their compilation depends on.

A key covers the source of the kernel's module and of every project module that it imports, found from the import
statements themselves, the DSL's version, the Python version that traces the kernels, and the configuration. There is no
invalidation: what changes gets another key.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from aot.compile import Compiled
from aot.configs import Configuration

_COMPILER = "aot.compile"  # the module that compiles; it and what it imports are part of every key


def default_directory() -> Path:
    """``SPARSE_AOT_CACHE_DIR`` where set, else ``sparse_aot`` under the user's cache directory."""
    if chosen := os.environ.get("SPARSE_AOT_CACHE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparse_aot"


@functools.cache
def dsl_versions() -> dict[str, str]:
    """Name and version of every installed distribution of the DSL; its compiler comes in distributions of its own."""
    names = ((dist.metadata["Name"], dist.version) for dist in metadata.distributions())
    return {name: version for name, version in sorted(names) if name.startswith("nvidia-cutlass-dsl")}


def key(configuration: Configuration) -> str:
    """The cache key: a SHA-256 of everything that can change the compiled kernel."""
    content = {
        "configuration": asdict(configuration),
        "sources": source_hashes(configuration.module) | source_hashes(_COMPILER),
        "dsl": dsl_versions(),
        "python": sys.version_info[:2],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def source_hashes(module: str) -> dict[str, str]:
    """SHA-256 of the source of ``module`` and of all that it imports from its own top-level package or from ``aot``."""
    packages = {module.partition(".")[0], "aot"}
    hashes: dict[str, str] = {}
    pending = [module]
    while pending:
        name = pending.pop()
        file = _module_file(name, packages)
        if name in hashes or file is None:
            continue
        source = file.read_bytes()
        hashes[name] = hashlib.sha256(source).hexdigest()
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        pending += _imports(source, package, file)
        if "." in name:
            pending.append(name.rpartition(".")[0])
    if module not in hashes:
        raise ModuleNotFoundError(f"no source file for the module {module}", name=module)
    return hashes


@functools.cache
def _imports(source: bytes, package: str, file: Path) -> list[str]:
    """Absolute names of all that a module's import statements can name, wherever they stand in it.

    Only what type checkers alone import is left out: it has no part in a compilation.
    """
    names = []
    pending: list[ast.AST] = [ast.parse(source, file)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            pending += ast.iter_child_nodes(node)
    return names


def _module_file(name: str, packages: set[str]) -> Path | None:
    """The source file of a module of one of ``packages``, found without importing anything."""
    top, *rest = name.split(".")
    root = _package_directory(top) if top in packages else None
    if root is None:
        return None
    path = root.joinpath(*rest)
    candidates = (path / "__init__.py", path.with_name(path.name + ".py"))
    return next((file for file in candidates if file.is_file()), None)


def _package_directory(top: str) -> Path | None:
    spec = importlib.util.find_spec(top)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


class Cache:
    """Compiled kernels in a directory, one entry a key; safe for builds that run at the same time.

    An entry is written under another name and renamed, and carries a checksum, so that a reader sees all of it or none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, key: str) -> Compiled | None:
        """The entry, or None where there is none or it is damaged."""
        entry = self._entry(key)
        try:
            record = json.loads((entry / "launch.json").read_bytes())
            compiled = Compiled(
                (entry / "kernel.cubin").read_bytes(), (entry / "kernel.ptx").read_bytes(), record["launch"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return compiled if record["checksum"] == _checksum(compiled) else None

    def store(self, key: str, compiled: Compiled) -> None:
        """Add an entry, in place of a damaged one if there is one."""
        entry = self._entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{key[:8]}-", dir=entry.parent))
        try:
            (new / "kernel.cubin").write_bytes(compiled.cubin)
            (new / "kernel.ptx").write_bytes(compiled.ptx)
            record = {"checksum": _checksum(compiled), "launch": compiled.launch}
            (new / "launch.json").write_text(json.dumps(record))
            if self.load(key) is None:
                shutil.rmtree(entry, ignore_errors=True)
                new.rename(entry)
        except OSError:
            if self.load(key) is None:  # else another build has been quicker
                raise
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def _entry(self, key: str) -> Path:
        return self.directory / key[:2] / key


def _checksum(compiled: Compiled) -> str:
    launch = json.dumps(compiled.launch, sort_keys=True).encode()
    parts = (hashlib.sha256(part).hexdigest() for part in (compiled.cubin, compiled.ptx, launch))
    return hashlib.sha256("".join(parts).encode()).hexdigest()
