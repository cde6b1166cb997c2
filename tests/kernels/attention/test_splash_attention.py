"""What `flash_attention` leaves to JAX's splash attention on TPUs, in Pallas' interpreter against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import Case, results_and_gradients
from conftest import assert_close

import ejkernel
from ejkernel.kernels import _pallas
from ejkernel.kernels.attention import splash

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
    assert not refused(cu_seqlens=jnp.array([0, 100]))
    assert "cu_seqlens_kv" in refused(cu_seqlens=jnp.array([0, 100]), cu_seqlens_kv=jnp.array([0, 90]))
    ids = jnp.zeros((1, 128), int)
    assert not refused(segment_ids=ids)
    assert "segment_ids_kv" in refused(segment_ids=ids, segment_ids_kv=ids)
    assert "float32" in refused(dtype=jnp.float32)
    assert "128" in refused((1, 100, 2, 64))
    assert "head dims" in refused((1, 128, 2, 80))
    assert "bias" in refused(bias=jnp.zeros((1, 1, 128, 128)))
    assert "sink" in refused(softmax_aux=jnp.zeros(3))

    def mapped(checked):
        x, whole = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16), jax.P()
        call = jax.shard_map(
            lambda x: ejkernel.flash_attention(x, x, x),
            mesh=jax.make_mesh((1,), ("time",)),
            in_specs=whole,
            out_specs=whole,
            check_vma=checked,
        )
        return ejkernel.explain(call, x).refused.get("splash", "")

    # lowering its kernel there would be an error
    assert "check_vma" in mapped(True)
    assert not mapped(False)


@pytest.mark.parametrize("platforms", [["tpu"], ["cpu", "tpu"]])
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": jnp.array([0, 100])}], ids=["rows", "packed"])
def test_exports_hold_the_kernels(platforms, options):
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

    def loss(x):
        output = ejkernel.flash_attention(x, x, x, causal=True, **options)
        return output.astype(jnp.float32).sum()

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=platforms)(x)
    assert exported.mlir_module().count("tpu_custom_call") == 3


PACKINGS = {
    "packed": {"cu_seqlens": np.array([0, 100, 100, 200])},
    "segments": {"segment_ids": np.repeat([3, 1, -2], [100, 100, 56])[None]},
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed(monkeypatch, packing):
    """A NaN stays in its sequence, also one in a cotangent; padding has no effect."""
    monkeypatch.setattr(_pallas, "INTERPRET", True)
    monkeypatch.setattr(splash, "LARGEST_BLOCK", 128)
    case = Case("packed", **SIZES | {"queries": 256}, keys=256, kv_heads=1)
    options = {"causal": True, "sliding_window": (60, 0), **PACKINGS[packing]}
    arrays = {name: jnp.asarray(each).at[:, 200:].set(jnp.nan) for name, each in case.arrays(jnp.bfloat16).items()}
    cotangent = jax.random.normal(jax.random.key(0), arrays["query"].shape).at[:, 200:].set(jnp.nan)

    def of(platform):
        call = functools.partial(ejkernel.flash_attention, **options, platform=platform)
        return functools.partial(results_and_gradients, call)

    run = of("splash")
    exact = {name: each.astype(np.float32) for name, each in arrays.items()}
    without_padding = {name: np.nan_to_num(each) for name, each in exact.items()}
    right = oracle.flash_attention(**without_padding, **options)[0], of("xla")(exact, cotangent)[1]
    spoilt = arrays | {"value": arrays["value"].at[:, 150].set(jnp.nan)}
    for given, last in ((cotangent, arrays), (cotangent, spoilt), (cotangent.at[:, 150].set(jnp.nan), arrays)):
        found = run(last, given)
        clean = slice(0, 256 if last is arrays and given is cotangent else 100)
        assert_close(found[0][:, clean], right[0][:, clean], 1e-2)
        for name, each in found[1].items():
            assert_close(each[:, clean], right[1][name][:, clean], 2e-2, name)
        assert not found[0][:, 200:].any() and not any(each[:, 200:].any() for each in found[1].values())
    assert np.isnan(found[1]["query"][:, 150]).any()
