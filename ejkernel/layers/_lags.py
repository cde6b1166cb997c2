"""The tokens just before each token, within its own sequence."""

import jax
import jax.numpy as jnp

from ejkernel.xla_utils.utils import prepare_token_indices


def lagged(
    x: jax.Array, count: int, recent: jax.Array | None, cu_seqlens: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """`x` delayed by 0 … `count` tokens, and the last `count` tokens of each sequence.

    `recent` is that second result of an earlier call, `[N, count, width]`; `None` means zeros. It gives the tokens
    before the first ones of `x`, which is `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
    """
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    recent = jnp.zeros((rows, count, x.shape[-1]), x.dtype) if recent is None else recent.astype(x.dtype)
    if cu_seqlens is not None:
        delayed, recent = _packed(x.reshape(x.shape[-2:]), count, recent, cu_seqlens)
        return [each.reshape(x.shape) for each in delayed], recent
    T = x.shape[1]
    longer = jnp.concatenate([recent, x], 1)  # [B, count + T, width]
    return [longer[:, count - lag : count - lag + T] for lag in range(count + 1)], longer[:, T:]


def _packed(x: jax.Array, count: int, recent: jax.Array, cu_seqlens: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    T, N, width = x.shape[0], recent.shape[0], x.shape[-1]
    # all that a token may come after: the stream, what came before it, and a 0 for padding
    rows = jnp.concatenate([x, recent.reshape(N * count, width), jnp.zeros((1, width), x.dtype)])

    def at(sequence: jax.Array, place: jax.Array) -> jax.Array:
        # where a sequence is thought of as following its recent tokens, its first token stands at `count`
        row = jnp.where(place >= count, cu_seqlens[sequence] + place - count, T + sequence * count + place)
        return rows[jnp.where(sequence < N, row, T + N * count)]

    sequence, position = prepare_token_indices(cu_seqlens, total_tokens=T).T
    delayed = [x, *(at(sequence, position + count - lag) for lag in range(1, count + 1))]
    ends = jnp.diff(cu_seqlens)[:, None] + jnp.arange(count, dtype=cu_seqlens.dtype)[None]
    return delayed, at(jnp.arange(N, dtype=cu_seqlens.dtype)[:, None], ends)
