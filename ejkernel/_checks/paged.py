"""What attention over pages takes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._checks.arrays import floating, grouped_heads, int32
from ejkernel._checks.packing import cu_seqlens
from ejkernel._checks.values import known_size, positive_int
from ejkernel._checks.wording import Dims, fail, is_concrete


class PagedCache(NamedTuple):
    """Keys and values of many sequences in pages of a fixed number of tokens, for `paged_attention`; a pytree.

    Attributes:
        key: `[P, page, Hkv, D]`, in bfloat16, float16 or float32.
        value: `[P, page, Hkv, Dv]`; `None` where values are the first dims of keys, as in MLA's latent caches.
    """

    key: jax.Array
    value: jax.Array | None


class PagedAttention(NamedTuple):
    """The arrays of `paged_attention`, checked, integers as int32, and what follows from their shapes."""

    query: jax.Array
    key: jax.Array | None
    value: jax.Array | None
    pages: PagedCache
    table: jax.Array
    lengths: jax.Array
    cu_seqlens: jax.Array
    dims: Dims


def paged_attention(
    query: Any, key: Any, value: Any, pages: Any, table: Any, lengths: Any, borders: Any, value_dim: Any = None
) -> PagedAttention:
    """The arguments of `paged_attention`; `borders` is its `cu_seqlens`."""
    dims = Dims()
    query = floating("query", query)
    dims.match("query", query, "T H D")
    for letter, what in (("T", "tokens"), ("H", "heads"), ("D", "dims")):
        known_size("query", dims[letter], what)
    pages = _pages(dims, pages, value_dim)
    grouped_heads(dims["H"], dims["Hkv"])
    latent = pages.value is None
    if latent and value is not None:
        fail("value", "an array", "None, as the pages' values are the first dims of their keys")
    if key is None and value is not None:
        fail("key", None, "an array beside value, or None for both, which only reads")
    if key is not None:
        if value is None and not latent:
            fail("value", None, "an array beside key, or None for both, which only reads")
        key = floating("key", key)
        dims.match("key", key, "T Hkv D")
        if not latent:
            value = floating("value", value)
            dims.match("value", value, "T Hkv Dv")
    checked_borders = cu_seqlens(borders, dims["T"])
    dims.bind("N", known_size("cu_seqlens", checked_borders.shape[0] - 1, "sequences"), "cu_seqlens")
    checked_table, checked_lengths = int32("table", table), int32("lengths", lengths)
    dims.match("table", checked_table, "N M")
    dims.match("lengths", checked_lengths, "N")
    page_values(dims, table, lengths, borders if key is not None else None)
    return PagedAttention(
        query, key, value, pages, checked_table, checked_lengths, checked_borders.astype(jnp.int32), dims
    )


def _pages(dims: Dims, pages: Any, value_dim: Any) -> PagedCache:
    """`pages`, whose sizes `dims` learns; with `value_dim` they have no values of their own."""
    if not isinstance(pages, PagedCache):
        raise TypeError(f"pages: got {type(pages).__name__}; expected an ejkernel.PagedCache")
    key = floating("pages.key", pages.key)
    dims.match("pages.key", key, "P page Hkv D")
    for letter, what in (("P", "pages"), ("page", "tokens a page"), ("Hkv", "heads")):
        known_size("pages.key", dims[letter], what)
    if dims["page"] < 1:
        fail("pages.key", "pages of 0 tokens", "pages of at least 1")
    if pages.value is None:
        if value_dim is None:
            fail("value_dim", None, "how many of a key's first dims are its value, as the pages have no values")
        if positive_int("value_dim", value_dim) > dims["D"]:
            fail("value_dim", value_dim, f"at most the {dims['D']} dims of a key")
        dims.bind("Dv", int(value_dim), "value_dim")
        return PagedCache(key, None)
    if value_dim is not None:
        fail("value_dim", value_dim, "None, as the pages have values of their own")
    value = floating("pages.value", pages.value)
    dims.match("pages.value", value, "P page Hkv Dv")
    return PagedCache(key, value)


def page_values(dims: Dims, table: Any, lengths: Any, borders: Any, argument: str = "table") -> None:
    """What can be said of tables and lengths whose values are known; `borders` of new tokens, `None` if none are.

    `dims` knows the pages `P`, the tokens of a `page` and the columns `M` of the table.
    """
    pages, page, places = dims["P"], dims["page"], dims["M"]
    if is_concrete(table):
        known = np.asarray(table)
        wrong = known[(known < -1) | (known >= pages)]
        if wrong.size:
            fail(argument, f"page {wrong[0]}", f"pages from 0 to {pages - 1}, or -1 for none")
    if is_concrete(lengths):
        known = np.asarray(lengths)
        wrong = known[(known < 0) | (known > places * page)]
        if wrong.size:
            fail("lengths", wrong[0], f"0 to {places * page}, the tokens of {places} pages of {page}")
    every_border = borders if isinstance(borders, list | tuple) else [borders]
    if borders is not None and all(map(is_concrete, (table, lengths, *every_border))):
        before, new = np.asarray(lengths).astype(np.int64), np.diff(np.asarray(borders).astype(np.int64))
        place = np.arange(places)
        written = (place >= (before // page)[:, None]) & (place * page < (before + new)[:, None]) & (new > 0)[:, None]
        names, counts = np.unique(np.asarray(table)[written & (np.asarray(table) >= 0)], return_counts=True)
        if (counts > 1).any():
            fail(argument, f"page {names[counts > 1][0]} for new tokens in two places", "pages that only one writes")
