"""The delta rule with its tokens sharded over a mesh axis.

The transition of a slice of the tokens is a matrix `[K, K]`.
"""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _checks
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import Implementation
from ejkernel._front import public
from ejkernel.delta_rule import GATE_DIMS, bind
from ejkernel.kernels.delta_rule import IMPLEMENTATIONS
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.phases import phases_from_wide_states
from ejkernel.parallel import _tokens
from ejkernel.parallel._exchange import Algebra
from ejkernel.parallel._tokens import Arrays, Result

PER_TOKEN = ("query", "key", "value", "beta", "g")


@public
def delta_rule(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    normalize: bool = False,
    platform: str | None = None,
) -> Result:
    """`ejkernel.delta_rule` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    Without `mesh` it is called inside the caller's own `shard_map`: arrays with a token dimension are this device's
    slice of it, everything else (`initial_state`, `cu_seqlens`) is the same on all devices, and so is the final state
    that comes back. With `mesh` it takes and returns global arrays and does the `shard_map` itself; other axes of the
    mesh stay as JAX has them.

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
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
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import parallel
        >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> query = key = value = jnp.ones((2, 100, 4, 64))
        >>> beta = jnp.full((2, 100, 8), 0.5)
        >>> output, state = parallel.delta_rule(
        ...     query, key, value, beta, normalize=True, axis_name="time", mesh=mesh
        ... )
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    more = {"normalize": normalize}
    return _tokens.run_sharded(RECURRENCES["none"], query, key, value, *options, more, beta=beta)


@public
def gated_delta_rule(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    normalize: bool = False,
    platform: str | None = None,
) -> Result:
    """`ejkernel.gated_delta_rule` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.delta_rule` is.

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        g: Log decay of each head, `[B, T, H]` (packed: `[T, H]` for unbatched arrays). Any value is legal: 0 keeps,
            `-inf` forgets everything.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
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
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    more = {"normalize": normalize}
    return _tokens.run_sharded(RECURRENCES["head"], query, key, value, *options, more, g=g, beta=beta)


@public
def kda(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    g: AnyArray,
    beta: AnyArray,
    softmax_scale: float | AnyArray | None = None,
    initial_state: AnyArray | None = None,
    reverse: bool = False,
    cu_seqlens: Borders | None = None,
    *,
    segment_ids: AnyArray | None = None,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    normalize: bool = False,
    platform: str | None = None,
) -> Result:
    """`ejkernel.kda` with the tokens sharded over a mesh axis, in one exchange forward and one backward.

    With and without `mesh` it is called as `parallel.delta_rule` is.

    Args:
        query: `[B, T, ·, K]`, what each token reads the memory with. Query, key and value may each have fewer heads
            than `H`, any divisor of it: head `h` reads their head `h // (H / theirs)`.
        key: `[B, T, ·, K]`, where in the memory each token writes.
        value: `[B, T, ·, V]`, what it writes there.
        g: Log decay of each key dim, `[B, T, H, K]`. Any value is legal: 0 keeps, `-inf` forgets everything.
        beta: `[B, T, H]`, how much of a recalled value is replaced: 0 nothing, 1 all, 2 reflects; any value is legal.
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
        normalize: Divide each query and key by `sqrt(sum of its squares + 1e-6)` first, in float32.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[B, T, H, V]` in the query's dtype (without `B` if the arrays came without it), and the final state
        `[B, H, K, V]` in float32 (float64 for float64 input), which as `initial_state` continues the sequence.
    """
    options = softmax_scale, initial_state, reverse, cu_seqlens, segment_ids, axis_name, mesh, platform
    more = {"normalize": normalize}
    return _tokens.run_sharded(RECURRENCES["key"], query, key, value, *options, more, g=g, beta=beta)


def _check(gate: str, arrays: Arrays) -> _checks.RecurrenceArrays:
    names = (*PER_TOKEN, "initial_state", "cu_seqlens", "segment_ids")
    query, key, value, beta, g, *sequences = map(arrays.get, names)
    return _checks.delta_rule(query, key, value, beta, g, gate, *sequences)


def _begin(
    implementation: Implementation, call: Call, inputs: tuple[Any, ...], sequences: jax.Array | None
) -> tuple[Any, jax.Array, jax.Array]:
    phases = (not call.segmented and implementation.phases) or phases_from_wide_states(implementation.run)
    carry, effect = phases.begin(call, inputs, sequences)
    return carry, *_unpack(effect)


def _pack(transition: jax.Array, added: jax.Array) -> jax.Array:
    """The transition and the added state side by side, `[N, H, K, K + V]`."""
    return jnp.concatenate([transition, added], -1)


def _unpack(effect: jax.Array) -> tuple[jax.Array, jax.Array]:
    K = effect.shape[-2]
    return effect[..., :K], effect[..., K:]


def _matmul(transition: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.einsum("nhjk,nhkv->nhjv", transition, state, precision=lax.Precision.HIGHEST)


ALGEBRA = Algebra(_pack, _unpack, apply=_matmul, compose=_matmul, transpose=lambda transition: transition.mT)


RECURRENCES = {
    decay: _tokens.Recurrence(
        PER_TOKEN, partial(_check, dims), partial(bind, decay=decay), IMPLEMENTATIONS, _begin, ALGEBRA
    )
    for decay, dims in GATE_DIMS.items()
}
