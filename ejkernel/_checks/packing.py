"""Borders of packed sequences, and what is counted by them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ejkernel._checks.arrays import array, integers
from ejkernel._checks.wording import Dims, fail, is_concrete

# what callers may pass for `cu_seqlens`
Borders = ArrayLike | Sequence[int]


def cu_seqlens(cu: Any, total_tokens: int | None = None, argument: str = "cu_seqlens") -> jax.Array:
    """`cu`, an array or a list of any integers, as an int32 or int64 array of sequence borders.

    Values that can be read are checked before JAX, or the dtype they are counted in, could change them.
    """
    cu = np.asarray(cu) if isinstance(cu, list | tuple) and all(map(is_concrete, cu)) else cu
    result = array(argument, cu)
    if not jnp.issubdtype(cu.dtype, jnp.integer):
        raise TypeError(f"{argument}: got dtype {cu.dtype}; expected int32 or int64")
    if cu.ndim != 1 or cu.shape[0] < 1:
        fail(argument, f"shape {cu.shape}", "[N+1]: 0 and the end of each of N sequences")
    if result.dtype not in (jnp.int32, jnp.int64):
        # below, borders are subtracted from each other and compared with numbers of tokens: neither may wrap
        result = jnp.asarray(cu.astype(jnp.int64 if result.dtype == jnp.uint64 else jnp.int32))
    if is_concrete(cu):
        limit, why = np.iinfo(result.dtype).max, f"what {result.dtype} counts"
        if total_tokens is not None:
            limit, why = total_tokens, f"the {total_tokens} tokens there are"
        border_values(argument, np.asarray(cu), limit, why)
    return result


def border_values(argument: str, borders: np.ndarray, limit: int, why: str) -> None:
    """Borders start at 0, never decrease and end at most at `limit`, which is `why`."""
    if borders[0] != 0:
        fail(argument, f"first value {borders[0]}", "0")
    # not by their difference, which unsigned numbers do not have
    decreases = borders[1:] < borders[:-1]
    if decreases.any():
        fail(argument, f"a decrease at index {int(np.argmax(decreases)) + 1}", "values that never decrease")
    if int(borders[-1]) > limit:
        fail(argument, f"last value {borders[-1]}", f"at most {why}")


def static_total(argument: str, total: Any, cu: Any, count: Callable[[np.ndarray], np.integer]) -> int:
    """How many rows a function of cu_seqlens returns: `total`, or what `count` says of its lengths if known."""
    # in int64, as unsigned or narrow borders may wrap where they are counted
    needed = int(count(np.diff(np.asarray(cu).astype(np.int64)))) if is_concrete(cu) else None
    if total is None:
        if needed is None:
            what = argument.removeprefix("total_")
            fail(argument, "None with a traced cu_seqlens", f"{argument}=, the number of {what} known when tracing")
        return needed
    return _room(argument, total, needed, "cu_seqlens")


def _room(argument: str, total: Any, needed: int | None, source: str) -> int:
    """`total`, an int known when tracing, and no less than is `needed` if that is known."""
    if isinstance(total, bool) or not isinstance(total, int | np.integer) or total < 0:
        fail(argument, repr(total) if is_concrete(total) else "a traced value", "an int of at least 0")
    if needed is not None and total < needed:
        fail(argument, total, f"at least the {needed} that {source} has")
    return int(total)


def segment_ids(ids: Any, sequences: Any) -> tuple[jax.Array, int]:
    """`ids` as an integer array `[B, T]`, and `sequences`, room for its runs of equal ids."""
    checked, runs = integers("ids", ids), None
    if checked.ndim != 2:
        fail("ids", f"shape {checked.shape}", "[B, T]")
    if is_concrete(ids):
        # numbered anew, as JAX may count in fewer bits than they have
        known = np.unique(np.asarray(ids), return_inverse=True)[1].reshape(checked.shape).astype(np.int32)
        runs = int(np.count_nonzero(known[:, 1:] != known[:, :-1])) + known[:, :1].size
        checked = jnp.asarray(known)
    return checked, _room("sequences", sequences, runs, "ids")


def token_segments(
    dims: Dims, ids: Any, borders: Any, pattern: str = "B T", argument: str = "segment_ids"
) -> jax.Array:
    """`ids`, an integer array that says of each token of `dims` to which sequence of its row it belongs.

    It keeps its dtype: unsigned ids are never padding, however large. `borders` are `cu_seqlens`, which it excludes.
    """
    if borders is not None:
        fail(argument, "ids beside cu_seqlens", "one of the two")
    checked = integers(argument, ids)
    dims.match(argument, checked, pattern)
    if isinstance(ids, np.ndarray) and (ids != (held := ids.astype(checked.dtype))).any():
        # JAX counts in fewer bits unless x64 is on, and ids that are cut off may coincide
        fail(argument, f"id {ids[ids != held][0]}", f"ids that {checked.dtype} holds")
    return checked


def token_mask(mask: Any) -> jax.Array:
    """`mask` as a bool array `[B, T]`; integers count as True unless they are 0."""
    mask = array("mask", mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask: got dtype {mask.dtype}; expected bool")
    if mask.ndim != 2:
        fail("mask", f"shape {mask.shape}", "[B, T]")
    return mask.astype(bool)


def one_row(batch: int) -> None:
    """Packed sequences share a single row."""
    if batch != 1:
        fail("cu_seqlens", f"a batch of {batch}", "batch 1, as packed sequences share one row")


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
        cu_seqlens(cu, devices * key.shape[-3])
        borders_kv = borders
    else:
        borders_kv = cu_seqlens(cu_kv, devices * key.shape[-3], "cu_seqlens_kv")
    if borders.shape != borders_kv.shape:
        fail("cu_seqlens_kv", f"{borders_kv.shape[0] - 1} sequences", f"the {borders.shape[0] - 1} of cu_seqlens")
    if borders.shape[0] == 1:  # no sequences at all: one empty one is the same and spares a case
        borders, borders_kv = jnp.zeros(2, jnp.int32), jnp.zeros(2, jnp.int32)
    return borders.astype(jnp.int32), borders_kv.astype(jnp.int32)
