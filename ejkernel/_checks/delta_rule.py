"""What the delta rule takes."""

from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel._checks.arrays import floating
from ejkernel._checks.packing import cu_seqlens
from ejkernel._checks.values import known_size
from ejkernel._checks.wording import Dims, fail


class DeltaRule(NamedTuple):
    """The arrays of the delta rule, checked, with a batch dimension, and what follows from their shapes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    g: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    sequences: int
    unbatched: bool

    @property
    def state_dtype(self) -> np.dtype:
        """What states are kept in."""
        return np.dtype(np.float64 if self.query.dtype == np.float64 else np.float32)


def delta_rule(
    query: Any, key: Any, value: Any, beta: Any, g: Any, gate: str, initial_state: Any, borders: Any
) -> DeltaRule:
    """The arguments of the delta rule; `gate` is the pattern of `g` after the tokens, if it has one."""
    packed = borders is not None
    query = floating("query", query)
    unbatched = packed and query.ndim == 3
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
    rows = "B"
    if packed:
        if not unbatched and dims["B"] != 1:
            fail("cu_seqlens", f"a batch of {dims['B']}", "packed sequences in [1, T, …] or [T, …] arrays")
        borders = cu_seqlens(borders, dims["T"])
        rows, dims.sizes["N"] = "N", known_size("cu_seqlens", borders.shape[0] - 1, "sequences")
    if initial_state is not None:
        initial_state = floating("initial_state", initial_state)
        dims.match("initial_state", initial_state, "H K V", f"{rows} H K V")
    if unbatched:
        arrays = {name: x[None] for name, x in arrays.items()}
    return DeltaRule(
        arrays["query"],
        arrays["key"],
        arrays["value"],
        arrays["beta"],
        arrays.get("g"),
        initial_state,
        borders,
        dims[rows],
        unbatched,
    )
