"""The Triton kernel of a token's rotation and its way to the cache, against the same in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ejkernel import layers
from ejkernel.kernels.rotary import IMPLEMENTATIONS
from ejkernel.layers import _one_token

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import MARKS, kernels

pytestmark = MARKS
TRITON, XLA = (each.run for each in IMPLEMENTATIONS)
WIDTH, TOKENS, CAPACITY = 12, 5, 7
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LAYERS = {
    "Llama": functools.partial(layers.MultiHeadAttention, heads=2),
    "Qwen3-Next": functools.partial(
        layers.MultiHeadAttention, heads=4, kv_heads=2, head_dim=10, norm=True, output_gate=True, rotary_dim=6
    ),
    "Gemma 4": functools.partial(
        layers.MultiHeadAttention, heads=2, kv_heads=1, head_dim=8, norm=True, value_norm=True, values_are_keys=True
    ),
    "yarn": functools.partial(layers.MultiHeadAttention, heads=2, head_dim=8, rope_scaling=YARN),
    "no rotation": functools.partial(layers.MultiHeadAttention, heads=3, head_dim=5, rope_theta=None),
}


@pytest.fixture(autouse=True)
def on_triton():
    with kernels():
        yield


@pytest.fixture
def compared(monkeypatch):
    """What was called, after both ways were found to agree."""
    seen = []

    def dispatch(implementations, call, *arrays):
        assert implementations is IMPLEMENTATIONS
        kernel, plain = (jax.jit(each, static_argnums=0)(call, *arrays) for each in (TRITON, XLA))
        for found, expected in zip(kernel, plain, strict=True):
            assert found.dtype == expected.dtype
            tolerance = 1e-6 if call.dtype == np.float32 else 1e-2
            np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=tolerance, atol=tolerance)
        seen.append((call, arrays))
        return kernel

    monkeypatch.setattr(_one_token, "dispatch", dispatch)
    return seen


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("rows", [1, 2])
def test_steps_go_on_as_whole_sequences_do(name, rows, compared):
    layer = LAYERS[name](WIDTH, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, TOKENS + 1, WIDTH)), jnp.float32)
    whole, _ = jax.jit(layer)(x)
    _, cache = jax.jit(layer)(x[:, :TOKENS], layer.empty_cache(rows, CAPACITY))
    output, cache = layer(x[:, TOKENS:], cache)
    assert compared
    np.testing.assert_allclose(output, whole[:, TOKENS:], rtol=1e-5, atol=1e-5)
    assert cache.position.tolist() == [TOKENS + 1] * rows


def test_half_precision_and_a_cache_of_another_dtype(compared):
    layer = LAYERS["Qwen3-Next"](WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, WIDTH)), jnp.bfloat16)
    output, _ = layer(x, layer.empty_cache(2, CAPACITY, jnp.float16))
    assert output.dtype == compared[0][0].dtype == jnp.bfloat16


def test_tokens_without_a_place_are_not_stored(compared):
    layer = LAYERS["Llama"](WIDTH, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 1, WIDTH)), jnp.float32)
    layer(x, layer.empty_cache(3, CAPACITY))
    call, arrays = compared[-1]
    positions = jnp.array([CAPACITY - 1, CAPACITY, -1])
    _, keys, values = jax.jit(TRITON, static_argnums=0)(call, *arrays[:3], positions, *arrays[4:])
    for each in (keys, values):
        assert np.asarray(each[0, -1]).all() and not np.asarray(each[0, :-1]).any()
        assert not np.asarray(each[1:]).any()


def test_gradients_and_vmap(compared):
    layer = LAYERS["Qwen3-Next"](WIDTH, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, WIDTH)), jnp.float32)
    layer(x, layer.empty_cache(2, CAPACITY))
    call, arrays = compared[-1]

    def derivatives(run):
        def loss(query, key, scale):
            given = (query, key, *arrays[2:7], scale, *arrays[8:])
            return sum((each**2).sum() for each in run(call, *given))

        moved = arrays[0], arrays[1], arrays[7]
        rows = jax.vmap(lambda *given: run(call, *given, *arrays[6:]))(*(jnp.stack([x, x + 1]) for x in arrays[:6]))
        return jax.grad(loss, (0, 1, 2))(*moved), jax.jvp(loss, moved, moved), rows

    found, expected = (jax.jit(derivatives, static_argnums=0)(each) for each in (TRITON, XLA))
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
