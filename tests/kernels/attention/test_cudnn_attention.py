"""What `flash_attention` leaves to cuDNN and wraps around it; on a GPU, cuDNN itself against the oracle."""

import contextlib
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from attention_cases import Case, results_and_gradients
from conftest import assert_close

from ejkernel import _dispatch
from ejkernel._dispatch import Implementation, SlowerImplementationWarning, explain
from ejkernel.attention import attention, flash_attention
from ejkernel.kernels import _launch
from ejkernel.kernels.attention import cudnn, splash, triton, xla
from ejkernel.kernels.attention.call import Call, lacking

SIZES = {"queries": 64, "keys": 64, "heads": 4, "key_dim": 16, "value_dim": 16}
CAUSAL = {"causal": True}

SERVED = [
    Case("plain", **SIZES, kv_heads=4),
    Case("more keys", **{**SIZES, "keys": 128}, kv_heads=4),
    Case("scale", **SIZES, kv_heads=4, options={"softmax_scale": 0.3}),
    Case("grouped", **SIZES, kv_heads=2, options=CAUSAL),
    Case("one key head", **SIZES, kv_heads=1),
    Case("window", **SIZES, kv_heads=4, options={"sliding_window": (10, 0)}),
    Case("causal window", **SIZES, kv_heads=2, options={"sliding_window": 7, "causal": True}),
    Case("mask", **SIZES, kv_heads=2, mask_heads=1, dead=(3, 9)),
    Case("mask by head", **SIZES, kv_heads=4, mask_heads=4, dead=(3,), broadcast=True, options=CAUSAL),
    Case("mask by row and head", **SIZES, kv_heads=4, mask_heads=4),
    Case("bias", **SIZES, kv_heads=2, bias_heads=4, broadcast=True, dead=(5,), options=CAUSAL),
    Case("bias and mask", **SIZES, kv_heads=2, bias_heads=4, mask_heads=1, broadcast=True, dead=(5,)),
]
FEW = [each for each in SERVED if each.name in {"grouped", "causal window", "mask", "bias", "bias and mask"}]


@pytest.fixture
def stand_in(monkeypatch):
    """Everything that is wrapped around cuDNN, around XLA's attention in its place, on any device."""
    monkeypatch.setattr(cudnn, "BACKEND", "xla")
    monkeypatch.setattr(cudnn, "_installed", lambda: None)
    pretender = Implementation("cudnn", None, cudnn.supports, cudnn.run)
    monkeypatch.setattr(sys.modules["ejkernel.attention"], "FLASH_ATTENTION", (pretender,))


@pytest.fixture
def installed(monkeypatch):
    """cuDNN is there, and Triton is not."""
    monkeypatch.setattr(cudnn, "_installed", lambda: None)
    monkeypatch.setattr(_launch, "unavailable", lambda: "no NVIDIA GPU here")


def compare(case, tolerance, platform=None):
    """Output and gradients in bfloat16 with those of `attention` in float32, and the output with the oracle's."""
    arrays = case.arrays(jnp.bfloat16)
    exact = {name: each.astype(np.float32) if each.dtype != bool else each for name, each in arrays.items()}
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape).astype(np.float32)

    def run(**arrays):
        return flash_attention(**arrays, **case.options, dtype=None, platform=platform)

    def reference(attention_mask=None, bias=None, **arrays):
        if bias is not None and attention_mask is not None:
            attention_mask, bias = None, jnp.where(attention_mask, bias, -jnp.inf)
        return attention(**arrays, attention_mask=attention_mask, bias=bias, **case.options, dtype=None)[0]

    mine = results_and_gradients(run, arrays, cotangent)
    right = results_and_gradients(reference, exact, cotangent)
    assert_close(right[0], oracle.flash_attention(**exact, **case.options)[0], 1e-5)
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(right), strict=True):
        assert one.dtype == jnp.bfloat16
        assert_close(one, other, tolerance)
    for query in case.dead:
        assert (mine[0][:, query] == 0).all() and (mine[1]["query"][:, query] == 0).all()


@pytest.mark.parametrize("case", FEW, ids=str)
def test_stand_in_matches_oracle(case, stand_in):
    compare(case, 3e-2)


@pytest.mark.parametrize("has_triton", [True, False])
def test_tangents_are_those_of_triton_or_xla(has_triton, stand_in, monkeypatch):
    """cuDNN has none; in forward mode it is not even run, as outputs come with their tangents."""
    case, runs = Case("", **SIZES, kv_heads=2, options=CAUSAL), []

    def run(call, *arrays):
        runs.append(call)
        return xla.run(call, *arrays)

    monkeypatch.setattr(triton, "supports", lambda call: None if has_triton else "not here")
    monkeypatch.setattr(triton, "run", run)
    arrays = case.arrays(jnp.bfloat16)
    _dispatch._warn_once.cache_clear()
    along = jax.jit(lambda x: jax.jvp(lambda x: flash_attention(**x, **CAUSAL), (x,), (x,)))
    with (
        contextlib.nullcontext() if has_triton else pytest.warns(SlowerImplementationWarning, match="'xla' serves tan")
    ):
        found = along(arrays)
    assert bool(runs) == has_triton
    exact = {name: each.astype(np.float32) for name, each in arrays.items()}
    right = jax.jvp(lambda x: attention(**x, **CAUSAL, dtype=None)[0], (exact,), (exact,))
    for one, other in zip(found, right, strict=True):
        assert one.dtype == jnp.bfloat16
        assert_close(one, other, 3e-2)


def check_shifted_rows(tolerance, platform=None):
    """What all of a query's keys have in common makes no difference, however large: -1e9 is how many models mask."""
    case = Case("", **SIZES | {"queries": 32, "keys": 32}, kv_heads=2, options=CAUSAL)
    arrays = case.arrays(jnp.bfloat16)
    small = np.random.default_rng(0).normal(size=(1, 4, 32, 32)).astype(jnp.bfloat16)
    small[:, :, 5:7] = 0
    large = small.copy()
    # causality hides the rest of row 5 from it
    large[:, :, 5, :6], large[:, :, 6] = -1e9, float(jnp.finfo(jnp.bfloat16).min)
    cotangent = np.random.default_rng(1).normal(size=arrays["query"].shape)

    def run(**arrays):
        return flash_attention(**arrays, **case.options, dtype=None, platform=platform)

    found, expected = (results_and_gradients(run, {**arrays, "bias": bias}, cotangent) for bias in (large, small))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, other, tolerance)


def test_stand_in_never_sees_a_huge_bias(stand_in, monkeypatch):
    seen = []
    original = jax.nn.dot_product_attention

    def spy(*arrays, bias, **options):
        causal = np.tri(32, dtype=bool)
        jax.debug.callback(lambda bias: seen.append(np.where(causal, bias, -np.inf).max(-1)), bias)
        return original(*arrays, bias=bias, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    check_shifted_rows(0)
    jax.effects_barrier()
    assert seen and max(np.abs(each).max() for each in seen) < 256


@pytest.mark.gpu
def test_cudnn_with_rows_masked_by_a_huge_bias():
    check_shifted_rows(1e-2, platform="cudnn")


def test_stand_in_differentiates_twice(stand_in):
    case = Case("", **{**SIZES, "queries": 8, "keys": 8}, kv_heads=2, options=CAUSAL)
    arrays = case.arrays(jnp.bfloat16)

    def second(run):
        def loss(query):
            return (run(**{**arrays, "query": query}).astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(lambda query: (jax.grad(loss)(query) ** 2).astype(jnp.float32).sum()))

    mine = second(lambda **arrays: flash_attention(**arrays, causal=True, dtype=None))(arrays["query"])
    right = second(lambda **arrays: attention(**arrays, causal=True, dtype=None)[0])(arrays["query"])
    assert_close(mine, right, 5e-2)


def test_stand_in_maps_over_some_arguments(stand_in):
    case = Case("grouped", **{**SIZES, "queries": 8, "keys": 8}, kv_heads=2, options=CAUSAL)
    arrays = case.arrays(jnp.bfloat16)

    def loss(query, key, value):
        return (flash_attention(query, key, value, causal=True, dtype=None).astype(jnp.float32) ** 2).sum()

    key, value = arrays["key"][:1], arrays["value"][:1]
    mapped = jax.jit(jax.vmap(jax.grad(loss), (0, None, None)))(arrays["query"][:, None], key, value)
    for row in range(2):
        assert_close(mapped[row], jax.grad(loss)(arrays["query"][row : row + 1], key, value), 2e-2)


X = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.bfloat16)
CALL = {"query": X, "key": X, "value": X}


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


REFUSED = [
    ({"logits_soft_cap": 5.0}, "it has no logits_soft_cap"),
    ({"softmax_aux": shape(4, 1)}, "it has no softmax_aux"),
    ({"deterministic": False, "dropout_prob": 0.1, "dropout_rng": shape(2, dtype=jnp.uint32)}, "it has no dropout"),
    ({"query_offset": 3}, "it has no query_offset"),
    ({"return_lse": True}, "it has no return_lse"),
    ({"softmax_dtype": jnp.bfloat16}, "it has no softmax_dtype other than float32"),
    ({"sliding_window": 5}, "its sliding_window needs causal"),
    ({"sliding_window": (5, 1)}, "its sliding_window needs causal"),
    ({"causal": True, "key": shape(2, 32, 4, 16), "value": shape(2, 32, 4, 16)}, "causal with 64 queries and 32 keys"),
    ({"attention_mask": shape(2, 1, 1, 64, dtype=bool)}, "attention_mask broadcast over queries or keys"),
    ({"bias": shape(2, 4, 64, 64)}, "bias [2, 4, 64, 64]; its gradient needs one for all rows, with 4 heads"),
    (
        {"bias": shape(1, 4, 64, 64), "attention_mask": shape(2, 1, 64, 64, dtype=bool)},
        "attention_mask with 2 rows beside a bias; its gradient needs one for all rows",
    ),
    ({"bias": shape(1, 4, 64, 64, dtype=jnp.float32)}, "bias in float32, query in bfloat16"),
    (dict.fromkeys(CALL, shape(2, 64, 4, 16, dtype=jnp.float32)), "float32 arrays; it takes float16 or bfloat16"),
    ({"value": shape(2, 64, 4, 16, dtype=jnp.float16)}, "bfloat16/float16 arrays"),
    ({"dtype": jnp.float32}, "output in float32; its own is bfloat16"),
    (dict.fromkeys(CALL, shape(2, 63, 4, 16)), "an odd length: 63 queries, 63 keys"),
    ({"value": shape(2, 64, 4, 8)}, "value dim 8 other than key dim 16"),
    (dict.fromkeys(CALL, shape(2, 64, 4, 12)), "head dim 12; it takes multiples of 8 up to 256"),
    (dict.fromkeys(CALL, shape(2, 0, 4, 16)), "an empty array"),
]


@pytest.mark.parametrize("arguments, reason", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(arguments, reason, installed):
    found = explain(flash_attention, **{**CALL, **arguments})
    assert found.chosen == {"default": "xla"}
    assert found.refused["cudnn"].startswith(reason)
    with pytest.raises(_dispatch.PlatformError, match="'cudnn' cannot serve this call: " + reason.split("[")[0]):
        explain(flash_attention, **{**CALL, **arguments}, platform="cudnn")


@pytest.mark.parametrize("arguments, reason", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_is_refused_runs_on_triton(arguments, reason, installed, monkeypatch):
    monkeypatch.setattr(_launch, "unavailable", lambda: None)
    found = explain(flash_attention, **{**CALL, **arguments})
    if "softmax_dtype" in arguments or "empty" in reason:
        assert found.chosen == {"default": "xla"}
    else:
        assert found.chosen == {"cuda": "triton", "default": "xla"}


@pytest.mark.parametrize("implementation", [cudnn, splash])
def test_an_option_that_is_not_listed_is_refused(implementation):
    """As one will be that is added to calls later."""

    @dataclass(frozen=True)
    class Later(Call):
        tilt: float = 0.0

    half = np.dtype(jnp.bfloat16)
    later = Later(1, 128, 128, 4, 4, 64, 64, half, half, half, 0.1, half, np.dtype(np.float32))
    assert "tilt" not in (implementation.supports(later) or "")
    assert lacking(later, implementation.SUPPORTED) is None
    assert lacking(replace(later, tilt=0.5), implementation.SUPPORTED) == "it has no tilt"
    assert implementation._options(replace(later, tilt=0.5)) == "it has no tilt"
    # the least that a bound can be is one still
    assert lacking(replace(later, right=0), ()) == "it has no causal"


def test_packed_is_refused(installed):
    one = shape(1, 64, 4, 16)
    found = explain(flash_attention, one, one, one, cu_seqlens=np.array([0, 64]))
    assert found.refused["cudnn"] == "it has no cu_seqlens"


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_explain_says_cudnn(case, installed):
    found = explain(flash_attention, **case.arrays(jnp.bfloat16), **case.options)
    assert found.chosen == {"cuda": "cudnn", "default": "xla"} and "cudnn" not in found.refused
    assert str(found).startswith("on cuda: cudnn\nelsewhere: xla")


@pytest.mark.parametrize("case", [each for each in SERVED if each.mask_heads or each.bias_heads], ids=str)
def test_masks_are_left_to_triton(case, installed, monkeypatch):
    monkeypatch.setattr(_launch, "unavailable", lambda: None)
    found = explain(flash_attention, **case.arrays(jnp.bfloat16), **case.options)
    assert found.chosen["cuda"] == ("cudnn" if case.bias_heads else "triton")
    assert found.slower == ({} if case.bias_heads else {"cudnn": "attention_mask"})


def test_explain_without_the_plugin(monkeypatch):
    monkeypatch.setattr(cudnn, "_installed", lambda: "JAX's CUDA plugin is not installed")
    monkeypatch.setattr(_launch, "unavailable", lambda: "no NVIDIA GPU here")
    refusals = "not cudnn: JAX's CUDA plugin is not installed\nnot triton: no NVIDIA GPU here"
    refusals = f"not splash: 64 queries and 64 keys; it takes multiples of 128\n{refusals}"
    assert str(explain(flash_attention, **CALL)) == f"everywhere: xla\n{refusals}"
    assert str(explain(attention, **CALL)) == "everywhere: xla"
    with pytest.raises(ValueError, match="calls no op of this library"):
        explain(jnp.sin, X)


def test_slower_implementation_on_a_gpu_warns_once(installed, monkeypatch):
    x = np.zeros((1, 2, 1, 8), np.float32)
    _dispatch._warn_once.cache_clear()
    flash_attention(x, x, x)
    monkeypatch.setattr(_dispatch, "_default_platform", lambda: "cuda")
    with pytest.warns(SlowerImplementationWarning, match="'cudnn': float32 arrays"):
        flash_attention(x, x, x)
    flash_attention(x, x, x)
    flash_attention(x, x, x, platform="xla", causal=True)
    _dispatch._warn_once.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("case", SERVED, ids=str)
def test_cudnn_matches_oracle(case):
    arrays = case.arrays(jnp.bfloat16)
    run = jax.jit(lambda arrays: flash_attention(**arrays, **case.options, platform="cudnn"))
    assert "__cudnn$fmha" in run.lower(arrays).compile().as_text()
    compare(case, 4e-2, platform="cudnn")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cudnn_head_dims(dim):
    compare(Case("", **{**SIZES, "key_dim": dim, "value_dim": dim}, kv_heads=2, options=CAUSAL), 4e-2)


@pytest.mark.gpu
def test_cudnn_differentiates_twice_and_maps():
    case = Case("grouped", **{**SIZES, "queries": 8, "keys": 8}, kv_heads=2, options=CAUSAL)
    arrays = case.arrays(jnp.bfloat16)

    def loss(query, key, value):
        return (flash_attention(query, key, value, causal=True, dtype=None).astype(jnp.float32) ** 2).sum()

    second = jax.jit(jax.grad(lambda *a: (jax.grad(loss)(*a) ** 2).astype(jnp.float32).sum()))(*arrays.values())
    assert np.isfinite(np.asarray(second, np.float32)).all()
    mapped = jax.vmap(jax.grad(loss), (0, None, None))(arrays["query"][:, None], arrays["key"][:1], arrays["value"][:1])
    assert mapped.shape == (2, 1, 8, 4, 16)
