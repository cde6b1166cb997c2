"""What commands share: numbers in arguments, machines without a device, and output that cannot be written."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable


def quietly(run: Callable[[], int]) -> int:
    """The exit code of `run`; Ctrl-C and output that cannot be written end it with one line instead of a traceback.

    The code is then 130 after Ctrl-C, 141 if the reader of a pipe has gone, and 2 for any other `OSError`.
    """
    try:
        try:
            return run()
        finally:
            # here, where an error can be handled; stdout is None if it was closed before Python started
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        # so that Python does not fail again when it flushes the buffer at its end
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
    except (RuntimeError, AssertionError) as error:  # an AssertionError if JAX_PLATFORMS names what is not installed
        return f"JAX has no device to run on: {str(error) or 'see JAX_PLATFORMS'}"
    return None


def whole(low: int, high: int) -> Callable[[str], int]:
    """A type of command-line arguments: whole numbers from `low` to `high`."""

    def number(text: str) -> int:
        # Python refuses to read a number of thousands of digits
        if text.isdecimal() and len(text) < 20 and low <= int(text) <= high:
            return int(text)
        raise argparse.ArgumentTypeError(f"got {text}; expected a whole number from {low} to {high}")

    return number
