"""The command line: ``sparse-aot info | verify | demo | bench``."""

import argparse
import json
import os
import signal
import struct
import sys
from importlib.metadata import PackageNotFoundError, version

from sparse_aot import _bundle, _driver, sim
from sparse_aot._cubin import read_layout


def main(argv=None):
    """Run one command; returns the exit status."""
    try:
        status = run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there at exit
        return 128 + signal.SIGPIPE


def run(argv):
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="sparse-aot", description="Block-sparse attention, compiled ahead of time.")
    parser.add_argument("--version", action="version", version=f"sparse_aot {_installed('sparse_aot')}")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="versions, architectures, configurations, devices")
    info.add_argument("--json", action="store_true", help="machine-readable")
    commands.add_parser("verify", help="check hash and layout of every cubin")
    commands.add_parser("demo", help="the main job, end to end, on whatever this machine has")
    commands.add_parser("bench", help="the benchmark; `sparse-aot bench --help` lists its options", add_help=False)
    options, rest = parser.parse_known_args(argv)
    if options.command == "bench":
        from sparse_aot import bench

        return bench.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "info":
            return print_info(options.json)
        if options.command == "verify":
            return print_verified()
        from sparse_aot.demo import run_demo

        sim.options.check()
        return run_demo()
    except (
        RuntimeError,
        sim.OptionError,
    ) as error:  # BundleError, CudaError, SimulationError, a simulator that does not compile
        print(f"sparse-aot: {error}", file=sys.stderr)
        return 1


def print_info(as_json):
    bundle = _bundle.get_bundle()
    devices, cuda_error = [], None
    try:
        devices = _driver.describe_devices()
    except _driver.CudaError as error:  # what is known without CUDA may help to find out why
        cuda_error = str(error)
    info = {
        "version": _installed("sparse_aot"),
        "bundle": {
            "folder": str(bundle.folder),
            "package_version": bundle.manifest["package_version"],
            "dsl_version": bundle.manifest["dsl_version"],
            "architectures": bundle.architectures,
            "configurations": [f"{entry['arch']}/{entry['name']}" for entry in bundle.configurations],
        },
        "cuda_bindings_version": _installed("cuda-bindings"),
        "driver_version": _driver.driver_version(),
        "cuda_error": cuda_error,
        "devices": [
            {
                "ordinal": device.ordinal,
                "name": device.name,
                "compute_capability": "{}.{}".format(*device.capability),
                "multiprocessors": device.multiprocessors,
                "architecture": bundle.architecture(device),
            }
            for device in devices
        ],
        "simulator": sim.is_installed() and sim.find_ptx(bundle) is not None,
    }
    if as_json:
        print(json.dumps(info, indent=2))
    else:
        print_text(info, bundle)
    if cuda_error:
        print(f"sparse-aot: {cuda_error}", file=sys.stderr)
    return 1 if cuda_error else 0


def print_text(info, bundle):
    print(f"sparse_aot {info['version']}, cuda-bindings {info['cuda_bindings_version']}")
    print(f"bundle: {bundle.folder}, built with DSL {info['bundle']['dsl_version']}")
    for arch in bundle.architectures:
        names = [entry["name"] for entry in bundle.configurations if entry["arch"] == arch]
        print(f"  {arch}: {len(names)} configurations")
        for name in names:
            print(f"    {name}")
    for device in info["devices"]:
        kernels = device["architecture"] or "no kernels for it"
        print(
            f"cuda:{device['ordinal']}: {device['name']}, compute capability {device['compute_capability']}: {kernels}"
        )
    version = info["driver_version"]
    print(f"driver: for CUDA {version}" if version else "no CUDA driver")
    if not info["devices"]:
        print("CUDA fails" if info["cuda_error"] else "no CUDA device")
    print(f"simulator for host arrays: {'installed' if info['simulator'] else 'not installed'}")


def _installed(distribution):
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def print_verified():
    bundle = _bundle.get_bundle()
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
        except _bundle.BundleError as error:
            yield str(error)


def find_damage(bundle):
    """One message for each cubin whose hash, size or parameter layout is not what it has to be; it names the file."""
    for entry in bundle.configurations:
        try:
            bundle.check_layout(entry)
            layout = read_layout(bundle.read(entry), entry["symbol"])
        except _bundle.BundleError as error:
            yield str(error)
            continue
        except (ValueError, struct.error) as error:
            yield f"{bundle.folder / entry['file']}: {error}"
            continue
        listed = [(param["offset"], param["size"]) for param in entry["params"]]
        if layout != listed:
            yield f"{bundle.folder / entry['file']}: parameters at (offset, size) {layout}, the manifest has {listed}"


if __name__ == "__main__":
    sys.exit(main())
