"""Softmax attention over keys and values in pages, for serving."""

# aliases are shown by their names, not spelled out
from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from ejkernel import _checks
from ejkernel._checks import AnyArray, Borders, PagedCache
from ejkernel._dispatch import dispatch
from ejkernel._front import public
from ejkernel.kernels._differentiable import refuse_derivatives
from ejkernel.kernels.attention.call import common_dtype
from ejkernel.kernels.attention.paged import PAGED_ATTENTION
from ejkernel.kernels.attention.paged.call import Call, Inputs, places
from ejkernel.kernels.attention.paged.xla import write

__all__ = ["PagedCache", "paged_attention"]


@public
def paged_attention(
    query: Float[AnyArray, "T H D"],
    key: Float[AnyArray, "T Hkv D"] | None,
    value: Float[AnyArray, "T Hkv Dv"] | None,
    pages: PagedCache,
    table: Int[AnyArray, "N M"],
    lengths: Int[AnyArray, " N"],
    cu_seqlens: Borders,
    *,
    softmax_scale: float | AnyArray | None = None,
    logits_soft_cap: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    softmax_aux: Float[AnyArray, "heads sinks"] | Float[AnyArray, " sinks"] | None = None,
    value_dim: int | None = None,
    platform: str | None = None,
) -> tuple[Array, PagedCache]:
    """Writes new tokens of many sequences into pages, and has them attend to all that their sequence has there.

    Prompts, pieces of prompts, single tokens and empty sequences may share a call. Attention is causal and reads what
    the pages hold, new tokens included, so a cut of a prompt changes nothing. It returns the query's dtype. What a
    sequence gets does not depend, to the bit, on the other sequences of the call, on their number, on padding, or on
    which pages it has. Memory grows with the tokens of the call, never with tokens times keys.

    It has no derivatives: to differentiate it is an error.

    Args:
        query: `[T, H, D]`, the new tokens' queries, packed.
        key: `[T, Hkv, D]`, `H` a multiple of `Hkv`: key/value head `j` serves query heads `j·H/Hkv …`. Cast to the
            pages' dtype. `None` for key and value writes nothing: then the queries' own tokens are the last that
            `lengths` counts, written before.
        value: `[T, Hkv, Dv]`; `None` beside latent pages.
        pages: `PagedCache` of `[P, page, Hkv, D]` and `[P, page, Hkv, Dv]`. Donated to a jitted function, they are
            updated in place. What no sequence has written there, NaN too, has no effect. Pages that several tables name
            are a prompt that is shared. Latent pages, `PagedCache(key, None)`, have values that are the first
            `value_dim` dims of keys.
        table: int `[N, M]`, the pages of each sequence in order; -1 is none. A token without a page is not written and
            gets NaN, and so does a query that would see an earlier place without one.
        lengths: int `[N]`, how many tokens each sequence has in its pages already.
        cu_seqlens: `[N + 1]`, where each of `N` packed sequences of new tokens begins and the last ends. Sequences may
            be empty. Tokens past the end are padding: output 0, not written.
        softmax_scale: What scores are multiplied by; `None` is `D**-0.5`.
        logits_soft_cap: Bends scores towards `±logits_soft_cap`; above 0, or `None` for no cap.
        sliding_window: `w` or `(left, right)`: a query sees itself and the `w` or `left` tokens before it. Pages that
            lie before that are not read, and may be given back.
        softmax_aux: `[H | Hkv | 1, sinks]` or `[sinks]`, logits that only take part in the denominator. `[H]` is `H`
            sinks that all heads share; one sink a head, which models store so, is `sinks[:, None]`.
        value_dim: How many of a key's first dims are its value, for latent pages; `None` for pages with values.
        platform: Force one implementation (`"xla"`, …) instead of the fastest that supports the call.

    Returns:
        The output `[T, H, Dv]`, and the pages with the new tokens.

    Raises:
        ValueError: Ranks or sizes that do not fit together; if their values are known when tracing, entries of the
            table that are no page, lengths below 0 or past the table, a page that new tokens of two places would be
            written to, and a `cu_seqlens` that does not start at 0, decreases or ends past `T`. Where they are not
            known, entries that are no page count as -1.
        TypeError: An array of another kind of dtype; pages that are no `PagedCache`; a derivative.
        PlatformError: The implementation that `platform` names cannot serve the call.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import PagedCache, paged_attention
        >>> query = jax.random.normal(jax.random.key(0), (7, 4, 8))
        >>> key, value = jax.random.normal(jax.random.key(1), (2, 7, 2, 8))
        >>> pages = PagedCache(jnp.zeros((6, 4, 2, 8)), jnp.zeros((6, 4, 2, 8)))
        >>> table = jnp.array([[5, 0], [2, -1]])

        A prompt of six tokens, and one of one; then a token more of each:

        >>> output, pages = paged_attention(query, key, value, pages, table, jnp.array([0, 0]), jnp.array([0, 6, 7]))
        >>> more = query[:2], key[:2], value[:2]
        >>> output, pages = paged_attention(*more, pages, table, jnp.array([6, 1]), jnp.array([0, 1, 2]))
        >>> output.shape
        (2, 4, 8)
    """
    arrays = _checks.paged_attention(query, key, value, pages, table, lengths, cu_seqlens, value_dim)
    dims, query, pages = arrays.dims, arrays.query, arrays.pages
    sinks = None if softmax_aux is None else _checks.sinks(dims, softmax_aux)
    window = _checks.sliding_window(sliding_window)
    dtype, cached = np.dtype(query.dtype), [x.dtype for x in pages if x is not None]
    wide = common_dtype(query.dtype, *cached, np.float32)
    scale = max(dims["D"], 1) ** -0.5 if softmax_scale is None else _checks.factor("softmax_scale", softmax_scale)
    if isinstance(scale, jax.Array):
        query, scale = query.astype(wide) * scale.astype(wide), 1.0
    call = Call(
        **_sizes(arrays),
        dtype=dtype,
        cached=tuple(np.dtype(each) for each in cached),
        wide=wide,
        scale=scale,
        scaled=query.dtype != dtype,
        soft_cap=_checks.soft_cap(logits_soft_cap),
        left=None if window is None else window[0],
        sinks=None if sinks is None else sinks.shape[-1],
    )
    rows = [None if x is None else x[None] for x in (query, arrays.key, arrays.value)]

    def run(*operands: Array | None) -> tuple[Array, Array, Array | None]:
        return dispatch(PAGED_ATTENTION, call, *operands, platform=platform)

    operands = (*rows, *pages, sinks, arrays.table, arrays.lengths, arrays.cu_seqlens)
    output, *cache = refuse_derivatives("paged_attention", run)(*operands)
    return output[0], PagedCache(*cache)


def _sizes(arrays: _checks.PagedAttention) -> dict[str, Any]:
    """Fields of `Call` that follow from the arrays' shapes."""
    letters = {"tokens": "T", "sequences": "N", "places": "M", "pages": "P", "page": "page", "heads": "H"}
    letters |= {"kv_heads": "Hkv", "key_dim": "D", "value_dim": "Dv"}
    sizes = {name: arrays.dims[letter] for name, letter in letters.items()}
    return sizes | {"writes": arrays.key is not None, "latent": arrays.pages.value is None}


def write_pages(
    key: AnyArray,
    value: AnyArray | None,
    pages: PagedCache,
    table: AnyArray,
    lengths: AnyArray,
    cu_seqlens: Borders,
) -> PagedCache:
    """The pages with new tokens in them, as `paged_attention` writes them; tokens without a page are left out."""
    latent = {} if pages.value is not None else {"value_dim": key.shape[-1]}
    arrays = _checks.paged_attention(key, key, value, pages, table, lengths, cu_seqlens, **latent)
    call = Call(**_sizes(arrays), dtype=np.dtype(key.dtype), cached=(), wide=np.dtype(np.float32), scale=1.0)
    if 0 in (call.tokens, call.sequences, call.places, call.pages):
        return arrays.pages

    def run(key: Array, value: Array | None, key_pages: Array, value_pages: Array | None) -> PagedCache:
        rows = [None if x is None else x[None] for x in (key, value)]
        where = arrays.table, arrays.lengths, arrays.cu_seqlens
        inputs = Inputs(key, rows[0], rows[1], key_pages, value_pages, None, *where)
        written = write(call, inputs, places(call, inputs))
        return PagedCache(written.key_pages, written.value_pages)

    assert arrays.key is not None
    return refuse_derivatives("write_pages", run)(arrays.key, arrays.value, *arrays.pages)
