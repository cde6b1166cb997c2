"""The arguments of the gated linear recurrence, of the delta rule and of their layers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import array, floating
from ejkernel._checks.packing import cu_seqlens, token_segments
from ejkernel._checks.pools import STATES, Pool, pool
from ejkernel._checks.values import known_size
from ejkernel._checks.wording import Dims, fail, is_concrete


def state_dtype(query: Any) -> np.dtype:
    """The dtype of states and of sums over tokens."""
    return np.dtype(np.float64 if floating("query", query).dtype == np.float64 else np.float32)


class RecurrenceArrays(NamedTuple):
    """The arrays of a recurrence, checked and with a batch dimension, and what follows from their shapes."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    initial_state: Any  # an array, a `Pool` or `None`
    cu_seqlens: jax.Array | None
    segment_ids: jax.Array | None
    sequences: int
    unbatched: bool
    g: jax.Array | None = None
    gk: jax.Array | None = None
    gv: jax.Array | None = None
    g_gamma: jax.Array | None = None
    beta: jax.Array | None = None  # the delta rule's, and `None` in every other recurrence

    @property
    def heads(self) -> int:
        """Of gates, states and output; query, key and value each have a number that divides it."""
        return max(x.shape[2] for x in (self.query, self.key, self.value, self.beta) if x is not None)

    @property
    def state_dtype(self) -> np.dtype:
        """The dtype of states and of sums of gates."""
        return state_dtype(self.query)


def linear_attention(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    initial_state: Any = None,
    borders: Any = None,
    segment_ids: Any = None,
) -> RecurrenceArrays:
    """The arguments of `recurrent`; `borders` is its `cu_seqlens`."""
    dims, query = Dims(), floating("query", query)
    unbatched, lead = _token_dims(query, borders)
    arrays = _matched(dims, lead, query=(query, "H K"), key=(key, "Hk K"), value=(value, "Hv V"))
    known = (("query", "T", "tokens"), ("query", "K", "key dims"), ("value", "V", "value dims"))
    for name, letter, what in known:
        known_size(name, dims[letter], what)
    counts = {"query": dims["H"], "key": dims["Hk"], "value": dims["Hv"]}
    for name, count in counts.items():
        known_size(name, count, "heads")
    most = max(counts, key=lambda name: counts[name])
    dims.bind("H", counts[most], most)
    _heads_divide(dims, counts, most)
    gates = {"g": (g, "H 1|K"), "gk": (gk, "H 1|K"), "gv": (gv, "H 1|V")}
    arrays |= _matched(dims, lead, **{name: each for name, each in gates.items() if each[0] is not None})
    return _with_sequences(dims, arrays, g_gamma, initial_state, borders, segment_ids, unbatched)


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
) -> RecurrenceArrays:
    """The arguments of the delta rule; `gate` is the pattern of `g` after the tokens, if it has one."""
    dims, query = Dims(), floating("query", query)
    unbatched, lead = _token_dims(query, borders)
    # beta says how many heads there are
    arrays = _matched(dims, lead, beta=(beta, "H"), query=(query, "Hq K"), key=(key, "Hk K"), value=(value, "Hv V"))
    known_size("beta", dims["T"], "tokens")
    known_size("beta", dims["H"], "heads")
    for name in ("query", "key", "value"):
        known_size(name, arrays[name].shape[-1], "dims")
        known_size(name, arrays[name].shape[-2], "heads")
    _heads_divide(dims, {"query": dims["Hq"], "key": dims["Hk"], "value": dims["Hv"]}, "beta")
    if gate:
        arrays |= _matched(dims, lead, g=(g, gate))
    return _with_sequences(dims, arrays, None, initial_state, borders, segment_ids, unbatched)


def _token_dims(query: jax.Array, borders: Any) -> tuple[bool, str]:
    """Whether arrays are packed without a batch dimension, and the pattern of the dimensions before heads."""
    unbatched = borders is not None and query.ndim == 3
    return unbatched, "T" if unbatched else "B T"


def _matched(dims: Dims, lead: str, **arrays: tuple[Any, str]) -> dict[str, jax.Array]:
    """Floating arrays by name, each matched against its pattern behind `lead`."""
    checked = {}
    for name, (x, pattern) in arrays.items():
        checked[name] = floating(name, x)
        dims.match(name, checked[name], f"{lead} {pattern}")
    return checked


def _heads_divide(dims: Dims, counts: dict[str, int], largest: str) -> None:
    """The number of heads of each array divides `H`, which is that of the array `largest`."""
    for name, count in counts.items():
        if count == 0 or dims["H"] % count:
            fail(name, f"{count} heads", f"a divisor of {largest}'s {dims['H']} heads")


def _with_sequences(
    dims: Dims, arrays: dict[str, jax.Array], g_gamma: Any, initial_state: Any, borders: Any, ids: Any, unbatched: bool
) -> RecurrenceArrays:
    """`arrays` beside what a recurrence has for each sequence, which is checked here."""
    ids = None if ids is None else token_segments(dims, ids, borders)
    borders = packed(dims, borders, unbatched)
    if g_gamma is not None:
        g_gamma = floating("g_gamma", g_gamma)
        dims.match("g_gamma", g_gamma, "H", f"1|{rows(dims)} H")
    if initial_state is not None:
        initial_state = _state(dims, initial_state, borders)
    if unbatched:
        arrays = {name: x[None] for name, x in arrays.items()}
    return RecurrenceArrays(
        **arrays,
        g_gamma=g_gamma,
        initial_state=initial_state,
        cu_seqlens=borders,
        segment_ids=ids,
        sequences=dims[rows(dims)],
        unbatched=unbatched,
    )


def rows(dims: Dims) -> str:
    """The letter of what has a state of its own: packed sequences, or rows of a batch."""
    return "N" if "N" in dims.sizes else "B"


def packed(dims: Dims, borders: Any, unbatched: bool) -> jax.Array | None:
    """`cu_seqlens`, if given; `dims` knows `T`, and `B` unless the arrays are `unbatched`, and learns `N`."""
    if borders is None:
        return None
    if not unbatched and dims["B"] != 1:
        fail("cu_seqlens", f"a batch of {dims['B']}", "packed sequences in [1, T, …] or [T, …] arrays")
    borders = cu_seqlens(borders, dims["T"])
    dims.sizes["N"] = known_size("cu_seqlens", borders.shape[0] - 1, "sequences")
    return borders


def _state(dims: Dims, x: Any, borders: Any) -> jax.Array | Pool:
    """`initial_state`, one for each sequence or one for all, or a pool of states."""
    if isinstance(x, Pool):
        return pool(dims, rows(dims), x, "H K V", borders, STATES)
    x = floating("initial_state", x)
    dims.match("initial_state", x, "H K V", f"{rows(dims)} H K V")
    return x


def heads(query: Any, key: Any, value: Any) -> int:
    """The number of heads, before anything else is known of the call."""
    query = floating("query", query)
    if query.ndim not in (3, 4):
        fail("query", f"shape {query.shape}", "[B, T, H, K], or [T, H, K] with cu_seqlens")
    arrays = {"query": query, "key": floating("key", key), "value": floating("value", value)}
    # other ranks are errors later on
    fitting = {name: x for name, x in arrays.items() if x.ndim == query.ndim}
    return max(known_size(name, x.shape[-2], "heads") for name, x in fitting.items())


def gate_per_head(g: Any, query: Any, key: Any, value: Any) -> jax.Array:
    """`g`, one number a head and token, with a last dimension of 1."""
    g = floating("g", g)
    expected = (*floating("query", query).shape[:-2], heads(query, key, value))
    if g.shape != expected:
        fail("g", f"shape {g.shape}", f"{expected}, one number for each token and head")
    return g[..., None]


def layer_number(x: Any, num_layers: int) -> jax.Array:
    """`layer_idx`, a number that may be traced, from 0 to `num_layers - 1`: past those a memory would grow."""
    if isinstance(x, bool) or not isinstance(x, int | float | np.integer | np.floating | np.ndarray | jax.Array):
        raise TypeError(f"layer_idx: got {type(x).__name__}; expected a number")
    known = is_concrete(x)
    number = array("layer_idx", np.asarray(x) if known else x)
    if number.shape != ():
        fail("layer_idx", f"shape {number.shape}", "one number")
    if known and not 0 <= float(x) < num_layers:
        fail("layer_idx", x, f"at least 0 and below num_layers, {num_layers}")
    return number


def layer_input(dims: Dims, x: Any, borders: Any, ids: Any) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The tokens that a layer takes, its `cu_seqlens` and its `segment_ids`.

    `dims` knows the `width` and learns `B` or `N`.
    """
    x = floating("x", x)
    if ids is not None or borders is None:
        dims.match("x", x, "B T width")
        return x, None, None if ids is None else token_segments(dims, ids, borders)
    dims.match("x", x, "T width", "1 T width")
    borders = cu_seqlens(borders, x.shape[-2])
    dims.sizes["N"] = borders.shape[0] - 1
    return x, borders, None


def carried(dims: Dims, argument: str, x: Any, pattern: str) -> jax.Array:
    """`x`, a part of what a layer hands from call to call: an array for each of `B` rows or `N` packed sequences."""
    x = floating(argument, x)
    dims.match(argument, x, f"{rows(dims)} {pattern}")
    return x


def position(dims: Dims, argument: str, x: Any) -> jax.Array:
    """`x`, where the next token of each of `B` rows or `N` packed sequences goes."""
    given, x = x, array(argument, x)
    if x.dtype not in (jnp.int32, jnp.int64):  # narrower ones would wrap as tokens are added
        raise TypeError(f"{argument}: got dtype {x.dtype}; expected an integer dtype, int32 or int64")
    dims.match(argument, x, rows(dims))
    if is_concrete(given) and x.size and (lowest := np.asarray(given).min()) < 0:
        fail(argument, lowest, "positions of at least 0")
    return x
