"""``sparse-aot verify``: every file of the bundle against the manifest, and the manifest against the launcher."""

import struct
import sys

import sparse_aot.msa  # noqa: F401 - says what the launcher packs
from sparse_aot import sim
from sparse_aot._core.bundle import BundleError, get_bundle
from sparse_aot._core.cubin import read_layout


def print_verified():
    bundle = get_bundle()
    damage = list(find_damage(bundle))
    print_damage(bundle.folder, "cubins", bundle, damage)
    if ptx := sim.find_ptx(bundle):
        ptx_damage = list(find_ptx_damage(bundle))
        print_damage(ptx, "kernels' PTX", bundle, ptx_damage)
        damage += ptx_damage
    return 1 if damage else 0


def print_damage(where, what, bundle, damage):
    for problem in damage:
        print(problem, file=sys.stderr)
    print(f"{where}: {len(bundle.configurations)} {what}, {len(damage)} damaged")


def find_ptx_damage(bundle):
    """One message for each kernel whose PTX is not what its cubin was assembled from."""
    for entry in bundle.configurations:
        try:
            sim.read_ptx(bundle, entry)
        except BundleError as error:
            yield str(error)


def find_damage(bundle):
    """One message for each cubin whose hash, size or parameter layout is not what it has to be; it names the file."""
    for entry in bundle.configurations:
        try:
            bundle.check_layout(entry)
            layout = read_layout(bundle.read(entry), entry["symbol"])
        except BundleError as error:
            yield str(error)
            continue
        except (ValueError, struct.error) as error:
            yield f"{bundle.folder / entry['file']}: {error}"
            continue
        listed = [(param["offset"], param["size"]) for param in entry["params"]]
        if layout != listed:
            yield f"{bundle.folder / entry['file']}: parameters at (offset, size) {layout}, the manifest has {listed}"
