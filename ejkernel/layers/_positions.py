"""Where tokens stand in their sequences, counted from 0."""

import jax
import jax.numpy as jnp

from ejkernel.xla_utils.utils import prepare_lens, prepare_token_indices


def positions(x: jax.Array, start: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """`[T]`, or `[B, T]` where rows `start` somewhere, `[B]` (packed: `[N]`); `x` is `[…, T, width]`."""
    T = x.shape[-2]
    if cu_seqlens is None:
        return jnp.arange(T) if start is None else start[:, None] + jnp.arange(T, dtype=start.dtype)[None]
    sequence, position = prepare_token_indices(cu_seqlens, total_tokens=T).T
    if start is None or not start.shape[0]:
        return position
    # padding belongs to no sequence
    return position.astype(start.dtype) + start.at[sequence].get(mode="fill", fill_value=0)


def advanced(x: jax.Array, start: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """Where the next token of each row or packed sequence stands: `start` and the tokens of `x`."""
    if cu_seqlens is None:
        start = jnp.zeros(x.shape[0], jnp.int32) if start is None else start
        return start + x.shape[1]
    lengths = prepare_lens(cu_seqlens).astype(jnp.int32)
    return lengths if start is None else start + lengths.astype(start.dtype)
