"""The gated linear recurrence with its tokens sharded over a mesh axis.

The transition of a slice of the tokens is a decay. Devices exchange its logarithm, so that a huge decay leaves zeros
alone.
"""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel import _checks
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import Implementation
from ejkernel._front import public
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


@public
def recurrent(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray | None = None,
    g_gamma: AnyArray | None = None,
    gk: AnyArray | None = None,
    gv: AnyArray | None = None,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
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
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each key dim, `[B, T, H, K]`, or `[B, T, H, 1]` for one a head. Any value is legal: 0 keeps,
            `-inf` forgets everything.
        g_gamma: Log decay of each head at every token, `[H]`, `[1, H]` or `[B, H]` (packed: `[N, H]`).
        gk: Like `g`, and added to it.
        gv: Log decay of each value dim, `[B, T, H, V]`, or `[B, T, H, 1]`.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import parallel
        >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = parallel.recurrent(query, key, value, axis_name="time", mesh=mesh)
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options, g=g, g_gamma=g_gamma, gk=gk, gv=gv)


@public
def recurrent_gla(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray | None = None,
    g_gamma: AnyArray | None = None,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.recurrent_gla` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.recurrent` is.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each key dim, `[B, T, H, K]`, or `[B, T, H, 1]` for one a head. Any value is legal: 0 keeps,
            `-inf` forgets everything.
        g_gamma: Log decay of each head at every token, `[H]`, `[1, H]` or `[B, H]` (packed: `[N, H]`).
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options, g=g, g_gamma=g_gamma)


@public
def simple_gla(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.simple_gla` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.recurrent` is.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        g: Log decay of each head, `[B, T, H]` (packed: `[T, H]` for unbatched arrays). Any value is legal: 0 keeps,
            `-inf` forgets everything.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options, g=_checks.gate_per_head(g, query, key, value))


@public
def retention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.retention` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.recurrent` is.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options, g_gamma=retention_decay(query, key, value))


@public
def lightning_attn(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    layer_idx: ArrayLike,
    num_layers: int,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.lightning_attn` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.recurrent` is.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        layer_idx: The layer's number, from 0: an int, or an array of one number, which may be traced, as in a scan over
            layers.
        num_layers: How many layers there are, an int of at least 1.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    g_gamma = lightning_decay(query, key, value, layer_idx, num_layers)
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options, g_gamma=g_gamma)


@public
def linear_attention(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.linear_attention` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.recurrent` is.

    Args:
        query: `[B, T, H, K]`, what each token reads the memory with.
        key: `[B, T, H, K]`, where in the memory each token writes.
        value: `[B, T, H, V]`, what it writes there. Query, key and value may each have fewer heads, any divisor of
            `H`, the largest number of the three: head `h` reads their head `h // (H / theirs)`, as in grouped attention
            or Mamba-2.
        softmax_scale: What the output is multiplied by; `None` means `K ** -0.5`.
        initial_state: The state to start from, `[B, H, K, V]`, or `[H, K, V]` for every row; `None` means zeros.
        reverse: Visit the tokens last to first; the final state is then the one after token 0.
        cu_seqlens: Borders `[0, l1, l1 + l2, …]`, `[N + 1]`, of `N` sequences in arrays `[1, T, …]` or `[T, …]`; states
            are then `[N, H, K, V]`. Tokens past the last border are padding: output 0, no gradient, no effect. They
            count the tokens of the whole stream: packed sequences may straddle devices.
        segment_ids: Integers `[B, T]` instead of `cu_seqlens`: which sequence of its row each token belongs to. Where
            the id changes, the state restarts from zeros; `initial_state` is that of each row's first sequence, and the
            final state that after the row's last token. Negative ids are padding: output 0, no gradient, no effect.
            Sequences may straddle devices.
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    return _tokens.run_sharded(RECURRENCE, query, key, value, *options)


def _check(arrays: Arrays) -> _checks.RecurrenceArrays:
    names = (*PER_TOKEN[:3], "g", "g_gamma", "gk", "gv", "initial_state", "cu_seqlens", "segment_ids")
    return _checks.linear_attention(*map(arrays.get, names))


def _begin(
    implementation: Implementation, call: Call, inputs: tuple[Any, ...], sequences: jax.Array | None
) -> tuple[Any, LogDecays, jax.Array]:
    carry, added = _phases.phases_of(implementation, call).begin(call, inputs, sequences)
    log_decay, value_log_decay = inputs[3:]
    return carry, _log_decays(call, log_decay, value_log_decay, sequences), added


def _log_decays(
    call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array | None, sequences: jax.Array | None
) -> LogDecays:
    """The log decay of a state over each sequence's tokens here: `[N, H, 1 or K, 1]` and `[N, H, 1, 1 or V]`.

    Of rows that hold several sequences, over all tokens that are no padding: it counts where they are of one.
    """

    def over_tokens(gate: jax.Array | None) -> jax.Array:
        if gate is None:
            return jnp.zeros((1, 1, 1), call.state_dtype)
        gate = (gate[..., None] if gate.ndim == 3 else gate).astype(call.state_dtype)
        if sequences is None:
            return gate.sum(1)
        if call.segmented:
            return jnp.where((sequences >= 0)[..., None, None], gate, 0).sum(1)
        # by selecting: a sum of products with 0 would carry a NaN from one sequence to all
        sequence = prepare_sequence_ids(sequences, total_tokens=call.tokens)
        return jax.ops.segment_sum(gate[0], sequence, call.sequences + 1)[:-1]

    if call.decay == "constant" and log_decay is not None:
        lengths: Any = np.full(1, call.tokens)
        if sequences is not None:
            lengths = (sequences >= 0).sum(1) if call.segmented else prepare_lens(sequences)
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
