"""Scores of a whole chunk of a TPU kernel and their gradients, for gates of any strength, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels.chunks.pallas.device import key_gates
from ejkernel.kernels.chunks.pallas.device.key_gates import BOUNDED, MILD, STRONG, Blocks
from ejkernel.kernels.delta_rule.pallas.device.parts import digits

C, K = 128, 64
LIMITS = (55.0, 55.0)


def shipped(random, tokens=C):
    return -5 / (1 + np.exp(-random.normal(size=(tokens, K))))


def mixture(random):
    """Mild, bounded and very strong gates, some of them -inf."""
    gates = shipped(random)
    gates[:, ::3] = -1e-3
    return np.where(random.random(gates.shape) < 0.05, random.choice([-30, -1e4, -np.inf], size=gates.shape), gates)


GATES = {
    "shipped": (shipped, BOUNDED),
    "-6": (lambda random: np.full((C, K), -6.0), BOUNDED),
    "one dim of -6": (lambda random: np.where(np.arange(K) == 7, -6.0, np.full((C, K), -1e-3)), BOUNDED),
    "mixture": (mixture, STRONG),
}


def truth(queries, key, gates, d_scores, reverse):
    """Scores of queries with keys, and the cotangents of both, pair by pair."""
    order = slice(None, None, -1) if reverse else slice(None)
    gates, key, *rest = (np.asarray(x, np.float64)[order] for x in (gates, key, *queries, *d_scores))
    queries, d_scores = rest[: len(queries)], [x[:, order] for x in rest[len(queries) :]]
    scores, d_queries, d_key = np.zeros((len(queries), C, C)), np.zeros((len(queries), C, K)), np.zeros((C, K))
    for t in range(C):
        # from the token itself back to the first one, without a difference of sums
        decay = np.exp(np.concatenate([np.cumsum(gates[t:0:-1], 0)[::-1], np.zeros((1, K))]))
        for i, query in enumerate(queries):
            scores[i, t, : t + 1] = (decay * key[: t + 1]) @ query[t]
            flow = d_scores[i][t, :t, None] * decay[:t]
            d_queries[i, t] = (flow * key[:t]).sum(0)
            d_key[:t] += flow * query[t]
    return scores[:, order, order], d_queries[:, order], d_key[order]


@functools.cache
def compiled(kind, split, reverse):
    @jax.jit
    def run(queries, key, gates, d_scores):
        blocks = Blocks.of(gates, kind == BOUNDED, LIMITS, reverse)
        how = digits(exact=not split)
        return blocks.scores(queries, key, how), blocks.score_gradients(queries, key, d_scores, how), blocks.kinds

    return run


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("split, tolerance", [(False, 2e-6), (True, 3e-5)], ids=["float32", "two parts"])
@pytest.mark.parametrize("name", GATES)
def test_matches_pairs_one_by_one(name, split, tolerance, reverse):
    make, kind = GATES[name]
    random = np.random.default_rng(0)
    queries, key = random.normal(size=(2, C, K)).astype(np.float32), random.normal(size=(C, K)).astype(np.float32)
    d_scores = random.normal(size=(2, C, C)).astype(np.float32)
    gates = make(random).astype(np.float32)
    scores, (d_queries, d_key), kinds = compiled(kind, split, reverse)(list(queries), key, gates, list(d_scores))
    assert np.max(kinds) == kind
    wanted = truth(queries, key, gates, d_scores, reverse)
    for found, expected in zip((np.stack(scores), np.stack(d_queries), d_key), wanted, strict=True):
        assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


def test_kinds():
    random = np.random.default_rng(0)
    kinds = jax.jit(lambda gates, reverse: key_gates.kinds(gates, LIMITS, reverse), static_argnums=1)
    for gates, kind in (
        (np.full((C, K), -0.85), MILD),
        (np.full((C, K), -0.87), BOUNDED),
        (shipped(random), BOUNDED),
        (np.full((C, K), -6.87), BOUNDED),
        (np.full((C, K), -6.88), STRONG),
        (np.where(np.arange(C)[:, None] == 99, -60.0, np.full((C, K), -0.01)), STRONG),
        (np.where(np.arange(C)[:, None] == 99, -np.inf, np.full((C, K), -0.01)), STRONG),
        (np.where(np.arange(C)[:, None] == 99, np.nan, np.full((C, K), -0.01)), STRONG),
        (np.where(np.arange(C)[:, None] == 99, 0.01, np.full((C, K), -0.01)), STRONG),
    ):
        for reverse in (False, True):
            assert np.max(kinds(jnp.float32(gates), reverse)) == kind
