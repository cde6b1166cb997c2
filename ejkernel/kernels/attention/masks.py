"""Which pairs may attend, which tokens are padding, and the heads of masks, biases and sinks by group."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, heads_last


def by_group(call: Call, x: Array, axis: int) -> Array:
    """`x` with its axis of 1, `Hkv` or `H` heads split into two that broadcast to `[Hkv, G]`."""
    heads = x.shape[axis]
    split = (call.kv_heads, call.groups) if heads == call.heads else (heads, 1)
    return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])


def allowed_pairs(call: Call, mask: Array | None) -> Array | None:
    """Which pairs may attend, broadcasting to `[B, Hkv, G, S, L]`; `None` if all may."""
    allowed = None if mask is None else by_group(call, mask, 1)
    distance = jnp.arange(call.keys).reshape(1, 1, 1, 1, -1) - jnp.arange(call.queries).reshape(1, 1, 1, -1, 1)
    for bound, near in ((call.left, lambda left: distance >= -left), (call.right, lambda right: distance <= right)):
        if bound is not None:
            allowed = near(bound) if allowed is None else allowed & near(bound)
    return allowed


def live(allowed: Array) -> tuple[Array, Array]:
    """Queries that may attend to a key `[B, Hkv, G, S, 1]`, and keys that a query may attend to `[B, Hkv, L, 1]`."""
    return allowed.any(-1, keepdims=True), allowed.any((2, 3))[..., None]


def live_tokens(call: Call, allowed: Array) -> tuple[Array, Array]:
    """`live` with heads last, as the arrays are: `[B, S, H, 1]`, and what broadcasts to `[B, L, Hkv, 1]`."""
    queries, keys = live(allowed)
    queries = jnp.broadcast_to(queries, (call.batch, call.kv_heads, call.groups, call.queries, 1))
    return heads_last(call, queries), keys.swapaxes(1, 2)


def live_by_position(call: Call) -> tuple[Array, Array] | None:
    """`live` where position alone decides, broadcasting to the same shapes; `None` if every query and key is live."""
    if call.left is None and call.right is None:
        return None
    sizes_known = isinstance(call.queries, int) and isinstance(call.keys, int)
    numpy: Any = np if sizes_known else jnp

    def reaches(tokens: int, others: int, left: int | None, right: int | None) -> Any:
        position = numpy.arange(tokens)
        first = 0 * position if left is None else numpy.maximum(position - left, 0)
        last = 0 * position + (others - 1) if right is None else numpy.minimum(position + right, others - 1)
        return first <= last

    queries = reaches(call.queries, call.keys, call.left, call.right)
    keys = reaches(call.keys, call.queries, call.right, call.left)
    if sizes_known and queries.all() and keys.all():
        return None
    return jnp.asarray(queries).reshape(1, 1, 1, -1, 1), jnp.asarray(keys).reshape(1, 1, -1, 1)


def in_sequences(inputs: Inputs) -> Array | None:
    """Which queries belong to a sequence, `[1 or B, S]`; the others are padding. `None` if there is no padding."""
    if inputs.segment_ids is not None:
        return inputs.segment_ids >= 0
    if inputs.cu_seqlens is None:
        return None
    end = inputs.cu_seqlens[-1]
    return (jnp.arange(inputs.query.shape[1], dtype=end.dtype) < end)[None]


def int32_ids(ids: Array, ids_kv: Array) -> tuple[Array, Array]:
    """Ids `[B, S]` and `[B, L]` as int32: wider ids by their rank among the ids of the row, and padding as -1."""
    if ids.dtype == jnp.int32:
        return ids, ids_kv
    both = jnp.sort(jnp.concatenate([ids, ids_kv], 1), 1)

    def rank(ids: Array) -> Array:
        return jnp.where(ids < 0, -1, jax.vmap(jnp.searchsorted)(both, ids).astype(jnp.int32))

    return rank(ids), rank(ids_kv)
