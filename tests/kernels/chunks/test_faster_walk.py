import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels import _xla
from ejkernel.kernels.chunks import faster_walk

TABLE = Path(faster_walk.__file__).with_suffix(".json")


@pytest.fixture(autouse=True)
def as_measured(monkeypatch):
    monkeypatch.setattr(faster_walk, "_forced", None)
    jax.clear_caches()


@pytest.mark.parametrize("release", json.loads(TABLE.read_text()))
def test_every_measured_call_goes_the_faster_way(release):
    found = faster_walk.measured(release)
    assert set(found) == set(itertools.product(("head", "key", "value", "delta"), (False, True), (False, True)))
    for which, points in found.items():
        for heads, dim, tokens, by_tokens in points:
            assert faster_walk.chosen(*which, heads, dim, tokens, release) == by_tokens


def test_other_releases_go_by_the_newest_that_is_not_newer():
    releases = list(json.loads(TABLE.read_text()))
    for release, like in (("0.9.1", releases[0]), (f"{releases[-1]}.7", releases[-1]), ("99.0", releases[-1])):
        assert faster_walk.measured(release) == faster_walk.measured(like)


@pytest.mark.parametrize("op", [_xla.linear_attention, lambda *x: _xla.delta_rule(*x, x[0][..., 0])])
def test_rows_of_vmap_count_like_those_of_a_batch(op, monkeypatch):
    heads = []
    monkeypatch.setattr(faster_walk, "chosen", lambda kind, packed, gradient, found, *_: heads.append(found))
    gradient = jax.grad(lambda x: op(x, x, x)[0].sum())
    jax.eval_shape(jax.jit(jax.vmap(jax.vmap(gradient))), jax.ShapeDtypeStruct((5, 3, 2, 40, 4, 8), np.float32))
    assert set(heads) == {5 * 3 * 2 * 4}


def test_what_one_thread_traced_another_may_map():
    call = jax.jit(lambda x: _xla.linear_attention(x, x, x)[0])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, 4, 1, 2)), jnp.float32)
    alone = [call(row) for row in x]
    with ThreadPoolExecutor(1) as other:
        together = other.submit(jax.vmap(call), x).result()
    np.testing.assert_allclose(together, alone, rtol=1e-6)


@pytest.mark.parametrize("platform, dim, by_tokens", [("cpu", 16, True), ("cpu", 256, False), ("cuda", 16, False)])
def test_small_states_go_token_by_token_on_a_cpu(platform, dim, by_tokens):
    x = jax.ShapeDtypeStruct((1, 512, 4, dim), np.float32)
    traced = jax.jit(lambda x: _xla.recurrent(x, x, x, g=-jnp.abs(x))).trace(x)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # a token reads, in a loop for gates that overflow and in one for others, and one product tells which
    assert (text.count("dot_general") == 3) == by_tokens
