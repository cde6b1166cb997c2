"""A recurrence's call that reads and writes slots of a pool of states, from its checked arrays to its results."""

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
    """Output and pool of a call whose `initial_state` is a pool; `bind` says what cores are called with."""
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
    """Rows as packed sequences, so that a sequence is computed in one way however it comes."""
    if arrays.cu_seqlens is not None:
        return arrays
    B, T = arrays.query.shape[:2]
    names = [name for name in arrays._fields if name in ("query", "key", "value", "g", "gk", "gv", "beta")]
    rows = {name: getattr(arrays, name) for name in names if getattr(arrays, name) is not None}
    rows = {name: x.reshape(1, B * T, *x.shape[2:]) for name, x in rows.items()}
    return arrays._replace(**rows, cu_seqlens=jnp.arange(B + 1, dtype=jnp.int32) * T)


def run_convolution(output_of: Callable[[Inputs], jax.Array], inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Output and pool of a convolution whose `initial_state` is a pool; a state is a copy of inputs."""
    pool = inputs.initial_state
    B, T, D = inputs.x.shape
    borders = jnp.arange(B + 1, dtype=jnp.int32) * T if inputs.cu_seqlens is None else inputs.cu_seqlens

    def serve(
        x: jax.Array, weight: jax.Array, bias: jax.Array | None, states: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        slots, history, _ = states.shape
        if states.size == 0:
            return output_of(inputs._replace(initial_state=None)), states
        known = ((pool.reads >= 0) & (pool.reads < slots))[:, None, None]
        starts = jnp.where(known, states[jnp.clip(pool.reads, 0, slots - 1)], 0).astype(x.dtype)
        output = output_of(inputs._replace(x=x, weight=weight, bias=bias, initial_state=starts))
        at, slot = checkpoints(slots, jnp.minimum(borders, B * T), pool.writes, pool.at)
        number = at[:, :, None] - history + jnp.arange(history, dtype=at.dtype)  # of tokens, [N, C, W - 1]
        token = jnp.clip(borders[:-1, None, None] + number, 0, max(B * T - 1, 0))
        before = jax.vmap(lambda start, each: start[jnp.clip(each + history, 0, history - 1)])(starts, number)
        inside = x.reshape(B * T, D)[token] if B * T else before
        written = jnp.where((number >= 0)[..., None], inside, before).astype(states.dtype)
        return output, states.at[slot].set(written, mode="drop")

    return refuse_derivatives("a call with states=", serve)(inputs.x, inputs.weight, inputs.bias, pool.states)


def normalized_apart(x: jax.Array, epsilon: float) -> jax.Array:
    """`normalized`, with the same bits however many tokens `x [1, T, heads, dim]` has."""

    def one_by_one(x: jax.Array) -> jax.Array:
        # a CPU's vectors end elsewhere with another number of tokens, and what is left over is rounded otherwise
        return lax.map(lambda each: normalized(each, epsilon), x[0])[None]

    return lax.platform_dependent(x, cpu=one_by_one, default=lambda x: normalized(x, epsilon))


def is_pooled(arrays: Any) -> bool:
    """Whether the call has a pool in place of an initial state."""
    return isinstance(arrays.initial_state, _checks.Pool)
