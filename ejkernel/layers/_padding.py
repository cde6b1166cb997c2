"""Padding of a packed stream, past its last border."""

import jax
import jax.numpy as jnp


def without_padding(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """`x [..., T, width]` with 0 for padding, whatever is there, even NaN; neither has that a gradient."""
    if cu_seqlens is None:
        return x
    used = jnp.arange(x.shape[-2], dtype=cu_seqlens.dtype) < cu_seqlens[-1]
    return jnp.where(used.reshape(*[1] * (x.ndim - 2), x.shape[-2], 1), x, jnp.zeros((), x.dtype))
