"""The short convolution on NVIDIA GPUs, as Triton kernels."""

import importlib
from collections.abc import Callable
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
from ejkernel.kernels.convolution.states import final_states, initial_states
from ejkernel.xla_utils.utils import cdiv

Results = tuple[jax.Array, jax.Array]
DEVICE = "ejkernel.kernels.convolution.triton.device.walk"
_MOST_TAPS = 8  # the weight's rows and the last tokens are held in registers
_MOST_COLUMNS = 512
# Tokens of a program, and how many of them it loads at once. Backward, longer spans write fewer partial sums.
_SIZES = {"forward": (64, 8), "backward": (128, 4)}


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.taps > _MOST_TAPS:
        return f"more than {_MOST_TAPS} taps (W={call.taps})"
    return _launch.refusal([call.dtype], (call.batch, call.tokens, call.channels, call.sequences))


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """The output and the final states; arrays as `Inputs` lists them."""
    if call.unit_dim and (call.unit_dim & (call.unit_dim - 1) or call.unit_dim > _MOST_COLUMNS):
        return xla.with_norms_apart(run, call, *arrays)  # programs do not hold whole heads
    return _differentiable.call(OP, call, Inputs(*_varying.align(arrays)))


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
    span: int  # tokens of a program
    spans: int  # of a row
    group: int  # tokens loaded at once
    columns: int  # channels of a program
    columns_blocks: int
    unit_dim: int


def _launch_walk(
    kernel: str,
    call: Call,
    inputs: Inputs,
    where: Places | None,
    more: dict[str, jax.Array],
    outputs: Callable[[int], dict[str, Any]],
) -> Any:
    """Runs a kernel over all tokens; `outputs` gives its outputs' shapes, given the number of spans in all rows."""
    span, group = _SIZES[kernel]
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
    spans = call.batch * constants.spans
    return _launch.launch(
        getattr(importlib.import_module(DEVICE), kernel),
        arrays | more,
        outputs(spans),
        constants=constants,
        programs=spans * constants.columns_blocks,
        tile=Tile(span, columns, warps=max(columns // 128, 1)),
    )


def _owners(call: Call, where: Places) -> jax.Array:
    """The index of the initial state that each token reads, `[B, T]`; -1 for tokens that read none."""
    at, there = where.heads(call)
    index = jnp.where(there, at, call.tokens).reshape(call.batch, -1)
    number = jnp.broadcast_to(jnp.arange(call.sequences, dtype=jnp.int32)[:, None], at.shape).reshape(index.shape)
    none = jnp.full((call.batch, call.tokens), -1, jnp.int32)
    return jax.vmap(lambda row, index, number: row.at[index].set(number, mode="drop"))(none, index, number)


def _forward(call: Call, inputs: Inputs) -> Results:
    where = places(call, inputs)
    output = {"output": shape(*inputs.x.shape, dtype=call.dtype)}
    results = _launch_walk("forward", call, inputs, where, {}, lambda spans: output)
    return results.output, final_states(call, where, inputs.x, inputs.initial_state)


def _backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """Cotangents of `x`, weight and bias from one kernel, and of initial states, which are small, from XLA."""
    (d_output, d_final), where = cotangents, places(call, inputs)
    d_output = jnp.zeros_like(inputs.x) if d_output is None else d_output
    rows = call.taps + (inputs.bias is not None)

    def outputs(spans: int) -> dict[str, Any]:
        return {"d_x": shape(*inputs.x.shape, dtype=call.dtype), "d_sums": shape(spans, rows, call.channels)}

    d_x, d_sums = _launch_walk("backward", call, inputs, where, {"d_output": d_output}, outputs)
    d_sums = d_sums.sum(0)
    gradients = d_x, d_sums[: call.taps], d_sums[-1]
    return xla.finish(call, inputs, where, (d_output, d_final), gradients, all_tokens=True)


OP = Op(_forward, xla.reference, backward=_backward, tangent=xla.tangent_behind_kernels, fold=fold)
