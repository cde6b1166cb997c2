"""Calls that read and write slots of a pool of states, from their checked arrays to their results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ejkernel import _checks, _sharding
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
    pool, query = arrays.initial_state, arrays.query
    call, operands = bind(_packed(arrays._replace(initial_state=None)))
    *inputs, _, cu_seqlens = operands
    writes = pool.writes[:, None] if pool.at is None else pool.writes
    pooled = PooledCall(call, writes.shape[1], query.shape[1])

    def serve(*operands: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return dispatch(implementations, pooled, *operands, platform=platform)

    refused = refuse_derivatives("a call with states=", serve)
    output, states = refused(*inputs, cu_seqlens, pool.states, pool.reads, writes, pool.at)
    spec = PartitionSpec(*_sharding.spec_of(query)[:2], *_sharding.spec_of(output)[2:])
    output = _sharding.reshape(output, (*query.shape[:2], *output.shape[2:]), spec)
    return (output[0] if arrays.unbatched else output), states


def _packed(arrays: Arrays) -> Arrays:
    """`arrays` with the rows of a batch packed into one, so that a sequence is computed in the same way in both."""
    if arrays.cu_seqlens is not None:
        return arrays
    B, T = arrays.query.shape[:2]

    def joined(x: jax.Array) -> jax.Array:
        rows, tokens, *others = _sharding.spec_of(x)
        spec = PartitionSpec(None, _sharding.axes_of(rows) + _sharding.axes_of(tokens), *others)
        return _sharding.reshape(x, (1, B * T, *x.shape[2:]), spec)

    names = ("query", "key", "value", "g", "gk", "gv", "beta")
    stream: dict[str, Any] = {name: joined(x) for name in names if (x := getattr(arrays, name)) is not None}
    return arrays._replace(**stream, cu_seqlens=jnp.arange(B + 1, dtype=jnp.int32) * T)


def run_convolution(output_of: Callable[[Inputs], jax.Array], inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The output and the pool of a convolution whose `initial_state` is a pool.

    A state is the last `history` inputs of a sequence, so states are copied from the inputs.
    """
    pool = inputs.initial_state
    B, T, _ = inputs.x.shape
    borders = jnp.arange(B + 1, dtype=jnp.int32) * T if inputs.cu_seqlens is None else inputs.cu_seqlens

    def serve(
        x: jax.Array, weight: jax.Array, bias: jax.Array | None, states: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        if states.size == 0:
            return output_of(inputs._replace(initial_state=None)), states
        spec = _sharding.spec_of(states)
        # slots may be anywhere in the pool, whichever rows a device has
        starts = _sharding.partitioned(_read_states, PartitionSpec(None, *spec[1:]), states, pool.reads)
        starts = starts.astype(x.dtype)
        output = output_of(inputs._replace(x=x, weight=weight, bias=bias, initial_state=starts))
        arrays = x, starts, states, borders, pool.writes, pool.at
        return output, _sharding.partitioned(_write_inputs, spec, *arrays)

    return refuse_derivatives("a call with states=", serve)(inputs.x, inputs.weight, inputs.bias, pool.states)


def _read_states(states: jax.Array, reads: jax.Array) -> jax.Array:
    """What the sequences start from: the slots `reads [N]` of `states`, or zeros."""
    slots = states.shape[0]
    is_slot = ((reads >= 0) & (reads < slots))[:, None, None]
    return jnp.where(is_slot, states[jnp.clip(reads, 0, slots - 1)], 0)


def _write_inputs(
    x: jax.Array, starts: jax.Array, states: jax.Array, borders: jax.Array, writes: jax.Array, at: jax.Array | None
) -> jax.Array:
    """The pool `states`, with the last inputs `x` of sequences that start from `starts` written to slots."""
    (B, T, D), (slots, history, _) = x.shape, states.shape
    at, slot = checkpoints(slots, jnp.minimum(borders, B * T), writes, at)
    # positions in the sequence of the inputs to be written, [N, C, W - 1]; below 0, those are in the start state
    position = at[:, :, None] - history + jnp.arange(history, dtype=at.dtype)[None, None]
    token = jnp.clip(borders[:-1, None, None] + position, 0, max(B * T - 1, 0))
    before = jax.vmap(lambda start, each: start[jnp.clip(each + history, 0, history - 1)])(starts, position)
    inside = x.reshape(B * T, D)[token] if B * T else before
    written = jnp.where((position >= 0)[..., None], inside, before).astype(states.dtype)
    return states.at[slot].set(written, mode="drop")


def normalized_apart(x: jax.Array, epsilon: float) -> jax.Array:
    """`normalized` token by token, so that a token's bits do not depend on how many there are in `x [1, T, …]`."""

    def one_by_one(x: jax.Array) -> jax.Array:
        # CPUs round what is left over behind whole vectors in another way, and where that begins depends on `T`
        return lax.map(lambda each: normalized(each, epsilon), x[0])[None]

    def run(x: jax.Array) -> jax.Array:
        return lax.platform_dependent(x, cpu=one_by_one, default=lambda x: normalized(x, epsilon))

    # tokens may be sharded, over which `lax.map` cannot go
    return _sharding.partitioned(run, _sharding.spec_of(x), x)


def is_pooled(arrays: Any) -> bool:
    """Whether the call has a pool in place of an initial state."""
    return isinstance(arrays.initial_state, _checks.Pool)
