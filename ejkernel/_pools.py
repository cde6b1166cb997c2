"""Calls that read and write slots of a pool of states, from their checked arrays to their results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import _checks
from ejkernel._dispatch import Implementation, dispatch
from ejkernel._normalization import normalized
from ejkernel.kernels._differentiable import refuse_derivatives
from ejkernel.kernels.chunks.pools import PooledCall, checkpoints

Inputs = Any  # of `kernels.convolution`
Arrays = _checks.RecurrenceArrays


def run(
    implementations: Sequence[Implementation],
    arrays: Arrays,
    bind: Callable[[Arrays], tuple[Any, tuple[jax.Array | None, ...]]],
    platform: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The output and the pool of a recurrence's call whose `initial_state` is a pool.

    `bind` gives the static facts of a call and the arrays that its implementations take.
    """
    pool, lead = arrays.initial_state, arrays.query.shape[:2]
    call, operands = bind(_packed(arrays._replace(initial_state=None)))
    *inputs, _, cu_seqlens = operands
    writes = pool.writes[:, None] if pool.at is None else pool.writes
    pooled = PooledCall(call, writes.shape[1])

    def serve(*operands: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return dispatch(implementations, pooled, *operands, platform=platform)

    refused = refuse_derivatives("a call with states=", serve)
    output, states = refused(*inputs, cu_seqlens, pool.states, pool.reads, writes, pool.at)
    output = output.reshape(*lead, *output.shape[2:])
    return (output[0] if arrays.unbatched else output), states


def _packed(arrays: Arrays) -> Arrays:
    """`arrays` with the rows of a batch packed into one, so that a sequence is computed in the same way in both."""
    if arrays.cu_seqlens is not None:
        return arrays
    B, T = arrays.query.shape[:2]
    names = ("query", "key", "value", "g", "gk", "gv", "beta")
    rows = {name: x for name in names if (x := getattr(arrays, name)) is not None}
    stream = {name: x.reshape(1, B * T, *x.shape[2:]) for name, x in rows.items()}
    return arrays._replace(**stream, cu_seqlens=jnp.arange(B + 1, dtype=jnp.int32) * T)


def run_convolution(output_of: Callable[[Inputs], jax.Array], inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The output and the pool of a convolution whose `initial_state` is a pool.

    A state is the last `history` inputs of a sequence, so states are copied from the inputs.
    """
    pool = inputs.initial_state
    B, T, D = inputs.x.shape
    borders = jnp.arange(B + 1, dtype=jnp.int32) * T if inputs.cu_seqlens is None else inputs.cu_seqlens

    def serve(
        x: jax.Array, weight: jax.Array, bias: jax.Array | None, states: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots, history, _ = states.shape
        if states.size == 0:
            return output_of(inputs._replace(initial_state=None)), states
        is_slot = ((pool.reads >= 0) & (pool.reads < slots))[:, None, None]
        starts = jnp.where(is_slot, states[jnp.clip(pool.reads, 0, slots - 1)], 0).astype(x.dtype)
        output = output_of(inputs._replace(x=x, weight=weight, bias=bias, initial_state=starts))
        at, slot = checkpoints(slots, jnp.minimum(borders, B * T), pool.writes, pool.at)
        # positions in the sequence of the inputs to be written, [N, C, W - 1]; below 0, those are in the start state
        position = at[:, :, None] - history + jnp.arange(history, dtype=at.dtype)[None, None]
        token = jnp.clip(borders[:-1, None, None] + position, 0, max(B * T - 1, 0))
        before = jax.vmap(lambda start, each: start[jnp.clip(each + history, 0, history - 1)])(starts, position)
        inside = x.reshape(B * T, D)[token] if B * T else before
        written = jnp.where((position >= 0)[..., None], inside, before).astype(states.dtype)
        return output, states.at[slot].set(written, mode="drop")

    return refuse_derivatives("a call with states=", serve)(inputs.x, inputs.weight, inputs.bias, pool.states)


def normalized_apart(x: jax.Array, epsilon: float) -> jax.Array:
    """`normalized` token by token, so that a token's bits do not depend on how many there are in `x [1, T, …]`."""

    def one_by_one(x: jax.Array) -> jax.Array:
        # CPUs round what is left over behind whole vectors in another way, and where that begins depends on `T`
        return lax.map(lambda each: normalized(each, epsilon), x[0])[None]

    return lax.platform_dependent(x, cpu=one_by_one, default=lambda x: normalized(x, epsilon))


def is_pooled(arrays: Any) -> bool:
    """Whether the call has a pool in place of an initial state."""
    return isinstance(arrays.initial_state, _checks.Pool)
