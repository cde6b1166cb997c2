"""The norm and the output gate of a layer with a memory, as one internal op."""

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
    """`norm` of each of the heads `x […, T, H, D]`, times the activated `gate […, T, H · D]`; heads side by side.

    The norm has one scale for all heads, or one for each side by side. The gate comes before it with `gate_first`.
    `skip [H · D]` times `value` is added to `x` first; then each head has a scale.
    """
    T, heads, dim = x.shape[-3:]
    own_scales = skip is not None or norm.scale.shape != (dim,)
    call = Call(
        batch=math.prod(x.shape[:-3]),
        tokens=T,
        heads=heads,
        dim=dim,
        epsilon=norm.epsilon,
        activation=activation,
        gate_first=gate_first,
        shared_scale=not own_scales,
        dtype=np.dtype(gate.dtype),
    )
    whole, of_heads = (call.batch, T, heads, dim), (heads, dim)
    inputs = Inputs(
        x.reshape(whole),
        gate.reshape(whole),
        norm.scale[...].reshape(of_heads if own_scales else dim),
        None if value is None else value.reshape(whole),
        None if skip is None else skip.reshape(of_heads),
    )
    if _is_left_to_xla(call, inputs):
        return xla.gated_norm(call, inputs).reshape(gate.shape)
    return dispatch(IMPLEMENTATIONS, call, *inputs).reshape(gate.shape)


def _is_left_to_xla(call: Call, inputs: Inputs) -> bool:
    """Whether devices share, or may share, tokens or what is normalised together: for a kernel it would be gathered."""
    if any(axes for each in inputs[:2] for axes in _sharding.spec_of(each)[1::2]):
        return True
    if call.shared_scale or jax.device_count() == 1:
        return False
    mesh = _sharding.explicit_mesh(inputs.x) or jax.sharding.get_abstract_mesh()
    return mesh.empty or _sharding.left_to_xla(mesh, mapped=True)
