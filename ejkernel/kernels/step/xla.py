"""A layer's step in plain JAX. It runs anywhere, and the kernels are compared with it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._normalization import normalized
from ejkernel.kernels.step.call import Call, Inputs, Results

EPSILON = 1e-6  # added to the squared norms of queries and keys


def run(call: Call, *arrays: Any) -> Results:
    """Arrays as `Inputs` lists them."""
    return step(call, Inputs(*arrays))


def step(call: Call, inputs: Inputs) -> Results:
    """The step that `Call` describes, in at least float32."""
    query, key, value, recent = _convolved(call, inputs)
    if call.normalize:
        query, key = (normalized(each, EPSILON) for each in (query, key))
    query, key, value = (_for_heads(call, each) for each in (query, key, value))  # [B, H, …]
    log_decay, time_step = _decay(call, inputs)
    plain_value = value
    if call.values_by_step and time_step is not None:
        value = value * time_step
    memory = inputs.memory.astype(call.wide) * jnp.exp(log_decay)[..., None]
    if call.beta is not None and inputs.beta is not None:
        beta = call.beta_factor * jax.nn.sigmoid(_wide(call, call.beta.of(inputs.beta, call.batch)))
        value = _for_heads(call, beta) * (value - (key[..., None] * memory).sum(-2))
    memory = memory + key[..., None] * value[..., None, :]
    output = (query[..., None] * memory).sum(-2) * np.asarray(call.scale, call.wide)
    if inputs.skip is not None:
        output = output + _wide(call, inputs.skip)[None, :, None] * plain_value
    if call.epsilon is not None:
        V = call.value_dim
        output = normalized(output, V * call.epsilon) * np.sqrt(V).astype(call.wide)
        if inputs.norm is not None:
            output = output * _wide(call, inputs.norm)[None, None]
    if call.output_gate is not None and inputs.output_gate is not None:
        gate = _for_heads(call, _wide(call, call.output_gate.of(inputs.output_gate, call.batch)))
        output = output * (jax.nn.silu(gate) if call.activation == "silu" else jax.nn.sigmoid(gate))
    output = output.astype(call.output_dtype).reshape(call.batch, -1)
    return Results(output if call.copies == 1 else jnp.concatenate([output] * call.copies), memory, recent)


def _wide(call: Call, x: jax.Array) -> jax.Array:
    return x.astype(call.wide)


def _for_heads(call: Call, x: jax.Array) -> jax.Array:
    """`x [B, heads, dim]` repeated for all heads of the state, of which several may share one."""
    return x if x.shape[1] == call.heads else jnp.repeat(x, call.heads // x.shape[1], 1)


def _convolved(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Queries, keys and values `[B, heads, dim]`, convolved if there are taps, and the last tokens."""
    tokens = [view.of(x, call.batch) for view, x in zip(call.convolved, inputs[:3], strict=True)]
    if inputs.taps is None or inputs.recent is None:
        query, key, value = (_wide(call, each) for each in tokens)
        return query, key, value, None
    order = sorted(range(3), key=lambda i: call.first_channels[i])
    token = jnp.concatenate([tokens[i].reshape(call.batch, 1, -1) for i in order], -1)
    longer = jnp.concatenate([inputs.recent.astype(call.dtype), token], 1)  # [B, taps, channels]
    sums = sum(_wide(call, longer[:, i]) * _wide(call, inputs.taps[i])[None] for i in reversed(range(call.taps)))
    if inputs.taps_bias is not None:
        sums = sums + _wide(call, inputs.taps_bias)[None]
    convolved = jax.nn.silu(sums)
    query, key, value = (
        convolved[:, first : first + view.heads * view.dim].reshape(call.batch, view.heads, view.dim)
        for first, view in zip(call.first_channels, call.convolved, strict=True)
    )
    return query, key, value, longer[:, 1:]


def _decay(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array | None]:
    """The log decay of each head `[B, H, 1]` or key dim `[B, H, K]`, and the time step in it, if there is one."""
    gate = _for_heads(call, _wide(call, call.gate.of(inputs.gate, call.batch)))
    if call.decay == "log_sigmoid":
        return jax.nn.log_sigmoid(gate) * np.asarray(call.factor, call.wide), None
    assert inputs.rate is not None
    assert inputs.bias is not None
    rate = jnp.exp(_wide(call, inputs.rate))[None, :, None]
    gate = gate + _wide(call, inputs.bias).reshape(1, call.heads, -1)
    if call.decay == "bounded":
        return jax.nn.sigmoid(rate * gate) * np.asarray(call.factor, call.wide), None
    time_step = jnp.clip(jax.nn.softplus(gate), *call.limits)
    return -rate * time_step, time_step
