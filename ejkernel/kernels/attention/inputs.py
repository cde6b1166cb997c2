"""The arrays of a call of softmax attention, their cotangents, and the axis order of the heads."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call, common_dtype


class Inputs(NamedTuple):
    """The arrays of a call, as `Call` lists them."""

    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None
    sinks: Array | None
    dropout_key: Array | None
    cu_seqlens: Array | None
    cu_seqlens_kv: Array | None
    query_offset: Array | None
    segment_ids: Array | None = None
    segment_ids_kv: Array | None = None


def differentiable(inputs: Inputs) -> dict[str, Array]:
    """The arrays of `inputs` that have a gradient."""
    names = ("query", "key", "value", "bias", "sinks")
    return {name: getattr(inputs, name) for name in names if getattr(inputs, name) is not None}


def cotangents(inputs: Inputs, gradients: Mapping[str, Array]) -> Inputs:
    """`gradients` as fields of `Inputs`, shaped and typed like the arrays; `None` for arrays that have no gradient."""
    like = {name: gradients[name].reshape(x.shape).astype(x.dtype) for name, x in differentiable(inputs).items()}
    return Inputs(*(like.get(name) for name in Inputs._fields))  # type: ignore[arg-type]


def to_common_dtype(*arrays: Array) -> tuple[Array, ...]:
    """`arrays` in the dtype that holds them all."""
    dtype = common_dtype(*(x.dtype for x in arrays))
    return tuple(x.astype(dtype) for x in arrays)


def heads_first(call: Call, x: Array) -> Array:
    """`[B, S, H, …]` to `[B, Hkv, G, S, …]`."""
    x = x.reshape(*x.shape[:2], call.kv_heads, call.groups, *x.shape[3:])
    return jnp.moveaxis(x, 1, 3)


def heads_last(call: Call, x: Array) -> Array:
    """`[B, Hkv, G, S, …]` to `[B, S, H, …]`."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], call.heads, *x.shape[4:])
