"""Arguments that are no arrays: numbers, flags and dtypes known when tracing."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel._checks.wording import fail, is_concrete

_FLOATING = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))


def positive_int(argument: str, x: Any) -> int:
    """`x`, an int of at least 1 known when tracing."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        fail(argument, repr(x) if is_concrete(x) else "a traced value", "an int of at least 1")
    return int(x)


def known_size(argument: str, x: Any, what: str) -> int:
    """`x`, a number of tokens or the like that blocks are cut by."""
    if not isinstance(x, int):
        fail(argument, f"{x} {what}, a symbolic size", "a size known when exporting; the batch alone may be symbolic")
    return x


def power_of_two(argument: str, x: Any) -> int:
    """`x`, one of 1, 2, 4, … known when tracing."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1 or x & (x - 1):
        fail(argument, repr(x) if is_concrete(x) else "a traced value", "a power of two")
    return int(x)


def real(argument: str, x: Any) -> float:
    """`x` as a finite float known now; a traced value or anything that is no real number is a `TypeError`."""
    if not is_concrete(x):
        raise TypeError(f"{argument}: got a traced value; expected a number known when tracing (a static argument)")
    if isinstance(x, bool) or not isinstance(x, int | float | np.floating | np.integer):
        raise TypeError(f"{argument}: got {type(x).__name__}; expected a number")
    if not math.isfinite(x):
        fail(argument, x, "a finite number")
    return float(x)


def positive(argument: str, x: Any) -> float:
    """`x` as a float above 0 known now."""
    x = real(argument, x)
    if not x > 0:
        fail(argument, x, "a number above 0")
    return x


def flag(argument: str, x: Any) -> bool:
    """`x` as a bool known now."""
    if not isinstance(x, bool | np.bool_):
        what = type(x).__name__ if is_concrete(x) else "a traced value"
        raise TypeError(f"{argument}: got {what}; expected True or False, known when tracing")
    return bool(x)


def floating_dtype(argument: str, dtype: Any) -> np.dtype:
    """`dtype` as a floating-point NumPy dtype."""
    checked = _dtype(argument, dtype, "a floating-point dtype")
    precision(argument, checked)
    return checked


def precision(argument: str, dtype: np.dtype, got: str = "") -> None:
    """Refuses dtypes that ops do not take: JAX promotes floats of 8 bits and less to no other dtype.

    Errors write `got` before the dtype.
    """
    if dtype in _FLOATING:
        return
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{argument}: got {got}{dtype}; expected a floating-point dtype")
    raise TypeError(f"{argument}: got {got}{dtype}; expected bfloat16, float16, float32 or float64")


def integer_dtype(argument: str, dtype: Any) -> np.dtype:
    """`dtype`, if it is an integer one."""
    checked = _dtype(argument, dtype, "an integer dtype")
    if not jnp.issubdtype(checked, jnp.integer):
        raise TypeError(f"{argument}: got {checked}; expected an integer dtype")
    return checked


def _dtype(argument: str, dtype: Any, expected: str) -> np.dtype:
    try:
        # NumPy reads None as float64
        return np.dtype(dtype if dtype is not None else "None")
    except TypeError:
        raise TypeError(f"{argument}: got {dtype!r}; expected {expected}") from None


def axis(x: Any, rank: int) -> int:
    """`axis`, counted from the front, of an array of that rank."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or not -rank <= x < rank:
        fail("axis", repr(x), f"an axis of an array of rank {rank}")
    return int(x) % rank
