"""What `flash_attention` leaves to JAX's splash attention on TPUs, in Pallas' interpreter against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import Case, results_and_gradients
from conftest import assert_close

import ejkernel
from ejkernel.kernels import _pallas

SIZES = {"batch": 1, "queries": 128, "key_dim": 64, "value_dim": 64}
SERVED = [
    Case("causal", **SIZES, keys=256, kv_heads=1, options={"causal": True, "logits_soft_cap": 5.0}),
    Case("window", **SIZES, keys=128, options={"sliding_window": (9, 3)}, sink_shape=(2, 1)),
]


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_matches_oracle(monkeypatch, case):
    monkeypatch.setattr(_pallas, "INTERPRET", True)
    arrays = case.arrays(jnp.bfloat16)
    if "softmax_aux" in arrays:
        arrays["softmax_aux"] = arrays["softmax_aux"].astype(np.float32)
    exact = {name: each.astype(np.float32) for name, each in arrays.items()}
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)

    def run(**arrays):
        return ejkernel.flash_attention(**arrays, **case.options, platform="splash")

    def reference(**arrays):
        return ejkernel.attention(**arrays, **case.options, dtype=None)[0]

    mine, right = results_and_gradients(run, arrays, cotangent), results_and_gradients(reference, exact, cotangent)
    assert_close(mine[0], oracle.flash_attention(**exact, **case.options)[0], 1e-2)
    for name, each in mine[1].items():
        assert_close(each, right[1][name], 2e-2, name)


def test_refuses_what_it_would_get_wrong():
    def refused(shape=(1, 128, 2, 64), dtype=jnp.bfloat16, **options):
        x = jax.ShapeDtypeStruct(shape, dtype)
        return ejkernel.explain(ejkernel.flash_attention, x, x, x, **options).refused.get("splash", "")

    assert not refused(causal=True)
    assert "NaN" in refused(cu_seqlens=jnp.array([0, 100]))
    assert "float32" in refused(dtype=jnp.float32)
    assert "128" in refused((1, 100, 2, 64))
    assert "head dims" in refused((1, 128, 2, 80))
    assert "bias" in refused(bias=jnp.zeros((1, 1, 128, 128)))
    assert "sink" in refused(softmax_aux=jnp.zeros(3))


@pytest.mark.parametrize("platforms", [["tpu"], ["cpu", "tpu"]])
def test_exports_hold_the_kernels(platforms):
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

    def gradient(x):
        return jax.grad(lambda x: ejkernel.flash_attention(x, x, x, causal=True).astype(jnp.float32).sum())(x)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        exported = jax.export.export(jax.jit(gradient), platforms=platforms)(x)
    assert exported.mlir_module().count("tpu_custom_call") == 3
