"""The short convolution in plain JAX: sums of shifted arrays. Runs anywhere."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._differentiable import Op
from ejkernel.kernels.convolution.call import Call, Inputs
from ejkernel.kernels.convolution.places import Places, places
from ejkernel.kernels.convolution.states import final_gradient, final_states, initial_states, put, take

Results = tuple[jax.Array, jax.Array]


def supports(call: Call) -> str | None:
    """Everything."""
    return None


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """The output and the final states; arrays as `Inputs` lists them."""
    inputs = Inputs(*_varying.align(arrays))
    if 0 in (call.batch, call.tokens, call.channels, call.sequences):
        return jnp.zeros_like(inputs.x), initial_states(call, inputs.initial_state)
    return _differentiable.call(OP, call, inputs)


def forward(call: Call, inputs: Inputs) -> Results:
    """The same in a form that JAX can differentiate."""
    where = places(call, inputs)
    output = activated(call, _sums(call, inputs, _taps(call, inputs, where)))
    if where is not None:
        output = jnp.where((where.position >= 0)[..., None], output, 0)
    output = output.astype(call.dtype)
    if where is not None and inputs.initial_state is not None and call.history:
        heads = activated(call, _sums(call, inputs, head_taps(call, inputs, where))).astype(call.dtype)
        output = put(call, output, *where.heads(call), heads)
    return output, final_states(call, where, inputs.x, inputs.initial_state)


def backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """Cotangents of the inputs. Nothing is remembered from the forward pass: sums cost less than reading them."""
    (d_output, d_final), where = cotangents, places(call, inputs)
    if d_output is None:
        d_output = jnp.zeros_like(inputs.x)
    taps = _taps(call, inputs, where)
    d_sums = d_activated(call, _sums(call, inputs, taps), d_output)
    if where is not None:
        d_sums = jnp.where((where.position >= 0)[..., None], d_sums, 0)
    has_states = inputs.initial_state is not None and bool(call.history)
    d_heads = head_gradient(call, inputs, where, d_output) if has_states else None
    if where is not None and d_heads is not None:
        d_sums = put(call, d_sums, *where.heads(call), d_heads)
    # in reverse, as the last row weighs the token itself
    d_weight = jnp.stack([(d_sums * tap.astype(call.sum_dtype)).sum((0, 1)) for tap in taps][::-1])
    if where is not None and d_heads is not None:
        d_weight += states_in_weight(call, inputs, where, d_heads)
    d_bias = None if inputs.bias is None else d_sums.sum((0, 1))
    d_x = _d_x(call, inputs, where, d_sums)
    d_states = initial_gradient(call, inputs, d_heads)
    if d_final is not None:
        d_x, d_states = final_gradient(call, where, d_final, d_x, d_states)
    return Inputs(d_x, d_weight, d_bias, None if inputs.initial_state is None else d_states, None, None)


def activated(call: Call, sums: jax.Array) -> jax.Array:
    return jax.nn.silu(sums) if call.activation == "silu" else sums


def d_activated(call: Call, sums: jax.Array, d_output: jax.Array) -> jax.Array:
    """The cotangent of the sums."""
    d_output = d_output.astype(call.sum_dtype)
    if call.activation is None:
        return d_output
    share = jax.nn.sigmoid(sums)
    return d_output * (share * (1 + sums * (1 - share)))


def _taps(call: Call, inputs: Inputs, where: Places | None) -> list[jax.Array]:
    """`x` delayed by 0 … `W - 1` tokens, each `[B, T, D]`; 0 where that is another sequence's, or padding."""
    x = inputs.x
    if where is None:
        before = initial_states(call, inputs.initial_state)
    else:
        before = jnp.zeros((call.batch, call.history, call.channels), x.dtype)
    taps = _slices(call, before, x)
    if where is None:
        return taps
    return [jnp.where((where.position >= lag)[..., None], tap, 0) for lag, tap in enumerate(taps)]


def head_taps(call: Call, inputs: Inputs, where: Places | None) -> list[jax.Array]:
    """As `_taps` of the tokens that read initial states, `W - 1` of each sequence: `[N, W - 1, D]`."""
    states = initial_states(call, inputs.initial_state)
    if where is None:
        heads = jnp.pad(inputs.x[:, : call.history], ((0, 0), (0, max(call.history - call.tokens, 0)), (0, 0)))
    else:
        heads = take(call, inputs.x, *where.heads(call))
    return _slices(call, states, heads)


def _slices(call: Call, before: jax.Array, x: jax.Array) -> list[jax.Array]:
    """`x`, of any length, delayed by 0 … `W - 1` tokens, with `before` in front of it."""
    # One array in memory, of which slices are added up. Fused with that, the concatenation would have branches, which
    # decide whether a compiler contracts a product and a sum: then bits would depend on a call's length.
    longer = jax.lax.optimization_barrier(jnp.concatenate([before, x], 1))
    return [longer[:, call.history - lag : call.history - lag + x.shape[1]] for lag in range(call.taps)]


def _sums(call: Call, inputs: Inputs, taps: list[jax.Array]) -> jax.Array:
    """What is activated, always added up in the same order."""
    weight = inputs.weight.astype(call.sum_dtype)[::-1, None, None]
    first, *others = [tap.astype(call.sum_dtype) * row for tap, row in zip(taps, weight, strict=True)]
    sums = sum(others, first)
    return sums if inputs.bias is None else sums + inputs.bias.astype(call.sum_dtype)[None, None]


def _d_x(call: Call, inputs: Inputs, where: Places | None, d_sums: jax.Array) -> jax.Array:
    weight, T = inputs.weight.astype(call.sum_dtype)[::-1, None, None], call.tokens
    longer = jnp.pad(d_sums, ((0, 0), (0, call.history), (0, 0)))
    later = [longer[:, lag : lag + T] for lag in range(call.taps)]
    if where is not None:
        position = jnp.pad(where.position, ((0, 0), (0, call.history)), constant_values=-1)
        later = [jnp.where((position[:, lag : lag + T] >= lag)[..., None], each, 0) for lag, each in enumerate(later)]
    first, *others = [each * row for each, row in zip(later, weight, strict=True)]
    return sum(others, first)


def head_gradient(call: Call, inputs: Inputs, where: Places | None, d_output: jax.Array) -> jax.Array:
    """The cotangent of the sums of those tokens that read initial states, `[N, W - 1, D]`; 0 where there is none."""
    if where is None:
        at = jnp.broadcast_to(jnp.arange(call.history, dtype=jnp.int32)[None], (call.sequences, call.history))
        there = at < call.tokens
    else:
        at, there = where.heads(call)
    d_heads = d_activated(call, _sums(call, inputs, head_taps(call, inputs, where)), take(call, d_output, at, there))
    return jnp.where(there[..., None], d_heads, 0)


def states_in_weight(call: Call, inputs: Inputs, where: Places, d_heads: jax.Array) -> jax.Array:
    """What initial states contribute to the weight's cotangent, `[W, D]`."""
    _, there = where.heads(call)
    states = initial_states(call, inputs.initial_state).astype(call.sum_dtype)
    order = jnp.arange(call.history)[None]
    rows = []
    for lag in range(call.taps)[::-1]:
        # the token in place `i` reads row `W - 1 - lag + i`, if that is one
        read = jnp.pad(states[:, call.history - lag :], ((0, 0), (0, call.history - lag), (0, 0)))
        reads = there & (order < lag)
        rows.append(jnp.where(reads[..., None], read * d_heads, 0).sum((0, 1)))
    return jnp.stack(rows)


def initial_gradient(call: Call, inputs: Inputs, d_heads: jax.Array | None) -> jax.Array:
    """The cotangent of the initial states that comes from the output, `[N, W - 1, D]`."""
    d_states = jnp.zeros((call.sequences, call.history, call.channels), call.sum_dtype)
    if d_heads is None:
        return d_states
    weight = inputs.weight.astype(call.sum_dtype)[None]
    for place in range(call.history):
        # row `j` is weighed by row `j - place` of the weight for the token in that place
        read = d_heads[:, place : place + 1] * weight[:, : call.history - place]
        d_states += jnp.pad(read, ((0, 0), (place, 0), (0, 0)))
    return d_states


OP = Op(forward, lambda call, inputs: (forward(call, inputs), None), backward, forward)
