"""Rotation and cache update of one token in plain JAX, which runs anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._normalization import normalized
from ejkernel.kernels.rotary.call import Call, Inputs, Results


def run(call: Call, *arrays: Any) -> Results:
    """Arrays as `Inputs` lists them."""
    return rotate_and_store(call, Inputs(*arrays))


def rotate_and_store(call: Call, inputs: Inputs) -> Results:
    """What `Call` describes, in at least float32."""
    views = call.queries, call.keys, call.values
    query, key, value = (
        view.of(x, call.batch).astype(call.wide) for view, x in zip(views, inputs[:3], strict=True)
    )  # [B, heads, D]
    if inputs.query_scale is not None and inputs.key_scale is not None:
        query = _normed(call, query) * inputs.query_scale.astype(call.wide)[None, None]
        key = _normed(call, key) * inputs.key_scale.astype(call.wide)[None, None]
    if call.value_norm:
        value = _normed(call, value)
    query, key = (_rotated(call, inputs, each) for each in (query, key))
    place = inputs.position.astype(jnp.int32)
    # a negative index would count from the end; one past the capacity is dropped
    place = jnp.where((place >= 0) & (place < call.capacity), place, call.capacity)
    row = jnp.arange(call.batch, dtype=jnp.int32)
    # rounded to the dtype of the computation first, then to that of the cache
    key, value = key.astype(call.dtype), value.astype(call.dtype)
    return Results(
        query.astype(call.dtype)[:, None],
        inputs.keys.at[row, place].set(key.astype(inputs.keys.dtype), mode="drop"),
        inputs.values.at[row, place].set(value.astype(inputs.values.dtype), mode="drop"),
    )


def _normed(call: Call, x: jax.Array) -> jax.Array:
    dims = x.shape[-1]
    return normalized(x, dims * call.epsilon) * np.sqrt(dims).astype(call.wide)


def _rotated(call: Call, inputs: Inputs, x: jax.Array) -> jax.Array:
    if inputs.frequencies is None:
        return x
    angles = inputs.position.astype(call.wide)[:, None, None] * inputs.frequencies.astype(call.wide)[None, None]
    cos, sin = (each(angles) * np.asarray(call.factor, call.wide) for each in (jnp.cos, jnp.sin))  # [B, 1, pairs]
    first, second, others = jnp.split(x, [call.pairs, 2 * call.pairs], -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, others], -1)
