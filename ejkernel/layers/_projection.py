"""Projections into heads and out of them, with the heads partitioned over the mesh axis `"model"`."""

import jax
from flax import nnx

from ejkernel import _checks

MODEL_AXIS = "model"


def into_heads(width: int, features: int, rngs: nnx.Rngs) -> nnx.Linear:
    """`[…, width]` to `[…, features]`, whose columns are split over devices."""
    return _linear(width, features, (None, MODEL_AXIS), rngs)


def out_of_heads(features: int, width: int, rngs: nnx.Rngs) -> nnx.Linear:
    """`[…, features]` to `[…, width]`, summed over devices."""
    return _linear(features, width, (MODEL_AXIS, None), rngs)


def _linear(rows: int, columns: int, partition: tuple[str | None, ...], rngs: nnx.Rngs) -> nnx.Linear:
    # an annotation only: placing parameters as they are made would demand a mesh of those who have none
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), partition, eager_sharding=False)
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=init, rngs=rngs)


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
