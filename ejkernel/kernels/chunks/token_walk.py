"""The walk of a recurrence token after token, which a CPU is faster at than at chunks of small states."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.walk import Call
from ejkernel.xla_utils.utils import prepare_sequence_ids

# `step(arrays of one token, what is kept of the state before it)` gives the output and the state after it.
Step = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]
# Log decays of tokens' key and value dims, `[B, T, H, 1 or K]` and `[B, T, H, V]`.
Gates = tuple[jax.Array | None, jax.Array | None]
Results = tuple[jax.Array, jax.Array]
# What a walk is of: arrays `[B, T, ...]`, gates, the states `[N, H, K, V]` that sequences are entered with, with their
# first gates in them, and borders.
Inputs = tuple[Any, Gates, jax.Array, jax.Array | None]


def walked(call: Call, step: Step, stateful: bool, inputs: Inputs) -> Results:
    """The results, as `walk.forward` gives them; sequences start from zeros unless `stateful`. Not differentiable."""
    arrays, gates, first, cu_seqlens = inputs
    output = _no_output(call, first)

    def tokens(guarded: bool, state: jax.Array, output: jax.Array, low: Any, high: Any, end: Any = None) -> Results:
        def token(i: jax.Array, both: Results) -> Results:
            state, output = both
            at = low + high - 1 - i if call.reverse else i
            own, gate = jax.tree.map(
                lambda x: lax.dynamic_slice_in_dim(x, at, 1, 1, allow_negative_indices=False), (arrays, gates)
            )
            for each in _beside_states(call, gate, i == low):
                kept = _factor(each, at) * state
                state = jnp.where(state == 0, state, kept) if guarded else kept
            read, state = step(own, state)
            return state, lax.dynamic_update_slice_in_dim(output, read, at, 1, allow_negative_indices=False)

        return lax.fori_loop(low, high if end is None else end, token, (state, output))

    def sequences(guarded: bool) -> Results:
        if cu_seqlens is None:
            return tokens(guarded, first, output, 0, call.tokens)[::-1]

        def visit(output: jax.Array, own: tuple[jax.Array, ...]) -> Results:
            low, high, *start = own
            state, output = tokens(guarded, start[0] if stateful else jnp.zeros_like(first[:1]), output, low, high)
            return output, state[0]

        borders = jnp.minimum(cu_seqlens, call.tokens)
        return lax.scan(visit, output, (borders[:-1], borders[1:], *([first[:, None]] if stateful else [])))

    # What never wrote may grow at any rate, also at one that overflows. Then zeros are kept by selection, which takes a
    # seventh of the time.
    if not jax.tree.leaves(gates):
        return sequences(False)
    if call.tokens * call.key_dim * call.value_dim <= 4096:  # less than finding out
        return sequences(True)
    if call.packed or call.tokens <= 64:
        return lax.cond(_overflow(gates), lambda: sequences(True), lambda: sequences(False))
    # 0 · inf is NaN up to the end, and a state has fewer numbers than the gates
    result, state = sequences(False)
    lost = ~jnp.isfinite(jnp.einsum("nhkv,v->nhk", state, jnp.ones_like(state, shape=state.shape[-1:])).sum())
    again = jnp.where(lost, call.tokens, 0)
    return tokens(True, jnp.where(lost, first, state), result, 0, call.tokens, again)[::-1]


def keeping(call: Call, step: Step, stateful: bool, inputs: Inputs) -> tuple[Results, jax.Array]:
    """The results and the states that tokens meet, `[T, rows, H, K, V]`."""
    del stateful
    first = inputs[2]

    def visit(states: Any, x: Any) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        state, ends = states
        own, (n, at, new, _) = x
        met = _entered(state, n, new, first)
        read, state = _token(call, step, at, new, own, met)
        ends = None if n is None else lax.dynamic_update_slice_in_dim(ends, state, n, 0)
        return (state, ends), (read[:, 0], met)

    visited, flags = _by_token(call, inputs)
    states = first[: call.batch], _with_a_place_for_rest(call, first)
    (state, ends), (output, met) = lax.scan(visit, states, (visited, flags), reverse=call.reverse)
    return (_inside(call, flags[0], jnp.moveaxis(output, 0, 1)), state if ends is None else ends[:-1]), met


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def shadow(call: Call, step: Step, stateful: bool, inputs: Inputs, met: jax.Array) -> Results:
    """Zeros in place of the results, with the gradients of these, from the states that tokens `met`."""
    return _no_output(call, inputs[2]), jnp.zeros_like(inputs[2])


def _forward(call: Call, step: Step, stateful: bool, inputs: Inputs, met: jax.Array) -> tuple[Results, Any]:
    return shadow(call, step, stateful, inputs, met), (inputs, met)


def _backward(call: Call, step: Step, stateful: bool, saved: Any, cotangents: Results) -> tuple[Any, None]:
    inputs, met = saved
    d_output, d_final = cotangents

    def visit(d_states: Any, x: Any) -> tuple[Any, Any]:
        d_state, d_first = d_states
        own, (n, at, new, last), met, d_read = x
        _, pull = jax.vjp(functools.partial(_token, call, step, at, new), own, met)
        d_own, d_met = pull((d_read[:, None], _entered(d_state, n, last, d_final)))
        d_first = None if d_first is None else lax.dynamic_update_slice_in_dim(d_first, d_met, n, 0)
        return (d_met, d_first), d_own

    visited, flags = _by_token(call, inputs)
    d_states = d_final[: call.batch], _with_a_place_for_rest(call, d_final) if stateful else None
    xs = visited, flags, met, jnp.moveaxis(d_output, 1, 0)
    (d_entering, d_first), d_visited = lax.scan(visit, d_states, xs, reverse=not call.reverse)
    d_visited = jax.tree.map(lambda x: _inside(call, flags[0], jnp.moveaxis(x, 0, 1)), d_visited)
    d_first = d_entering if d_first is None else d_first[:-1]
    return (*d_visited, d_first if stateful else None, None), None


shadow.defvjp(_forward, _backward)


def of_heads(call: Call, x: jax.Array) -> jax.Array:
    """One token's `[B, 1, heads, ...]` for all heads, `[B, H, ...]` in the dtype of the states."""
    x = x[:, 0].astype(call.state_dtype)
    return jnp.repeat(x, call.heads // x.shape[1], axis=1)


def _no_output(call: Call, like: jax.Array) -> jax.Array:
    return jnp.zeros_like(like, call.dtype, shape=(call.batch, call.tokens, call.heads, call.value_dim))


def _by_token(call: Call, inputs: Inputs) -> tuple[Any, Any]:
    """Arrays and gates `[T, B, ...]`, and of each token its sequence if packed, its place, and whether it is the first
    and the last of its sequence to be visited.
    """
    arrays, gates, _, cu_seqlens = inputs
    token = jnp.arange(call.tokens, dtype=np.int32)
    if cu_seqlens is None:
        sequence, ends = None, (token == 0, token == call.tokens - 1)
    else:
        sequence = prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)
        change, end = sequence[1:] != sequence[:-1], np.ones(1, bool)
        ends = jnp.concatenate([end, change]), jnp.concatenate([change, end])
    visited = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (arrays, gates))
    return visited, (sequence, token, *(ends[::-1] if call.reverse else ends))


def _token(call: Call, step: Step, at: jax.Array, new: jax.Array, own: Any, met: jax.Array) -> Results:
    """Differentiable."""
    arrays, gates = jax.tree.map(lambda x: x[:, None], own)
    for each in _beside_states(call, gates, new):
        met = _kept(met, each, at)
    return step(arrays, met)


def _entered(state: jax.Array, n: jax.Array | None, new: jax.Array, states: jax.Array) -> jax.Array:
    """`state`, or that of `states [N, H, K, V]` where sequence `n` is entered."""
    return state if n is None else jnp.where(new, lax.dynamic_index_in_dim(states, n), state)


def _with_a_place_for_rest(call: Call, states: jax.Array) -> jax.Array | None:
    """States of packed sequences and one that rows of no sequence may write to."""
    return jnp.concatenate([states, states[:1]]) if call.packed else None


def _inside(call: Call, sequence: jax.Array | None, x: jax.Array) -> jax.Array:
    """`x [B, T, ...]`, 0 for rows of no sequence."""
    if sequence is None:
        return x
    return jnp.where((sequence < call.sequences).reshape(-1, *(1,) * (x.ndim - 2)), x, 0)


def _beside_states(call: Call, gates: Gates, new: jax.Array) -> list[jax.Array]:
    """What there is of one token's, `[B, 1, H, 1 or K]` and `[B, 1, H, V]`, beside states; 0 for the first token."""
    by_key, by_value = jax.tree.map(lambda x: jnp.where(new, 0, x.astype(call.state_dtype)), gates)
    found = [] if by_key is None else [by_key[:, 0, :, :, None]]
    return found if by_value is None else [*found, by_value[:, 0, :, None, :]]


def _factor(gate: jax.Array, at: jax.Array) -> jax.Array:
    """`exp(gate)`, rounded up at some tokens and down at others.

    A factor just below 1 is off by up to 3e-8 of it once it is rounded, and where all are alike so would be their
    errors: over a hundred thousand tokens that are kept for as long they would add up to a few thousandths. So what is
    to be rounded is moved by a part of the distance between numbers there, another one at each token: multiples of the
    golden ratio leave no gaps. The exponential comes last, or XLA would do the rest for every number of a state.
    """
    if gate.dtype == np.float32:
        part = (at.astype(np.uint32) * np.uint32(2654435769)).astype(np.float32) * np.float32(2**-32) - np.float32(0.5)
        gate = gate + part * jnp.where(gate > 0, np.float32(2**-23), np.float32(2**-24))
    return jnp.exp(gate)


@jax.custom_jvp
def _kept(state: jax.Array, gate: jax.Array, at: jax.Array) -> jax.Array:
    """`_factor(gate, at) * state`, in two factors where `exp` has no number for one: so a zero stays zero."""
    largest = 88.0 if state.dtype == np.float32 else 709.0
    return state * _factor(jnp.minimum(gate, largest), at) * jnp.exp(jnp.maximum(gate - largest, 0))


@_kept.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # a gate's derivative is what it leaves of the state: taken factor by factor it could be 0 · inf
    left = _kept(*primals)
    return left, _kept(tangents[0], *primals[1:]) + left * tangents[1]


@jax.custom_batching.custom_vmap
def _overflow(gates: Gates) -> jax.Array:
    """Whether a factor does, anywhere: under `vmap` a condition for each row would have both branches run."""
    return functools.reduce(jnp.logical_or, (jnp.max(x) > 88 for x in jax.tree.leaves(gates)))


@_overflow.def_vmap
def _(size: int, batched: Any, gates: Gates) -> tuple[jax.Array, bool]:
    return _overflow(gates), False
