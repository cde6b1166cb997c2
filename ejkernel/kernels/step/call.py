"""What a step of a layer is: its static facts and its arrays."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from ejkernel.kernels._views import View


@dataclass(frozen=True)
class Call:
    """Static facts of one step, which is in order:

    1. With `taps`, queries, keys and values are convolved with the last tokens, and go through SiLU.
    2. With `normalize`, queries and keys are divided by their norm.
    3. The log decay is `factor · log σ(gate)`, `-exp(rate) · softplus(gate + bias)` or
       `factor · σ(exp(rate) · (gate + bias))`, as `decay` says. In the second the softplus is a time step within
       `limits`, by which values are multiplied if `values_by_step`.
    4. The memory fades by it and takes up the token, by the delta rule with the share `beta_factor · σ(beta)`, or
       adding it; the output is what the query finds there, times `scale`.
    5. `skip` times the value is added.
    6. With an `epsilon` each head is divided by the root of its mean square, and multiplied by `norm`.
    7. It is multiplied by the activated output gate.

    Each of query, key and value has a number of heads that divides `heads`.
    """

    batch: int
    copies: int  # how often the rows of the batch, one after the other, are in the arrays of projections and the output
    heads: int
    query: View
    key: View
    value: View
    gate: View
    beta: View | None
    output_gate: View | None
    rule: Literal["linear", "delta"]
    decay: Literal["log_sigmoid", "softplus", "bounded"]
    factor: float
    limits: tuple[float, float]
    values_by_step: bool
    beta_factor: float
    taps: int
    channels: tuple[int, int, int]  # of the convolution: the first of queries, of keys and of values
    normalize: bool
    scale: float
    epsilon: float | None
    activation: Literal["silu", "sigmoid"]
    dtype: np.dtype

    @property
    def key_dim(self) -> int:
        return self.key.dim

    @property
    def value_dim(self) -> int:
        return self.value.dim

    @property
    def mixed(self) -> tuple[View, View, View]:
        """What is convolved."""
        return self.query, self.key, self.value

    @property
    def output_dtype(self) -> np.dtype:
        """What is not normalised here will be elsewhere, from all of its digits."""
        return self.wide if self.epsilon is None else self.dtype

    @property
    def wide(self) -> np.dtype:
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


class Inputs(NamedTuple):
    """The arrays of a step. Several of the first six may be the same."""

    query: jax.Array  # these six `[copies · B, groups, width]`
    key: jax.Array
    value: jax.Array
    gate: jax.Array
    beta: jax.Array | None
    output_gate: jax.Array | None
    memory: jax.Array  # [B, H, K, V]
    recent: jax.Array | None  # [B, taps - 1, channels]
    taps: jax.Array | None  # [taps, channels]
    taps_bias: jax.Array | None  # [channels]
    rate: jax.Array | None  # [H]
    bias: jax.Array | None  # [H] or, with a gate a key dim, [H · K]
    skip: jax.Array | None  # [H]
    norm: jax.Array | None  # [V]


class Results(NamedTuple):
    """Of a step."""

    output: jax.Array  # [copies · B, H · V]
    memory: jax.Array
    recent: jax.Array | None
