"""The gated linear recurrence with its tokens spread over a mesh axis.

A slice of the tokens multiplies a state by a decay. A decay is only ever multiplied by, never divided by.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ejkernel import _checks
from ejkernel.linear_attention import lightning_decay, retention_decay
from ejkernel.linear_attention import recurrent as on_one_device
from ejkernel.parallel import _tokens
from ejkernel.parallel._tokens import Arrays, Result
from ejkernel.xla_utils.utils import prepare_lens, prepare_sequence_ids

PER_TOKEN = ("query", "key", "value", "g", "gk", "gv")


def recurrent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    softmax_scale: float | jax.Array | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.recurrent` with the tokens sharded over a mesh axis, in one collective forward and one backward.

    Without `mesh` it is called inside the caller's own `shard_map`: arrays with a token dimension are this device's
    slice of it, everything else (`g_gamma`, `initial_state`, `cu_seqlens`) is the same on all devices, and so is the
    final state that comes back. With `mesh` it takes and returns global arrays and does the `shard_map` itself; other
    axes of the mesh stay as JAX has them.

    Args:
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.

    The other arguments are `ejkernel.recurrent`'s, `cu_seqlens` counting the tokens of the whole stream: packed
    sequences may straddle devices.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import parallel
        >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = parallel.recurrent(query, key, value, axis_name="time", mesh=mesh)
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))
    """
    arrays = {
        "query": query,
        "key": key,
        "value": value,
        "g": g,
        "gk": gk,
        "gv": gv,
        "g_gamma": g_gamma,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    options = {"softmax_scale": softmax_scale, "reverse": reverse, "platform": platform}
    return _tokens.spread(RECURRENCE, arrays, options, axis_name, mesh)


def recurrent_gla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    **options: Any,
) -> Result:
    """`ejkernel.recurrent_gla` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g, g_gamma, **options)


def simple_gla(query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, **options: Any) -> Result:
    """`ejkernel.simple_gla` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, _checks.gate_per_head(g, query, key, value), **options)


def retention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
    """`ejkernel.retention` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g_gamma=retention_decay(query, key, value), **options)


def lightning_attn(
    query: jax.Array, key: jax.Array, value: jax.Array, layer_idx: ArrayLike, num_layers: int, **options: Any
) -> Result:
    """`ejkernel.lightning_attn` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g_gamma=lightning_decay(query, key, value, layer_idx, num_layers), **options)


def linear_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
    """`ejkernel.linear_attention` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, **options)


def _check(arrays: Arrays) -> _checks.LinearAttention:
    names = (*PER_TOKEN[:3], "g", "g_gamma", "gk", "gv", "initial_state", "cu_seqlens")
    return _checks.linear_attention(*map(arrays.get, names))


def _effect(arrays: Arrays, options: Arrays) -> jax.Array:
    """Both decays and the added state: `[N, H, K + 1, V + 1]`."""
    _, added = on_one_device(**arrays, **options)  # [N, H, K, V]
    return _packed(*_total_decay(arrays), added)


def _total_decay(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """What a state is multiplied by over each sequence's tokens here: `[N, H, 1 or K, 1]` and `[N, H, 1, 1 or V]`."""
    unbatched, borders = arrays["query"].ndim == 3, arrays.get("cu_seqlens")
    tokens, heads = arrays["query"].shape[-3], _checks.heads(arrays["query"], arrays["key"], arrays["value"])
    dtype = jnp.float64 if arrays["query"].dtype == jnp.float64 else jnp.float32

    def over_tokens(name: str) -> jax.Array:
        gate = arrays[name].astype(dtype)
        if borders is None:
            return gate.sum(1)
        gate = gate if unbatched else gate[0]
        # by selecting: a sum of products with 0 would carry a NaN from one sequence to all
        sequence = prepare_sequence_ids(borders, total_tokens=tokens)
        return jax.ops.segment_sum(gate, sequence, borders.shape[0])[:-1]

    total = jnp.zeros((1, heads, 1), dtype)
    for name in ("g", "gk"):
        total = total + over_tokens(name) if name in arrays else total
    if "g_gamma" in arrays:
        lengths = jnp.full((1, 1), tokens, dtype) if borders is None else prepare_lens(borders)[:, None].astype(dtype)
        gamma = arrays["g_gamma"].astype(dtype).reshape(-1, heads)
        # no tokens, no decay: 0 · -inf would be NaN
        total = total + jnp.where(lengths > 0, gamma * lengths, 0)[..., None]
    value_total = over_tokens("gv") if "gv" in arrays else jnp.zeros((1, heads, 1), dtype)
    return jnp.exp(total)[..., :, None], jnp.exp(value_total)[..., None, :]


def _packed(decay: jax.Array, value_decay: jax.Array, added: jax.Array) -> jax.Array:
    N, H, K, V = added.shape
    column = jnp.broadcast_to(decay, (N, H, K, 1))
    row = jnp.broadcast_to(value_decay, (N, H, 1, V))
    return jnp.block([[added, column], [row, jnp.ones((N, H, 1, 1), added.dtype)]])


def _parts(effect: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return (effect[..., :-1, -1:], effect[..., -1:, :-1]), effect[..., :-1, :-1]


def _kept(decays: tuple[jax.Array, jax.Array], state: jax.Array) -> jax.Array:
    decay, value_decay = decays
    return decay * value_decay * state


RECURRENCE = _tokens.Recurrence(PER_TOKEN, _check, on_one_device, _effect, _parts, _kept)
