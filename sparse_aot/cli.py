"""The command line: ``sparse-aot info | verify | demo | bench``."""

import argparse
import json
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version

from sparse_aot import sim
from sparse_aot._core import _driver, bundle
from sparse_aot.verify import print_verified


def main(argv=None):
    """Run one command; returns the exit status."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    try:
        status = run(argv)
        sys.stdout.flush()
        return status
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is buffered goes there at exit
        if isinstance(error, BrokenPipeError):  # whoever read has enough
            return 128 + signal.SIGPIPE
        print(f"sparse-aot: {error}", file=sys.stderr)
        return 1


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
    except (RuntimeError, sim.OptionError) as error:  # of the bundle, CUDA, a simulation, a simulator's compilation
        print(f"sparse-aot: {error}", file=sys.stderr)
        return 1


def print_info(as_json):
    found = bundle.get_bundle()
    devices, cuda_error = [], None
    try:
        devices = _driver.describe_devices()
    except _driver.CudaError as error:  # what is known without CUDA may help to find out why
        cuda_error = str(error)
    info = {
        "version": _installed("sparse_aot"),
        "bundle": {
            "folder": str(found.folder),
            "package_version": found.manifest["package_version"],
            "dsl_version": found.manifest["dsl_version"],
            "architectures": found.architectures,
            "configurations": [f"{entry['arch']}/{entry['name']}" for entry in found.configurations],
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
                "architecture": found.architecture(device),
            }
            for device in devices
        ],
        "simulator": sim.is_installed() and sim.find_ptx(found) is not None,
    }
    if as_json:
        print(json.dumps(info, indent=2))
    else:
        print_text(info, found)
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


if __name__ == "__main__":
    sys.exit(main())
