"""The tokens just before each token, within its own sequence."""

import jax
import jax.numpy as jnp

from ejkernel.xla_utils.utils import prepare_position_ids, prepare_sequence_ids


def lagged(
    x: jax.Array, count: int, recent: jax.Array | None, cu_seqlens: jax.Array | None
) -> tuple[list[jax.Array], jax.Array]:
    """`x` delayed by 0 … `count` tokens, and the last `count` tokens of each sequence.

    `recent` is that second result of an earlier call, `[N, count, width]`; `None` means zeros. It gives the tokens
    before the first ones of `x`, which is `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
    """
    if cu_seqlens is not None:
        delayed, recent = _packed(x.reshape(-1, x.shape[-1]), count, recent, cu_seqlens)
        return [each.reshape(x.shape) for each in delayed], recent
    if recent is None:
        recent = jnp.zeros((x.shape[0], count, x.shape[-1]), x.dtype)
    T = x.shape[1]
    longer = jnp.concatenate([recent.astype(x.dtype), x], 1)  # [B, count + T, width]
    return [longer[:, count - lag : count - lag + T] for lag in range(count + 1)], longer[:, T:]


def _packed(
    x: jax.Array, count: int, recent: jax.Array | None, cu_seqlens: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    T, N = x.shape[0], cu_seqlens.shape[0] - 1
    if recent is None:
        recent = jnp.zeros((N, count, x.shape[-1]), x.dtype)
    recent = recent.astype(x.dtype)
    # where a sequence is thought of as following its recent tokens, its first token stands at `count`
    starts, lengths = cu_seqlens[:-1], jnp.diff(cu_seqlens)

    def at(sequence: jax.Array, place: jax.Array) -> jax.Array:
        here = x[jnp.clip(starts[sequence] + place - count, 0, T - 1)]
        before = recent[sequence, jnp.clip(place, 0, count - 1)]
        return jnp.where((place >= count)[..., None], here, before)

    sequence = jnp.minimum(prepare_sequence_ids(cu_seqlens, total_tokens=T), N - 1)
    position = prepare_position_ids(cu_seqlens, total_tokens=T)
    delayed = [x, *(at(sequence, position + count - lag) for lag in range(1, count + 1))]
    return delayed, at(jnp.arange(N)[:, None], lengths[:, None] + jnp.arange(count))
