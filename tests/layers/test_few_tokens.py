"""Projections of a few tokens: computed together only where XLA need not copy their kernels for it."""

import itertools

import jax
import jax.numpy as jnp
import pytest

nnx = pytest.importorskip("flax.nnx")

from conftest import assert_close  # noqa: E402

from ejkernel import layers  # noqa: E402
from ejkernel.layers._parameters import ParamInit, apart, side_by_side  # noqa: E402

WIDTH = 24


def projections(*sizes):
    init = ParamInit(None, jnp.float32, nnx.Rngs(0))
    return [init.column_parallel(WIDTH, size, bias=True) for size in sizes]


def inputs_of_products(function, x):
    return [each.invars[0] for each in jax.make_jaxpr(function)(x).eqns if each.primitive is jax.lax.dot_general_p]


@pytest.mark.parametrize("sizes", [(128, 384, 256), (20, 40, 12), (128, 130)])
def test_each_output_is_where_it_is_said_to_be(sizes):
    linears, x = projections(*sizes), jax.random.normal(jax.random.key(0), (3, 1, WIDTH))
    found, starts = side_by_side(linears, apart(x))
    assert found.shape == (3, sum(sizes))
    for linear, start in zip(linears, starts, strict=True):
        assert_close(found[:, start : start + linear.out_features], linear(x)[:, 0], 1e-6)


@pytest.mark.parametrize(
    "sizes, values", [((128, 256, 128), 1), ((128,) * 4, 1), ((128,) * 5, 5), ((128, 16), 2), ((20, 20), 2)]
)
def test_products_share_their_input_where_kernels_are_read_in_place(sizes, values):
    linears = projections(*sizes)
    found = inputs_of_products(lambda x: side_by_side(linears, apart(x))[0], jnp.ones((2, 1, WIDTH)))
    assert (len(found), len(set(found))) == (len(sizes), values)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: layers.GatedLinearAttention(
            WIDTH, heads=2, key_width=128, value_width=256, convolution=2, rngs=rngs
        ),
        lambda rngs: layers.KimiDeltaAttention(WIDTH, heads=1, head_dim=128, value_dim=256, rngs=rngs),
        lambda rngs: layers.MultiHeadAttention(WIDTH, heads=3, kv_heads=1, head_dim=128, rngs=rngs),
    ],
    ids=["GatedLinearAttention", "KimiDeltaAttention", "MultiHeadAttention"],
)
def test_steps_whose_products_are_joined_are_one_pass(make):
    layer, x = make(nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 4, WIDTH))
    call = nnx.jit(lambda layer, x, state: layer(x, state))
    expected, state = call(layer, x, None)[0], layer.empty_cache(2, 4)
    pieces = []
    for start, stop in itertools.pairwise([0, 2, 3, 4]):
        piece, state = call(layer, x[:, start:stop], state)
        pieces.append(piece)
    assert_close(jnp.concatenate(pieces, 1), expected, 1e-5)
