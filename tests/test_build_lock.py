"""tools/rebuild.py: what it reports against the lock, and when it fails."""

import hashlib
import subprocess

import pytest

from tools import rebuild

BUILT = rebuild.Lock("4.8.1", {"sm_90a/a.cubin": "11" * 32, "sm_90a/b.cubin": "22" * 32, "sm_100f/c.cubin": "33" * 32})


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
    lock.write_text(str(rebuild.Lock("4.8.1", tracked)))
    before = lock.read_text()
    assert rebuild.main([]) == 1
    assert line in capsys.readouterr().out.splitlines()
    assert lock.read_text() == before
    assert rebuild.main(["--update"]) == 0
    assert rebuild.main([]) == 0
    assert lock.read_text() == str(BUILT)


def test_other_version_of_the_dsl_fails_even_with_the_same_cubins(lock, capsys):
    lock.write_text(str(rebuild.Lock("4.8.0", BUILT.hashes)))
    assert rebuild.main([]) == 1
    assert "nvidia-cutlass-dsl: the lock has 4.8.0, this is 4.8.1" in capsys.readouterr().out


def test_missing_lock_fails_and_can_be_made(lock):
    lock.unlink()
    assert rebuild.main([]) == 1
    assert rebuild.main(["--update"]) == 0
    assert rebuild.main([]) == 0


def test_lock_is_a_checksum_file_of_a_built_bundle(tmp_path):
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / "a.cubin").write_bytes(b"cubin")
    digest = hashlib.sha256(b"cubin").hexdigest()
    (tmp_path / "MANIFEST.lock").write_text(str(rebuild.Lock("4.8.1", {"sm_90a/a.cubin": digest})))
    check = ["sha256sum", "--check", "--strict", "MANIFEST.lock"]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    (tmp_path / "sm_90a" / "a.cubin").write_bytes(b"damaged")
    assert subprocess.run(check, cwd=tmp_path).returncode == 1
