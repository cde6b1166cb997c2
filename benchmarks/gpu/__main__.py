"""Tests and times of one NVIDIA GPU: `make gpu`, or parts of it.

python -m benchmarks.gpu [--parts tests,layers] [--seconds 500] [row ...]

Parts run one after the other, each in a process of its own, so that one that breaks takes no other with it. `tests` are
those that need a GPU, the most telling first, and `bench` is `ejkernel bench`. The other parts time rows: they print
each as it comes, and write those there are to `benchmarks/results/PART_h200.json` (on an H200), from which the pages
are made. The exit status is 1 if anything failed. A row that there was no time left for keeps the numbers that it had.

Without a GPU, `--described` compiles the programs of layers, steps and serving for an H200, and counts what they do.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = "tests"
# each part's module, and what has to be set before JAX starts
PARTS: dict[str, tuple[str, dict[str, str]]] = {
    "linear_recurrence": ("ops", {}),
    "delta_rule": ("ops", {}),
    "segments": ("ops", {}),
    "convolution": ("ops", {}),
    "flash_attention": ("attention", {}),
    "attention": ("cudnn", {}),
    "layers": ("layers", {}),
    # CUDA graphs of our kernels, docs/serving.md
    "steps": ("layers", {"XLA_FLAGS": "--xla_gpu_enable_dynamic_slice_fusion=false"}),
    "serving": ("serving", {}),
    "heads": ("ops", {}),
    "phases": ("phases", {}),
    # docs/benchmarks.md is made from its rows
    "bench": ("bench", {}),
    # needs PyTorch, and runs only when it is named
    "flex": ("attention", {}),
}
DEFAULT = [TESTS, *(each for each in PARTS if each != "flex")]
DESCRIBED = ["layers", "steps", "serving"]
# a kernel that is wrong shows here within minutes; the other files come after
FIRST = [
    "kernels/convolution/test_triton_convolution_gpu.py",
    "kernels/linear_recurrence/test_triton_gpu.py",
    "kernels/delta_rule/test_triton_delta_rule_gpu.py",
    "kernels/attention/test_triton_attention_gpu.py",
    "kernels/attention/test_triton_paged.py",
    "kernels/chunks/test_triton_segments.py",
    "kernels/chunks/test_triton_pools.py",
    "kernels/attention/test_cudnn_attention.py",
    "test_bits.py",
]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Tests and times of one NVIDIA GPU.")
    parser.add_argument("rows", nargs="*", metavar="row", help="which rows, all if none")
    parser.add_argument("--parts", help=f"with commas between, all but flex if none: {', '.join((TESTS, *PARTS))}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start nothing after so many seconds")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results", help="of the results files")
    parser.add_argument("--described", action="store_true", help="compile for an H200, time nothing")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",") if given.parts else DESCRIBED if given.described else DEFAULT
    if unknown := [each for each in parts if each not in (TESTS, *PARTS)]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join((TESTS, *PARTS))}")
    if not given.described and (problem := missing()):
        print(f"python -m benchmarks.gpu: {problem}", file=sys.stderr)
        return 2
    until, failed = time.monotonic() + given.seconds, []
    for part in parts:
        print(f"== {part}", flush=True)
        left = until - time.monotonic()
        if left <= 0 or run(part, given, left):
            failed.append(part)
            print(f"== {part}: {'no time left' if left <= 0 else 'failed'}", flush=True)
    print(f"failed or not finished: {', '.join(failed)}" if failed else "all parts done")
    return 1 if failed else 0


def missing() -> str:
    """What a machine with a GPU has and this one lacks, asked in a process that leaves the GPU to the parts."""
    ask = "from ejkernel.kernels import _launch; print(_launch.unavailable() or '')"
    found = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else found.stderr.strip().splitlines()[-1]


def run(part: str, given: argparse.Namespace, seconds: float) -> int:
    """The exit status of a part in a process of its own."""
    if part == TESTS:
        # most of a test is tracing and compiling, so several share the GPU; pytest-benchmark warns beside pytest-xdist
        several = ["-n", str(min(12, os.cpu_count() or 1)), "-p", "no:benchmark"]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        return ended([sys.executable, "-m", "pytest", *several, "-m", "gpu", *test_files()], environment, seconds)
    module, settings = PARTS[part]
    command = [sys.executable, "-m", "benchmarks.gpu.part", f"{module}:{part}", str(given.folder), str(seconds)]
    if given.described:
        return ended([*command, "--described", *given.rows], os.environ, seconds)
    environment = os.environ | {name: f"{os.environ.get(name, '')} {value}".strip() for name, value in settings.items()}
    # a part stops by itself between two rows; this is for one that hangs
    return ended([*command, *given.rows], environment, seconds + 120)


def test_files() -> list[str]:
    folder = ROOT / "tests"
    others = sorted(str(each.relative_to(folder)) for each in folder.rglob("test_*.py"))
    return [f"tests/{each}" for each in [*FIRST, *(each for each in others if each not in FIRST)]]


def ended(command: list[str], environment: Mapping[str, str], seconds: float) -> int:
    """The exit status of a command, which is interrupted after so many seconds, and killed soon after."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    for stop in (process.send_signal, lambda _: process.kill()):
        try:
            return process.wait(None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            stop(signal.SIGINT)
            seconds = 20.0
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
