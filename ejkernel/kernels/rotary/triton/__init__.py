"""A token's rotation and its way to the cache on NVIDIA GPUs, as one Triton kernel."""

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _differentiable, _launch
from ejkernel.kernels._differentiable import Op, fold_rows
from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels._views import View
from ejkernel.kernels.rotary import xla
from ejkernel.kernels.rotary.call import Call, Inputs, Results

DEVICE = "ejkernel.kernels.rotary.triton.device.rotate"
_DTYPES = {np.dtype(each) for each in (jnp.bfloat16, jnp.float16, jnp.float32)}


def supports(call: Call) -> str | None:
    """Why this kernel cannot serve the call, or `None` if it can."""
    if call.dtype not in _DTYPES:
        return f"dtype {call.dtype} is none of bfloat16, float16, float32"
    if call.batch == 0:
        return "an array without elements"
    return _launch.unavailable()


def run(call: Call, *arrays: Any) -> Results:
    """Arrays as `Inputs` lists them."""
    return _differentiable.call(OP, call, Inputs(*arrays))


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the kernel is compiled for; device code gets it as `CALL`."""

    queries: View
    keys: View
    values: View
    capacity: int
    dim: int
    pairs: int
    pair_block: int
    rest_block: int
    factor: float
    has_norm: bool
    value_norm: bool
    epsilon: float
    root: float  # of the number of a head's dims


def _forward(call: Call, inputs: Inputs) -> Results:
    dim = call.query.dim
    constants = Constants(
        queries=call.query,
        keys=call.key,
        values=call.value,
        capacity=call.capacity,
        dim=dim,
        pairs=call.pairs,
        pair_block=padded(max(call.pairs, 1)),
        rest_block=padded(max(dim - 2 * call.pairs, 1)),
        factor=call.factor,
        has_norm=inputs.query_scale is not None,
        value_norm=call.value_norm,
        epsilon=call.epsilon,
        root=math.sqrt(dim),
    )
    frequencies = None if inputs.frequencies is None else inputs.frequencies.astype(jnp.float32)
    found = _launch.launch(
        importlib.import_module(DEVICE).rotate_and_store,
        inputs._replace(frequencies=frequencies)._asdict(),
        {
            "rotated": shape(call.batch, 1, call.query.heads, dim, dtype=call.dtype),
            "next_keys": shape(*inputs.keys.shape, dtype=inputs.keys.dtype),
            "next_values": shape(*inputs.values.shape, dtype=inputs.values.dtype),
        },
        constants=constants,
        programs=call.batch * (call.query.heads + call.key.heads + call.value.heads),
        tile=Tile(1, warps=1),
        in_place={"next_keys": inputs.keys, "next_values": inputs.values},
    )
    return Results(*found)


def _backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """By JAX: a single token is nothing to train on."""
    results, pull = jax.vjp(lambda inputs: xla.rotate_and_store(call, inputs), inputs)
    given = (jnp.zeros_like(x) if d is None else d for x, d in zip(results, cotangents, strict=True))
    return pull(Results(*given))[0]


_PARAMETERS = ("frequencies", "query_scale", "key_scale")


def _fold(call: Call, size: int, inputs: Inputs, mapped: Inputs, wanted: Inputs) -> tuple[Call, Inputs] | None:
    """Rows of mapped calls join the batch, unless they have scales of their own, or gradients of them."""
    nothing: Any = dict.fromkeys(_PARAMETERS)
    copies = inputs.query.shape[bool(mapped.query)] // call.batch
    if copies > 1 or any(getattr(each, name) for each in (mapped, wanted) for name in _PARAMETERS):
        return None
    folded = fold_rows(inputs._replace(**nothing), size, mapped._replace(**nothing))
    return replace(call, batch=call.batch * size), folded._replace(
        **{name: getattr(inputs, name) for name in _PARAMETERS}
    )


OP = Op(
    _forward,
    lambda call, inputs: (_forward(call, inputs), None),
    _backward,
    xla.rotate_and_store,
    fold=_fold,
    splits=False,
    one_device=True,
)
