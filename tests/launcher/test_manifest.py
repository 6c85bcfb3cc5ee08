"""The manifest as the run time reads it: what it refuses before anything of it is used."""

import json

import pytest
from stub_driver import REAL_BUNDLE, read_manifest, write_bundle, write_manifest

from aot import build
from sparse_aot import BundleError, cli, verify
from sparse_aot._core import bundle as bundles


@pytest.fixture
def folder(tmp_path):
    return write_bundle(tmp_path / "bundle")


def rewrite(folder, change):
    """Change the manifest's values behind the back of its digest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def leaves(value, path=()):
    """The path of every value in a manifest that holds no others, of the first of each list alone."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    elif isinstance(value, list) and value:
        yield from leaves(value[0], (*path, 0))
    else:
        yield path


def test_any_value_that_changed_since_the_build_is_refused(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    paths = [path for path in leaves(manifest) if path not in (("schema",), ("digest",))]
    names = {path[-1] for path in paths} | {path[-2] for path in paths if len(path) > 1}
    assert {"threads", "smem_bytes", "work_per_cta", "box", "pdl", "symbol", "offset", "package_version"} <= names

    for path in paths:

        def change(place, path=path):
            for step in path[:-1]:
                place = place[step]
            value = place[path[-1]]
            place[path[-1]] = (
                not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value + "1"
            )

        before = (folder / "manifest.json").read_text()
        rewrite(folder, change)
        with pytest.raises(BundleError, match="changed since it was built"):
            bundles.Bundle(folder)
        (folder / "manifest.json").write_text(before)
    bundles.Bundle(folder)


@pytest.mark.parametrize("change", ["an entry less", "an entry twice", "another order", "another field"])
def test_entries_that_changed_since_the_build_are_refused(folder, change):
    def edit(manifest):
        entries = manifest["configurations"]
        if change == "an entry less":
            entries.pop()
        elif change == "an entry twice":
            entries.append(entries[0])
        elif change == "another order":
            entries.reverse()
        else:
            entries[0]["note"] = ""

    rewrite(folder, edit)
    with pytest.raises(BundleError, match="changed since it was built"):
        bundles.Bundle(folder)


def test_the_layout_of_the_text_may_change(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(dict(reversed(manifest.items())), indent=3))
    bundles.Bundle(folder)


def test_verify_fails_where_a_launch_fact_changed_or_there_is_no_configuration(folder, monkeypatch, capsys):
    monkeypatch.setattr(verify, "get_bundle", lambda: bundles.Bundle(folder))
    rewrite(folder, lambda manifest: manifest["configurations"][0].update(threads=256))
    assert cli.main(["verify"]) == 1
    assert capsys.readouterr().err.startswith(f"sparse-aot: {folder / 'manifest.json'}: changed since")
    write_manifest(folder, [])
    assert cli.main(["verify"]) == 1
    assert "manifest.json: expected at least one configuration" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("threads", value) for value in (0, -128, 1025, 2**40, True)),
        *(("smem_bytes", value) for value in (-1, 232449, 2**32)),
        *(("work_per_cta", value) for value in (-1, -(2**63), 2**31, False)),
        *(("size", value) for value in (0, -5)),
    ],
)
def test_a_number_that_no_kernel_can_have_is_refused(folder, name, value):
    entries = read_manifest(folder)
    entries[3][name] = value
    write_manifest(folder, entries)
    with pytest.raises(BundleError, match=rf"configuration 3: expected {name} .*, got {value}"):
        bundles.Bundle(folder)


@pytest.mark.parametrize(
    "file",
    [
        "/etc/passwd",
        "../x.cubin",
        "sm_90a/../../x.cubin",
        "sm_90a/..",
        "./x.cubin",
        "",
        "a//b",
        "sm_90a/",
        "a\0b",
        "a\nb",
    ],
)
def test_a_file_outside_the_bundles_folder_is_refused(folder, file):
    entries = read_manifest(folder)
    entries[0]["file"] = file
    write_manifest(folder, entries)
    with pytest.raises(BundleError, match="configuration 0: expected file to be a path below the bundle's folder"):
        bundles.Bundle(folder)


@pytest.mark.parametrize("schema", [build.SCHEMA - 1, build.SCHEMA + 1])
def test_another_schema_is_an_error_that_names_both_numbers(folder, schema):
    rewrite(folder, lambda manifest: manifest.update(schema=schema))
    with pytest.raises(BundleError, match=f"expected manifest schema {bundles.SCHEMA}, got {schema}: another version"):
        bundles.Bundle(folder)


def test_the_schema_that_is_built_is_the_one_that_is_read():
    assert build.SCHEMA == bundles.SCHEMA


@pytest.mark.skipif(not (REAL_BUNDLE / "manifest.json").exists(), reason="no bundle built")
def test_the_lock_has_the_digest_of_the_bundle_that_was_built():
    """Where the bundle is all of this source; a bundle of other source has other cubins than the lock."""
    from tools import rebuild

    manifest = json.loads((REAL_BUNDLE / "manifest.json").read_text())
    lock = rebuild.Lock.parse(rebuild.LOCK.read_text())
    if lock.hashes != {entry["file"]: entry["sha256"] for entry in manifest["configurations"]}:
        pytest.skip("the bundle is not the lock's")
    assert lock.digest == manifest["digest"] == build.digest(manifest)
