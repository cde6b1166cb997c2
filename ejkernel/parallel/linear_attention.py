"""The gated linear recurrence with its tokens sharded over a mesh axis.

The transition of a slice of the tokens is a decay. Devices exchange its logarithm, so that a huge decay leaves zeros
alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel import _checks
from ejkernel._dispatch import Implementation
from ejkernel.kernels import _phases
from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.linear_attention import bind, lightning_decay, retention_decay
from ejkernel.parallel import _tokens
from ejkernel.parallel._exchange import Algebra
from ejkernel.parallel._tokens import Arrays, Result
from ejkernel.xla_utils.utils import prepare_lens, prepare_sequence_ids

LogDecays = tuple[jax.Array, jax.Array]  # by key dim and by value dim, both broadcast to a state
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
    cu_seqlens: _checks.Borders | None = None,
    *,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.recurrent` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

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
    options = {"softmax_scale": softmax_scale, "reverse": reverse}
    return _tokens.run_sharded(RECURRENCE, arrays, options, axis_name, mesh, platform)


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


def _begin(
    implementation: Implementation, call: Call, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None
) -> tuple[Any, LogDecays, jax.Array]:
    carry, added = _phases.phases_of(implementation).begin(call, inputs, cu_seqlens)
    log_decay, value_log_decay = inputs[3:]
    return carry, _log_decays(call, log_decay, value_log_decay, cu_seqlens), added


def _log_decays(
    call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None, cu_seqlens: jax.Array | None
) -> LogDecays:
    """The log decay of a state over each sequence's tokens here: `[N, H, 1 or K, 1]` and `[N, H, 1, 1 or V]`."""

    def over_tokens(gate: jax.Array | None) -> jax.Array:
        if gate is None:
            return jnp.zeros((1, 1, 1), call.state_dtype)
        gate = (gate[..., None] if gate.ndim == 3 else gate).astype(call.state_dtype)
        if cu_seqlens is None:
            return gate.sum(1)
        # by selecting: a sum of products with 0 would carry a NaN from one sequence to all
        sequence = prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)
        return jax.ops.segment_sum(gate[0], sequence, call.sequences + 1)[:-1]

    if call.decay == "constant" and log_decay is not None:
        lengths = np.full(1, call.tokens) if cu_seqlens is None else prepare_lens(cu_seqlens)
        tokens = jnp.asarray(lengths, call.state_dtype)[:, None]
        # no tokens, no decay: 0 · -inf would be NaN
        total = jnp.where(tokens > 0, log_decay.astype(call.state_dtype) * tokens, 0)[..., None]
    else:
        total = over_tokens(log_decay)
    return total[..., :, None], over_tokens(value_log_decay)[..., None, :]


def _pack(log_decays: LogDecays, added: jax.Array) -> jax.Array:
    """The added state with the log decays at its edges: `[N, H, K + 1, V + 1]`."""
    N, H, K, V = added.shape
    column = jnp.broadcast_to(log_decays[0], (N, H, K, 1))
    row = jnp.broadcast_to(log_decays[1], (N, H, 1, V))
    return jnp.block([[added, column], [row, jnp.zeros((N, H, 1, 1), added.dtype)]])


def _unpack(effect: jax.Array) -> tuple[LogDecays, jax.Array]:
    return (effect[..., :-1, -1:], effect[..., -1:, :-1]), effect[..., :-1, :-1]


def _apply(log_decays: LogDecays, state: jax.Array) -> jax.Array:
    return decayed(state, *log_decays)


def _compose(later: LogDecays, earlier: LogDecays) -> LogDecays:
    return later[0] + earlier[0], later[1] + earlier[1]


# a decay is its own transpose
ALGEBRA = Algebra(_pack, _unpack, _apply, _compose, transpose=lambda log_decays: log_decays)
RECURRENCE = _tokens.Recurrence(PER_TOKEN, _check, bind, IMPLEMENTATIONS, _begin, ALGEBRA)
