"""The real bundle: the manifest against NVIDIA's own tools, and the instructions that the kernels are written for."""

import hashlib
import json
import re
import subprocess
import tomllib
from functools import cache
from importlib import metadata

import pytest

from aot import build, configs

pytestmark = pytest.mark.xdist_group("bundle")  # one worker reads what the other tests of a cubin have disassembled
CONFIGURATIONS = {item.path: item for item in configs.configurations()}


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """Every configuration, built (from the cache where it is warm)."""
    out = tmp_path_factory.mktemp("bundle")
    build.build(configs.configurations(), out)
    return out


@pytest.fixture(scope="session")
def manifest(bundle):
    return json.loads((bundle / "manifest.json").read_bytes())


@pytest.fixture(params=CONFIGURATIONS)
def entry(request, manifest):
    (found,) = (item for item in manifest["configurations"] if f"{item['arch']}/{item['name']}" == request.param)
    return found


@cache
def tool(distribution, name):
    (program,) = (file.locate() for file in metadata.files(distribution) if file.name == name)
    return program


def cuobjdump(option, cubin):
    return _run(tool("nvidia-cuda-cuobjdump", "cuobjdump"), option, cubin)


@cache
def instructions(cubin):
    """The opcodes of a cubin's machine code, each with its modifiers."""
    listing = _run(tool("nvidia-cuda-nvdisasm", "nvdisasm"), "-c", cubin)
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE))


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_manifest_describes_the_bundle(bundle, manifest):
    project = tomllib.loads((build.ROOT / "pyproject.toml").read_text())["project"]
    assert manifest["schema"] == build.SCHEMA
    assert manifest["package_version"] == project["version"]
    assert manifest["dsl_version"] == metadata.version("nvidia-cutlass-dsl")
    assert {f"{entry['arch']}/{entry['name']}" for entry in manifest["configurations"]} == CONFIGURATIONS.keys()
    assert {str(file.relative_to(bundle)) for file in bundle.rglob("*.cubin")} == {
        entry["file"] for entry in manifest["configurations"]
    }


def test_entry_names_its_configuration_and_file(bundle, entry):
    configuration = CONFIGURATIONS[f"{entry['arch']}/{entry['name']}"]
    cubin = (bundle / entry["file"]).read_bytes()
    assert entry["operation"] == configuration.operation
    assert entry["options"] == configuration.options
    assert (entry["sha256"], entry["size"]) == (hashlib.sha256(cubin).hexdigest(), len(cubin))


def test_parameters_are_those_that_cuobjdump_reads(bundle, entry):
    text = cuobjdump("-elf", bundle / entry["file"])
    assert f".nv.info.{entry['symbol']}\n" in text
    found = re.findall(r"Ordinal : (0x\w+)\s+Offset  : (0x\w+)\s+Size    : (0x\w+)", text)
    expected = {int(ordinal, 16): (int(offset, 16), int(size, 16)) for ordinal, offset, size in found}
    assert {i: (param["offset"], param["size"]) for i, param in enumerate(entry["params"])} == expected
    end = entry["params"][-1]["offset"] + entry["params"][-1]["size"]
    assert int(re.search(r"EIATTR_CBANK_PARAM_SIZE\s+Format:.*\s+Value:\s+(0x\w+)", text)[1], 16) == end


def test_registers_and_stack_are_those_that_cuobjdump_reads(bundle, entry):
    usage = re.search(
        r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", cuobjdump("-res-usage", bundle / entry["file"])
    )
    registers, stack, _, local = map(int, usage.groups())
    assert entry["registers"] == registers
    assert entry["spill_bytes"] == stack + local


def test_block_and_architecture_are_those_that_the_code_was_compiled_for(bundle, entry):
    text = cuobjdump("-elf", bundle / entry["file"])
    block = re.search(r"EIATTR_REQNTID\s+Format:.*\s+Value:\s+(0x\w+) (0x\w+) (0x\w+)", text)
    assert [int(extent, 16) for extent in block.groups()] == [entry["threads"], 1, 1]
    assert re.search(r"Command Line Arguments:.* -arch (\w+)", text)[1] == entry["arch"]


def test_nothing_spills(bundle, entry):
    assert not {opcode for opcode in instructions(bundle / entry["file"]) if opcode.startswith(("STL", "LDL"))}


TENSOR_CORES = {
    "sm_90a": ("HGMMA.64x128x16.F32.BF16",),
    "sm_100f": ("UTCHMMA", "UTCBAR", "LDTM", "STTM"),  # products, their commits, tensor memory in and out
}


@pytest.mark.parametrize("path", [path for path in CONFIGURATIONS if "/fwd-" in path])
def test_forward_uses_the_tensor_cores_and_tma(bundle, path):
    opcodes = instructions(bundle / f"{path}.cubin")
    for wanted in (*TENSOR_CORES[CONFIGURATIONS[path].arch], "UTMALDG.5D", "MUFU.EX2", "SYNCS", "USETMAXREG"):
        assert any(opcode.startswith(wanted) for opcode in opcodes), wanted


@pytest.mark.parametrize("path", [path for path in CONFIGURATIONS if "/combine-" in path])
def test_combine_reads_16_bytes_a_lane_and_waits_for_the_forward(bundle, path):
    opcodes = instructions(bundle / f"{path}.cubin")
    assert any(opcode.startswith("LDG.E.128") for opcode in opcodes)
    assert "ACQBULK" in opcodes


def test_cubins_name_no_path_of_the_machine_that_built_them(bundle, entry):
    assert str(build.ROOT).encode() not in (bundle / entry["file"]).read_bytes()


def test_no_two_configurations_compile_to_the_same_code(manifest):
    by_hash = {}
    for entry in manifest["configurations"]:
        by_hash.setdefault(entry["sha256"], []).append(f"{entry['arch']}/{entry['name']}")
    assert [paths for paths in by_hash.values() if len(paths) > 1] == []


def test_documented_shared_memory_is_that_of_the_bundle(manifest):
    text = (build.ROOT / "docs" / "msa.md").read_text()
    rows = re.findall(r"^\| `(\w+)` (\d+) \|.*\| ([\d,]+) \|$", text, re.MULTILINE)
    documented = {(arch, int(g), int(n_bytes.replace(",", ""))) for arch, g, n_bytes in rows}
    forwards = [entry for entry in manifest["configurations"] if entry["operation"] == "fwd"]
    assert documented == {(entry["arch"], entry["options"]["g"], entry["smem_bytes"]) for entry in forwards}
