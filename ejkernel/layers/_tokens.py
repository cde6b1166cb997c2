"""The tokens that a layer is called with: checked, without padding, and where each stands in its sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.xla_utils.utils import prepare_lens, prepare_token_indices


def layer_input(
    dims: _checks.Dims, x: Any, cu_seqlens: Any, dtype: DTypeLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """`x` in the dtype to compute in, with 0 for padding, and `cu_seqlens`; `dims` knows the `width`."""
    x, cu_seqlens = _checks.layer_input(dims, x, cu_seqlens)
    return without_padding(x if dtype is None else x.astype(dtype), cu_seqlens), cu_seqlens


def without_padding(x: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """`x [..., T, width]` with 0 past the last border, whatever is there, even NaN; padding has no gradient either."""
    if cu_seqlens is None:
        return x
    used = jnp.arange(x.shape[-2], dtype=cu_seqlens.dtype) < cu_seqlens[-1]
    return jnp.where(used.reshape(*[1] * (x.ndim - 2), x.shape[-2], 1), x, jnp.zeros((), x.dtype))


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


def next_position(x: jax.Array, start: jax.Array | None, cu_seqlens: jax.Array | None) -> jax.Array:
    """Where the next token of each row or packed sequence stands: `start` and the tokens of `x`."""
    if cu_seqlens is None:
        start = jnp.zeros(x.shape[0], jnp.int32) if start is None else start
        return start + x.shape[1]
    lengths = prepare_lens(cu_seqlens).astype(jnp.int32)
    return lengths if start is None else start + lengths.astype(start.dtype)
