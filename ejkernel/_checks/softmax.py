"""What softmax attention takes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import array, floating, grouped_heads, int32
from ejkernel._checks.packing import token_segments
from ejkernel._checks.values import flag, positive, positive_int, real
from ejkernel._checks.wording import Dims, fail, is_concrete


def attention_inputs(dims: Dims, query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The three arrays of attention, whose sizes `dims` learns."""
    query, key, value = floating("query", query), floating("key", key), floating("value", value)
    dims.match("query", query, "B S H D")
    dims.match("key", key, "B L Hkv D")
    dims.match("value", value, "B L Hkv Dv")
    grouped_heads(dims["H"], dims["Hkv"])
    return query, key, value


def query_offset(offset: Any, rows: int) -> jax.Array | None:
    """`offset` as int32 `[1]` or `[rows]`, `None` if it is 0; numbers beyond int32 become its least or largest."""
    if isinstance(offset, int | np.integer) and not isinstance(offset, bool):
        return None if offset == 0 else jnp.full(1, min(max(offset, -(2**31)), 2**31 - 1), jnp.int32)
    offset = int32("query_offset", offset)
    if offset.shape not in ((), (1,), (rows,)):
        fail("query_offset", f"shape {offset.shape}", f"one int, or [{rows}]: one for each row or packed sequence")
    return offset.reshape(-1)


def attention_segments(dims: Dims, ids: Any, ids_kv: Any) -> tuple[jax.Array, jax.Array] | tuple[None, None]:
    """`segment_ids` and `segment_ids_kv` in one dtype, the one standing in for the other; `None` if there are none."""
    if ids is None:
        if ids_kv is not None:
            fail("segment_ids_kv", "ids of keys alone", "segment_ids beside it")
        return None, None
    ids = _signed(token_segments(dims, ids, None, "B S"))
    if ids_kv is None:
        if dims["S"] != dims["L"]:
            fail("segment_ids_kv", f"None with {dims['S']} queries and {dims['L']} keys", "ids [B, L] of the keys")
        return ids, ids
    ids_kv = _signed(token_segments(dims, ids_kv, None, "B L", "segment_ids_kv"))
    if {ids.dtype, ids_kv.dtype} == {np.dtype(np.int32), np.dtype(np.int64)}:
        ids, ids_kv = ids.astype(np.int64), ids_kv.astype(np.int64)
    if ids.dtype != ids_kv.dtype:
        raise TypeError(f"segment_ids_kv: got dtype {ids_kv.dtype}; expected {ids.dtype}, as segment_ids has")
    return ids, ids_kv


def no_segments(ids: Any, ids_kv: Any) -> None:
    """Sequences are told apart by `cu_seqlens` or by ids."""
    for argument, each in (("segment_ids", ids), ("segment_ids_kv", ids_kv)):
        if each is not None:
            fail(argument, "ids beside cu_seqlens", "one of the two")


def _signed(ids: jax.Array) -> jax.Array:
    """`ids` as int32 where that holds all of their dtype."""
    return ids.astype(np.int32) if np.iinfo(ids.dtype).max <= np.iinfo(np.int32).max else ids


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


def sinks(dims: Dims, logits: Any) -> jax.Array | None:
    """`logits` as `[1 or Hkv or H, sinks]`, `None` if there are none."""
    logits = floating("softmax_aux", logits)
    # models store `[H]`, which here would be `H` sinks that all heads share
    dims.match("softmax_aux", logits, "sinks", "1|H|Hkv sinks", hint="; one sink a head is sinks[:, None]")
    if logits.shape[-1] == 0:
        return None
    return logits if logits.ndim == 2 else logits[None]


def soft_cap(cap: Any) -> float | None:
    """`logits_soft_cap`, if given, limited to numbers that float32 scores can be divided by."""
    # beyond these limits a cap changes no score, or makes all of them 0
    return None if cap is None else min(max(positive("logits_soft_cap", cap), 2.0**-100), 2.0**100)


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
    # no keys are as many, and sums with one stay within int32
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
