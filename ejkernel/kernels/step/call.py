"""One decoding step of a recurrent layer, between its projections: the static facts of a call, and its arrays."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from ejkernel.kernels._views import View


@dataclass(frozen=True)
class Call:
    """Static facts of one step. In this order, a step does the following to one token of each row:

    1. With `taps`, queries, keys and values are convolved with the last tokens, and go through SiLU.
    2. With `normalize`, each query and key head is divided by its norm.
    3. The log decay is, by `decay`: `factor · log σ(gate)`, or `-exp(rate) · softplus(gate + bias)`, or
       `factor · σ(exp(rate) · (gate + bias))`. In the second, the softplus is a time step, clipped to `limits`. With
       `values_by_step`, values are multiplied by it.
    4. The state decays. Then it is updated by the delta rule with the step size `beta_factor · σ(beta)`, or, without
       `beta`, by adding `key valueᵀ`. The output is the query times the new state, times `scale`.
    5. `skip` times the value is added to the output.
    6. With an `epsilon`, each head of the output is divided by the root of its mean square and multiplied by `norm`.
    7. The output is multiplied by the activated output gate.

    Queries, keys and values may each have fewer heads than the state has, any number that divides `heads`.
    """

    batch: int
    copies: int  # how many copies of the batch the projections and the output hold, one after the other
    heads: int
    queries: View  # not `query`: with it would be `value`, which means something else to Triton
    keys: View
    values: View
    gate: View
    beta: View | None
    output_gate: View | None
    decay: Literal["log_sigmoid", "softplus", "bounded"]
    factor: float
    limits: tuple[float, float]
    values_by_step: bool
    beta_factor: float
    taps: int
    first_channels: tuple[int, int, int]  # where queries, keys and values begin among the convolution's channels
    normalize: bool
    scale: float
    epsilon: float | None
    activation: Literal["silu", "sigmoid"]
    dtype: np.dtype

    @property
    def key_dim(self) -> int:
        return self.keys.dim

    @property
    def value_dim(self) -> int:
        return self.values.dim

    @property
    def convolved(self) -> tuple[View, View, View]:
        return self.queries, self.keys, self.values

    @property
    def output_dtype(self) -> np.dtype:
        """An output that is not normalised here is normalised elsewhere, and is not rounded before that."""
        return self.wide if self.epsilon is None else self.dtype

    @property
    def wide(self) -> np.dtype:
        """The dtype to compute in."""
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Inputs(NamedTuple):
    """The arrays of a step. The first six are outputs of projections, and several of them may be one array."""

    query: jax.Array  # the first six are `[copies · B, groups, width]`
    key: jax.Array
    value: jax.Array
    gate: jax.Array
    beta: jax.Array | None
    output_gate: jax.Array | None
    memory: jax.Array  # the state, [B, H, K, V]
    recent: jax.Array | None  # the last tokens before the convolution, [B, taps - 1, channels]
    taps: jax.Array | None  # [taps, channels]
    taps_bias: jax.Array | None  # [channels]
    rate: jax.Array | None  # [H]
    bias: jax.Array | None  # [H] or, if each key dim has a gate, [H · K]
    skip: jax.Array | None  # [H]
    norm: jax.Array | None  # [V]


class Results(NamedTuple):
    """The results of a step."""

    output: jax.Array  # [copies · B, H · V]
    memory: jax.Array
    recent: jax.Array | None
