"""Pools of states that calls read and write slots of, in place of initial and final states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import array, int32
from ejkernel._checks.wording import Dims, fail, is_concrete


class Pool(NamedTuple):
    """A pool, and the slots that a call's `N` sequences read and write."""

    states: jax.Array  # [slots, …]
    reads: jax.Array  # [N]
    writes: jax.Array  # [N], or [N, C] with `at`
    at: jax.Array | None  # [N, C]


def start(initial_state: Any, slots: tuple[Any, Any, Any, Any], reverse: Any = False, segment_ids: Any = None) -> Any:
    """What a call starts from: its `initial_state`, or a `Pool` if there are states in `slots`.

    `slots` are the call's `states`, `reads`, `writes` and `at`.
    """
    states, reads, writes, at = slots
    if states is None:
        for name, x, what in (("reads", reads, "slots"), ("writes", writes, "slots"), ("at", at, "tokens")):
            if x is not None:
                fail(name, f"{what} without a pool", "states= beside it")
        return initial_state
    for name, x in (("reads", reads), ("writes", writes)):
        if x is None:
            fail(name, None, "a slot of states, or -1, for each sequence")
    if initial_state is not None:
        fail("initial_state", "an array beside states", "one of the two")
    if isinstance(reverse, bool | np.bool_) and reverse:
        fail("reverse", True, "False, as states= is given")
    if segment_ids is not None:
        fail("segment_ids", "ids beside states", "cu_seqlens, or rows of one sequence each")
    return Pool(states, reads, writes, at)


def pool(dims: Dims, rows: str, unchecked: Pool, pattern: str, borders: Any, dtypes: tuple[Any, ...]) -> Pool:
    """A checked pool: states `[slots, *pattern]` of one of `dtypes`, and slots for each of the `rows` of `dims`."""
    states = array("states", unchecked.states)
    if states.dtype not in dtypes:
        names = " or ".join(np.dtype(each).name for each in dtypes)
        raise TypeError(f"states: got dtype {states.dtype}; expected {names}")
    dims.match("states", states, f"slots {pattern}")
    reads, writes = int32("reads", unchecked.reads), int32("writes", unchecked.writes)
    dims.match("reads", reads, rows)
    at = None
    if unchecked.at is not None:
        at = int32("at", unchecked.at)
        dims.match("at", at, f"{rows} C")
    dims.match("writes", writes, rows if at is None else f"{rows} C", hint="" if at is None else ", as at has")
    slot_values(dims, unchecked, borders)
    return Pool(states, reads, writes, at)


def slot_values(dims: Dims, pool: Pool, borders: Any) -> None:
    """Slots whose values are known are those of the pool, which `dims` knows, and none is written twice."""
    for name, x in (("reads", pool.reads), ("writes", pool.writes)):
        if is_concrete(x):
            known = np.asarray(x)
            wrong = known[(known < -1) | (known >= dims["slots"])]
            if wrong.size:
                fail(name, f"slot {wrong[0]}", f"slots from 0 to {dims['slots'] - 1}, or -1 for none")
    if not is_concrete(pool.writes) or not is_concrete(pool.at) or (pool.at is not None and not is_concrete(borders)):
        return
    writes = np.asarray(pool.writes)
    written = writes >= 0
    if pool.at is not None:
        lengths = dims["T"] if borders is None else np.diff(np.asarray(borders))[:, None]
        written = written & (np.asarray(pool.at) >= 0) & (np.asarray(pool.at) <= lengths)
    slots, counts = np.unique(writes[written], return_counts=True)
    if (counts > 1).any():
        fail("writes", f"slot {slots[counts > 1][0]} twice", "each slot at most once")


# dtypes of pools: a recurrence's states, and the convolution's inputs
STATES = (jnp.float32, jnp.bfloat16)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
