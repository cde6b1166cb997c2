"""The gates of state space models and delta rules: log decays, time steps and beta."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel import _checks
from ejkernel.layers._parameters import ParamInit, matching, wide

SHORTEST, LONGEST = 1e-3, 0.1


def shortest_and_longest(argument: str, pair: Any, expected: str) -> tuple[float, float]:
    """`pair`, checked: two times in order, of which the second may be infinite."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        _checks.fail(argument, repr(pair), expected)
    unbounded = isinstance(pair[1], float | np.floating) and pair[1] == math.inf
    shortest, longest = _checks.real(argument, pair[0]), math.inf if unbounded else _checks.real(argument, pair[1])
    if not 0 <= shortest <= longest or longest == 0:
        _checks.fail(argument, repr(pair), expected)
    return shortest, longest


def time_step(x: jax.Array, bias: jax.Array) -> jax.Array:
    """`softplus(x + bias)`, in at least float32."""
    x = wide(x)
    return _softplus(x + matching(bias, x))


@jax.custom_jvp
def _softplus(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x)


@_softplus.defjvp
def _softplus_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # from the argument: JAX computes it from the result, which XLA would have to keep in memory
    return _softplus(*primals), jax.nn.sigmoid(primals[0]) * tangents[0]


def log_decay(A_log: jax.Array, step: jax.Array) -> jax.Array:
    """`-exp(A_log) · step`."""
    return -jnp.exp(matching(A_log, step)) * step


def bounded_log_decay(A_log: jax.Array, x: jax.Array, bias: jax.Array, lower_bound: float) -> jax.Array:
    """`lower_bound · σ(exp(A_log) · (x + bias))`, in at least float32: between `lower_bound` and 0."""
    x = wide(x)
    return lower_bound * jax.nn.sigmoid(jnp.exp(matching(A_log, x)) * (x + matching(bias, x)))


def beta_of(x: jax.Array, negative_eigenvalues: bool) -> jax.Array:
    """The delta rule's beta in at least float32: `σ(x)`, or `2 σ(x)` with `negative_eigenvalues`."""
    beta = jax.nn.sigmoid(wide(x))
    return 2 * beta if negative_eigenvalues else beta


def log_rates(heads: int, init: ParamInit) -> nnx.Param:
    """Initial `A_log`: rates uniform from 1 to 16."""
    return init.param(jnp.log(init.uniform((heads,), 1, 16, jnp.float32)))


def time_step_bias(count: int, init: ParamInit) -> nnx.Param:
    """Initial `dt_bias`: its softplus is log-uniform from `SHORTEST` to `LONGEST`."""
    steps = init.uniform((count,), math.log(SHORTEST), math.log(LONGEST), jnp.float32)
    return init.param(jnp.log(jnp.expm1(jnp.exp(steps))))
