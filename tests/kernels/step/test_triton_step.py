"""The Triton kernels of a layer's step, against the same in plain JAX, and against whole sequences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejkernel import layers
from ejkernel.kernels.step import IMPLEMENTATIONS
from ejkernel.layers import _one_token

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import MARKS, kernels

pytestmark = MARKS
TRITON, XLA = (each.run for each in IMPLEMENTATIONS)
WIDTH, TOKENS, ROWS = 12, 5, 2
LAYERS = {
    "GLA": functools.partial(layers.GatedLinearAttention, heads=2, key_width=12, value_width=20, convolution=4),
    "GLA, shared keys, no convolution": functools.partial(
        layers.GatedLinearAttention, heads=4, kv_heads=2, key_width=12, value_width=20
    ),
    "GLA, shared keys": functools.partial(
        layers.GatedLinearAttention, heads=4, kv_heads=2, key_width=12, value_width=20, convolution=2
    ),
    "Gated DeltaNet": functools.partial(layers.GatedDeltaNet, key_heads=2, value_heads=2, key_dim=6, value_dim=10),
    "Gated DeltaNet, shared keys": functools.partial(
        layers.GatedDeltaNet, key_heads=2, value_heads=4, key_dim=6, value_dim=3, negative_eigenvalues=True
    ),
    # a memory that no program holds at once
    "Gated DeltaNet, wide": functools.partial(
        layers.GatedDeltaNet, key_heads=1, value_heads=1, key_dim=130, value_dim=90
    ),
    "KDA": functools.partial(layers.KimiDeltaAttention, heads=2, head_dim=6, value_dim=10),
    "KDA, bounded": functools.partial(
        layers.KimiDeltaAttention, heads=1, value_heads=2, head_dim=6, lower_bound=-5.0, gate_bias=True
    ),
    "Mamba-2": functools.partial(layers.Mamba2, heads=4, head_dim=6, state_dim=10, groups=2),
    "Mamba-2, gate last": functools.partial(
        layers.Mamba2, heads=2, head_dim=6, state_dim=10, norm_before_gate=True, time_step_limit=(0.01, 0.1)
    ),
}


@pytest.fixture(autouse=True)
def on_triton():
    with kernels():
        yield


def relative(found, expected):
    found, expected = (np.asarray(each, np.float64) for each in (found, expected))
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.fixture
def compared(monkeypatch):
    """What a layer's step is called with, and how far the kernels are from plain JAX at most."""
    seen = []

    def dispatch(implementations, call, *arrays):
        assert implementations is IMPLEMENTATIONS
        kernels, plain = (jax.jit(each, static_argnums=0)(call, *arrays) for each in (TRITON, XLA))
        errors = [relative(*each) for each in zip(*map(jax.tree.leaves, (kernels, plain)), strict=True)]
        seen.append((call, arrays, max(errors)))
        return kernels

    monkeypatch.setattr(_one_token, "dispatch", dispatch)
    return seen


def tokens(dtype, rows=ROWS):
    return jnp.asarray(np.random.default_rng(0).normal(size=(rows, TOKENS + 1, WIDTH)), dtype)


@pytest.mark.parametrize("name", LAYERS)
def test_steps_go_on_as_whole_sequences_do(name, compared):
    layer, x = LAYERS[name](WIDTH, rngs=nnx.Rngs(0)), tokens(jnp.float32)
    whole, last = jax.jit(layer)(x)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    output, state = layer(x[:, TOKENS:], state)
    ((_, _, error),) = compared
    assert error < 1e-5
    assert relative(output, whole[:, TOKENS:]) < 1e-5
    for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["GLA", "Gated DeltaNet, shared keys", "Mamba-2"])
def test_half_precision(name, compared):
    layer, x = LAYERS[name](WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), tokens(jnp.bfloat16)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    output, _ = layer(x[:, TOKENS:], state)
    ((call, _, error),) = compared
    # what is convolved is rounded on its way to heads that share it
    assert error < 2e-2
    assert output.dtype == call.dtype == jnp.bfloat16


def test_rows_that_are_there_twice(compared):
    layer, x = LAYERS["Gated DeltaNet"](WIDTH, rngs=nnx.Rngs(0)), tokens(jnp.float32, rows=1)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    token = x[:, TOKENS:]
    once, state_once = layer._decode(token, state)
    twice, state_twice = layer._decode(jnp.concatenate([token, token]), state)
    assert [call.copies for call, _, _ in compared] == [1, 2]
    np.testing.assert_array_equal(twice[0], twice[1])
    # a product with two rows is rounded otherwise than one with a single row
    for each in zip(jax.tree.leaves((once, state_once)), jax.tree.leaves((twice[:1], state_twice)), strict=True):
        np.testing.assert_allclose(*each, rtol=1e-5, atol=1e-6)


def test_extreme_numbers(compared):
    layer, x = LAYERS["KDA"](WIDTH, rngs=nnx.Rngs(0)), tokens(jnp.float32)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    layer(x[:, TOKENS:], state)
    call, arrays, _ = compared[-1]
    for index, scale in ((0, 1e25), (1, 1e-25), (3, 1e6), (3, -1e6), (4, 1e6), (5, -1e6)):
        changed = [x * scale if i == index else x for i, x in enumerate(arrays)]
        found, expected = (jax.jit(each, static_argnums=0)(call, *changed) for each in (TRITON, XLA))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.isfinite(np.asarray(one)).all()
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6 * np.abs(other).max())


def test_nothing_leaks_between_rows(compared):
    layer, x = LAYERS["Gated DeltaNet, shared keys"](WIDTH, rngs=nnx.Rngs(0)), tokens(jnp.float32)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    layer(x[:, TOKENS:], state)
    call, arrays, _ = compared[-1]
    spoilt = [x if x is None or i > 7 else x.at[1].set(jnp.nan) for i, x in enumerate(arrays)]
    clean, found = (jax.jit(TRITON, static_argnums=0)(call, *each) for each in (arrays, spoilt))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert np.isnan(np.asarray(one[1])).all()


def test_gradients_and_vmap(compared):
    layer, x = LAYERS["GLA"](WIDTH, rngs=nnx.Rngs(0)), tokens(jnp.float32)
    _, state = jax.jit(layer)(x[:, :TOKENS])
    layer(x[:, TOKENS:], state)
    call, arrays, _ = compared[-1]
    directions = [None if x is None else jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in arrays]

    def derivatives(run):
        def loss(arrays):
            return sum((each**2).sum() for each in jax.tree.leaves(run(call, *arrays)))

        def rows(*mapped):
            return run(call, *mapped, *arrays[8:])

        along = jax.jvp(loss, (list(arrays),), (directions,))
        return (
            jax.grad(loss)(list(arrays)),
            along,
            jax.vmap(rows)(*(jnp.stack([x, x + 1]) if x is not None else None for x in arrays[:8])),
        )

    found, expected = (jax.jit(derivatives, static_argnums=0)(each) for each in (TRITON, XLA))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())
