"""The arguments of the short convolution."""

from typing import Any, Literal, NamedTuple

import jax

from ejkernel._checks.arrays import floating
from ejkernel._checks.packing import token_segments
from ejkernel._checks.pools import INPUTS, Pool, pool
from ejkernel._checks.recurrence import packed, rows
from ejkernel._checks.values import known_size
from ejkernel._checks.wording import Dims, fail


class Convolution(NamedTuple):
    """The arrays of the convolution, checked, with a batch dimension, and what follows from their shapes."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    initial_state: Any  # an array, a `Pool` or `None`
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    sequences: int
    unbatched: bool


def convolution(x: Any, weight: Any, bias: Any, initial_state: Any, borders: Any, ids: Any) -> Convolution:
    """The arguments of `causal_conv1d`; `borders` is its `cu_seqlens`, and `ids` its `segment_ids`."""
    x = floating("x", x)
    unbatched = borders is not None and x.ndim == 2
    dims = Dims()
    dims.match("x", x, "T D" if unbatched else "B T D")
    known_size("x", dims["T"], "tokens")
    known_size("x", dims["D"], "channels")
    weight = floating("weight", weight)
    dims.match("weight", weight, "W D")
    if known_size("weight", dims["W"], "taps") < 1:
        fail("weight", f"shape {weight.shape}", "[W, D] with W of at least 1")
    if bias is not None:
        bias = floating("bias", bias)
        dims.match("bias", bias, "D")
    ids = None if ids is None else token_segments(dims, ids, borders)
    borders = packed(dims, borders, unbatched)
    dims.bind("history", dims["W"] - 1, "weight")
    if isinstance(initial_state, Pool):
        initial_state = pool(dims, rows(dims), initial_state, "history D", borders, INPUTS)
    elif initial_state is not None:
        initial_state = floating("initial_state", initial_state)
        dims.match("initial_state", initial_state, f"{rows(dims)} history D")
    x = x[None] if unbatched else x
    return Convolution(x, weight, bias, initial_state, borders, ids, dims[rows(dims)], unbatched)


def activation(x: Any) -> Literal["silu"] | None:
    """The activation of the convolution's sums: `None` or `"silu"`."""
    if x is None:
        return None
    if not isinstance(x, str) or x != "silu":
        fail("activation", repr(x), "None or 'silu'")
    return "silu"
