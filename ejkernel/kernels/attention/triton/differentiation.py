"""The kernels' passes as one op that JAX can differentiate and map."""

from dataclasses import replace
from operator import itemgetter
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels import _differentiable
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op
from ejkernel.kernels.attention import xla
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs, cotangents
from ejkernel.kernels.attention.masks import by_group, in_sequences
from ejkernel.kernels.attention.triton.backward import backward
from ejkernel.kernels.attention.triton.forward import forward
from ejkernel.kernels.attention.triton.launcher import LOG2E
from ejkernel.kernels.attention.triton.plan import Plan
from ejkernel.kernels.attention.triton.tangent import tangent

Static = tuple[Call, Plan]
Outputs = tuple[Array, Array]


def attend(call: Call, inputs: Inputs) -> Outputs:
    """The output `[B, S, H, Dv]` and the log-sum-exp `[B, S, H]`."""
    return _differentiable.call(OP, (call, Plan.of(call)), inputs)


def _forward(static: Static, inputs: Inputs) -> Outputs:
    return _with_residuals(static, inputs)[0]


def _with_residuals(static: Static, inputs: Inputs) -> tuple[Outputs, tuple[Array, Array]]:
    """Output and log-sum-exp, and the two numbers `[B, H, S]` that the log-sum-exp to base 2 is the sum of."""
    output, *lse = forward(*static, inputs)
    return (output, _log_sum_exp(inputs, *lse)), (lse[0], lse[1])


def _log_sum_exp(inputs: Inputs, lse: Array, lse_rest: Array) -> Array:
    return _without_padding(inputs, (lse + lse_rest).swapaxes(1, 2) / LOG2E, -jnp.inf)


def _without_padding(inputs: Inputs, rows: Array, fill: float) -> Array:
    """`rows [B, S, H]` with `fill` for padding."""
    inside = in_sequences(inputs)
    return rows if inside is None else jnp.where(inside[..., None], rows, fill)


def _backward(static: Static, inputs: Inputs, residuals: Any, d_outputs: Any, wanted: Inputs) -> Inputs:
    (call, plan), (output, lse), (d_output, d_lse) = static, residuals, d_outputs
    d_output = jnp.zeros_like(output) if d_output is None else d_output
    d_lse = None if d_lse is None else _without_padding(inputs, d_lse, 0).swapaxes(1, 2)
    # a bias' gradient costs as much as all the others
    gradients = backward(bool(wanted.bias), call, plan, inputs, (output, *lse), d_output, d_lse)._asdict()
    if inputs.bias is not None and gradients["bias"] is None:
        gradients["bias"] = jnp.zeros_like(inputs.bias)
    if inputs.sinks is not None:
        gradients["sinks"] = _sinks_gradient(call, inputs.sinks, lse[0], lse[1], gradients["sink_delta"])
    return cotangents(inputs, gradients)


def _sinks_gradient(call: Call, sinks: Array, lse: Array, lse_rest: Array, delta: Array) -> Array:
    """The sum over rows of a sink's weight times `-delta`, as a sink has no value."""
    lse_rest = jnp.where(lse_rest == -jnp.inf, 0, lse_rest)
    rows = (each.reshape(call.batch, call.kv_heads, call.groups, -1) for each in (lse, lse_rest, delta))
    lse, lse_rest, delta = (each[..., None] for each in rows)
    split = by_group(call, sinks.astype(jnp.float32), 0)[None, :, :, None]
    d_sinks = -jnp.exp2(split * LOG2E - lse - lse_rest) * delta  # [B, Hkv, G, S, sinks]
    axes = (0, 3, *(axis for axis in (1, 2) if split.shape[axis] == 1))
    return d_sinks.sum(axes)


def _tangent(static: Static, inputs: Inputs, residuals: Any, tangents: Inputs) -> tuple[Outputs, Outputs]:
    output, lse = residuals
    d_output, d_lse = tangent(*static, inputs, (output, *lse), tangents)
    d_lse = _without_padding(inputs, d_lse.swapaxes(1, 2), 0)
    return (output, _log_sum_exp(inputs, *lse)), (d_output, d_lse)


def _reference(static: Static, inputs: Inputs) -> Outputs:
    call = static[0]
    return xla.run(replace(call, dtype=call.residual_dtype, return_lse=True), *inputs)


def _fold(static: Static, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Static, Inputs] | None:
    """Rows of mapped calls join the batch, unless what they share would need a copy or a gradient for each."""
    call, plan = static
    if call.sequences is not None or call.dropout or mapped.sinks or wanted.sinks:
        return None
    for shape, each, moves in ((call.mask_shape, mapped.mask, False), (call.bias_shape, mapped.bias, wanted.bias)):
        if shape is not None and (shape[0] != call.batch if each else shape[0] != 1 or moves):
            return None
    # one for all rows stays one for all
    shared: dict[str, Any] = {
        name: getattr(inputs, name) for name in ("mask", "bias", "sinks") if getattr(mapped, name) is False
    }
    if inputs.query_offset is not None:
        offset = inputs.query_offset if mapped.query_offset else inputs.query_offset[None]
        shared["query_offset"] = jnp.broadcast_to(offset, (size, call.batch)).reshape(-1)
    folded = fold_rows(inputs, size, mapped, shared)._replace(**shared)
    larger = replace(
        call,
        batch=call.batch * size,
        mask_shape=None if folded.mask is None else folded.mask.shape,
        bias_shape=None if folded.bias is None else folded.bias.shape,
    )
    return (larger, plan), folded


OP = Op(_forward, _reference, _with_residuals, _backward, _tangent, keeps=itemgetter(0), fold=_fold)
