"""Pools of states that calls read and write slots of, in place of initial and final states."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import array
from ejkernel._checks.paged import integers
from ejkernel._checks.wording import Dims, fail, is_concrete


class Pool(NamedTuple):
    """A pool, and the slots that a call's `N` sequences read and write."""

    states: jax.Array  # [slots, …]
    reads: jax.Array  # [N]
    writes: jax.Array  # [N], or [N, C] with `at`
    at: jax.Array | None  # [N, C]


def start(
    initial_state: Any, states: Any, reads: Any, writes: Any, at: Any, reverse: Any = False, segment_ids: Any = None
) -> Any:
    """What a call starts from: its `initial_state`, or a `Pool` if `states` are given."""
    slots = {"reads": reads, "writes": writes}
    if states is None:
        for name, x in {**slots, "at": at}.items():
            if x is not None:
                fail(name, "slots without a pool" if name in slots else "tokens without a pool", "states= beside it")
        return initial_state
    for name, x in slots.items():
        if x is None:
            fail(name, None, "a slot of states, or -1, for each sequence")
    if initial_state is not None:
        fail("initial_state", "an array beside states", "one of the two")
    if isinstance(reverse, bool | np.bool_) and reverse:
        fail("reverse", True, "False, as states= is given")
    if segment_ids is not None:
        fail("segment_ids", "ids beside states", "cu_seqlens, or rows of one sequence each")
    return Pool(states, reads, writes, at)


def pool(dims: Dims, rows: str, given: Pool, pattern: str, borders: Any, dtypes: tuple[Any, ...]) -> Pool:
    """`given`, checked: states `[slots, *pattern]` of one of `dtypes`, slots for each of the `rows` of `dims`."""
    states = array("states", given.states)
    if states.dtype not in dtypes:
        names = " or ".join(np.dtype(each).name for each in dtypes)
        raise TypeError(f"states: got dtype {states.dtype}; expected {names}")
    dims.match("states", states, f"slots {pattern}")
    reads, writes = integers("reads", given.reads), integers("writes", given.writes)
    at = None if given.at is None else integers("at", given.at)
    dims.match("reads", reads, rows)
    if at is not None:
        dims.match("at", at, f"{rows} C")
    dims.match("writes", writes, rows if at is None else f"{rows} C", hint="" if at is None else ", as at has")
    slot_values(dims, given, borders)
    return Pool(states, reads, writes, at)


def slot_values(dims: Dims, given: Pool, borders: Any) -> None:
    """What can be said of slots whose values are known; `dims` knows how many `slots` there are."""
    for name, x in (("reads", given.reads), ("writes", given.writes)):
        if is_concrete(x):
            known = np.asarray(x)
            wrong = known[(known < -1) | (known >= dims["slots"])]
            if wrong.size:
                fail(name, f"slot {wrong[0]}", f"slots from 0 to {dims['slots'] - 1}, or -1 for none")
    _once(dims, given, borders)


def _once(dims: Dims, given: Pool, borders: Any) -> None:
    """No slot is written twice, where that is known."""
    if not is_concrete(given.writes) or not is_concrete(given.at):
        return
    written = np.asarray(given.writes)
    written = written[written >= 0] if given.at is None else _with_tokens(dims, given, borders)
    slots, counts = np.unique(written, return_counts=True)
    if (counts > 1).any():
        fail("writes", f"slot {slots[counts > 1][0]} twice", "each slot at most once")


def _with_tokens(dims: Dims, given: Pool, borders: Any) -> np.ndarray:
    """The slots that are written where `at` says after which tokens."""
    if borders is not None and not is_concrete(borders):
        return np.zeros(0, int)
    lengths = dims["T"] if borders is None else np.diff(np.asarray(borders))[:, None]
    writes, at = np.asarray(given.writes), np.asarray(given.at)
    return writes[(writes >= 0) & (at >= 0) & (at <= lengths)]


# what states of the recurrences are kept in, and inputs of the convolution
STATES = (jnp.float32, jnp.bfloat16)
INPUTS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
