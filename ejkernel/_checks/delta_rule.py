"""The arguments of the delta rule."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel._checks.arrays import floating
from ejkernel._checks.packing import token_segments
from ejkernel._checks.recurrence import packed, rows, state, state_dtype
from ejkernel._checks.values import known_size
from ejkernel._checks.wording import Dims, fail


class DeltaRule(NamedTuple):
    """The arrays of the delta rule, checked, with a batch dimension, and what follows from their shapes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    g: jax.Array | None
    initial_state: Any  # an array, a `Pool` or `None`
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    sequences: int
    unbatched: bool

    @property
    def heads(self) -> int:
        """Of beta, gates, states and output; query, key and value each have a number that divides it."""
        return self.beta.shape[2]

    @property
    def state_dtype(self) -> np.dtype:
        """The dtype of states."""
        return state_dtype(self.query)


def delta_rule(
    query: Any,
    key: Any,
    value: Any,
    beta: Any,
    g: Any,
    gate: str,
    initial_state: Any,
    borders: Any,
    segment_ids: Any = None,
) -> DeltaRule:
    """The arguments of the delta rule; `gate` is the pattern of `g` after the tokens, if it has one."""
    query = floating("query", query)
    unbatched = borders is not None and query.ndim == 3
    lead = "T" if unbatched else "B T"
    dims = Dims()
    # beta says how many heads there are
    beta = floating("beta", beta)
    dims.match("beta", beta, f"{lead} H")
    arrays = {"query": query, "key": floating("key", key), "value": floating("value", value), "beta": beta}
    known_size("beta", dims["T"], "tokens")
    known_size("beta", dims["H"], "heads")
    for name, pattern in (("query", "Hq K"), ("key", "Hk K"), ("value", "Hv V")):
        dims.match(name, arrays[name], f"{lead} {pattern}")
        known_size(name, arrays[name].shape[-1], "dims")
        heads = known_size(name, arrays[name].shape[-2], "heads")
        if heads == 0 or dims["H"] % heads:
            fail(name, f"{heads} heads", f"a divisor of beta's {dims['H']} heads")
    if gate:
        arrays["g"] = floating("g", g)
        dims.match("g", arrays["g"], f"{lead} {gate}")
    ids = None if segment_ids is None else token_segments(dims, segment_ids, borders)
    borders = packed(dims, borders, unbatched)
    if initial_state is not None:
        initial_state = state(dims, initial_state, borders)
    if unbatched:
        arrays = {name: x[None] for name, x in arrays.items()}
    query, key, value, beta = (arrays[name] for name in ("query", "key", "value", "beta"))
    sequences = dims[rows(dims)]
    return DeltaRule(query, key, value, beta, arrays.get("g"), initial_state, borders, ids, sequences, unbatched)
