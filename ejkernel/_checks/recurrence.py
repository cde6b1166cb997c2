"""What the linear recurrence, its family and the layers of them take."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import array, floating, grouped_heads
from ejkernel._checks.packing import cu_seqlens
from ejkernel._checks.values import known_size
from ejkernel._checks.wording import Dims, fail, is_concrete


def state_dtype(query: Any) -> np.dtype:
    """What the states of a call, and what is added up over its tokens, are kept in."""
    return np.dtype(np.float64 if floating("query", query).dtype == np.float64 else np.float32)


class LinearAttention(NamedTuple):
    """The arrays of `recurrent`, checked, with a batch dimension, and what follows from their shapes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    g: jax.Array | None
    g_gamma: jax.Array | None
    gk: jax.Array | None
    gv: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    sequences: int
    unbatched: bool

    @property
    def state_dtype(self) -> np.dtype:
        """What states are kept in and gates are added in."""
        return state_dtype(self.query)


def linear_attention(
    query: Any, key: Any, value: Any, g: Any, g_gamma: Any, gk: Any, gv: Any, initial_state: Any, borders: Any
) -> LinearAttention:
    """The arguments of `recurrent`; `borders` is its `cu_seqlens`."""
    packed = borders is not None
    query = floating("query", query)
    unbatched = packed and query.ndim == 3
    lead = "T" if unbatched else "B T"
    dims = Dims()
    dims.match("query", query, f"{lead} H K")
    arrays = {"query": query}
    for name, x, pattern in (
        ("key", key, f"{lead} Hkv K"),
        ("value", value, f"{lead} Hkv V"),
        ("g", g, f"{lead} H 1|K"),
        ("gk", gk, f"{lead} H 1|K"),
        ("gv", gv, f"{lead} H 1|V"),
    ):
        if x is not None or name in ("key", "value"):
            arrays[name] = floating(name, x)
            dims.match(name, arrays[name], pattern)
    known = (
        ("query", "T", "tokens"),
        ("query", "H", "heads"),
        ("query", "K", "key dims"),
        ("value", "V", "value dims"),
    )
    for name, letter, what in (*known, ("key", "Hkv", "heads")):
        known_size(name, dims[letter], what)
    grouped_heads(dims["H"], dims["Hkv"])
    rows = "B"
    if packed:
        if not unbatched and dims["B"] != 1:
            fail("cu_seqlens", f"a batch of {dims['B']}", "packed sequences in [1, T, …] or [T, …] arrays")
        borders = cu_seqlens(borders, dims["T"])
        rows, dims.sizes["N"] = "N", known_size("cu_seqlens", borders.shape[0] - 1, "sequences")
    if g_gamma is not None:
        g_gamma = floating("g_gamma", g_gamma)
        dims.match("g_gamma", g_gamma, "H", f"1|{rows} H")
    if initial_state is not None:
        initial_state = floating("initial_state", initial_state)
        dims.match("initial_state", initial_state, "H K V", f"{rows} H K V")
    if unbatched:
        arrays = {name: x[None] for name, x in arrays.items()}
    tokens = [arrays.get(name) for name in ("query", "key", "value", "g", "gk", "gv")]
    query, key, value, g, gk, gv = tokens
    return LinearAttention(query, key, value, g, g_gamma, gk, gv, initial_state, borders, dims[rows], unbatched)


def heads(query: Any) -> int:
    """The number of query heads, before anything else is known of the call."""
    query = floating("query", query)
    if query.ndim not in (3, 4):
        fail("query", f"shape {query.shape}", "[B, T, H, K], or [T, H, K] with cu_seqlens")
    return known_size("query", query.shape[-2], "heads")


def gate_per_head(g: Any, query: Any) -> jax.Array:
    """`g`, one number a head and token, with a last dimension of 1."""
    g = floating("g", g)
    heads(query)
    if g.shape != query.shape[:-1]:
        fail("g", f"shape {g.shape}", f"{query.shape[:-1]}, one number for each token and head of query")
    return g[..., None]


def layer_number(x: Any) -> jax.Array:
    """`layer_idx`, a number that may be traced."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating | np.ndarray | jax.Array):
        raise TypeError(f"layer_idx: got {type(x).__name__}; expected a number")
    x = array("layer_idx", np.asarray(x) if is_concrete(x) else x)
    if x.shape != ():
        fail("layer_idx", f"shape {x.shape}", "one number")
    return x


def layer_input(dims: Dims, x: Any, borders: Any) -> tuple[jax.Array, jax.Array | None]:
    """The tokens that a layer takes, and its `cu_seqlens`; `dims` knows the `width` and learns `B` or `N`."""
    x = floating("x", x)
    if borders is None:
        dims.match("x", x, "B T width")
        return x, None
    dims.match("x", x, "T width", "1 T width")
    borders = cu_seqlens(borders, x.shape[-2])
    dims.sizes["N"] = borders.shape[0] - 1
    return x, borders


def carried(dims: Dims, argument: str, x: Any, pattern: str) -> jax.Array:
    """`x`, a part of what a layer hands from call to call: an array for each of `B` rows or `N` packed sequences."""
    x = floating(argument, x)
    dims.match(argument, x, f"{'N' if 'N' in dims.sizes else 'B'} {pattern}")
    return x


def cache_position(dims: Dims, position: Any) -> jax.Array:
    """`position`, where the next token of each row goes."""
    position = array("cache.position", position)
    if not jnp.issubdtype(position.dtype, jnp.integer):
        raise TypeError(f"cache.position: got dtype {position.dtype}; expected an integer dtype")
    dims.match("cache.position", position, "B")
    return position
