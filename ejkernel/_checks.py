"""Every validation of user input and its wording: the argument, what it got, what would fit.

Wrong shapes and values raise `ValueError`, wrong kinds of array `TypeError`. Code below the fronts trusts what passed.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np


def fail(argument: str, got: object, expected: str) -> NoReturn:
    """Raises the `ValueError` that every check of a value ends in."""
    raise ValueError(f"{argument}: got {got}; expected {expected}")


def is_concrete(x: Any) -> bool:
    """Whether `x`'s values can be read now, rather than only when a compiled function runs."""
    return not isinstance(x, jax.core.Tracer)


def array(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array; anything that is no array (a list, `None`, a string) is a `TypeError`."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{argument}: got {type(x).__name__}; expected an array")
    if isinstance(x, np.ndarray) and x.dtype.kind in "OSUMm":
        raise TypeError(f"{argument}: got dtype {x.dtype}; expected an array of numbers")
    return jnp.asarray(x)


def floating(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array of a floating-point dtype."""
    x = array(argument, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{argument}: got dtype {x.dtype}; expected a floating-point dtype")
    return x


class Dims:
    """Letters bound to sizes as arrays are matched against shape patterns, so that one mistake is told once.

    A pattern names one dimension a word: a letter bound by an earlier array must agree with it, a number must be
    that number, and `1|H|Hkv` allows any of its parts (and binds none).

    >>> import numpy as np
    >>> dims = Dims()
    >>> dims.match("query", np.zeros((2, 5, 4, 16)), "B T H K")
    >>> dims.match("key", np.zeros((2, 6, 4, 16)), "B T Hkv K")
    Traceback (most recent call last):
    ValueError: key: got shape (2, 6, 4, 16); expected [B, T, Hkv, K] with B=2, T=5, K=16 (B, T, K as in query)
    """

    def __init__(self, **sizes: int) -> None:
        self.sizes = dict(sizes)
        self._source: dict[str, str] = {}

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def match(self, argument: str, x: Any, *patterns: str) -> None:
        """Checks `x` against the first pattern of its rank, binding letters not seen before."""
        shape = tuple(x.shape)
        of_rank = [pattern.split() for pattern in patterns if len(pattern.split()) == len(shape)]
        if not of_rank:
            fail(argument, f"shape {shape}", f"{self._words([each.split() for each in patterns])}")
        for words in of_rank:
            if all(self._fits(word, size) for word, size in zip(words, shape, strict=True)):
                for word, size in zip(words, shape, strict=True):
                    if word.isalpha() and word not in self.sizes:
                        self.sizes[word] = size
                        self._source[word] = argument
                return
        fail(argument, f"shape {shape}", self._words(of_rank))

    def _fits(self, word: str, size: int) -> bool:
        if "|" in word:
            return any(self._fits(part, size) for part in word.split("|"))
        return self.sizes.get(word, size) == size if word.isalpha() else size == int(word)

    def _words(self, patterns: Sequence[Sequence[str]]) -> str:
        letters = list(dict.fromkeys(part for words in patterns for word in words for part in word.split("|")))
        known = [letter for letter in letters if letter in self.sizes]
        text = " or ".join(f"[{', '.join(words)}]" for words in patterns)
        if known:
            text += " with " + ", ".join(f"{letter}={self.sizes[letter]}" for letter in known)
        sources: dict[str, list[str]] = {}
        for letter in known:
            if letter in self._source:
                sources.setdefault(self._source[letter], []).append(letter)
        if sources:
            text += " (" + "; ".join(f"{', '.join(each)} as in {name}" for name, each in sources.items()) + ")"
        return text


def cu_seqlens(cu: Any, total_tokens: int | None = None, argument: str = "cu_seqlens") -> jax.Array:
    """`cu`, an array or a list, as an array of sequence borders; its values are checked when they can be read."""
    cu = array(argument, np.asarray(cu) if isinstance(cu, list | tuple) and all(map(is_concrete, cu)) else cu)
    if not jnp.issubdtype(cu.dtype, jnp.integer):
        raise TypeError(f"{argument}: got dtype {cu.dtype}; expected int32 or int64")
    if cu.ndim != 1 or cu.shape[0] < 1:
        fail(argument, f"shape {cu.shape}", "[N+1]: 0 and the end of each of N sequences")
    if is_concrete(cu):
        borders = np.asarray(cu)
        if borders[0] != 0:
            fail(argument, f"first value {borders[0]}", "0")
        if (np.diff(borders) < 0).any():
            fail(
                argument,
                f"a decrease at index {int(np.argmax(np.diff(borders) < 0)) + 1}",
                "values that never decrease",
            )
        if total_tokens is not None and borders[-1] > total_tokens:
            fail(argument, f"last value {borders[-1]}", f"at most the {total_tokens} tokens there are")
    return cu


def static_total(argument: str, total: Any, cu: Any, count: Callable[[np.ndarray], np.integer]) -> int:
    """How many rows a function of cu_seqlens returns: `total`, or what `count` says of its lengths if known."""
    needed = int(count(np.diff(np.asarray(cu)))) if is_concrete(cu) else None
    if total is None:
        if needed is None:
            what = argument.removeprefix("total_")
            fail(argument, "None with a traced cu_seqlens", f"{argument}=, the number of {what} known when tracing")
        return needed
    if isinstance(total, bool) or not isinstance(total, int | np.integer) or total < 0:
        fail(argument, repr(total) if is_concrete(total) else "a traced value", "an int of at least 0")
    if needed is not None and total < needed:
        fail(argument, total, f"at least the {needed} that cu_seqlens has")
    return int(total)


def positive_int(argument: str, x: Any) -> int:
    """`x`, an int of at least 1 known when tracing."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1:
        fail(argument, repr(x) if is_concrete(x) else "a traced value", "an int of at least 1")
    return int(x)


def power_of_two(argument: str, x: Any) -> int:
    """`x`, one of 1, 2, 4, … known when tracing."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or x < 1 or x & (x - 1):
        fail(argument, repr(x) if is_concrete(x) else "a traced value", "a power of two")
    return int(x)


def integer_dtype(argument: str, dtype: Any) -> np.dtype:
    """`dtype`, if it is an integer one."""
    found = _dtype(argument, dtype, "an integer dtype")
    if not jnp.issubdtype(found, jnp.integer):
        raise TypeError(f"{argument}: got {found}; expected an integer dtype")
    return found


def token_mask(mask: Any) -> jax.Array:
    """`mask` as a bool array `[B, T]`; integers count as True unless they are 0."""
    mask = array("mask", mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask: got dtype {mask.dtype}; expected bool")
    if mask.ndim != 2:
        fail("mask", f"shape {mask.shape}", "[B, T]")
    return mask != 0


def time_series(argument: str, x: Any, ranks: Sequence[int], head_first: bool) -> jax.Array:
    """`x` as the floating-point input of a sum along time, of one of `ranks`."""
    x = floating(argument, x)
    layout = "B H T S" if head_first else "B T H S"
    Dims().match(argument, x, *(layout[: 2 * rank - 1] for rank in ranks))
    return x


def one_row(batch: int) -> None:
    """Packed sequences share a single row."""
    if batch != 1:
        fail("cu_seqlens", f"a batch of {batch}", "batch 1, as packed sequences share one row")


def grouped_heads(heads: int, kv_heads: int) -> None:
    """Each key/value head serves the same number of query heads."""
    if kv_heads == 0 or heads % kv_heads:
        fail("key", f"{kv_heads} heads", f"a divisor of query's {heads} heads")


def real(argument: str, x: Any) -> float:
    """`x` as a finite float known now; a traced value or anything that is no real number is a `TypeError`."""
    if not is_concrete(x):
        raise TypeError(f"{argument}: got a traced value; expected a number known when tracing (a static argument)")
    if isinstance(x, bool) or not isinstance(x, int | float | np.floating | np.integer):
        raise TypeError(f"{argument}: got {type(x).__name__}; expected a number")
    if not math.isfinite(x):
        fail(argument, x, "a finite number")
    return float(x)


def flag(argument: str, x: Any) -> bool:
    """`x` as a bool known now."""
    if not isinstance(x, bool | np.bool_):
        what = type(x).__name__ if is_concrete(x) else "a traced value"
        raise TypeError(f"{argument}: got {what}; expected True or False, known when tracing")
    return bool(x)


def floating_dtype(argument: str, dtype: Any) -> np.dtype:
    """`dtype` as a floating-point NumPy dtype."""
    found = _dtype(argument, dtype, "a floating-point dtype")
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{argument}: got {found}; expected a floating-point dtype")
    return found


def _dtype(argument: str, dtype: Any, expected: str) -> np.dtype:
    try:
        # NumPy reads None as float64
        return np.dtype(dtype if dtype is not None else "None")
    except TypeError:
        raise TypeError(f"{argument}: got {dtype!r}; expected {expected}") from None


def positive(argument: str, x: Any) -> float:
    """`x` as a float above 0 known now."""
    x = real(argument, x)
    if not x > 0:
        fail(argument, x, "a number above 0")
    return x


def scalar(argument: str, x: Any) -> jax.Array:
    """`x` as a floating array of one number and no dimensions."""
    x = floating(argument, x)
    if x.size != 1:
        fail(argument, f"shape {x.shape}", "one number")
    return x.reshape(())


def factor(argument: str, x: Any) -> float | jax.Array:
    """`x`, a number: as a float if it is known now, or as an array, which may be traced and has a gradient."""
    return scalar(argument, x) if isinstance(x, jax.Array | np.ndarray) else real(argument, x)


def attention_inputs(dims: Dims, query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three arrays of attention, whose sizes `dims` learns."""
    query, key, value = floating("query", query), floating("key", key), floating("value", value)
    dims.match("query", query, "B S H D")
    dims.match("key", key, "B L Hkv D")
    dims.match("value", value, "B L Hkv Dv")
    grouped_heads(dims["H"], dims["Hkv"])
    return query, key, value


def unbatched(argument: str, x: Any) -> jax.Array:
    """`x`, a packed stream `[T, heads, dim]`, as a batch of one row."""
    x = array(argument, x)
    if x.ndim != 3:
        fail(argument, f"shape {x.shape}", "[tokens, heads, dim], of rank 3 as query is")
    return x[None]


def packed_borders(
    query: Any, key: Any, cu: Any, cu_kv: Any, devices: int = 1
) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """`cu_seqlens` and `cu_seqlens_kv` as int32, the one standing in for the other; `None` if nothing is packed.

    They count the tokens of `devices` slices like this one.
    """
    if cu is None:
        if cu_kv is not None:
            fail("cu_seqlens_kv", "borders of keys alone", "cu_seqlens beside it")
        return None, None
    query, key = array("query", query), array("key", key)
    if query.ndim not in (3, 4) or (query.ndim == 4 and query.shape[0] != 1):
        fail("query", f"shape {query.shape}", "[1, S, H, D] or [S, H, D], as cu_seqlens packs one row")
    if key.ndim != query.ndim:
        fail("key", f"shape {key.shape}", f"rank {query.ndim}, as query has")
    borders = cu_seqlens(cu, devices * query.shape[-3])
    if cu_kv is None:
        # they stand for the keys too, and must fit them
        borders_kv = cu_seqlens(cu, devices * key.shape[-3])
    else:
        borders_kv = cu_seqlens(cu_kv, devices * key.shape[-3], "cu_seqlens_kv")
    if borders.shape != borders_kv.shape:
        fail("cu_seqlens_kv", f"{borders_kv.shape[0] - 1} sequences", f"the {borders.shape[0] - 1} of cu_seqlens")
    if borders.shape[0] == 1:  # no sequences at all: one empty one is the same and spares a case
        borders, borders_kv = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    return borders.astype(jnp.int32), borders_kv.astype(jnp.int32)


def query_offset(offset: Any, rows: int) -> jax.Array | None:
    """`offset` as int32 `[1]` or `[rows]`, `None` if it is 0."""
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return None if offset == 0 else jnp.full(1, offset, jnp.int32)
    offset = array("query_offset", offset)
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"query_offset: got dtype {offset.dtype}; expected an integer dtype")
    if offset.shape not in ((), (1,), (rows,)):
        fail("query_offset", f"shape {offset.shape}", f"one int, or [{rows}]: one for each row or packed sequence")
    return offset.reshape(-1).astype(jnp.int32)


def attention_mask(dims: Dims, mask: Any) -> jax.Array:
    """`mask` as a bool array that broadcasts to `[B, H, S, L]`, or does with its heads repeated by group."""
    mask = array("attention_mask", mask)
    if mask.dtype != np.bool_:
        raise TypeError(f"attention_mask: got dtype {mask.dtype}; expected bool, True where a query may attend")
    dims.match("attention_mask", mask, "1|B 1|H|Hkv 1|S 1|L")
    return mask


def attention_bias(dims: Dims, bias: Any, argument: str = "bias") -> jax.Array:
    """`bias` as a floating array that broadcasts to `[B, H, S, L]`, or does with its heads repeated by group."""
    bias = floating(argument, bias)
    if bias.ndim == 4 and bias.shape[1] not in (1, dims["H"], dims["Hkv"]):
        raise NotImplementedError(
            f"{argument}: got {bias.shape[1]} heads; expected 1, Hkv={dims['Hkv']} or H={dims['H']}"
        )
    dims.match(argument, bias, "1|B 1|H|Hkv 1|S 1|L")
    return bias


def sinks(dims: Dims, logits: Any) -> jax.Array:
    """`logits` as `[1 or Hkv or H, sinks]`."""
    logits = floating("softmax_aux", logits)
    dims.match("softmax_aux", logits, "sinks", "1|H|Hkv sinks")
    return logits.reshape(-1, logits.shape[-1])


def block_sizes(sizes: Any) -> tuple[int, int]:
    """`sizes` as how many queries and how many keys a block has."""
    if not isinstance(sizes, tuple | list) or len(sizes) != 2:
        fail("block_sizes", repr(sizes), "(queries, keys)")
    return positive_int("block_sizes", sizes[0]), positive_int("block_sizes", sizes[1])


def sliding_window(window: Any) -> tuple[int, int] | None:
    """`window` as how far to the left and to the right of its own position a query sees."""
    if window is None:
        return None
    bounds = window if isinstance(window, tuple | list) else (window, window)
    if len(bounds) != 2:
        fail("sliding_window", f"{len(bounds)} bounds", "one bound or (left, right)")
    for bound in bounds:
        if isinstance(bound, bool) or not isinstance(bound, int | np.integer):
            what = type(bound).__name__ if is_concrete(bound) else "a traced value"
            raise TypeError(f"sliding_window: got {what}; expected an int or a pair of them, known when tracing")
        if bound < 0:
            fail("sliding_window", bound, "bounds of at least 0")
    # no position differs by as much, and sums with one stay within int32
    return min(int(bounds[0]), 2**30), min(int(bounds[1]), 2**30)


def dropout(deterministic: Any, probability: Any, key: Any) -> tuple[float, jax.Array | None]:
    """The probability of dropping a weight, 0 if none is to be dropped, and the key to draw with."""
    probability = real("dropout_prob", probability)
    if not 0 <= probability < 1:
        fail("dropout_prob", probability, "a probability in [0, 1)")
    if flag("deterministic", deterministic) or probability == 0:
        return 0.0, None
    if key is None:
        fail("dropout_rng", None, "a key, as deterministic=False and dropout_prob is above 0")
    key = array("dropout_rng", key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed and key.dtype != np.uint32:
        raise TypeError(
            f"dropout_rng: got dtype {key.dtype}; expected jax.random.key(seed) or jax.random.PRNGKey(seed)"
        )
    if (typed and key.shape != ()) or (not typed and key.shape not in ((2,), (4,))):
        fail("dropout_rng", f"shape {key.shape}", f"one key, of shape {'[]' if typed else '[2]'}")
    return probability, key


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
        return np.dtype(np.float64 if self.query.dtype == np.float64 else np.float32)


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
    grouped_heads(dims["H"], dims["Hkv"])
    rows = "B"
    if packed:
        if not unbatched and dims["B"] != 1:
            fail("cu_seqlens", f"a batch of {dims['B']}", "packed sequences in [1, T, …] or [T, …] arrays")
        borders = cu_seqlens(borders, dims["T"])
        rows, dims.sizes["N"] = "N", borders.shape[0] - 1
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
    return int(query.shape[-2])


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


def layer_input(x: Any, width: int, borders: Any) -> jax.Array:
    """`x`, the tokens that a layer of that width takes; `borders` is its `cu_seqlens`."""
    x = floating("x", x)
    Dims(width=width).match("x", x, *(("B T width",) if borders is None else ("T width", "1 T width")))
    if borders is not None:
        cu_seqlens(borders, x.shape[-2])
    return x


def bound_axis(axis_name: str) -> int:
    """The size of a mesh axis that the caller's `shard_map` runs over."""
    _axis_name(axis_name)
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        fail("axis_name", repr(axis_name), "an axis of the shard_map around this call; outside of one, give mesh=")


def mesh_axis(mesh: jax.sharding.Mesh, axis_name: str) -> int:
    """The size of an axis of `mesh`."""
    if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        raise TypeError(f"mesh: got {type(mesh).__name__}; expected a jax.sharding.Mesh")
    _axis_name(axis_name)
    if axis_name not in mesh.shape:
        fail("axis_name", repr(axis_name), f"one of the mesh's axes {tuple(mesh.shape)}")
    return mesh.shape[axis_name]


def _axis_name(axis_name: Any) -> None:
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name: got {type(axis_name).__name__}; expected the name of a mesh axis")


def divisible_time(tokens: int, axis_name: str, devices: int) -> None:
    """The tokens can be dealt out evenly."""
    if tokens % devices:
        fail("query", f"{tokens} tokens", f"a multiple of the {devices} devices of axis {axis_name!r}: pad the tokens")


def ring_slices(layout: str) -> int:
    """How many slices of the tokens a device holds."""
    if layout not in ("contiguous", "balanced"):
        fail("layout", repr(layout), "'contiguous' or 'balanced'")
    return 2 if layout == "balanced" else 1


def axis(x: Any, rank: int) -> int:
    """`axis`, counted from the front, of an array of that rank."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer) or not -rank <= x < rank:
        fail("axis", repr(x), f"an axis of an array of rank {rank}")
    return int(x) % rank


def even_slices(argument: str, tokens: int, slices: int, devices: int | None = None) -> int:
    """How many tokens a slice has if they are dealt out evenly, over `devices` or on one."""
    whole = slices * (devices or 1)
    if tokens % whole:
        if devices is None:
            expected = "an even number on each device"
        else:
            expected = f"a multiple of {whole}, {'twice ' if slices == 2 else ''}the {devices} devices"
        why = ", as layout='balanced' gives each device two slices" if slices == 2 else ""
        fail(argument, f"{tokens} tokens", f"{expected}{why}: pad the tokens")
    return tokens // whole
