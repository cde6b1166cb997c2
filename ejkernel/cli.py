"""The `ejkernel` command: `info`, `check` and `bench`."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence

from ejkernel import __version__, explain
from ejkernel._command_line import no_device, quietly

EXAMPLES = """examples:
  ejkernel info              what is installed, and what will run where
  ejkernel check             compare every op that runs here with its definition, in two minutes
  ejkernel bench --quick     time the ops against their peers, for a minute or two
  ejkernel bench --help      what else it can be asked
"""
NOT_INSTALLED = "not installed"
PACKAGES = ("jax", "jaxlib", "numpy", "flax", "matplotlib", "rich", "triton", "jax-triton")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    0, 1 if it cannot run here, 2 for wrong use or files that cannot be written, 130 after Ctrl-C, 141 if whoever read
    its output has gone.
    """
    return quietly(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="ejkernel",
        description="Attention kernels for JAX.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ejkernel {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, run, words in (
        ("info", _info, "versions, devices, and which implementation serves each op"),
        # these parse options of their own
        ("check", _check, "compare every op that runs here with its definition"),
        ("bench", _bench, "time the ops against their peers on this machine"),
    ):
        commands.add_parser(name, help=words, add_help=run is _info).set_defaults(run=run)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command == "info":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options.run(rest)


def _check(rest: list[str]) -> int:
    from ejkernel.check import main as run

    return run(rest, prog="ejkernel check")


def _bench(rest: list[str]) -> int:
    from ejkernel.bench.command import main as run

    return run(rest, prog="ejkernel bench")


def _info(rest: list[str]) -> int:
    print("\n".join(_report()))
    return 0


def _report() -> Iterator[str]:
    import jax

    yield f"ejkernel {__version__}, Python {platform.python_version()} on {platform.system()}"
    yield from (f"  {name:<12} {_version(name)}" for name in PACKAGES)
    yield from _other_project()
    yield "devices"
    if why := no_device():
        yield f"  none; {why}"
        return
    yield from (f"  {device.id}: {device.platform}, {device.device_kind}" for device in jax.devices())
    yield "implementations, for a call of ordinary size"
    yield from _served()
    yield "No TPU chip has run the kernels for TPUs yet: on a TPU, run ejkernel check first."


def _served() -> Iterator[str]:
    """Which implementations serve each op; ops with the same explanation stand together."""
    from ejkernel._ops import OPS

    by_explanation: dict[str, list[str]] = {}
    for name, op in OPS.items():
        arguments, options = op.ordinary_call()
        by_explanation.setdefault(str(explain(op.function, *arguments, **options)), []).append(name)
    for explanation, names in by_explanation.items():
        yield f"  {', '.join(names)}"
        yield from (f"    {line}" for line in explanation.splitlines())


def _other_project() -> Iterator[str]:
    """A warning if the public index's project `ejkernel` is installed; this one is named `ejkernel-jax`."""
    if (version := _version("ejkernel")) != NOT_INSTALLED:
        yield f"  another project, ejkernel {version}, is installed too; both write the folder ejkernel/, the later"
        yield "  over the earlier. For this one alone: pip uninstall ejkernel ejkernel-jax, then install this one again"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


if __name__ == "__main__":
    sys.exit(main())
