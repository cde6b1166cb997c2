"""`python -m examples.demo`: train, score, generate, and write the page."""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ejkernel._command_line import no_device, quietly, whole
from examples.demo import drawing, generation, report
from examples.demo.checkpoint import CheckpointError
from examples.demo.training import HELD_OUT, Score, Settings, Trained, evaluate, train

CONTEXTS = (256, 1024, 4096, 16384)
SAMPLE = 400  # bytes shown
EXAMPLES = """examples:
  %(prog)s                 train for about two minutes, then write demo/report.html
  %(prog)s --resume        go on after Ctrl-C, bit for bit as if nothing had happened
  %(prog)s --steps 2000    train longer
"""


def main(arguments: Sequence[str] | None = None, prog: str = "python -m examples.demo") -> int:
    """Runs the demo; 0, 1 without a device, 2 if there is nothing to resume, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Train a small byte-level language model with gated linear attention and write a page about it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for checkpoint and page (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the folder's checkpoint")
    steps = whole(1, HELD_OUT)
    parser.add_argument("--steps", type=steps, default=Settings.steps, help="training steps (%(default)s)")
    # what keys of JAX tell apart
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=Settings.seed, help="of text and parameters (%(default)s)"
    )


def run(options: argparse.Namespace) -> int:
    """What `main` does, from parsed arguments."""
    if why := drawing.missing() or no_device():
        print(why, file=sys.stderr)
        return 1
    path = options.out / "checkpoint.npz"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        # that nothing can be written there is better known before the training than after it
        with tempfile.TemporaryFile(dir=options.out):
            pass
        settings = Settings(seed=options.seed, steps=options.steps)
        start = time.perf_counter()
        print(f"{settings.steps} steps of training; first they are compiled, which takes some seconds", flush=True)
        if trained := train(settings, path, resume=options.resume):
            show(settings, trained, options.out)
            print(f"{time.perf_counter() - start:.0f} s in all")
            return 0
    except BrokenPipeError:
        raise
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print(f"stopped; --resume goes on from {path}" if path.exists() else "stopped")
    return 130


def show(settings: Settings, trained: Trained, out: Path, contexts: Sequence[int] = CONTEXTS) -> Score:
    """Scores the model, lets it write, prints the figures and leaves the page in `out`."""
    score = evaluate(settings, trained.parameters)
    print(f"loss {score.loss:.3f} bits/byte; floor {score.floor:.3f}, byte frequencies {score.unigram:.3f}")
    print(f"recall {score.recall:.1%}; chance {score.chance:.1%}")
    prompt = generation.prompt(settings)
    sample, writers = generation.generate(settings, trained.parameters, prompt, contexts)
    linear, softmax = generation.costs(writers, generation.softmax(settings, contexts))
    print("context   linear ms/byte     kB   softmax ms/byte       kB")
    for mine, its in zip(linear, softmax, strict=True):
        left = f"{mine.context:7d}   {mine.milliseconds:14.3f} {mine.state_bytes / 1e3:6.0f}"
        print(f"{left}   {its.milliseconds:15.3f} {its.state_bytes / 1e3:8.0f}")
    page = report.page(settings, trained.history, score, linear, softmax, prompt, sample[:SAMPLE])
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    print(f"the page is {path.resolve().as_uri()}")
    return score


if __name__ == "__main__":
    sys.exit(quietly(main))
