"""What the commands have in common: numbers in arguments, no device, and output that cannot be written."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable


def quietly(run: Callable[[], int]) -> int:
    """The exit code of `run`, or what its output or Ctrl-C ended it with, said in one line.

    130 after Ctrl-C, 141 if whoever read the output has gone, 2 if it cannot be written, as on a full disk.
    """
    try:
        try:
            return run()
        finally:
            # here rather than when Python ends, which could only complain; it is None if it was closed from the start
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        # what is still in the buffer has nowhere to go
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        with contextlib.suppress(OSError):
            print(error, file=sys.stderr, flush=True)
        return 2


def no_device() -> str | None:
    """Why JAX cannot compute here, or `None`."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS asks for what is not installed
        return f"JAX has no device to run on: {str(error) or 'see JAX_PLATFORMS'}"
    return None


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from `low` to `high`."""

    def number(text: str) -> int:
        # more digits are no number in between, and Python would not read all too many
        if text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"got {text}; expected a whole number from {low} to {high}")

    return number
