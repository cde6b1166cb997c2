"""Walks for states alone: what tokens add to a state, and what outputs' cotangents add to that of a state.

There are no scores in it, so every decay is a sum of gates over a run of tokens that ends where the chunk does, and is
exact for any gates.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.linear_recurrence.pallas.device.products import (
    F32,
    index,
    running_sums,
    running_sums_along,
    sums,
)
from ejkernel.kernels.linear_recurrence.pallas.device.walk import Walk, grown
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes

MOST = 88.0  # whose exponential is the largest in float32


def added(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """The states that sequences end with, from zeros."""
    _states(sizes, names, table, refs, ("key", "value", "final"), back=False)


def returned(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """What the output alone gives of the cotangents of the states that sequences start from."""
    _states(sizes, names, table, refs, ("query", "d_output", "d_initial"), back=True)


def _states(sizes: Sizes, names: Sequence[str], table: Any, refs: Any, which: tuple[str, str, str], back: bool) -> None:
    walk = Walk.of(sizes, names, table, refs)
    columns, rows, ends = which
    states, heads, old, new = walk.arrays["states"], range(sizes.heads), walk.old, walk.new

    @pl.when(walk.item.first != 0)
    def _() -> None:
        for h in heads:
            states[old, h] = jnp.zeros((sizes.value_dim, sizes.key_dim), F32)

    by_head = {i: _of_heads(walk, i, back) for i in range(sizes.chunks)} if sizes.decay in ("head", "constant") else {}
    for h in heads:
        state = states[old, h]
        for i in walk.order(back):
            x = walk.rows_of(columns, h, i)
            if sizes.decay == "key":
                weights, total = _of_keys(walk, h, i, back)
                x, state = (x * weights).astype(x.dtype), grown(state, total)
            elif sizes.decay != "none":
                weights, total = by_head[i]
                x = (x * jnp.broadcast_to(weights[:, h : h + 1], x.shape)).astype(x.dtype)
                state = grown(state, total[h : h + 1])
            state = state + sums(walk.rows_of(rows, h, i), x)
        states[new, h] = state

    @pl.when(walk.item.last != 0)
    def _() -> None:
        for h in heads:
            walk.arrays[ends][0, h] = (states[new, h] * sizes.scale if back else states[new, h]).T


def _of_keys(walk: Walk, head: int, i: Any, back: bool) -> tuple[jax.Array, jax.Array]:
    """Decays from each token to the chunk's end, or `back` its start, and the logarithm of that through all of it."""
    gates, reverse = walk.gates(head, i), walk.sizes.reverse  # [C, K]
    C = len(gates)
    if back:
        found = running_sums(gates, reverse)
        return _factor(found), found[:1] if reverse else found[C - 1 :]
    first, last = (C - 1, 0) if reverse else (0, C - 1)
    later = jnp.where(index(gates.shape, 0) == last, 0, pltpu.roll(gates, 1 if reverse else C - 1, 0))
    found = running_sums(later, not reverse)
    return _factor(found), found[first : first + 1] + gates[first : first + 1]


def _of_heads(walk: Walk, i: Any, back: bool) -> tuple[jax.Array, jax.Array]:
    """The same of all heads, `[C, heads]` and `[heads, 1]`."""
    gates, reverse = walk.head_gates(i), walk.sizes.reverse  # [heads, C]
    C = gates.shape[1]
    if back:
        found = running_sums_along(gates, reverse)
        total = found[:, :1] if reverse else found[:, C - 1 :]
    else:
        first, last = (C - 1, 0) if reverse else (0, C - 1)
        later = jnp.where(index(gates.shape, 1) == last, 0, pltpu.roll(gates, 1 if reverse else C - 1, 1))
        found = running_sums_along(later, not reverse)
        total = found[:, first : first + 1] + gates[:, first : first + 1]
    return _factor(found).T, total


def _factor(log_decay: jax.Array) -> jax.Array:
    # finite, since what is not there must stay nothing however much would grow after it
    return jnp.exp(jnp.minimum(log_decay, MOST))
