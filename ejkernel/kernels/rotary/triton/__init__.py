"""Rotation and cache update of one token on NVIDIA GPUs, as one Triton kernel."""

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels import _differentiable, _launch
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op
from ejkernel.kernels.rotary import xla
from ejkernel.kernels.rotary.call import Call, Inputs, Results

DEVICE = "ejkernel.kernels.rotary.triton.device.rotate"


def supports(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or `None` if it can."""
    return _launch.refusal([call.dtype], [call.batch])


def run(call: Call, *arrays: Any) -> Results:
    """Arrays as `Inputs` lists them."""
    return _differentiable.call(OP, call, Inputs(*arrays))


@dataclass(frozen=True, kw_only=True)
class Constants(Call):
    """What the kernel is compiled for; device code gets it as `CALL`."""

    dim: int
    pair_block: int
    rest_block: int
    root: float  # of the number of a head's dims


def _forward(call: Call, inputs: Inputs) -> Results:
    dim = call.queries.dim
    constants = Constants(
        **vars(call),
        dim=dim,
        pair_block=padded(max(call.pairs, 1)),
        rest_block=padded(max(dim - 2 * call.pairs, 1)),
        root=math.sqrt(dim),
    )
    frequencies = None if inputs.frequencies is None else inputs.frequencies.astype(jnp.float32)
    results = _launch.launch(
        importlib.import_module(DEVICE).rotate_and_store,
        inputs._replace(frequencies=frequencies)._asdict(),
        {
            "rotated": shape(call.batch, 1, call.queries.heads, dim, dtype=call.dtype),
            "next_keys": shape(*inputs.keys.shape, dtype=inputs.keys.dtype),
            "next_values": shape(*inputs.values.shape, dtype=inputs.values.dtype),
        },
        constants=constants,
        programs=call.batch * (call.queries.heads + call.keys.heads + call.values.heads),
        tile=Tile(1, warps=1),
        in_place={"next_keys": inputs.keys, "next_values": inputs.values},
    )
    return Results(*results)


_PARAMETERS = ("frequencies", "query_scale", "key_scale")


def _fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless scales or frequencies are mapped, or their gradients wanted."""
    copies = inputs.query.shape[bool(mapped.query)] // call.batch
    if copies > 1 or any(getattr(each, name) for each in (mapped, wanted) for name in _PARAMETERS):
        return None
    return replace(call, batch=call.batch * size), fold_rows(inputs, size, mapped, _PARAMETERS)


# JAX differentiates the reference: nobody trains on single tokens
OP = Op(_forward, xla.rotate_and_store, fold=_fold, splits=False, one_device=True)
