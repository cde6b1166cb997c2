import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import token_by_token

from ejkernel.kernels import _xla
from ejkernel.kernels.chunks import token_walk

SMALL = token_walk.LARGEST_STATE


@pytest.mark.parametrize(
    "platform, dim, gate, packed, by_tokens",
    [
        ("cpu", 64, "g", False, True),
        ("cpu", 128, "g", False, False),
        ("cpu", 128, "gv", False, True),
        ("cpu", 128, "g", True, True),
        ("cpu", 256, "g", True, False),
        ("cuda", 16, "g", False, False),
    ],
)
def test_small_states_go_token_by_token_on_a_cpu(platform, dim, gate, packed, by_tokens):
    x = jax.ShapeDtypeStruct((1, 512, 4, dim), np.float32)
    borders = np.array([0, 200, 512]) if packed else None
    with token_by_token(SMALL):
        traced = jax.jit(lambda x: _xla.recurrent(x, x, x, **{gate: -jnp.abs(x)}, cu_seqlens=borders)).trace(x)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    # a token reads, and that is all
    assert (text.count("dot_general") == 1) == by_tokens


def test_gradients_go_by_chunks():
    def program(states):
        with token_by_token(states):
            gradient = jax.jit(jax.grad(lambda x: _xla.linear_attention(x, x, x)[0].sum()))
            return gradient.lower(jax.ShapeDtypeStruct((1, 512, 4, 16), np.float32)).as_text()

    assert program(SMALL) == program(0)


@pytest.mark.parametrize("packing", [{}, {"cu_seqlens": [0, 2, 5]}, {"segment_ids": np.array([[0, 0, 1, 1, -1]])}])
def test_without_jit(packing):
    """The places of tokens are then numbers of Python's."""
    query, key, value, gates = np.random.default_rng(0).normal(size=(4, 1, 5, 2, 4)).astype(np.float32)
    with token_by_token(SMALL):
        expected = _xla.recurrent_gla(query, key, value, -np.abs(gates), **packing)
        with jax.disable_jit():
            results = _xla.recurrent_gla(query, key, value, -np.abs(gates), **packing)
    for result, each in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, each, rtol=1e-5, atol=1e-6)
