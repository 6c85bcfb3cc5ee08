"""The build: what its cache keys cover, what it refuses, and what it writes."""

import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from aot import __main__ as command_line
from aot import build, cache, configs
from aot.compile import Compiled
from tools import rebuild

ROOT = Path(build.__file__).resolve().parent.parent


def configuration(name, factory, arch="sm_90a", **arguments):
    return configs.Configuration(
        operation="toy",
        arch=arch,
        name=name,
        options=arguments,
        factory=f"toy_kernels.{factory}",
        arguments=arguments,
    )


SCALE = configuration("scale-128", "scale:Scale", threads=128)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A copy of the toy kernels that a test may edit, and a cache of its own."""
    shutil.copytree(Path(__file__).with_name("toy_kernels"), tmp_path / "toy_kernels")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SPARSE_AOT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "toy_kernels"


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def snapshot(directory):
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def manifest_entries(directory):
    return json.loads((directory / "manifest.json").read_bytes())["configurations"]


# The cache key


@pytest.mark.parametrize(
    ("file", "changes"),
    [("scale.py", True), ("values.py", True), ("__init__.py", True), ("spill.py", False), ("unused.py", False)],
)
def test_key_changes_with_exactly_the_sources_that_the_kernel_imports(toy, file, changes):
    before = cache.key(SCALE)
    (toy / file).write_text((toy / file).read_text() + "# edited\n")
    assert (cache.key(SCALE) != before) is changes


@pytest.mark.parametrize(
    "statement",
    [
        "import toy_kernels.unused",
        "import toy_kernels.unused as other",
        "from toy_kernels import unused",
        "from toy_kernels.unused import NOTHING",
        "from . import unused",
        "from .unused import NOTHING",
        "def late():\n    from .unused import NOTHING",
    ],
)
def test_key_follows_every_form_of_import(toy, statement):
    (toy / "values.py").write_text(f"OFFSET = 3.0\n{statement}\n")
    before = cache.key(SCALE)
    edit(toy / "unused.py", "None", "1")
    assert cache.key(SCALE) != before


def test_key_covers_the_contract_and_the_compiler_of_every_real_kernel():
    for module in {item.module for item in configs.configurations()}:
        sources = cache.source_hashes(module)
        assert {module, "aot", "aot.kernels", "aot.kernel"} <= sources.keys()
    assert "aot.compile" in cache.source_hashes("aot.compile")


@pytest.mark.parametrize("file", sorted((ROOT / "aot" / "kernels").glob("*.py")), ids=lambda file: file.stem)
def test_what_families_share_knows_no_family(file):
    sources = cache.source_hashes("aot.kernels" if file.stem == "__init__" else f"aot.kernels.{file.stem}")
    assert {name for name in sources if name.startswith("aot.kernels.") and name.count(".") > 2} == set()


@pytest.mark.parametrize(
    "other",
    [
        replace(SCALE, arch="sm_100f"),
        replace(SCALE, arguments={"threads": 256}),
        replace(SCALE, options={"threads": 256}),
        replace(SCALE, factory="toy_kernels.scale:Other"),
    ],
)
def test_key_changes_with_the_configuration(toy, other):
    assert cache.key(other) != cache.key(SCALE)


def test_key_changes_with_the_version_of_any_part_of_the_dsl(toy, monkeypatch):
    before = cache.key(SCALE)
    versions = cache.dsl_versions()
    assert {"nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13"} <= versions.keys()
    for part in versions:
        monkeypatch.setattr(cache, "dsl_versions", lambda part=part: versions | {part: "0"})
        assert cache.key(SCALE) != before


def test_key_of_a_kernel_without_source_is_an_error(toy):
    with pytest.raises(ModuleNotFoundError, match=r"toy_kernels\.absent"):
        cache.key(replace(SCALE, factory="toy_kernels.absent:Kernel"))


# The cache


def test_second_build_compiles_nothing_and_writes_the_same(toy, out):
    both = [SCALE, replace(SCALE, arch="sm_100f")]
    first = build.build(both, out)
    files = snapshot(out)
    second = build.build(both, out)
    assert (first.compiled, first.cached) == (2, 0)
    assert (second.compiled, second.cached) == (0, 2)
    assert str(second) == "nothing to compile: all 2 configurations are in the cache"
    assert snapshot(out) == files
    assert set(files) == {"manifest.json", "sm_90a/scale-128.cubin", "sm_100f/scale-128.cubin"}


def test_build_after_an_edit_gives_another_cubin_and_undoing_it_gives_the_first(toy, out):
    build.build([SCALE], out)
    first = snapshot(out)
    edit(toy / "values.py", "3.0", "4.0")
    assert build.build([SCALE], out).compiled == 1
    assert snapshot(out)["sm_90a/scale-128.cubin"] != first["sm_90a/scale-128.cubin"]
    edit(toy / "values.py", "4.0", "3.0")
    assert build.build([SCALE], out).compiled == 0
    assert snapshot(out) == first


def test_source_that_changes_during_the_build_is_not_cached(toy, out, monkeypatch):
    compile_all = build._compile

    def compile_then_edit(*arguments):
        for result in compile_all(*arguments):
            edit(toy / "values.py", "3.0", "4.0")
            yield result

    monkeypatch.setattr(build, "_compile", compile_then_edit)
    with pytest.raises(build.BuildError, match="sm_90a/scale-128: its source changed during the build"):
        build.build([SCALE], out)
    monkeypatch.undo()
    monkeypatch.syspath_prepend(toy.parent)
    edit(toy / "values.py", "4.0", "3.0")
    assert build.build([SCALE], out, cache_directory=toy.parent / "cache").compiled == 1


ENTRY = Compiled(b"cubin", b"ptx", {"threads": 1})


@pytest.mark.parametrize("file", ["kernel.cubin", "kernel.ptx", "launch.json"])
@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b"{}"), lambda file: file.write_bytes(b"[]"), Path.unlink]
)
def test_damaged_cache_entry_is_not_served_and_is_replaced(tmp_path, file, damage):
    store = cache.Cache(tmp_path)
    key = "ab" * 32
    store.store(key, ENTRY)
    assert store.load(key) == ENTRY
    damage(next(tmp_path.rglob(file)))
    assert store.load(key) is None
    store.store(key, ENTRY)
    assert store.load(key) == ENTRY


def test_a_build_that_stores_the_same_entry_first_is_no_error(tmp_path, monkeypatch):
    store = cache.Cache(tmp_path)
    key = "ab" * 32
    remove = shutil.rmtree

    def be_overtaken(directory, **options):
        monkeypatch.setattr(shutil, "rmtree", remove)
        store.store(key, ENTRY)

    monkeypatch.setattr(shutil, "rmtree", be_overtaken)
    store.store(key, ENTRY)
    assert store.load(key) == ENTRY
    assert [entry.name for entry in (tmp_path / key[:2]).iterdir()] == [key]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SPARSE_AOT_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/sparse_aot"),
        ({"HOME": "/home/c"}, "/home/c/.cache/sparse_aot"),
    ],
)
def test_cache_directory_follows_the_environment(monkeypatch, environment, expected):
    for name in ("SPARSE_AOT_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache.default_directory() == Path(expected)


# What the build refuses


def test_spilling_kernel_fails_unless_allowed_by_name_with_a_reason(toy, out, monkeypatch):
    spilling = configuration("spill", "spill:Spill")
    with pytest.raises(build.BuildError, match=r"sm_90a/spill: spills \d+ bytes a thread at 64 registers"):
        build.build([spilling], out)
    assert not out.exists()
    monkeypatch.setitem(configs.SPILL_REASONS, "sm_90a/spill", "the test wants it")
    build.build([spilling], out)
    (entry,) = manifest_entries(out)
    assert entry["spill_bytes"] > 0


@pytest.mark.parametrize("arch", configs.ARCHS)
def test_more_shared_memory_than_the_architecture_has_fails(toy, out, arch):
    limit = configuration("limit", "scale:Scale", arch, threads=128, smem_bytes=232448)
    above = configuration("above", "scale:Scale", arch, threads=128, smem_bytes=232449)
    build.build([limit], out)
    with pytest.raises(build.BuildError, match=f"{arch}/above: needs 232449 bytes of shared memory"):
        build.build([above], out)


def test_failing_compilation_names_every_culprit_and_leaves_the_bundle_alone(toy, out):
    build.build([SCALE], out)
    before = snapshot(out)
    edit(toy / "scale.py", "vector[i] * p.factor", "vector[i] * missing")
    edit(toy / "spill.py", "p.x + ", "p.y + ")
    with pytest.raises(build.BuildError) as error:
        build.build([SCALE, configuration("spill", "spill:Spill")], out)
    assert "sm_90a/scale-128 does not compile" in str(error.value)
    assert "missing" in str(error.value)
    assert "sm_90a/spill does not compile" in str(error.value)
    assert "'Params' object has no attribute 'y'" in str(error.value)
    assert snapshot(out) == before


def test_kernel_that_does_not_read_all_its_parameters_fails(toy, out):
    edit(toy / "scale.py", "vector[i] * p.factor", "vector[i]")
    edit(toy / "scale.py", "p.x + p.first", "p.x")
    with pytest.raises(build.BuildError, match="sm_90a/scale-128: the kernel never reads its parameters first, factor"):
        build.build([SCALE], out)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"threads": 64}, "has 64 threads, the cubin is for 128"), ({"params": []}, r"sizes \[\], the cubin has")],
)
def test_cubin_that_contradicts_its_kernel_class_fails(toy, out, monkeypatch, change, message):
    build.build([SCALE], out)
    store = cache.Cache(cache.default_directory())
    good = store.load(cache.key(SCALE))
    monkeypatch.setattr(cache.Cache, "load", lambda *_: replace(good, launch=good.launch | change))
    with pytest.raises(build.BuildError, match=message):
        build.build([SCALE], out)


# What the build writes


def test_manifest_of_a_known_kernel(toy, out):
    build.build([SCALE], out)
    (entry,) = manifest_entries(out)
    cubin = (out / entry["file"]).read_bytes()
    assert entry["file"] == "sm_90a/scale-128.cubin"
    assert entry["size"] == len(cubin)
    assert entry["symbol"].encode() in cubin
    assert entry["params"] == [
        {"name": "count", "kind": "int32", "offset": 0, "size": 4},
        {"name": "x", "kind": "pointer", "offset": 8, "size": 8},
        {"name": "first", "kind": "int64", "offset": 16, "size": 8},
        {"name": "factor", "kind": "float32", "offset": 24, "size": 4},
    ]
    assert {field: entry[field] for field in ("operation", "arch", "name", "options")} == {
        "operation": "toy",
        "arch": "sm_90a",
        "name": "scale-128",
        "options": {"threads": 128},
    }
    assert (entry["threads"], entry["smem_bytes"], entry["work_per_cta"], entry["pdl"]) == (128, 0, 128, False)


def test_bundle_holds_exactly_what_the_last_build_was_asked_for(toy, out):
    build.build([SCALE, configuration("scale-64", "scale:Scale", threads=64)], out, ptx=True)
    assert set(snapshot(out)) == {
        "manifest.json",
        "ptx.zip",
        *(f"sm_90a/scale-{threads}.cubin" for threads in (64, 128)),
    }
    with zipfile.ZipFile(out / "ptx.zip") as ptx:
        assert {name: hashlib.sha256(ptx.read(name)).hexdigest() for name in ptx.namelist()} == {
            f"sm_90a/{entry['name']}.ptx": entry["ptx_sha256"] for entry in manifest_entries(out)
        }
    build.build([SCALE], out)
    assert set(snapshot(out)) == {"manifest.json", "sm_90a/scale-128.cubin"}
    assert [entry["name"] for entry in manifest_entries(out)] == ["scale-128"]


def test_files_that_no_build_put_there_stay(toy, out):
    foreign = {"sm_90a/foreign.cubin": b"mine", "other/kernel.cubin": b"mine too", "ptx.zip": b"a zip"}
    for file, data in foreign.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_bytes(data)
    build.build([SCALE, configuration("scale-64", "scale:Scale", threads=64)], out)
    assert foreign.items() <= snapshot(out).items()
    build.build([SCALE], out)
    assert set(snapshot(out)) == {"manifest.json", "sm_90a/scale-128.cubin", *(foreign.keys() - {"ptx.zip"})}


@pytest.mark.parametrize("file", ["../victim.cubin", "/tmp/victim.cubin", "sm_90a/../../victim.cubin"])
def test_an_earlier_manifest_makes_the_build_remove_nothing_outside(toy, out, tmp_path, file):
    build.build([SCALE], out)
    victim = tmp_path / "victim.cubin"
    victim.write_bytes(b"")
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["configurations"].append({"arch": "sm_90a", "name": "x", "file": file})
    (out / "manifest.json").write_text(json.dumps(manifest))
    build.build([SCALE], out)
    assert victim.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"configurations": 1}', '{"configurations": [{}, 2]}'])
def test_an_earlier_manifest_that_is_none_is_replaced(toy, out, text):
    out.mkdir()
    (out / "manifest.json").write_text(text)
    build.build([SCALE], out)
    assert [entry["name"] for entry in manifest_entries(out)] == ["scale-128"]


def test_cubins_do_not_depend_on_the_checkout_the_environment_or_the_order(toy, out, tmp_path):
    """The same sources in another directory, with another hash seed, with the DSL's debug switches set."""
    kernels = [SCALE, configuration("scale-64", "scale:Scale", threads=64)]
    build.build(kernels, out, jobs=1)

    elsewhere = tmp_path / "another checkout"
    shutil.copytree(ROOT / "aot", elsewhere / "aot")
    shutil.copytree(toy, elsewhere / "toy_kernels")
    shutil.copy(ROOT / "pyproject.toml", elsewhere)
    script = elsewhere / "again.py"
    script.write_text(
        "from aot.build import build\nfrom aot.configs import Configuration\nfrom pathlib import Path\n"
        f"if __name__ == '__main__':\n    build({kernels[::-1]!r}, Path('out'), jobs=1)\n"
    )
    environment = os.environ | {
        "PYTHONHASHSEED": "7",
        "SPARSE_AOT_CACHE_DIR": str(elsewhere / "cache"),
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_ARCH": "sm_100f",
    }
    subprocess.run([sys.executable, script], cwd=elsewhere, env=environment, check=True)
    again = snapshot(elsewhere / "out")
    for file in ("sm_90a/scale-128.cubin", "sm_90a/scale-64.cubin"):
        assert again[file] == snapshot(out)[file]
        assert str(tmp_path).encode() not in again[file]


def test_rebuild_tool_compiles_from_source_whatever_the_cache_holds(toy, out, monkeypatch):
    monkeypatch.setattr(rebuild, "configurations", lambda: [SCALE])
    other = replace(SCALE, arguments={"threads": 64})
    build.build([other], out)
    store = cache.Cache(cache.default_directory())
    store.store(cache.key(SCALE), store.load(cache.key(other)))  # a stale entry, were there such a thing
    build.build([SCALE], out)
    lock = rebuild.rebuild(jobs=1)
    assert lock.dsl_version == cache.dsl_versions()["nvidia-cutlass-dsl"]
    assert lock.hashes.keys() == {"sm_90a/scale-128.cubin"}
    assert lock.hashes["sm_90a/scale-128.cubin"] != manifest_entries(out)[0]["sha256"]


# The configuration space and the command line


def test_configurations_are_named_and_found_uniquely():
    space = configs.configurations()
    assert len({item.path for item in space}) == len(space)
    keys = {(item.arch, item.operation, json.dumps(item.options, sort_keys=True)) for item in space}
    assert len(keys) == len(space)


def test_names_that_users_know_stay():
    names = {item.path for item in configs.configurations()}
    assert {
        "sm_90a/fwd-bf16-g16-pbf16",
        "sm_90a/fwd-bf16-g1-pf32-temperature",
        "sm_90a/combine-pbf16-topk16",
        "sm_100f/combine-pf32-topk4",
    } <= names


def test_spill_reasons_name_configurations():
    assert configs.SPILL_REASONS.keys() <= {item.path for item in configs.configurations()}


def test_list_filters_by_architecture_and_needs_no_build_requirement():
    script = (
        "import sys\nfrom aot.__main__ import main\nmain(['list', '--arch', 'sm_100f'])\n"
        "assert not {'cutlass', 'elftools', 'tqdm'} & set(sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = [item.path for item in configs.configurations() if item.arch == "sm_100f"]
    assert listed.stdout.split() == expected


def test_list_as_json_has_the_launchers_keys(capsys):
    assert command_line.main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[0].keys() == {"name", "arch", "operation", "options"}
    assert len(listed) == len(configs.configurations())


@pytest.fixture
def toy_space(toy, monkeypatch):
    space = [SCALE, replace(SCALE, arch="sm_100f"), configuration("scale-64", "scale:Scale", threads=64)]
    monkeypatch.setattr(command_line, "configurations", lambda: space)


@pytest.mark.parametrize(
    ("arguments", "built"),
    [
        (["--arch", "sm_100f"], {"sm_100f/scale-128"}),
        (["--only", "*-128"], {"sm_90a/scale-128", "sm_100f/scale-128"}),
        (["--only", "sm_90a/*"], {"sm_90a/scale-128", "sm_90a/scale-64"}),
        (["--arch", "sm_100f", "--arch", "sm_90a", "--only", "scale-64"], {"sm_90a/scale-64"}),
    ],
)
def test_build_command_restricts(toy_space, out, arguments, built, capsys):
    assert command_line.main(["build", *arguments, "-j", "2", "--out", str(out)]) == 0
    assert {f"{entry['arch']}/{entry['name']}" for entry in manifest_entries(out)} == built
    assert f"{len(built)} configurations compiled, 0 from the cache" in capsys.readouterr().out


def names(directory):
    return [f"{entry['arch']}/{entry['name']}" for entry in manifest_entries(directory)]


def test_build_of_a_part_keeps_the_rest_of_the_bundle(toy_space, toy, out):
    assert command_line.main(["build", "--out", str(out)]) == 0
    before = snapshot(out)
    for restriction in (["--only", "scale-64"], ["--arch", "sm_100f"]):
        assert command_line.main(["build", *restriction, "--out", str(out)]) == 0
        assert snapshot(out) == before
    (out / "sm_90a" / "scale-64.cubin").unlink()
    assert command_line.main(["build", "--arch", "sm_100f", "--out", str(out)]) == 0
    assert snapshot(out) == before


def test_build_of_a_part_adds_to_what_another_part_left(toy_space, out):
    for arch in ("sm_100f", "sm_90a"):
        assert command_line.main(["build", "--arch", arch, "--out", str(out)]) == 0
    assert names(out) == ["sm_90a/scale-128", "sm_100f/scale-128", "sm_90a/scale-64"]


def test_build_of_a_part_drops_what_is_no_configuration_any_more(toy_space, out, monkeypatch):
    assert command_line.main(["build", "--out", str(out)]) == 0
    monkeypatch.setattr(command_line, "configurations", lambda: [SCALE, replace(SCALE, arch="sm_100f")])
    assert command_line.main(["build", "--arch", "sm_90a", "--out", str(out)]) == 0
    assert names(out) == ["sm_90a/scale-128", "sm_100f/scale-128"]


@pytest.mark.parametrize("arch, name", [("../../victim", "x"), ("sm_90a", "../../victim/x")])
def test_a_build_removes_nothing_outside_of_its_folder_whatever_an_earlier_manifest_names(toy_space, out, arch, name):
    victim = out / arch / f"{name}.cubin"
    (out / "sm_90a").mkdir(parents=True)
    victim.parent.mkdir(parents=True, exist_ok=True)
    victim.write_bytes(b"keep")
    entry = {"arch": arch, "name": name, "file": f"{arch}/{name}.cubin"}
    (out / build.MANIFEST).write_text(json.dumps({"configurations": [entry]}))
    assert command_line.main(["build", "--out", str(out)]) == 0
    assert victim.read_bytes() == b"keep"


def test_build_of_a_part_refuses_where_the_rest_is_of_other_source(toy_space, toy, out, capsys):
    assert command_line.main(["build", "--out", str(out)]) == 0
    before = snapshot(out)
    capsys.readouterr()
    edit(toy / "values.py", "3.0", "4.0")
    assert command_line.main(["build", "--only", "scale-64", "--out", str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {out} holds 2 other configurations that are not in the cache as of this source, sm_90a"
    )
    assert snapshot(out) == before


def test_interrupted_build_stops_at_once_and_keeps_what_is_finished(toy, out, tmp_path):
    (toy / "slow.py").write_text(f"import time\nopen({str(tmp_path / 'started')!r}, 'w')\ntime.sleep(100)\n")
    script = tmp_path / "command.py"
    space = [configuration("slow", "slow:Slow"), *(configuration(f"s{n}", "scale:Scale", threads=n) for n in (32, 64))]
    script.write_text(
        "import signal\nimport sys\nfrom aot import __main__ as command_line\nfrom aot.configs import Configuration\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever started the tests
        f"command_line.configurations = lambda: {space!r}\n"
        f"if __name__ == '__main__':\n    sys.exit(command_line.main(['build', '-j', '2', '--out', {str(out)!r}]))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(toy.parent)])}
    process = subprocess.Popen(
        [sys.executable, script], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    store = cache.Cache(cache.default_directory())
    finished = [cache.key(item) for item in space[1:]]
    deadline = time.monotonic() + 120
    while not ((tmp_path / "started").exists() and all(map(store.load, finished))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)

    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process
    said = process.communicate(timeout=60)[1]  # ends when the last process has that inherited it
    assert time.monotonic() - start < 5
    assert process.returncode == 130 and said.splitlines()[-1] == "interrupted" and "Traceback" not in said
    assert not out.exists() and all(map(store.load, finished))


def test_what_stops_a_build_is_one_line(toy_space, toy, out, tmp_path, monkeypatch, capsys):
    def said(*arguments):
        assert command_line.main(["build", *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line

    file = tmp_path / "file"
    file.write_text("")
    assert said("--out", str(file)) == f"error: {file}: {file} is not a folder"
    assert said("--out", str(file / "below" / "out")) == f"error: {file / 'below' / 'out'}: {file} is not a folder"
    monkeypatch.setenv("SPARSE_AOT_CACHE_DIR", str(file))
    assert said("--out", str(out)) == f"error: {file}: {file} is not a folder"
    monkeypatch.setenv("SPARSE_AOT_CACHE_DIR", str(tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        assert said("--out", str(out)) == f"error: {out}: {tmp_path} is not writable"

    monkeypatch.setattr(build, "_check_writable", lambda folder: None)
    assert said("--only", "scale-64", "--out", "/proc/none") == "error: /proc/none: No such file or directory"


@pytest.mark.parametrize("module", build.REQUIREMENTS)
def test_a_missing_build_requirement_is_named_before_anything_is_compiled(toy_space, out, module, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    assert command_line.main(["build", "--out", str(out)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {build.REQUIREMENTS[module]} not installed")
    assert not out.exists()


@pytest.mark.parametrize("command", [["list"], ["list", "--json"]])
def test_list_ends_quietly_where_its_reader_does(command):
    process = subprocess.Popen(
        [sys.executable, "-m", "aot", *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_build_command_fails_with_a_message(toy_space, toy, out, capsys):
    assert command_line.main(["build", "--only", "nothing", "--out", str(out)]) == 1
    assert "no configuration of sm_90a, sm_100f matches 'nothing'" in capsys.readouterr().err
    edit(toy / "scale.py", "class Scale", "class Other")
    assert command_line.main(["build", "--out", str(out)]) == 1
    assert "sm_90a/scale-64 does not compile" in capsys.readouterr().err
    for jobs in ("0", "-1"):
        assert command_line.main(["build", "-j", jobs, "--out", str(out)]) == 1
        assert f"jobs: expected at least 1, got {jobs}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["build", "--arch", "sm_75"])
