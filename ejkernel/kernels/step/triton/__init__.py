"""A layer's step on NVIDIA GPUs: one Triton kernel, and one before it where several heads share a convolved head."""

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _differentiable, _launch
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op
from ejkernel.kernels.step import xla
from ejkernel.kernels.step.call import Call, Inputs, Results

DEVICE = "ejkernel.kernels.step.triton.device.token"
_MOST_TAPS, _LARGEST_DIM = 8, 256
STAGES, WARPS = 3, 4
_STATE = 4096  # elements of a state that a program works on at once


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the step, or `None` if they can."""
    if max(call.key_dim, call.value_dim) > _LARGEST_DIM:
        return f"heads of more than {_LARGEST_DIM} dims"
    if call.taps > _MOST_TAPS:
        return f"more than {_MOST_TAPS} taps"
    return _launch.refusal([call.dtype], [call.batch])


def run(call: Call, *arrays: Any) -> Results:
    """Arrays as `Inputs` lists them."""
    return _differentiable.call(OP, call, Inputs(*arrays))


@dataclass(frozen=True, kw_only=True)
class Constants(Call):
    """What kernels are compiled for; device code gets it as `CALL`."""

    key_block: int
    value_block: int
    value_blocks: int  # a power of two, which may be more than there are
    stages: int
    channels: int
    first_query: int  # channel
    first_key: int
    first_value: int
    convolved_before: bool  # by a kernel of its own
    key_epsilon: float
    per_key: bool  # whether each key dim has a gate
    shortest: float
    longest: float
    root: float  # of the number of a head's value dims


def _constants(call: Call) -> Constants:
    block = padded(call.key_dim)
    columns = min(padded(call.value_dim), max(16, _STATE // block))
    first_query, first_key, first_value = call.first_channels
    shortest, longest = (min(each, float(np.finfo(np.float32).max)) for each in call.limits)
    return Constants(
        **vars(call),
        key_block=block,
        value_block=columns,
        value_blocks=padded(call.value_dim) // columns,
        stages=STAGES,
        channels=sum(view.heads * view.dim for view in call.convolved),
        first_query=first_query,
        first_key=first_key,
        first_value=first_value,
        convolved_before=call.taps > 0 and not all(view.heads == call.heads for view in call.convolved),
        key_epsilon=xla.EPSILON,
        per_key=call.gate.dim > 1,
        shortest=shortest,
        longest=longest,
        root=math.sqrt(call.value_dim),
    )


def _forward(call: Call, inputs: Inputs) -> Results:
    constants, device = _constants(call), importlib.import_module(DEVICE)
    inputs = inputs._replace(memory=inputs.memory.astype(jnp.float32))
    recent = None if inputs.recent is None else inputs.recent.astype(call.dtype)
    moved = {} if recent is None else {"moved": recent}
    arrays, mixed = inputs._asdict() | {"recent": recent}, None
    if constants.convolved_before:
        names = ("query", "key", "value", "recent", "taps", "taps_bias")
        mixed, recent = _launch.launch(
            device.convolve,
            {name: arrays[name] for name in names},
            {"mixed": shape(call.batch, constants.channels, dtype=call.dtype), **_shapes(moved)},
            constants=constants,
            programs=call.batch * sum(view.heads for view in call.convolved),
            tile=Tile(1, warps=1),
            in_place=moved,
        )
        arrays, moved = arrays | {"recent": None, "taps": None, "taps_bias": None}, {}
    state = {"next": inputs.memory}
    results = _launch.launch(
        device.step,
        arrays | {"mixed": mixed},
        {
            "output": shape(call.copies * call.batch, call.heads * call.value_dim, dtype=call.output_dtype),
            **_shapes(state),
            **({"moved": None} | _shapes(moved)),
        },
        constants=constants,
        programs=call.batch * call.heads,
        tile=Tile(1, warps=WARPS),
        in_place=state | moved,
    )
    return Results(results.output, results.next, results.moved if moved else recent)


def _shapes(arrays: dict[str, jax.Array]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def _fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped steps join the batch, unless parameters are mapped, or their gradients wanted."""
    parameters = Inputs._fields[Inputs._fields.index("taps") :]
    if call.copies > 1 or any(getattr(each, name) for each in (mapped, wanted) for name in parameters):
        return None
    return replace(call, batch=call.batch * size), fold_rows(inputs, size, mapped, parameters)


# JAX differentiates the reference: nobody trains on single tokens
OP = Op(_forward, xla.step, fold=_fold, splits=False, one_device=True)
