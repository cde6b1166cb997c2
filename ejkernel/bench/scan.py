"""The recurrences in their simplest form: a `lax.scan` over tokens, differentiated by JAX."""

from typing import Any

import jax
import jax.numpy as jnp

GATES = ("g", "g_gamma", "gk", "gv", "beta")


def token_scan(
    query: jax.Array, key: jax.Array, value: jax.Array, first: jax.Array | None = None, **gates: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Outputs and final states, of the delta rule if there is a `beta`; `gates` are named as in the ops.

    Tokens that are `first [T]` in their sequence forget what was before.
    """
    if unknown := gates.keys() - GATES:
        raise TypeError(f"gates: got {sorted(unknown)}; expected some of {GATES}")
    g, g_gamma, gk, gv, beta = map(gates.get, GATES)
    scale = query.shape[-1] ** -0.5
    g = g[..., None] if g is not None and g.ndim == 3 else g
    fixed = None if g_gamma is None else jnp.exp(g_gamma)[:, None, None]

    def step(state: jax.Array, x: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, gk, gv, beta, new = x
        decays = [] if fixed is None else [fixed]
        decays += [jnp.exp(each)[..., None] for each in (g, gk) if each is not None]
        decays += [] if gv is None else [jnp.exp(gv)[..., None, :]]
        if new is not None:
            decays = [jnp.where(new, 0, each) for each in decays or [jnp.ones(())]]
        for each in decays:
            state = each * state
        v = v if beta is None else beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * v[..., None, :]
        return state, scale * jnp.einsum("bhk,bhkv->bhv", q, state)

    state = jnp.zeros((query.shape[0], *query.shape[2:], value.shape[-1]))
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (query, key, value, g, gk, gv, beta))
    state, output = jax.lax.scan(step, state, (*by_token, first))
    return jnp.moveaxis(output, 0, 1), state
