"""The norm and the output gate of a recurrent layer, as one internal op."""

import math
from typing import Literal

import jax
import numpy as np

from ejkernel import _sharding
from ejkernel._dispatch import dispatch
from ejkernel.kernels.gated_norm import IMPLEMENTATIONS, xla
from ejkernel.kernels.gated_norm.call import Call, Inputs
from ejkernel.layers._parameters import RMSNorm


def normed_and_gated(
    norm: RMSNorm,
    x: jax.Array,
    gate: jax.Array,
    activation: Literal["silu", "sigmoid"] = "silu",
    *,
    gate_first: bool = False,
    value: jax.Array | None = None,
    skip: jax.Array | None = None,
) -> jax.Array:
    """`norm` of each head of `x […, T, H, D]`, times the activated `gate […, T, H · D]`; returned as `[…, T, H · D]`.

    The norm's scale is `[D]` for all heads, or `[H · D]`. With `gate_first`, `x` is multiplied by the gate before the
    norm instead. If `skip [H · D]` is given, `skip · value` is added to `x` first, and the scale is `[H · D]`.
    """
    T, heads, dim = x.shape[-3:]
    scale_per_head = skip is not None or norm.scale.shape != (dim,)
    call = Call(
        batch=math.prod(x.shape[:-3]),
        tokens=T,
        heads=heads,
        dim=dim,
        epsilon=norm.epsilon,
        activation=activation,
        gate_first=gate_first,
        shared_scale=not scale_per_head,
        dtype=np.dtype(gate.dtype),
    )
    shape, per_head = (call.batch, T, heads, dim), (heads, dim)
    inputs = Inputs(
        x.reshape(shape),
        gate.reshape(shape),
        norm.scale[...].reshape(per_head if scale_per_head else dim),
        None if value is None else value.reshape(shape),
        None if skip is None else skip.reshape(per_head),
    )
    if _is_left_to_xla(call, inputs):
        return xla.gated_norm(call, inputs).reshape(gate.shape)
    return dispatch(IMPLEMENTATIONS, call, *inputs).reshape(gate.shape)


def _is_left_to_xla(call: Call, inputs: Inputs) -> bool:
    """Whether tokens or normalised dims are, or may be, sharded: a kernel would gather them, XLA does not."""
    if any(axes for each in inputs[:2] for axes in _sharding.spec_of(each)[1::2]):
        return True
    if call.shared_scale or jax.device_count() == 1:
        return False
    mesh = _sharding.explicit_mesh(inputs.x) or jax.sharding.get_abstract_mesh()
    return mesh.empty or _sharding.left_to_xla(mesh, mapped=True)
