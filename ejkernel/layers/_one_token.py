"""Decoding: what a layer does to one token between its projections, as internal ops with kernels of their own."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _sharding
from ejkernel._dispatch import dispatch
from ejkernel.kernels import rotary
from ejkernel.kernels._views import View
from ejkernel.kernels.step import IMPLEMENTATIONS
from ejkernel.kernels.step.call import Call, Inputs, Results
from ejkernel.layers._convolution import ShortConvolution
from ejkernel.layers._parameters import RMSNorm
from ejkernel.layers._rotary import Rotary
from ejkernel.layers._tokens import Sequences


class Heads(NamedTuple):
    """Heads of size `dim` in the output of a projection, `[rows, groups · width]`, from `offset` on in each group."""

    projected: jax.Array
    dim: int
    groups: int = 1
    offset: int = 0
    heads: int | None = None  # how many; `None` is as many as fit

    def grouped(self) -> jax.Array:
        return self.projected.reshape(self.projected.shape[0], self.groups, -1)

    def view(self) -> View:
        width = self.projected.shape[-1] // self.groups
        heads = self.groups * (width // self.dim) if self.heads is None else self.heads
        return View(self.groups, width, self.offset, heads, self.dim)


def applies(x: jax.Array, sequences: Sequences) -> bool:
    """Whether `x` is a single token of each row, and not sharded as far as its type says."""
    plain = sequences.cu_seqlens is None and sequences.segment_ids is None
    return plain and x.shape[1] == 1 and x.size > 0 and not _sharding.explicit_mesh(x)


def in_two_rows(step: Callable[..., tuple[jax.Array, Any]], x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    """`step(x, state)`, but on GPUs a single row `x [1, 1, width]` is duplicated, while the state is not.

    XLA computes a matrix-vector product on GPUs by writing all products to memory before it sums them, which moves
    three times the bytes of the matrix; a product with two rows does not.
    """
    if x.shape[0] > 1:
        return step(x, state)

    def duplicated(x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        output, state = step(jnp.concatenate([x, x]), state)
        return output[:1], state

    return jax.lax.platform_dependent(x, state, cuda=duplicated, default=step)


def rotate_and_store(
    query: Heads,
    key: Heads,
    value: Heads,
    position: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    rotation: Rotary | None,
    query_norm: RMSNorm | None,
    key_norm: RMSNorm | None,
    value_norm: bool,
    epsilon: float,
) -> rotary.call.Results:
    """A token's queries `[B, 1, H, D]`, and the caches with its keys and values; `kernels.rotary.Call` says how."""
    call = rotary.call.Call(
        batch=keys.shape[0],
        queries=query.view(),
        keys=key.view(),
        values=value.view(),
        capacity=keys.shape[1],
        pairs=0 if rotation is None else len(rotation.frequencies),
        factor=1.0 if rotation is None else rotation.factor,
        value_norm=value_norm,
        epsilon=epsilon,
        dtype=np.dtype(query.projected.dtype),
    )
    inputs = rotary.call.Inputs(
        query.grouped(),
        key.grouped(),
        value.grouped(),
        position,
        keys,
        values,
        None if rotation is None else jnp.asarray(rotation.frequencies),
        None if query_norm is None else query_norm.scale[...],
        None if key_norm is None else key_norm.scale[...],
    )
    return dispatch(rotary.IMPLEMENTATIONS, call, *inputs)


def run(
    state: Any,
    query: Heads,
    key: Heads,
    value: Heads,
    gate: Heads,
    *,
    decay: Literal["log_sigmoid", "softplus", "bounded"],
    factor: float = 1.0,
    rate: jax.Array | None = None,
    bias: jax.Array | None = None,
    limits: tuple[float, float] = (0.0, math.inf),
    values_by_step: bool = False,
    beta: Heads | None = None,
    beta_factor: float = 1.0,
    convolution: ShortConvolution | None = None,
    channels: tuple[int, int, int] | None = None,
    normalize: bool = False,
    scale: float | None = None,
    skip: jax.Array | None = None,
    norm: RMSNorm | None = None,
    output_gate: Heads | None = None,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Results:
    """The step that `kernels.step.Call` describes, from a layer's `state`; the output is `[rows, 1, H · V]`.

    Projections and the output may have more rows than the state: copies of the state's rows. `channels` says where
    queries, keys and values begin among the convolution's channels; `None` is one after the other.
    """
    B, H, K, _ = state.memory.shape
    if channels is None:
        sizes = [each.view().heads * each.dim for each in (query, key)]
        channels = (0, sizes[0], sum(sizes))
    call = Call(
        batch=B,
        copies=query.projected.shape[0] // B,
        heads=H,
        queries=query.view(),
        keys=key.view(),
        values=value.view(),
        gate=gate.view(),
        beta=None if beta is None else beta.view(),
        output_gate=None if output_gate is None else output_gate.view(),
        decay=decay,
        factor=factor,
        limits=limits,
        values_by_step=values_by_step,
        beta_factor=beta_factor,
        taps=0 if convolution is None else convolution.size,
        first_channels=channels,
        normalize=normalize,
        scale=K**-0.5 if scale is None else scale,
        epsilon=None if norm is None else norm.epsilon,
        activation=activation,
        dtype=np.dtype(query.projected.dtype),
    )
    inputs = Inputs(
        query.grouped(),
        key.grouped(),
        value.grouped(),
        gate.grouped(),
        None if beta is None else beta.grouped(),
        None if output_gate is None else output_gate.grouped(),
        state.memory,
        None if convolution is None else state.recent,
        None if convolution is None else convolution.kernel[...],
        None if convolution is None or convolution.bias is None else convolution.bias[...],
        rate,
        bias,
        skip,
        None if norm is None else norm.scale[...],
    )
    results = dispatch(IMPLEMENTATIONS, call, *inputs)
    return results._replace(output=results.output[:, None])
