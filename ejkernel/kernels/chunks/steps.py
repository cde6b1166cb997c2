"""Few tokens one after the other, without chunks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Step = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


def by_tokens(step: Step, arrays: Any, state: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """All outputs and the last state, by `step(arrays of one token, state)` for each token of `arrays [B, T, ...]`."""

    def visit(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        output, state = step(jax.tree.map(lambda x: x[:, None], token), state)
        return state, output[:, 0]

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arrays)
    state, output = lax.scan(visit, state, tokens, reverse=reverse)
    return jnp.moveaxis(output, 0, 1), state
