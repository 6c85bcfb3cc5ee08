"""What ``pip install`` gives: the wheel's contents, its metadata, and that it works away from the checkout."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.xdist_group("packaging")  # one worker, since the wheels take a minute to build
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RESTRICTION = {"SPARSE_AOT_BUILD_ARCHS": "sm_100f", "SPARSE_AOT_BUILD_ONLY": "combine-*-topk4"}
RESTRICTED = {"sm_100f/combine-pbf16-topk4", "sm_100f/combine-pf32-topk4"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources alone."""
    copy = tmp_path_factory.mktemp("checkout") / "sparse_aot"
    unwanted = shutil.ignore_patterns(
        "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*", "*.cubin", "manifest.json", "ptx.zip"
    )
    shutil.copytree(ROOT, copy, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def engine(simulator):
    """The simulator's compiled engine."""
    from ptxsim.build import build

    return build()


@pytest.fixture(scope="module")
def simulator_wheel(checkout, engine, tmp_path_factory):
    """The simulator's wheel with two kernels; its engine comes compiled, for the sake of time."""
    directory = tmp_path_factory.mktemp("wheel")
    shutil.copy2(engine, checkout / "tools" / "ptxsim" / "ptxsim")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", directory, checkout / "tools" / "ptxsim"),
        env=RESTRICTION,
    )
    (path,) = directory.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory):
    """A wheel with two configurations, built with every warning on; (path, the build's output)."""
    directory = tmp_path_factory.mktemp("wheel")
    log = run(
        *(sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", directory, checkout),
        env={"CFLAGS": "-O1 -Wall -Wextra", **RESTRICTION},
    )
    (path,) = directory.glob("*.whl")
    return path, log


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked outside the checkout."""
    directory = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", directory, wheel[0])
    return directory


def run(*command, env=None, cwd=None):
    result = subprocess.run(
        [str(part) for part in command],
        env=os.environ | (env or {}),
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def names_in(wheel):
    return zipfile.ZipFile(wheel).namelist()


def test_wheel_carries_exactly_the_cubins_that_the_environment_asks_for(wheel):
    cubins = {name for name in names_in(wheel[0]) if name.startswith("sparse_aot/cubins/")}
    manifest = json.loads(zipfile.ZipFile(wheel[0]).read("sparse_aot/cubins/manifest.json"))
    assert cubins == {"sparse_aot/cubins/manifest.json", *(f"sparse_aot/cubins/{path}.cubin" for path in RESTRICTED)}
    assert {f"{entry['arch']}/{entry['name']}" for entry in manifest["configurations"]} == RESTRICTED


def test_wheel_carries_the_runtime_and_nothing_of_the_build(wheel):
    names = names_in(wheel[0])
    modules = {name.split("/")[0] for name in names}
    assert modules == {"sparse_aot", f"sparse_aot-{PROJECT['project']['version']}.dist-info"}
    files = [name for name in names if name.startswith("sparse_aot/")]
    assert {Path(name).suffix for name in files} == {".py", ".pyi", ".typed", ".so", ".json", ".cubin"}
    assert {"sparse_aot/__init__.pyi", "sparse_aot/py.typed"} <= set(files)
    assert {Path(name).name.split(".")[0] for name in names if name.endswith(".so")} == {
        source.stem for source in (ROOT / "sparse_aot").rglob("*.pyx")
    }


def test_extensions_have_neither_symbols_nor_paths_of_the_machine_that_built_them(wheel, checkout):
    opened = zipfile.ZipFile(wheel[0])
    extensions = [opened.read(name) for name in opened.namelist() if name.endswith(".so")]
    assert extensions
    for data in extensions:
        for path in (checkout, sysconfig.get_path("purelib")):
            assert os.fsencode(path) not in data
        assert b".symtab" not in data and b".debug_info" not in data


def test_wheel_metadata(wheel):
    (info,) = (name for name in names_in(wheel[0]) if name.endswith("/METADATA"))
    meta = metadata.PathDistribution(zipfile.Path(wheel[0]) / Path(info).parent.name)
    needed = {re.match(r"[\w-]+", line)[0] for line in meta.requires if "extra ==" not in line}
    assert needed == {"numpy", "cuda-bindings"}
    assert meta.metadata["License-Expression"] == "MIT"
    assert meta.metadata["Requires-Python"] == ">=3.11"
    assert [(point.name, point.value) for point in meta.entry_points] == [("sparse-aot", "sparse_aot.cli:main")]


def test_extensions_compile_without_a_warning(wheel):
    assert re.findall(r".*\.(?:c|cpp|pyx|pxd|h):\d+.*", wheel[1]) == []


def test_installed_wheel_verifies_its_bundle_with_no_checkout_no_gpu_and_no_framework(installed):
    script = (
        "import sys\nfrom sparse_aot import sim\nfrom sparse_aot.cli import main\n"
        "sim.find_ptx = lambda bundle: None\n"  # a simulator that is installed here has the PTX of another bundle
        "assert main(['verify']) in (0, None)\n"
        "assert not {'torch', 'cutlass', 'aot'} & set(sys.modules)"
    )
    log = run(sys.executable, "-c", script, env={"PYTHONPATH": str(installed)}, cwd=installed)
    assert "2 cubins, 0 damaged" in log


def test_installed_wheel_whose_cubin_is_damaged_does_not_verify(installed, tmp_path):
    damaged = tmp_path / "installed"
    shutil.copytree(installed, damaged)
    victim = next((damaged / "sparse_aot" / "cubins").rglob("*.cubin"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\xff")
    script = "import sys\nfrom sparse_aot.cli import main\nsys.exit(main(['verify']))"
    environment = os.environ | {"PYTHONPATH": str(damaged)}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=damaged, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert victim.name in result.stdout + result.stderr


def test_wheel_of_the_simulator_carries_its_libraries_and_the_ptx(simulator_wheel):
    assert re.fullmatch(r"sparse_aot_sim-[\d.]+-py3-none-linux_\w+\.whl", simulator_wheel.name)
    with zipfile.ZipFile(simulator_wheel) as opened:
        names = {name for name in opened.namelist() if "dist-info" not in name}
        ptx = zipfile.ZipFile(io.BytesIO(opened.read("ptxsim/ptx.zip"))).namelist()
        (licence,) = (name for name in opened.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert opened.read(licence) == (ROOT / "LICENSE").read_bytes()
    package = ROOT / "tools" / "ptxsim" / "ptxsim"
    modules = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    assert names == modules | {"ptxsim/_engine.so", "ptxsim/host/_runtime.so", "ptxsim/ptx.zip"}
    assert set(ptx) == {f"{path}.ptx" for path in RESTRICTED}


def test_simulator_has_the_version_of_the_package_and_no_index_is_asked_for_it(simulator_wheel):
    assert simulator_wheel.name.split("-")[1] == PROJECT["project"]["version"]
    extras = PROJECT["project"]["optional-dependencies"].values()
    assert not [
        name for names in (PROJECT["project"]["dependencies"], *extras) for name in names if "sparse-aot" in name
    ]


def test_source_distribution_of_the_simulator_installs_where_there_is_no_checkout(
    checkout, engine, simulator_wheel, tmp_path
):
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run(sys.executable, "-c", script, cwd=checkout / "tools" / "ptxsim", env=RESTRICTION)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert not [*folder.rglob("*.so")]
    shutil.copy2(engine, folder / "ptxsim")  # for the sake of time, as above
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", tmp_path, folder)
    with zipfile.ZipFile(tmp_path / simulator_wheel.name) as again, zipfile.ZipFile(simulator_wheel) as first:
        assert sorted(again.namelist()) == sorted(first.namelist())
        assert again.read("ptxsim/ptx.zip") == first.read("ptxsim/ptx.zip")


def test_simulator_builds_with_the_versions_that_the_package_builds_with():
    simulator = tomllib.loads((ROOT / "tools" / "ptxsim" / "pyproject.toml").read_text())
    assert set(simulator["build-system"]["requires"]) <= set(PROJECT["build-system"]["requires"])


def test_installed_simulator_has_the_ptx_of_the_installed_bundle(installed, simulator_wheel, tmp_path):
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", tmp_path, simulator_wheel)
    script = (
        "import sys\nfrom sparse_aot import sim\nfrom sparse_aot._core.bundle import get_bundle\n"
        "assert str(sim.find_simulator().__file__).startswith(sys.argv[1])\n"
        "bundle = get_bundle()\n"
        "for entry in bundle.configurations: sim.load(bundle, entry)\n"
        "print(sorted(sim.modules))"
    )
    environment = {"PYTHONPATH": f"{installed}{os.pathsep}{tmp_path}"}
    log = run(sys.executable, "-c", script, tmp_path, env=environment, cwd=installed)
    assert log.strip() == str(sorted(RESTRICTED))


def test_unknown_architecture_in_the_environment_is_an_error(checkout):
    script = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    environment = os.environ | {"SPARSE_AOT_BUILD_ARCHS": "sm_75"}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "the architecture sm_75 is not one of sm_90a, sm_100f" in result.stderr


def pack(checkout, folder):
    """The files in the source distribution of a checkout, which is written to ``folder``."""
    script = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", script, cwd=checkout)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        return {member.name.partition("/")[2] for member in opened if member.isfile()}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_source_distribution_holds_what_git_tracks_and_one_of_it_holds_the_same(checkout, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copy2(ROOT / ".gitignore", copy)
    run("git", "init", "-q", cwd=copy)
    run("git", "add", "-A", cwd=copy)
    for untracked in ("sparse_aot/secret.py", "sparse_aot/secret.pyx.bak", "tests/secret.txt", "secret", ".env"):
        (copy / untracked).write_text("")
    packed = pack(copy, tmp_path)
    assert not [name for name in packed if "secret" in name or name == ".env"]
    tracked = set(run("git", "ls-files", cwd=copy).split())
    assert {name for name in packed if ".egg-info" not in name} == tracked | {"PKG-INFO", "setup.cfg"}

    (archive,) = tmp_path.glob("*.tar.gz")
    (tmp_path / "again").mkdir()
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    shutil.copytree(checkout / "build", unpacked / "build")  # for the sake of time
    assert pack(unpacked, tmp_path / "again") == packed - {".gitignore"}


def test_source_distribution_holds_what_the_build_needs(checkout, tmp_path):
    packed = pack(checkout, tmp_path)
    for folder, pattern in (("aot", "*.py"), ("sparse_aot", "*.p*"), ("tests", "*.py"), ("tools", "*.py")):
        found = (file.relative_to(checkout) for file in (checkout / folder).rglob(pattern) if file.suffix != ".pyc")
        assert {str(file) for file in found if "build" not in file.parts} <= packed
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "cubins/MANIFEST.lock"} <= packed
    assert not [name for name in packed if name.endswith((".so", ".cubin", ".pyc"))]


def test_a_checkout_without_extensions_says_what_to_do(checkout, tmp_path):
    copy = tmp_path / "sparse_aot"
    shutil.copytree(checkout / "sparse_aot", copy, ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "-E", "-S", "-c", "import sparse_aot"]  # nor those of an installed package
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: {copy} has the sources of sparse_aot without its compiled extensions" in done.stderr
    assert "`pip install -e .`" in done.stderr and done.stderr.count("Traceback") == 1


def test_test_extra_holds_every_build_requirement():
    extra = PROJECT["project"]["optional-dependencies"]["test"]
    assert set(PROJECT["build-system"]["requires"]) <= set(extra)
