"""Gates as state space models have them: a rate times a time step that every token chooses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks
from ejkernel.layers._dtypes import matching, wide
from ejkernel.layers._projection import Made

SHORTEST, LONGEST = 1e-3, 0.1


def shortest_and_longest(argument: str, pair: Any, expected: str) -> tuple[float, float]:
    """`pair`, two times in order, the longest of which may be infinite."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        _checks.fail(argument, repr(pair), expected)
    unbounded = isinstance(pair[1], float | np.floating) and pair[1] == math.inf
    shortest, longest = _checks.real(argument, pair[0]), math.inf if unbounded else _checks.real(argument, pair[1])
    if not 0 <= shortest <= longest or longest == 0:
        _checks.fail(argument, repr(pair), expected)
    return shortest, longest


def log_decay(A_log: jax.Array, chosen: jax.Array, bias: jax.Array) -> jax.Array:
    """`-exp(A_log) · softplus(chosen + bias)`, in at least float32."""
    step = time_step(chosen, bias)
    return -jnp.exp(matching(A_log, step)) * step


def time_step(chosen: jax.Array, bias: jax.Array) -> jax.Array:
    chosen = wide(chosen)
    return jax.nn.softplus(chosen + matching(bias, chosen))


def log_rates(heads: int, made: Made) -> jax.Array:
    """`A_log` at first: rates spread evenly from 1 to 16."""
    return jnp.log(jax.random.uniform(made.rngs.params(), (heads,), jnp.float32, 1, 16)).astype(made.param_dtype)


def time_step_bias(count: int, made: Made) -> jax.Array:
    """A bias whose softplus is spread from `SHORTEST` to `LONGEST`, as many in each factor of ten."""
    steps = jax.random.uniform(made.rngs.params(), (count,), jnp.float32, math.log(SHORTEST), math.log(LONGEST))
    return jnp.log(jnp.expm1(jnp.exp(steps))).astype(made.param_dtype)
