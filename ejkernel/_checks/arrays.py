"""Arguments that are arrays, whatever the op."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.values import precision, real
from ejkernel._checks.wording import Dims, fail

# what callers may pass for an array
AnyArray = jax.Array | np.ndarray


def array(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array; anything that is no array (a list, `None`, a string) is a `TypeError`."""
    # most calls: nothing to convert, which JAX takes long to find out (keys of random numbers have no weak types)
    if isinstance(x, jax.Array) and not getattr(x, "weak_type", True):
        return x
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{argument}: got {type(x).__name__}; expected an array")
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
        raise TypeError(f"{argument}: got dtype {x.dtype}; expected an array of numbers")
    return jnp.asarray(x)


def floating(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array of a floating-point dtype."""
    x = array(argument, x)
    precision(argument, x.dtype, "dtype ")
    return x


def integers(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array of an integer dtype."""
    x = array(argument, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{argument}: got dtype {x.dtype}; expected an integer dtype")
    return x


def int32(argument: str, x: Any) -> jax.Array:
    """`x`, an array of any integers, as int32; integers beyond int32 become its least or largest."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "iu":
        # while `x` has all its bits, which JAX may cut off; NumPy makes a number of an array without dimensions
        x = np.asarray(np.clip(x, *_int32_limits(x.dtype)))
    x = integers(argument, x)
    return x if x.dtype == jnp.int32 else jnp.clip(x, *_int32_limits(x.dtype)).astype(jnp.int32)


def _int32_limits(dtype: Any) -> tuple[int, int]:
    """The least and the largest number of `dtype` that int32 has too."""
    limits = np.iinfo(dtype)
    return max(int(limits.min), -(2**31)), min(int(limits.max), 2**31 - 1)


def scalar(argument: str, x: Any) -> jax.Array:
    """`x` as a floating array of one number and no dimensions."""
    x = floating(argument, x)
    if x.size != 1:
        fail(argument, f"shape {x.shape}", "one number")
    return x.reshape(())


def factor(argument: str, x: Any) -> float | jax.Array:
    """`x`, a number: as a float if it is known now, or as an array, which may be traced and has a gradient."""
    return scalar(argument, x) if isinstance(x, jax.Array | np.ndarray) else real(argument, x)


def time_series(argument: str, x: Any, ranks: Sequence[int], head_first: bool) -> jax.Array:
    """`x` as the floating-point input of a sum along time, of one of `ranks`."""
    x = floating(argument, x)
    layout = "B H T S" if head_first else "B T H S"
    Dims().match(argument, x, *(layout[: 2 * rank - 1] for rank in ranks))
    return x


def unbatched(argument: str, x: Any) -> jax.Array:
    """`x`, a packed stream `[T, heads, dim]`, as a batch of one row."""
    x = array(argument, x)
    if x.ndim != 3:
        fail(argument, f"shape {x.shape}", "[tokens, heads, dim], of rank 3 as query is")
    return x[None]


def grouped_heads(heads: int, kv_heads: int) -> None:
    """Each key/value head serves the same number of query heads."""
    if kv_heads == 0 or heads % kv_heads:
        fail("key", f"{kv_heads} heads", f"a divisor of query's {heads} heads")
