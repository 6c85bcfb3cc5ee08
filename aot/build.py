"""Build the bundle: compile the configurations in worker processes, check them, write cubins and manifest.

The manifest's ``configurations`` hold, besides what finds and launches a kernel, only facts read from the cubin; the
launcher refuses a cubin that does not match them, and a manifest that does not match its own ``digest``. The output
directory ends up holding exactly what was asked for, beside files that no build put there.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aot import cache, configs
from aot.compile import Compiled, CompileError, compile_configuration, isolate
from aot.configs import ARCHS, Configuration

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ROOT / "cubins"
MANIFEST = "manifest.json"
PTX = "ptx.zip"
SCHEMA = 2
REQUIREMENTS = {"tqdm": "tqdm", "elftools": "pyelftools", "cutlass": "nvidia-cutlass-dsl"}  # module -> distribution

SMEM_LIMIT = {"sm_90a": 227 * 1024, "sm_100f": 227 * 1024}  # bytes a block can have
PARAM_SIZE = {"pointer": 8, "int32": 4, "int64": 8, "float32": 4, "tensor_map": 128}  # bytes


class BuildError(Exception):
    """There is no bundle: the message says why, and names each configuration that cannot be part of it."""


@dataclass(frozen=True)
class Summary:
    """What a build did: how many configurations it compiled and how many it took from the cache."""

    compiled: int
    cached: int

    def __str__(self) -> str:
        if not self.compiled:
            return f"nothing to compile: all {self.cached} configurations are in the cache"
        return f"{self.compiled} configurations compiled, {self.cached} from the cache"


def select(configurations: Iterable[Configuration], archs: Sequence[str] = (), only: str = "*") -> list[Configuration]:
    """The configurations of ``archs`` (empty: all) whose name, or ``arch/name``, matches the glob ``only``.

    BuildError where an architecture does not exist or nothing matches.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise BuildError(f"the architecture {arch} is not one of {', '.join(ARCHS)}")
    selected = [
        configuration
        for configuration in configurations
        if (not archs or configuration.arch in archs)
        and (fnmatchcase(configuration.name, only) or fnmatchcase(configuration.path, only))
    ]
    if not selected:
        raise BuildError(f"no configuration of {', '.join(archs or ARCHS)} matches {only!r}")
    return selected


def select_from_environment() -> list[Configuration]:
    """What ``SPARSE_AOT_BUILD_ARCHS`` (comma-separated) and ``SPARSE_AOT_BUILD_ONLY`` (a glob) leave of the space."""
    archs = [arch.strip() for arch in os.environ.get("SPARSE_AOT_BUILD_ARCHS", "").split(",") if arch.strip()]
    return select(configs.configurations(), archs, os.environ.get("SPARSE_AOT_BUILD_ONLY") or "*")


def complete(selected: Sequence[Configuration], space: Sequence[Configuration], out: Path) -> list[Configuration]:
    """``selected`` and what else of ``space`` the bundle in ``out`` has, in the order of ``space``: a build of a part
    keeps the rest.

    BuildError where the rest is not current, which is where the cache does not have it: a bundle is of one source.
    """
    store = cache.Cache(cache.default_directory())
    chosen = {configuration.path for configuration in selected}
    present = {f"{entry['arch']}/{entry['name']}" for entry in _read_entries(out)}
    kept = [item for item in space if item.path in present - chosen]
    if stale := [item.path for item in kept if store.load(cache.key(item)) is None]:
        raise BuildError(
            f"{out} holds {len(stale)} other configurations that are not in the cache as of this source, {stale[0]} "
            "among them: build all of them, or give another --out"
        )
    chosen.update(item.path for item in kept)
    return [item for item in space if item.path in chosen]


def run_command(command: Callable[[], int]) -> int:
    """The exit status of a command that builds, after one line on standard error where something stopped it."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there at exit
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def build(
    configurations: Sequence[Configuration],
    out: Path = DEFAULT_OUT,
    *,
    jobs: int | None = None,
    ptx: bool = False,
    cache_directory: Path | None = None,
) -> Summary:
    """Build ``configurations`` into ``out``, in at most ``jobs`` processes (default: one a core).

    Writes ``<arch>/<name>.cubin`` and ``manifest.json``, with ``ptx`` also ``ptx.zip`` for the simulator (members
    ``<arch>/<name>.ptx``), and removes what an earlier build left there besides. Raises BuildError, leaving ``out`` as
    it was, if a configuration does not compile, spills registers without a reason, or needs more shared memory than its
    architecture has, if a build requirement is not installed, or if ``out`` or the cache cannot be written. What an
    interrupted build had finished is in the cache.
    """
    if jobs is not None and jobs < 1:
        raise BuildError(f"jobs: expected at least 1, got {jobs}")
    if absent := [REQUIREMENTS[module] for module in REQUIREMENTS if importlib.util.find_spec(module) is None]:
        raise BuildError(
            f"{', '.join(absent)} not installed: a build needs it, and pip install -e '.[test]' installs what one needs"
        )
    store = cache.Cache(cache_directory or cache.default_directory())
    for folder in (out, store.directory):
        _check_writable(folder)
    keys = {configuration.path: cache.key(configuration) for configuration in configurations}
    done = {path: entry for path, key in keys.items() if (entry := store.load(key))}
    missing = [configuration for configuration in configurations if configuration.path not in done]

    failures = []
    for configuration, result in _compile(missing, jobs or len(os.sched_getaffinity(0))):
        if isinstance(result, CompileError):
            failures.append(str(result))
        elif cache.key(configuration) != keys[configuration.path]:
            failures.append(f"{configuration.path}: its source changed during the build")
        else:
            store.store(keys[configuration.path], result)
            done[configuration.path] = result

    entries = []
    for configuration in configurations:
        if configuration.path in done:
            try:
                entries.append(_manifest_entry(configuration, done[configuration.path]))
            except ValueError as error:
                failures.append(f"{configuration.path}: {error}")
    if failures:
        raise BuildError("\n".join(failures))

    _write(out, configurations, done, entries, ptx)
    return Summary(compiled=len(missing), cached=len(configurations) - len(missing))


def _compile(
    configurations: Sequence[Configuration], jobs: int
) -> Iterator[tuple[Configuration, Compiled | CompileError]]:
    """Compile in worker processes and yield the results as they come, under a progress bar."""
    if not configurations:
        return
    from tqdm import tqdm  # a build requirement; listing the configurations needs none

    workers = ProcessPoolExecutor(
        max_workers=min(jobs, len(configurations)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=isolate,
    )
    others = multiprocessing.active_children()
    try:
        # Ctrl-C reaches every process of the terminal; the workers, started here, leave it to this one.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {
                workers.submit(compile_configuration, configuration): configuration for configuration in configurations
            }
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with tqdm(total=len(configurations), unit="kernel", desc="compile", disable=None) as progress:
            for future in as_completed(futures):
                configuration = futures[future]
                progress.set_postfix_str(configuration.path)
                progress.update()
                try:
                    result = future.result()
                except CompileError as error:
                    result = error
                except BrokenProcessPool as error:
                    result = CompileError(f"{configuration.path}: {error}")
                yield configuration, result
    except BaseException:  # an interrupt, or nobody wants the rest: what is being compiled is not worth a wait
        for worker in multiprocessing.active_children():
            if worker not in others:
                worker.kill()
        raise
    finally:
        workers.shutdown(cancel_futures=True)


def _manifest_entry(configuration: Configuration, compiled: Compiled) -> dict[str, Any]:
    """The configuration's manifest entry; ValueError where the cubin breaks a rule or contradicts the kernel class."""
    from aot.cubin import read_cubin  # needs a build requirement too

    launch = compiled.launch
    cubin = read_cubin(compiled.cubin)

    sizes = [PARAM_SIZE[param["kind"]] for param in launch["params"]]
    if sizes != [size for _, size in cubin.params]:
        raise ValueError(f"the kernel class describes parameters of sizes {sizes}, the cubin has {cubin.params}")
    if launch["threads"] != cubin.threads:
        raise ValueError(f"the kernel class has {launch['threads']} threads, the cubin is for {cubin.threads}")
    smem_bytes = launch["smem_bytes"] + cubin.static_smem_bytes
    if smem_bytes > SMEM_LIMIT[configuration.arch]:
        limit = SMEM_LIMIT[configuration.arch]
        raise ValueError(f"needs {smem_bytes} bytes of shared memory, {configuration.arch} has {limit}")
    if cubin.stack_bytes and not configuration.spill_reason:
        raise ValueError(f"spills {cubin.stack_bytes} bytes a thread at {cubin.registers} registers")

    return {
        "name": configuration.name,
        "arch": configuration.arch,
        "operation": configuration.operation,
        "options": configuration.options,
        "file": f"{configuration.path}.cubin",
        "sha256": hashlib.sha256(compiled.cubin).hexdigest(),
        "size": len(compiled.cubin),
        "ptx_sha256": hashlib.sha256(compiled.ptx).hexdigest(),
        "symbol": cubin.symbol,
        "params": [
            param | {"offset": offset, "size": size}
            for param, (offset, size) in zip(launch["params"], cubin.params, strict=True)
        ],
        "threads": cubin.threads,
        "smem_bytes": launch["smem_bytes"],
        "registers": cubin.registers,
        "spill_bytes": cubin.stack_bytes,
        "work_per_cta": launch["work_per_cta"],
        "cluster": launch["cluster"],
        "pdl": launch["pdl"],
    }


def _write(
    out: Path,
    configurations: Sequence[Configuration],
    compiled: dict[str, Compiled],
    entries: list[dict[str, Any]],
    ptx: bool,
) -> None:
    """Write the files, then the manifest, then remove what only the manifest before it names."""
    before = _read_entries(out)
    earlier = {PTX, *(entry["file"] for entry in before)} if before else set()
    files = {f"{configuration.path}.cubin": compiled[configuration.path].cubin for configuration in configurations}
    if ptx:
        files[PTX] = _archive(
            {f"{configuration.path}.ptx": compiled[configuration.path].ptx for configuration in configurations}
        )
    for file, data in files.items():
        _write_atomically(out / file, data)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    manifest = {
        "schema": SCHEMA,
        "package_version": project["version"],
        "dsl_version": cache.dsl_versions()["nvidia-cutlass-dsl"],
        "configurations": entries,
    }
    manifest["digest"] = digest(manifest)
    _write_atomically(out / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())

    for file in earlier - files.keys():
        (out / file).unlink(missing_ok=True)


def digest(manifest: dict[str, Any]) -> str:
    """A SHA-256 of everything in a manifest but its own ``digest``."""
    content = {name: value for name, value in manifest.items() if name != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _read_entries(out: Path) -> list[dict[str, Any]]:
    """The entries of an earlier build's manifest, of any schema; none where there is no manifest of ours."""
    try:
        entries = json.loads((out / MANIFEST).read_bytes())["configurations"]
        ours = [entry for entry in entries if entry["arch"] in ARCHS and Path(entry["name"]).name == entry["name"]]
        return [entry for entry in ours if entry["file"] == f"{entry['arch']}/{entry['name']}.cubin"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _check_writable(folder: Path) -> None:
    """BuildError now, not after the compilation, where ``folder`` cannot be made or nothing can be written to it."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise BuildError(f"{folder}: {existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise BuildError(f"{folder}: {existing} is not writable")


def _archive(members: dict[str, bytes]) -> bytes:
    """A zip archive; the same bytes for the same members."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_LZMA) as opened:
        for name, data in members.items():
            opened.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_LZMA)
    return archive.getvalue()


def _write_atomically(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one; a file that already holds ``data`` is left alone."""
    if path.is_file() and path.read_bytes() == data:
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(data)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
