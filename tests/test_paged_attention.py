"""Attention over pages: its numbers, what is written where, what has no effect, and that bits do not change."""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from ejkernel import PagedCache, paged_attention

rng = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """A call: tokens that sequences have already and new ones, and what else it is given."""

    before: tuple[int, ...]
    new: tuple[int, ...]
    page: int = 16
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    padding: int = 0
    dtype: str = "float32"
    cached: str | None = None  # the pages' dtype
    latent: bool = False
    options: dict = field(default_factory=dict)


CASES = {
    "mixed": Case((0, 129, 0, 37, 5), (140, 1, 3, 17, 0), padding=3),
    "odd pages": Case((0, 129, 200), (131, 1, 2), page=5, heads=(3, 3), dims=(5, 7)),
    "one token each": Case((0, 127, 128, 300), (1, 1, 1, 1), page=64),
    "window": Case((0, 129, 140), (150, 1, 30), page=8, options={"sliding_window": 9}),
    "window, cap, sinks": Case(
        (0, 260), (20, 3), options={"sliding_window": (130, 2), "logits_soft_cap": 2.0, "softmax_aux": "H"}
    ),
    "latent": Case((0, 130), (9, 1), heads=(16, 1), dims=(12, 8), latent=True, options={"softmax_scale": 0.3}),
    "large dims": Case((3, 9), (2, 1), heads=(2, 1), dims=(576, 512), latent=True),
    "bfloat16": Case((0, 40), (20, 1), dtype="bfloat16", options={"softmax_aux": "Hkv"}),
    "float16 pages": Case((0, 40), (20, 1), dtype="float16"),
}


def arrays(case, spare=2):
    """Query, key, value, pages with garbage where nothing was written, table, lengths, borders, as NumPy arrays."""
    (H, kv), (D, Dv), N = case.heads, case.dims, len(case.new)
    needed = [-(-(a + b) // case.page) for a, b in zip(case.before, case.new, strict=True)]
    P = sum(needed) + spare
    order = iter(rng.permutation(P))
    table = np.full((N, max(needed) + 1), -1, np.int32)
    stored = [np.full((P, case.page, kv, dim), np.nan) for dim in ((D,) if case.latent else (D, Dv))]
    for n, count in enumerate(needed):
        table[n, :count] = [next(order) for _ in range(count)]
        for position in range(case.before[n]):
            for pages in stored:
                at = table[n, position // case.page], position % case.page
                pages[at] = rng.normal(size=pages.shape[2:])
    T = sum(case.new) + case.padding
    query = rng.normal(size=(T, H, D))
    new = [rng.normal(size=(T, kv, dim)) for dim in (D, Dv)]
    for x in (query, *new):
        x[T - case.padding :] = np.nan
    query, *new = (x.astype(jnp.float32).astype(case.dtype) for x in (query, *new))
    cached = case.cached or ("float32" if case.dtype == "bfloat16" else case.dtype)
    stored = [x.astype(np.float32).astype(cached) for x in stored]
    pages = PagedCache(stored[0], None if case.latent else stored[1])
    borders = np.concatenate([[0], np.cumsum(case.new)]).astype(np.int32)
    return query, new[0], None if case.latent else new[1], pages, table, np.array(case.before, np.int32), borders


def options_of(case):
    options = dict(case.options)
    if "softmax_aux" in options:
        heads = {"H": case.heads[0], "Hkv": case.heads[1]}[options["softmax_aux"]]
        options["softmax_aux"] = rng.normal(size=(heads, 2)).astype(np.float32)
    return options | ({"value_dim": case.dims[1]} if case.latent else {})


def wanted(case, options, query, key, value, pages, table, lengths, borders):
    window = options.get("sliding_window")
    return oracle.paged_attention(
        query,
        key,
        case.dims[1] if case.latent else value,
        pages,
        table,
        lengths,
        borders,
        scale=options.get("softmax_scale"),
        cap=options.get("logits_soft_cap"),
        left=window[0] if isinstance(window, tuple) else window,
        sinks=options.get("softmax_aux"),
    )


@pytest.mark.parametrize("name", CASES)
def test_numbers(name):
    case = CASES[name]
    options, given = options_of(case), arrays(case)
    output, pages = jax.jit(functools.partial(paged_attention, **options))(*given)
    exact = wanted(case, options, *given)
    T = len(given[0]) - case.padding
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[case.dtype]
    assert output.dtype == given[0].dtype
    np.testing.assert_allclose(np.asarray(output, float)[:T], exact[:T], rtol=0, atol=tolerance)
    assert not np.asarray(output)[T:].any()
    # the new tokens are written, cast to the pages' dtype, and nothing else is
    key, value, before, table, borders = given[1], given[2], given[3], given[4], given[6]
    for x, after, pages_before in zip((key, value), pages, before, strict=True):
        if x is None:
            assert after is None and pages_before is None
            continue
        expected = np.array(pages_before)
        for n, (length, new) in enumerate(zip(case.before, case.new, strict=True)):
            for i in range(new):
                column, row = divmod(length + i, case.page)
                expected[table[n, column], row] = x[borders[n] + i].astype(expected.dtype)
        np.testing.assert_array_equal(np.asarray(after), expected)
    # what was written is read again without writing
    lengths = given[5] + np.diff(borders)
    again, same = paged_attention(given[0], None, None, pages, table, lengths, borders, **options)
    np.testing.assert_array_equal(np.asarray(again, float), np.asarray(output, float))
    assert all(
        x is None or np.array_equal(np.asarray(x, float), np.asarray(y, float), equal_nan=True)
        for x, y in zip(same, pages, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("sliding_window",))
def attend(*arguments, **options):
    return paged_attention(*arguments, **options)


def test_missing_pages_are_nan_in_their_own_sequence():
    case = Case((0, 40, 3), (4, 2, 70), page=16)
    query, key, value, pages, table, lengths, borders = arrays(case)
    pages = jax.tree.map(np.nan_to_num, pages)
    output, after = attend(query, key, value, pages, table, lengths, borders)
    assert np.isfinite(output).all()
    spoiled = table.copy()
    spoiled[1, 0] = -1  # an earlier place
    spoiled[2, 2:] = [len(pages.key) + 7, -9, -1, *(-1,) * (table.shape[1] - 5)]  # the place of new tokens
    found, found_pages = attend(query, key, value, pages, spoiled, lengths, borders)
    np.testing.assert_array_equal(found[:4], output[:4])
    assert np.isnan(found[4:6]).all()
    inside = 6 + 2 * 16 - 3
    np.testing.assert_array_equal(found[6:inside], output[6:inside])
    assert np.isnan(found[inside:]).all()
    untouched = [n for n in range(len(pages.key)) if n not in table[2, 2:]]
    np.testing.assert_array_equal(found_pages.key[np.array(untouched)], after.key[np.array(untouched)])
    np.testing.assert_array_equal(found_pages.key[table[2, 3]], pages.key[table[2, 3]])
    # a window hides the place without a page
    seen, _ = attend(query, key, value, pages, spoiled, lengths, borders, sliding_window=20)
    assert np.isfinite(seen[4:6]).all()
    # tokens past the table, and more queries than tokens
    past, _ = attend(query, key, value, pages, table[:, :3], lengths, borders)
    np.testing.assert_array_equal(past[:6], output[:6])
    inside = 6 + 3 * 16 - 3
    np.testing.assert_array_equal(past[6:inside], output[6:inside])
    assert np.isnan(past[inside:]).all()
    more, _ = attend(query, None, None, after, table, np.array([4, 42, 69], np.int32), borders)
    np.testing.assert_array_equal(more[:6], output[:6])
    assert np.isnan(more[6:]).all()
    # lengths that are nonsense, where nobody can tell before
    wild, _ = attend(query, key, value, pages, table, np.array([0, 2**31 - 1, -5], np.int32), borders)
    np.testing.assert_array_equal(wild[:4], output[:4])
    assert np.isnan(wild[4:]).all()


def test_later_tokens_that_are_nan_reach_no_earlier_query():
    query, key, value, pages, table, lengths, borders = arrays(Case((2,), (30,)))
    output, _ = attend(query, key, value, pages, table, lengths, borders)
    for x in (key, value):
        x[20] = np.nan
    found, _ = attend(query, key, value, pages, table, lengths, borders)
    np.testing.assert_array_equal(found[:20], output[:20])
    assert np.isnan(found[20:]).all()


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("heads", "latent"), [((4, 2), False), ((24, 1), True)])
def test_bits_do_not_depend_on_the_call(heads, latent, window):
    """One prompt: whole, in pieces, token by token at its end, beside others, in other pages, padded."""
    length, dim = 270, 16
    options = {"sliding_window": window, **({"value_dim": 8} if latent else {})}
    run = jax.jit(functools.partial(paged_attention, **options))
    query = rng.normal(size=(length, heads[0], dim)).astype(np.float32)
    key, value = rng.normal(size=(2, length, heads[1], dim)).astype(np.float32)

    def pages(count, page):
        made = [np.full((count, page, heads[1], dim), np.nan, np.float32) for _ in range(2)]
        return PagedCache(made[0], None if latent else made[1])

    def call(low, high, cache, table, others=0, padding=0, page=32):
        """Tokens `low` to `high` behind `others` other sequences of three tokens, whose pages follow."""
        extra = [rng.normal(size=(3 * others, *x.shape[1:])).astype(np.float32) for x in (query, key, value)]
        end = [np.full((padding, *x.shape[1:]), np.nan, np.float32) for x in (query, key, value)]
        rows = [np.concatenate([a, x[low:high], b]) for a, x, b in zip(extra, (query, key, value), end, strict=True)]
        tables = np.full((others + 1, len(table)), -1, np.int32)
        tables[-1] = table
        tables[:-1, 0] = len(cache.key) - 1 - np.arange(others)
        lengths = np.array([0] * others + [low], np.int32)
        borders = np.array([*range(0, 3 * others + 1, 3), 3 * others + high - low], np.int32)
        output, cache = run(rows[0], rows[1], None if latent else rows[2], cache, tables, lengths, borders)
        return np.asarray(output)[3 * others : 3 * others + high - low], cache

    whole, _ = call(0, length, pages(20, 32), np.arange(9))
    # cut at multiples of 128, beside others, in other pages
    first, cache = call(0, 128, pages(30, 32), np.arange(9)[::-1], others=2)
    second, cache = call(128, 256, cache, np.arange(9)[::-1], others=1, padding=5)
    third, cache = call(256, 257, cache, np.arange(9)[::-1])
    fourth, _ = call(257, 270, cache, np.arange(9)[::-1], others=2, padding=1)
    np.testing.assert_array_equal(np.concatenate([first, second, third, fourth]), whole)
    # pages of another size
    other, _ = call(0, length, pages(60, 10), rng.permutation(40)[:27])
    np.testing.assert_array_equal(other, whole)


def test_donated_pages_are_updated_in_place():
    P, page, heads, dim = 64, 32, 2, 16
    shape = jax.ShapeDtypeStruct((P, page, heads, dim), jnp.float32)
    token = jax.ShapeDtypeStruct((8, heads, dim), jnp.float32)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 8), (4,), (5,))]
    compiled = (
        jax.jit(paged_attention, donate_argnums=3).lower(token, token, token, PagedCache(shape, shape), *ints).compile()
    )
    text = compiled.as_text()
    assert text.count("may-alias") == 2 or text.count("must-alias") == 2
    copies = [line for line in text.splitlines() if f"f32[{P},{page},{heads},{dim}]" in line and " copy(" in line]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < P * page * heads * dim * 4


def test_derivatives_are_refused():
    query, key, value, pages, table, lengths, borders = arrays(Case((0,), (3,)))

    def of_query(x):
        return paged_attention(x, key, value, pages, table, lengths, borders)[0].sum()

    def of_value(x):
        return paged_attention(query, key, x, pages, table, lengths, borders)[1].value.sum()

    for function, x in ((of_query, query), (of_value, value)):
        for derivative in (jax.grad(function), jax.jit(jax.grad(function)), jax.jacfwd(function)):
            with pytest.raises(TypeError, match="paged_attention is not differentiable"):
                derivative(x)


def test_empty_calls():
    query, key, value, pages, table, lengths, borders = arrays(Case((0, 4), (3, 1)))
    none = paged_attention(query[:0], key[:0], value[:0], pages, table, lengths, borders * 0)
    assert none[0].shape == (0, 4, 8)
    nobody = paged_attention(query, key, value, pages, table[:0], lengths[:0], borders[:1])
    assert not np.asarray(nobody[0]).any()
    unpaged = paged_attention(query, key, value, pages, table[:, :0], lengths * 0, np.array([0, 2, 3]))
    assert np.isnan(unpaged[0][:3]).all() and not np.asarray(unpaged[0])[3:].any()
