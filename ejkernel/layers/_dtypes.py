"""In which dtype a layer computes: the one it was given or else its input's."""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from ejkernel import _checks

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])


def checked(dtype: Any, param_dtype: Any) -> tuple[DTypeLike | None, DTypeLike]:
    """A layer's two arguments of these names."""
    dtype = None if dtype is None else _checks.floating_dtype("dtype", dtype)
    return dtype, _checks.floating_dtype("param_dtype", param_dtype)


def keep_inputs(arrays: Arrays, /, *, dtype: Any = None, inexact: bool = True) -> Arrays:
    """All of `arrays` in `dtype`, or in the first one's: Flax's own way would make a bfloat16 input float32."""
    dtype = arrays[0].dtype if dtype is None else dtype
    return tuple(None if each is None else each.astype(dtype) for each in arrays)  # type: ignore[return-value]


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is so already: what norms and gates are computed in."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def matching(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` in the dtype of `x`, with its last dims: nothing is left to implicit promotion."""
    return parameter.astype(x.dtype).reshape(*[1] * (x.ndim - parameter.ndim), *parameter.shape)
