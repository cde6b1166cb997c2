"""Who may attend to whom, by mask and by position, and heads of masks, biases and sinks laid out by group."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.attention.call import Call


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
    """Queries that may attend somewhere `[B, Hkv, G, S, 1]`, and keys that someone may attend to `[B, Hkv, L, 1]`."""
    return allowed.any(-1, keepdims=True), allowed.any((2, 3))[..., None]


def live_by_position(call: Call) -> tuple[Array, Array] | None:
    """The same where position alone decides, broadcasting to those shapes; `None` if all are."""
    query, key = np.arange(call.queries), np.arange(call.keys)
    left, right = (max(call.queries, call.keys) if bound is None else bound for bound in (call.left, call.right))
    alive = np.maximum(query - left, 0) <= np.minimum(query + right, call.keys - 1)
    seen = np.maximum(key - right, 0) <= np.minimum(key + left, call.queries - 1)
    if alive.all() and seen.all():
        return None
    return jnp.asarray(alive).reshape(1, 1, 1, -1, 1), jnp.asarray(seen).reshape(1, 1, -1, 1)
