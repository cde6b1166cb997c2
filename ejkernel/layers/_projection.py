"""Projections into heads and out of them, with the heads partitioned over the mesh axis `"model"`."""

from typing import NamedTuple

import jax
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers._dtypes import keep_inputs

MODEL_AXIS = "model"


class Made(NamedTuple):
    """How a layer's parameters are made."""

    dtype: DTypeLike | None
    param_dtype: DTypeLike
    rngs: nnx.Rngs


def into_heads(width: int, features: int, made: Made, *, bias: bool = False) -> nnx.Linear:
    """`[…, width]` to `[…, features]`, whose columns are split over devices."""
    return _linear(width, features, (None, MODEL_AXIS), made, bias)


def out_of_heads(features: int, width: int, made: Made, *, bias: bool = False) -> nnx.Linear:
    """`[…, features]` to `[…, width]`, summed over devices."""
    return _linear(features, width, (MODEL_AXIS, None), made, bias)


def whole(width: int, features: int, made: Made) -> nnx.Linear:
    """`[…, width]` to `[…, features]`, few enough to have on every device."""
    return _linear(width, features, (None, None), made, False)


def _linear(rows: int, columns: int, partition: tuple[str | None, ...], made: Made, bias: bool) -> nnx.Linear:
    # annotations only: placing parameters as they are made would demand a mesh of those who have none
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), partition, eager_sharding=False)
    zeros = nnx.with_partitioning(nnx.initializers.zeros_init(), partition[1:], eager_sharding=False)
    return nnx.Linear(
        rows,
        columns,
        use_bias=bias,
        kernel_init=kernel,
        bias_init=zeros,
        dtype=made.dtype,
        param_dtype=made.param_dtype,
        promote_dtype=keep_inputs,
        rngs=made.rngs,
    )


def split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def per_head(name: str, width: int, heads: int) -> int:
    """How wide a head is when `heads` of them share `width` evenly."""
    _checks.positive_int("heads", heads)
    if _checks.positive_int(name, width) % heads:
        _checks.fail(name, width, f"a multiple of the {heads} heads")
    return width // heads


def shared_by(name: str, fewer: int, heads: int, whose: str = "heads") -> int:
    """A number of heads, each of which serves as many of the `heads`."""
    _checks.positive_int(whose, heads)
    if heads % _checks.positive_int(name, fewer):
        _checks.fail(name, fewer, f"a divisor of the {heads} {whose}")
    return fewer
