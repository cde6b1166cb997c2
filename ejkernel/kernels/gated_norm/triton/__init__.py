"""A gated norm on NVIDIA GPUs: one Triton kernel, and one for its gradient, each of which reads every array once."""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import jax

from ejkernel.kernels import _differentiable, _launch, _varying
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._op import Op
from ejkernel.kernels._shared_memory import KIBIBYTES, MEMORY, SMALL
from ejkernel.kernels.gated_norm import xla
from ejkernel.kernels.gated_norm.call import Call, Inputs, fold
from ejkernel.xla_utils.utils import cdiv

DEVICE = "ejkernel.kernels.gated_norm.triton.device.rows"
_ELEMENTS = 8192  # of an array that a program holds at once; the most dims, too
_ELEMENTS_OF_WARP = 1024
_ROWS = 64  # the least rows of a program: in the backward pass, longer programs write fewer partial sums
_AHEAD = 2  # blocks that are loaded ahead, if they fit in shared memory
_ARRAYS = 5  # that a program reads at most
_SUMS = 8  # KiB of shared memory in which warps add up what they have


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dim > _ELEMENTS:
        return f"more than {_ELEMENTS} dims"
    return _launch.refusal([call.dtype], (call.batch, call.tokens, call.heads, call.dim))


def run(call: Call, *arrays: Any) -> jax.Array:
    """Arrays as `Inputs` lists them."""
    return _differentiable.call(OP, call, Inputs(*_varying.align(arrays)))


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    heads: int  # that have a scale of their own: 1 if all share one
    rows: int  # of each such head
    dim: int
    columns: int
    block: int  # rows that a program holds at once
    span: int  # rows of a program
    spans: int
    stages: int
    epsilon: float
    root: float  # of the number of dims
    silu: bool
    gate_first: bool


def _constants(call: Call) -> Constants:
    heads = 1 if call.shared_scale else call.heads
    rows, columns = call.batch * call.tokens * call.heads // heads, padded(call.dim)
    memory = (KIBIBYTES[MEMORY.get(_launch.capability() or 90, SMALL)] - _SUMS) * 1024
    fitting = memory // (_AHEAD * _ARRAYS * call.dtype.itemsize)
    elements = min(_ELEMENTS, 1 << (fitting.bit_length() - 1))
    block = min(max(elements // columns, 1), padded(rows, 1))
    span = min(max(8 * block, _ROWS), cdiv(rows, block) * block)
    return Constants(
        heads=heads,
        rows=rows,
        dim=call.dim,
        columns=columns,
        block=block,
        span=span,
        spans=cdiv(rows, span),
        stages=_AHEAD + 1 if columns <= elements else 1,
        epsilon=call.dim * call.epsilon,
        root=math.sqrt(call.dim),
        silu=call.activation == "silu",
        gate_first=call.gate_first,
    )


def _launch_rows(kernel: str, constants: Constants, inputs: dict[str, Any], outputs: dict[str, Any]) -> Any:
    """Runs a kernel over all rows."""
    elements = constants.block * constants.columns
    return _launch.launch(
        getattr(importlib.import_module(DEVICE), kernel),
        inputs,
        outputs,
        constants=constants,
        programs=constants.spans * constants.heads,
        tile=Tile(constants.block, constants.columns, warps=max(elements // _ELEMENTS_OF_WARP, 1)),
    )


def _forward(call: Call, inputs: Inputs) -> jax.Array:
    output = {"output": shape(*inputs.x.shape, dtype=call.dtype)}
    return _launch_rows("forward", _constants(call), inputs._asdict(), output).output


def _backward(call: Call, inputs: Inputs, residuals: None, d_output: Any, wanted: Inputs) -> Inputs:
    constants = _constants(call)
    # each program's part of the cotangents of the parameters
    sums = shape(constants.spans, constants.heads, call.dim)
    arrays = {f"d_{name}": getattr(inputs, name) for name in ("x", "gate", "value")}
    outputs = {name: None if each is None else shape(*each.shape, dtype=each.dtype) for name, each in arrays.items()}
    outputs |= {"d_scale": sums, "d_skip": None if inputs.skip is None else sums}
    gradients = _launch_rows("backward", constants, inputs._asdict() | {"d_output": d_output}, outputs)
    d_scale = gradients.d_scale.sum(0).reshape(inputs.scale.shape)
    d_skip = None if gradients.d_skip is None else gradients.d_skip.sum(0)
    return Inputs(gradients.d_x, gradients.d_gate, d_scale, gradients.d_value, d_skip)


OP = Op(_forward, xla.gated_norm, backward=_backward, fold=fold)
