"""A layer's step on NVIDIA GPUs: one Triton kernel, and one before it where heads share what is convolved."""

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
from ejkernel.kernels._views import View
from ejkernel.kernels.step import xla
from ejkernel.kernels.step.call import Call, Inputs, Results

DEVICE = "ejkernel.kernels.step.triton.device.token"
_MOST_TAPS, _LARGEST_DIM = 8, 256
STAGES, WARPS = 3, 4
_STATE = 4096  # numbers of a memory that a program works on at once


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
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    batch: int
    copies: int
    heads: int
    key_dim: int
    value_dim: int
    key_block: int
    value_block: int
    stages: int
    value_blocks: int  # a power of two, which may be more than there are
    queries: View
    keys: View
    values: View  # not `value`, which is something else to Triton
    gate: View
    beta: View | None
    output_gate: View | None
    taps: int
    channels: int
    first_query: int  # channel
    first_key: int
    first_value: int
    mixed_before: bool  # by a kernel of its own
    has_taps_bias: bool
    normalize: bool
    epsilon_of_keys: float
    decay: str
    per_key: bool
    factor: float
    shortest: float
    longest: float
    values_by_step: bool
    delta: bool
    beta_factor: float
    scale: float
    has_skip: bool
    has_norm: bool
    epsilon: float
    root: float  # of the number of a head's value dims
    has_output_gate: bool
    silu: bool


def _constants(call: Call, inputs: Inputs) -> Constants:
    block = padded(call.key_dim)
    columns = min(padded(call.value_dim), max(16, _STATE // block))
    most = float(np.finfo(np.float32).max)
    return Constants(
        batch=call.batch,
        copies=call.copies,
        heads=call.heads,
        key_dim=call.key_dim,
        value_dim=call.value_dim,
        key_block=block,
        value_block=columns,
        stages=STAGES,
        value_blocks=padded(call.value_dim) // columns,
        queries=call.query,
        keys=call.key,
        values=call.value,
        gate=call.gate,
        beta=call.beta,
        output_gate=call.output_gate,
        taps=call.taps,
        channels=sum(view.heads * view.dim for view in call.mixed),
        first_query=call.channels[0],
        first_key=call.channels[1],
        first_value=call.channels[2],
        mixed_before=call.taps > 0 and not all(view.heads == call.heads for view in call.mixed),
        has_taps_bias=inputs.taps_bias is not None,
        normalize=call.normalize,
        epsilon_of_keys=xla.EPSILON,
        decay=call.decay,
        per_key=call.gate.dim > 1,
        factor=call.factor,
        shortest=min(call.limits[0], most),
        longest=min(call.limits[1], most),
        values_by_step=call.values_by_step,
        delta=call.rule == "delta",
        beta_factor=call.beta_factor,
        scale=call.scale,
        has_skip=inputs.skip is not None,
        has_norm=call.epsilon is not None,
        epsilon=call.epsilon or 0.0,
        root=math.sqrt(call.value_dim),
        has_output_gate=call.output_gate is not None,
        silu=call.activation == "silu",
    )


def _forward(call: Call, inputs: Inputs) -> Results:
    constants = _constants(call, inputs)
    memory = inputs.memory.astype(jnp.float32)
    recent = None if inputs.recent is None else inputs.recent.astype(call.dtype)
    inputs = inputs._replace(memory=memory, recent=recent)
    moved, mixed = recent, None
    if constants.mixed_before and recent is not None:
        heads = sum(view.heads for view in call.mixed)
        names = ("query", "key", "value", "recent", "taps", "taps_bias")
        mixed, moved = _launch.launch(
            _device().convolve,
            {name: getattr(inputs, name) for name in names},
            {"mixed": shape(call.batch, constants.channels, dtype=call.dtype), "moved": _shape(recent)},
            constants=constants,
            programs=call.batch * heads,
            tile=Tile(1, warps=1),
            in_place={"moved": recent},
        )
    convolves = call.taps > 0 and not constants.mixed_before
    arrays = inputs._asdict() if convolves else inputs._replace(recent=None, taps=None, taps_bias=None)._asdict()
    found = _launch.launch(
        _device().step,
        arrays | {"mixed": mixed},
        {
            "output": shape(call.copies * call.batch, call.heads * call.value_dim, dtype=call.output_dtype),
            "next": _shape(memory),
            "moved": _shape(recent) if convolves and recent is not None else None,
        },
        constants=constants,
        programs=call.batch * call.heads,
        tile=Tile(1, warps=WARPS),
        in_place={"next": memory} | ({"moved": recent} if convolves and recent is not None else {}),
    )
    return Results(found.output, found.next, found.moved if convolves else moved)


def _device() -> Any:
    return importlib.import_module(DEVICE)


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


_OF_ROWS = ("query", "key", "value", "gate", "beta", "output_gate", "memory", "recent")


def _fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped steps join the batch, unless they have parameters of their own, or gradients of them."""
    parameters = [name for name in Inputs._fields if name not in _OF_ROWS]
    if call.copies > 1 or any(getattr(each, name) for each in (mapped, wanted) for name in parameters):
        return None
    return replace(call, batch=call.batch * size), fold_rows(inputs, size, mapped, parameters)


# a single token is nothing to train on: its gradients are by JAX
OP = Op(_forward, xla.step, fold=_fold, splits=False, one_device=True)
