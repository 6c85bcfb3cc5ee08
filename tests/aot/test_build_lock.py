"""tools/rebuild.py: what it reports against the lock, and when it fails."""

import hashlib
import subprocess
from dataclasses import replace

import pytest

from tools import rebuild

BUILT = rebuild.Lock(
    "4.8.1", "dd" * 32, {"sm_90a/a.cubin": "11" * 32, "sm_90a/b.cubin": "22" * 32, "sm_100f/c.cubin": "33" * 32}
)


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock that equals what a rebuild gives."""
    file = tmp_path / "MANIFEST.lock"
    file.write_text(str(BUILT))
    monkeypatch.setattr(rebuild, "LOCK", file)
    monkeypatch.setattr(rebuild, "rebuild", lambda jobs: BUILT)
    return file


def test_lock_survives_writing_and_reading():
    assert rebuild.Lock.parse(str(BUILT)) == BUILT


def test_identical_rebuild_passes(lock, capsys):
    assert rebuild.main([]) == 0
    assert capsys.readouterr().out.split() == [
        *("identical", "sm_100f/c.cubin"),
        *("identical", "sm_90a/a.cubin"),
        *("identical", "sm_90a/b.cubin"),
        *("identical", "manifest.json"),
    ]


@pytest.mark.parametrize(
    ("tracked", "line"),
    [
        (BUILT.hashes | {"sm_90a/a.cubin": "44" * 32}, "changed    sm_90a/a.cubin"),
        (BUILT.hashes | {"sm_90a/d.cubin": "44" * 32}, "gone       sm_90a/d.cubin"),
        ({"sm_90a/a.cubin": "11" * 32, "sm_90a/b.cubin": "22" * 32}, "new        sm_100f/c.cubin"),
    ],
)
def test_difference_is_named_and_fails_until_the_lock_is_updated(lock, capsys, tracked, line):
    lock.write_text(str(replace(BUILT, hashes=tracked)))
    before = lock.read_text()
    assert rebuild.main([]) == 1
    assert line in capsys.readouterr().out.splitlines()
    assert lock.read_text() == before
    assert rebuild.main(["--update"]) == 0
    assert rebuild.main([]) == 0
    assert lock.read_text() == str(BUILT)


def test_other_version_of_the_dsl_fails_even_with_the_same_cubins(lock, capsys):
    lock.write_text(str(replace(BUILT, dsl_version="4.8.0")))
    assert rebuild.main([]) == 1
    assert "nvidia-cutlass-dsl: the lock has 4.8.0, this is 4.8.1" in capsys.readouterr().out


def test_other_launch_facts_fail_even_with_the_same_cubins(lock, capsys):
    lock.write_text(str(replace(BUILT, digest="ee" * 32)))
    assert rebuild.main([]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "changed    manifest.json" in said and "identical  sm_90a/a.cubin" in said
    assert rebuild.main(["--update"]) == 0
    assert rebuild.main([]) == 0


def test_a_lock_without_a_digest_differs_in_the_manifest_alone(lock, capsys):
    lock.write_text("".join(line for line in str(BUILT).splitlines(True) if "manifest.json" not in line))
    assert rebuild.main([]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "identical" not in line] == [
        "changed    manifest.json"
    ]


def test_an_interrupted_rebuild_ends_with_130_and_leaves_the_lock(lock, monkeypatch, capsys):
    def interrupt(jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(rebuild, "rebuild", interrupt)
    assert rebuild.main(["--update"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert lock.read_text() == str(BUILT)


def test_missing_lock_fails_and_can_be_made(lock):
    lock.unlink()
    assert rebuild.main([]) == 1
    assert rebuild.main(["--update"]) == 0
    assert rebuild.main([]) == 0


def test_lock_is_a_checksum_file_of_a_built_bundle(tmp_path):
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / "a.cubin").write_bytes(b"cubin")
    digest = hashlib.sha256(b"cubin").hexdigest()
    (tmp_path / "MANIFEST.lock").write_text(str(replace(BUILT, hashes={"sm_90a/a.cubin": digest})))
    check = ["sha256sum", "--check", "--strict", "MANIFEST.lock"]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    (tmp_path / "sm_90a" / "a.cubin").write_bytes(b"damaged")
    assert subprocess.run(check, cwd=tmp_path).returncode == 1
