"""The walk of a recurrence token after token, which a CPU is faster at than at chunks of small states."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.walk import Call, einsum_of
from ejkernel.xla_utils.utils import prepare_sequence_ids

# `write(arrays of one token but its query, what is kept of the state before it)` gives the state after it.
Write = Callable[[Any, jax.Array], jax.Array]
# Log decays of tokens' key and value dims, `[B, T, H, 1 or K]` and `[B, T, H, V]`.
Gates = tuple[jax.Array | None, jax.Array | None]
Results = tuple[jax.Array, jax.Array]
# What a walk is of: arrays `[B, T, ...]`, queries first; gates; the states `[N, H, K, V]` that sequences are entered
# with, with their first gates in them; and borders.
Inputs = tuple[Any, Gates, jax.Array, jax.Array | None]


def walked(call: Call, write: Write, stateful: bool, inputs: Inputs) -> Results:
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
            state = write(own[1:], state)
            found = read(call, own[0], state)
            return state, lax.dynamic_update_slice_in_dim(output, found, at, 1, allow_negative_indices=False)

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


def keeping(call: Call, write: Write, stateful: bool, inputs: Inputs) -> tuple[Results, jax.Array]:
    """The results and the states that tokens leave, `[T, rows, H, K, V]`."""
    del stateful
    (query, *written), gates, first, cu_seqlens = inputs

    def visit(states: Any, x: Any) -> tuple[Any, jax.Array]:
        state, ends = states
        own, gates, (n, new, _) = x
        state = write(own, _entered(_kept(state, *gates), n, new, first))
        ends = None if n is None else lax.dynamic_update_slice_in_dim(ends, state, n, 0)
        return (state, ends), state

    flags = _visits(call, cu_seqlens)
    xs = _by_token(written), _with_factors(call, _beside_all(call, gates, flags)), _if_packed(flags)
    states = first[: call.batch], _with_a_place_for_rest(call, first)
    (state, ends), left = lax.scan(visit, states, xs, reverse=call.reverse)
    output = _inside(call, flags[0], _read_of_all(call, query, left))
    return (output, state if ends is None else ends[:-1]), left


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def shadow(call: Call, write: Write, stateful: bool, inputs: Inputs, left: jax.Array) -> Results:
    """Zeros in place of the results, with the gradients of these, from the states that tokens `left`."""
    return _no_output(call, inputs[2]), jnp.zeros_like(inputs[2])


def _forward(call: Call, write: Write, stateful: bool, inputs: Inputs, left: jax.Array) -> tuple[Results, Any]:
    return shadow(call, write, stateful, inputs, left), (inputs, left)


def _backward(call: Call, write: Write, stateful: bool, saved: Any, cotangents: Results) -> tuple[Any, None]:
    ((query, *written), gates, first, cu_seqlens), left = saved
    d_output, d_final = cotangents

    def visit(d_states: Any, x: Any) -> tuple[Any, Any]:
        token, d_state, d_first = d_states
        query, own, gates, (n, new, last), d_read = x
        new = token == start if n is None else new
        before = jnp.clip(token + (1 if call.reverse else -1), 0, call.tokens - 1)
        met = lax.dynamic_index_in_dim(left, before, keepdims=False, allow_negative_indices=False)
        kept = jnp.where(new, first if n is None else lax.dynamic_index_in_dim(first, n), _kept(met, *gates))
        # reading is linear, whatever is read
        (d_state_read,) = jax.vjp(functools.partial(read, call, query), kept)[1](d_read)
        d_own, d_kept = jax.vjp(write, own, kept)[1](_entered(d_state, n, last, d_final) + d_state_read)
        d_first = None if d_first is None else lax.dynamic_update_slice_in_dim(d_first, d_kept, n, 0)
        # a gate's derivative is what it leaves of the state: taken factor by factor it could be 0 · inf
        d_gates = [_summed(d_kept * kept, gate.shape) for gate, _ in gates]
        return (token + (1 if call.reverse else -1), _kept(d_kept, *gates), d_first), (d_own, d_gates)

    start, end = (call.tokens - 1, 0) if call.reverse else (0, call.tokens - 1)
    flags = _visits(call, cu_seqlens)
    beside, pull_gates = jax.vjp(lambda gates: _beside_all(call, gates, flags), gates)
    d_states = np.int32(end), d_final[: call.batch], _with_a_place_for_rest(call, d_final) if stateful else None
    xs = *_by_token((query, written)), _with_factors(call, beside), _if_packed(flags), _by_token(d_output)
    (_, d_entering, d_first), (d_written, d_gates) = lax.scan(visit, d_states, xs, reverse=not call.reverse)
    (d_query,) = jax.vjp(lambda query: _read_of_all(call, query, left), query)[1](d_output)
    d_written = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), d_written)
    d_tokens = jax.tree.map(functools.partial(_inside, call, flags[0]), ((d_query, *d_written), *pull_gates(d_gates)))
    d_first = d_entering if d_first is None else d_first[:-1]
    return (*d_tokens, d_first if stateful else None, None), None


shadow.defvjp(_forward, _backward)


def of_heads(call: Call, x: jax.Array) -> jax.Array:
    """One token's `[B, 1, heads, ...]` for all heads, `[B, H, ...]` in the dtype of the states."""
    x = x[:, 0].astype(call.state_dtype)
    return jnp.repeat(x, call.heads // x.shape[1], axis=1)


def _no_output(call: Call, like: jax.Array) -> jax.Array:
    return jnp.zeros_like(like, call.dtype, shape=(call.batch, call.tokens, call.heads, call.value_dim))


def _visits(call: Call, cu_seqlens: jax.Array | None) -> Any:
    """Of each token its sequence if packed, and whether it is the first and the last of it to be visited."""
    token = jnp.arange(call.tokens, dtype=np.int32)
    if cu_seqlens is None:
        sequence, ends = None, (token == 0, token == call.tokens - 1)
    else:
        sequence = prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)
        change, end = sequence[1:] != sequence[:-1], np.ones(1, bool)
        ends = jnp.concatenate([end, change]), jnp.concatenate([change, end])
    return sequence, *(ends[::-1] if call.reverse else ends)


def _if_packed(flags: Any) -> Any:
    """A loop over one sequence needs none of them, and each array that it reads takes time of its own."""
    return (None, None, None) if flags[0] is None else flags


def _by_token(arrays: Any) -> Any:
    """Of arrays `[B, T, ...]` those of each token, `[T, B, 1, ...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], arrays)


def read(call: Call, query: jax.Array, state: jax.Array) -> jax.Array:
    """The output `[B, 1, H, V]` of a token that leaves this state."""
    output = call.scale * einsum_of(call)("bhk,bhkv->bhv", of_heads(call, query), state)
    return output[:, None].astype(call.dtype)


def _read_of_all(call: Call, query: jax.Array, left: jax.Array) -> jax.Array:
    """The output `[B, T, H, V]`."""
    return jnp.moveaxis(jax.vmap(functools.partial(read, call))(_by_token(query), left)[:, :, 0], 0, 1)


def _beside_all(call: Call, gates: Gates, flags: Any) -> list[jax.Array]:
    """What there is of all tokens' gates, as `_beside_states` has one's."""
    return jax.vmap(functools.partial(_beside_states, call))(_by_token(gates), flags[1])


def _summed(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` summed over what is one in this shape."""
    return x.sum([axis for axis, size in enumerate(shape) if size == 1], keepdims=True)


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


def _with_factors(call: Call, gates: list[jax.Array]) -> list[tuple[jax.Array, Any]]:
    """With all tokens' gates the two factors that each is: `exp` has no number for some, and so a zero stays zero."""

    def factors(gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest = 88.0 if gate.dtype == np.float32 else 709.0
        token = jnp.arange(call.tokens).reshape(-1, *(1,) * (gate.ndim - 1))
        within = _factor(jnp.minimum(gate, largest), token)
        return within, jnp.exp(jnp.maximum(gate - largest, 0))

    return [(gate, lax.stop_gradient(factors(gate))) for gate in gates]


@jax.custom_jvp
def _kept(state: jax.Array, *gates: Any) -> jax.Array:
    """What one token's gates keep of a state."""
    for _, factors in gates:
        state = state * factors[0] * factors[1]
    return state


@_kept.defjvp
def _(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    # as in the gradient, and so its own is right too
    left, moved = _kept(*primals), _kept(tangents[0], *primals[1:])
    for moving, _ in tangents[1:]:
        moved = moved + left * moving
    return left, moved


@jax.custom_batching.custom_vmap
def _overflow(gates: Gates) -> jax.Array:
    """Whether a factor does, anywhere: under `vmap` a condition for each row would have both branches run."""
    return functools.reduce(jnp.logical_or, (jnp.max(x) > 88 for x in jax.tree.leaves(gates)))


@_overflow.def_vmap
def _(size: int, batched: Any, gates: Gates) -> tuple[jax.Array, bool]:
    return _overflow(gates), False
