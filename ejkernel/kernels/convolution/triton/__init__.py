"""The short convolution on NVIDIA GPUs, as Triton kernels."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _differentiable, _launch, _varying
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._op import Op
from ejkernel.kernels.convolution import xla
from ejkernel.kernels.convolution.call import Call, Inputs, fold
from ejkernel.kernels.convolution.places import Places, places
from ejkernel.kernels.convolution.states import final_gradient, final_states, initial_states
from ejkernel.xla_utils.utils import cdiv

Results = tuple[jax.Array, jax.Array]
DEVICE = "ejkernel.kernels.convolution.triton.device.walk"
_MOST_TAPS = 8  # the weight's rows and the tokens before are in registers
_MOST_COLUMNS = 512
# Tokens a program walks through, of which so many are loaded at once. Backward, longer spans write fewer partial sums.
_SPAN, _GROUP = 64, 8
_SPAN_BACK, _GROUP_BACK = 128, 4


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.taps > _MOST_TAPS:
        return f"more than {_MOST_TAPS} taps (W={call.taps})"
    return _launch.refusal([call.dtype], (call.batch, call.tokens, call.channels, call.sequences))


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """The output and the final states; arrays as `Inputs` lists them."""
    if call.unit_dim and (call.unit_dim & (call.unit_dim - 1) or call.unit_dim > _MOST_COLUMNS):
        return xla.with_norms_apart(run, call, *arrays)  # no program has whole heads
    inputs = Inputs(*_varying.align(arrays))
    return _differentiable.call(OP, call, inputs)


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    tokens: int
    channels: int
    taps: int
    silu: bool
    has_bias: bool
    has_states: bool
    placed: bool  # several sequences share a row, and positions tell them apart
    span: int  # tokens a program
    spans: int  # a row
    group: int  # tokens loaded at once
    columns: int  # channels a program
    columns_blocks: int
    unit_dim: int  # channels of a head that is divided by its norm; 0 without


def _launch_walk(
    kernel: str,
    call: Call,
    inputs: Inputs,
    where: Places | None,
    more: dict[str, jax.Array],
    outputs: dict[str, Any],
    span: int,
    group: int,
) -> Any:
    """Runs a kernel over all tokens; `outputs` may have functions of the number of spans in all rows for shapes."""
    span = min(span, padded(call.tokens, 1))
    columns = min(_MOST_COLUMNS, padded(call.channels, 32))
    has_states = inputs.initial_state is not None and call.history > 0
    constants = Constants(
        tokens=call.tokens,
        channels=call.channels,
        taps=call.taps,
        silu=call.activation == "silu",
        has_bias=inputs.bias is not None,
        has_states=has_states,
        placed=where is not None,
        span=span,
        spans=cdiv(call.tokens, span),
        group=min(group, span),
        columns=columns,
        columns_blocks=cdiv(call.channels, columns),
        unit_dim=call.unit_dim,
    )
    arrays: dict[str, Any] = {
        "x": inputs.x,
        "weight": inputs.weight.astype(jnp.float32),
        "bias": None if inputs.bias is None else inputs.bias.astype(jnp.float32),
        "states": initial_states(call, inputs.initial_state) if has_states else None,
        "position": None if where is None else where.position,
        "owner": _owners(call, where) if where is not None and has_states else None,
    }
    blocks = call.batch * constants.spans
    made = {name: each(blocks) if callable(each) else each for name, each in outputs.items()}
    return _launch.launch(
        getattr(importlib.import_module(DEVICE), kernel),
        arrays | more,
        made,
        constants=constants,
        programs=blocks * constants.columns_blocks,
        tile=Tile(span, columns, warps=max(columns // 128, 1)),
    )


def _owners(call: Call, where: Places) -> jax.Array:
    """Of each token that reads an initial state the number of that, `[B, T]`; -1 for the others."""
    at, there = where.heads(call)
    index = jnp.where(there, at, call.tokens).reshape(call.batch, -1)
    number = jnp.broadcast_to(jnp.arange(call.sequences, dtype=jnp.int32)[:, None], at.shape).reshape(index.shape)
    none = jnp.full((call.batch, call.tokens), -1, jnp.int32)
    return jax.vmap(lambda row, index, number: row.at[index].set(number, mode="drop"))(none, index, number)


def _forward(call: Call, inputs: Inputs) -> Results:
    where = places(call, inputs)
    output = shape(*inputs.x.shape, dtype=call.dtype)
    (output,) = _launch_walk("forward", call, inputs, where, {}, {"output": output}, _SPAN, _GROUP)
    return output, final_states(call, where, inputs.x, inputs.initial_state)


def _backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """`x`, weight and bias by one kernel; initial states, of which there are few tokens, by XLA."""
    (d_output, d_final), where = cotangents, places(call, inputs)
    d_output = jnp.zeros_like(inputs.x) if d_output is None else d_output
    rows = call.taps + (inputs.bias is not None)
    outputs = {
        "d_x": shape(*inputs.x.shape, dtype=call.dtype),
        "d_sums": lambda blocks: shape(blocks, rows, call.channels),
    }
    d_x, d_sums = _launch_walk(
        "backward", call, inputs, where, {"d_output": d_output}, outputs, _SPAN_BACK, _GROUP_BACK
    )
    d_sums = d_sums.sum(0)
    has_states = inputs.initial_state is not None
    d_heads = xla.head_gradient(call, inputs, where, d_output) if has_states and call.history else None
    d_states = xla.initial_gradient(call, inputs, d_heads)
    if d_final is not None:
        d_x, d_states = final_gradient(call, where, d_final, d_x, d_states)
    d_bias = None if inputs.bias is None else d_sums[call.taps]
    return Inputs(d_x, d_sums[: call.taps], d_bias, d_states if has_states else None, None, None)


OP = Op(_forward, xla.reference, backward=_backward, tangent=xla.tangent_behind_kernels, fold=fold)
