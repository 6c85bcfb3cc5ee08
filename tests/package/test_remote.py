"""What ``tools/remote.py`` runs on a machine with a GPU, which has neither the build's requirements nor a simulator."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from places import ROOT

from sparse_aot.bench.options import parse
from tools import remote

ABSENT = """
import sys

class Absent:
    def find_spec(name, *rest):
        if name.partition(".")[0] in ("cutlass", "elftools", "ml_dtypes", "ptxsim", "tqdm", "xdist"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent)
"""


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """What the step ``test`` collects there, by its own command."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "absent.py").write_text(ABSENT)
    ((command, environment),) = remote.test(folder)
    command = [*command, "--collect-only", "-p", "absent"]
    environment |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in os.environ.items() if "XDIST" not in name} | environment
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def test_all_tests_that_need_a_gpu_are_collected_without_simulator_and_compiler(collected):
    files = {line.partition("::")[0] for line in collected if "::" in line}
    needs_device = {*(ROOT / "tests" / "gpu").glob("test_*.py")} - {
        ROOT / "tests" / "gpu" / "test_benchmark.py"
    }  # Triton
    users = {file for file in (ROOT / "tests" / "msa").glob("test_*.py") if re.search(r"\bplace[,)]", file.read_text())}
    assert len(users) >= 6 and files >= {str(file.relative_to(ROOT)) for file in needs_device | users}
    assert not [line for line in collected if "[sim-" in line]


@pytest.mark.parametrize("test", remote.SANITIZED)
def test_what_a_sanitizer_runs_is_there(collected, test):
    assert test in collected or any(line.startswith(f"{test}[") for line in collected)


def test_its_benchmarks_are_those_of_the_readme():
    commands = re.findall(
        r"^sparse-aot bench.*", (ROOT / "README.md").read_text().partition("# other uses")[0], re.MULTILINE
    )
    given = [parse(shlex.split(command, comments=True)[2:]) for command in commands]
    assert [vars(options) | {"plot": None} for options in given] == [
        vars(parse(options)) for options in remote.BENCHMARKS.values()
    ]
