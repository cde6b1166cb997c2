"""A gated norm on NVIDIA GPUs: a Triton kernel, and one for its gradient, that read and write each array once."""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels import _differentiable, _launch, _varying
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._op import Op
from ejkernel.kernels.gated_norm import xla
from ejkernel.kernels.gated_norm.call import Call, Inputs, fold
from ejkernel.xla_utils.utils import cdiv

DEVICE = "ejkernel.kernels.gated_norm.triton.device.rows"
_LARGEST_DIM = 8192
_NUMBERS = 4096  # of an array that a program holds at once, unless a row has more
_ROWS = 64  # that a program goes through at least; backward, more write fewer partial sums


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dim > _LARGEST_DIM:
        return f"more than {_LARGEST_DIM} dims"
    return _launch.refusal([call.dtype], (call.batch, call.tokens, call.heads, call.dim))


def run(call: Call, *arrays: Any) -> jax.Array:
    """Arrays as `Inputs` lists them."""
    return _differentiable.call(OP, call, Inputs(*_varying.align(arrays)))


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    heads: int  # that have a scale of their own
    rows: int  # of each
    dim: int
    columns: int
    block: int  # rows that a program holds at once
    span: int  # rows that it goes through
    spans: int
    epsilon: float
    root: float
    silu: bool
    gate_first: bool
    has_value: bool


def _launch_rows(kernel: str, call: Call, inputs: Inputs, more: dict[str, Any], outputs: Any) -> Any:
    """Runs a kernel over all rows; `outputs` takes how many programs there are for each head."""
    heads = 1 if call.shared_scale else call.heads
    rows, columns = call.batch * call.tokens * call.heads // heads, padded(call.dim)
    block = min(max(_NUMBERS // columns, 1), padded(rows, 1))
    span = min(max(8 * block, _ROWS), cdiv(rows, block) * block)
    constants = Constants(
        heads=heads,
        rows=rows,
        dim=call.dim,
        columns=columns,
        block=block,
        span=span,
        spans=cdiv(rows, span),
        epsilon=call.dim * call.epsilon,
        root=math.sqrt(call.dim),
        silu=call.activation == "silu",
        gate_first=call.gate_first,
        has_value=inputs.value is not None,
    )
    return _launch.launch(
        getattr(importlib.import_module(DEVICE), kernel),
        inputs._asdict() | more,
        outputs(constants),
        constants=constants,
        programs=constants.spans * heads,
        tile=Tile(block, columns, warps=min(max(block * columns // 512, 1), 16)),
    )


def _forward(call: Call, inputs: Inputs) -> jax.Array:
    output = {"output": shape(*inputs.x.shape, dtype=call.dtype)}
    return _launch_rows("forward", call, inputs, {}, lambda _: output).output


def _backward(call: Call, inputs: Inputs, residuals: None, d_output: Any, wanted: Inputs) -> Inputs:
    def outputs(constants: Constants) -> dict[str, Any]:
        sums = shape(constants.spans, constants.heads, call.dim)
        like = {f"d_{name}": each for name, each in inputs._asdict().items() if name in ("x", "gate", "value")}
        made = {name: None if each is None else shape(*each.shape, dtype=each.dtype) for name, each in like.items()}
        return made | {"d_scale": sums, "d_skip": None if inputs.skip is None else sums}

    found = _launch_rows("backward", call, inputs, {"d_output": d_output}, outputs)
    d_scale = found.d_scale.sum(0).reshape(inputs.scale.shape)
    d_skip = None if found.d_skip is None else found.d_skip.sum(0)
    return Inputs(found.d_x, found.d_gate, d_scale, found.d_value, d_skip)


OP = Op(_forward, xla.gated_norm, backward=_backward, fold=fold)
