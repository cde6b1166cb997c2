"""The Triton kernels of attention over pages, against the oracle."""

import functools
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_paged_attention import CASES, Case, arrays, options_of, wanted
from test_serving import attention, follow_a_schedule

from ejkernel._dispatch import Implementation
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.attention.paged import triton
from ejkernel.paged_attention import paged_attention

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import GPU, MARKS, kernels

pytestmark = MARKS
# the smallest tiles that dots take, and few keys a range: each by a program of its own, or all by one
APART = triton.Plan(Tile(16, 16), Tile(16, 16), keys=64)
TOGETHER = replace(APART, largest_sums=0)
TALL = replace(TOGETHER, whole=Tile(32, 16))


@pytest.fixture
def serve(monkeypatch):
    """A function that has `paged_attention` served by these kernels, by a plan, for any device."""

    @functools.cache
    def implementations(plan):
        return (Implementation("triton", None, triton.supports, functools.partial(triton.run, plan=plan)),)

    def by(plan):
        monkeypatch.setattr(sys.modules["ejkernel.paged_attention"], "PAGED_ATTENTION", implementations(plan))

    with kernels():
        yield by


NAMES = ["odd pages", "one token each", "window", "window, cap, sinks", "latent", "large dims", "bfloat16"]


@pytest.mark.parametrize("plan", [APART, TOGETHER, TALL], ids=["apart", "together", "tall"])
@pytest.mark.parametrize("name", NAMES)
def test_numbers(serve, name, plan):
    check(serve, CASES[name], plan, 3e-2 if "16" in name else 1e-5)


def check(serve, case, plan, tolerance):
    serve(plan)
    options, given = options_of(case), arrays(case)
    output, _ = paged_attention(*given, **options)
    exact, T = wanted(case, options, *given), len(given[0]) - case.padding
    np.testing.assert_allclose(np.asarray(output, float)[:T], exact[:T], rtol=0, atol=tolerance)
    assert not np.asarray(output, float)[T:].any()


MODELS = [
    Case((0, 129, 2100, 37, 5), (140, 1, 3, 17, 0), page=64, heads=(8, 2), dims=(128, 128), padding=3),
    Case((3000, 129), (1, 140), page=64, heads=(4, 4), dims=(64, 64), options={"sliding_window": 100}),
    Case((0, 260), (20, 3), page=64, heads=(8, 1), dims=(256, 256), options={"logits_soft_cap": 30.0}),
    Case((0, 1130), (9, 1), page=64, heads=(32, 1), dims=(576, 512), latent=True),
    Case((0, 130), (9, 1), page=16, heads=(4, 2), dims=(192, 128), options={"softmax_aux": "H"}),
]


@pytest.mark.skipif(not GPU, reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: f"{case.dims[0]}")
def test_dims_of_models(serve, case, dtype):
    """By the tiles of this GPU, with pages of the dtype of the queries."""
    tolerance = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3}[dtype]
    check(serve, replace(case, dtype=dtype, cached=dtype), None, tolerance)


@pytest.mark.skipif(not GPU, reason="NumPy's products round by the number of rows")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: f"{case.dims[0]}")
def test_bits_do_not_depend_on_the_tile(serve, case, dtype, monkeypatch):
    """By the tiles of this GPU: ranges of keys in programs of their own, and in one."""
    serve(None)
    case = replace(case, dtype=dtype, cached=dtype)
    options, given = options_of(case), arrays(case)
    apart, _ = paged_attention(*given, **options)
    plan_of = triton.Plan.of
    monkeypatch.setattr(triton.Plan, "of", lambda call: replace(plan_of(call), largest_sums=0))
    jax.clear_caches()
    together, _ = paged_attention(*given, **options)
    np.testing.assert_array_equal(np.asarray(together, np.float32), np.asarray(apart, np.float32))
    jax.clear_caches()


def test_missing_pages_and_later_nan(serve):
    serve(TOGETHER)
    case = Case((0, 40, 3), (4, 2, 70), page=16, padding=2)
    query, key, value, pages, table, lengths, borders = arrays(case)
    output, _ = paged_attention(query, key, value, pages, table, lengths, borders)
    value[40] = np.nan
    table[1, 0] = table[2, 4] = -1
    found, _ = jax.jit(paged_attention)(query, key, value, pages, table, lengths, borders)
    np.testing.assert_array_equal(found[:4], output[:4])
    assert np.isnan(found[4:6]).all()
    np.testing.assert_array_equal(found[6:40], output[6:40])
    assert np.isnan(found[40:76]).all() and not np.asarray(found)[76:].any()


@pytest.mark.parametrize("window", [None, 100])
def test_bits_do_not_depend_on_the_call(serve, window):
    """A prompt whole, and in two pieces beside another; with ranges in programs of their own and in one."""
    query, key, value, pages, table, lengths, borders = arrays(Case((0,), (140,), page=32, heads=(2, 1)))
    options = {"sliding_window": window}
    serve(APART)
    whole, _ = paged_attention(query, key, value, pages, table, lengths, borders, **options)
    serve(TOGETHER)
    same, _ = paged_attention(query, key, value, pages, table, lengths, borders, **options)
    np.testing.assert_array_equal(same, whole)
    first, cache = paged_attention(
        query[:128], key[:128], value[:128], pages, table, lengths, np.array([0, 128]), **options
    )
    serve(APART)
    other = np.full((1, table.shape[1]), -1)
    more = [np.concatenate([x[:3], x[128:]]) for x in (query, key, value)]
    second, _ = paged_attention(
        *more, cache, np.concatenate([other, table]), np.array([0, 128]), np.array([0, 3, 15]), **options
    )
    np.testing.assert_array_equal(np.concatenate([first, second[3:]]), whole)


def test_a_random_schedule_gives_each_request_what_it_gets_alone(serve):
    """Whether ranges of keys have programs of their own or not, as the size of a call decides."""
    rng = np.random.default_rng(3)

    def step(*arrays):
        serve(APART if rng.random() < 0.5 else TOGETHER)
        return attention(*arrays)

    follow_a_schedule(rng, step, 4, 40)
