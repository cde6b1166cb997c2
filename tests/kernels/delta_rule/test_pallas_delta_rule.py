"""The TPU kernels of the delta rule in Pallas' interpreter, against float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from delta_rule_cases import Case
from triton_delta_rule_cases import answers, assert_matches, inputs, on, with_gradients

import ejkernel
from ejkernel.kernels import _pallas, _phases
from ejkernel.kernels.delta_rule import IMPLEMENTATIONS, pallas
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.pallas.device.inverse import inverse

# rounding to bfloat16 alone is 1.7e-3 of what is rounded; what is left of gates' gradients has cancelled
TOLERANCE = {"float32": {"other": 2e-6}, "bfloat16": {"other": 2e-3, "g": 5e-3}}
BASE = Case("base", batch=1, tokens=40, heads=1, own_heads=(1, 1, 1), key_dim=64, value_dim=64, state="each")


@pytest.fixture
def interpreted(monkeypatch):
    with pallas_interpreter.interpreted(monkeypatch), on(pallas):
        yield


def compiled(case):
    """Results and gradients of a call, compiled once for any arrays."""
    return jax.jit(lambda arrays, cotangents: with_gradients(case, arrays, cotangents)[0])


def cotangents_of(case, arrays):
    *rows, heads = arrays["beta"].shape
    sequences = len(case.lengths) if case.lengths else case.batch
    random = np.random.default_rng(1)
    shapes = (*rows, heads, case.value_dim), (sequences, heads, case.key_dim, case.value_dim)
    dtypes = arrays["query"].dtype, jnp.float32
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


def check(run, case, dtype, arrays=None):
    arrays = arrays or inputs(case, dtype)
    cotangents = cotangents_of(case, arrays)
    found = run(arrays, cotangents)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE[dtype])
    if "g" in found:
        assert not np.asarray(found["g"])[np.isneginf(np.asarray(arrays["g"]))].any()
    return found


HEAD, KEY = {"gate": "ordinary"}, {"gate": "ordinary", "per_key": True}
ALIKE, BETAS = {"gate": "tiny", "keys": "nearly equal"}, ("ordinary", "replaces", "reflects")
# one compilation each, for arrays of several kinds
CASES = [
    (
        "float32",
        replace(BASE, name="none", batch=2, tokens=32),
        [{"beta": "any"}, {"keys": "equal", "beta": "reflects"}],
    ),
    (
        "bfloat16",
        replace(BASE, name="none-reverse", options={"reverse": True}),
        [{"keys": "nearly equal", "beta": x} for x in BETAS],
    ),
    (
        "bfloat16",
        replace(BASE, name="head", **HEAD, state=None),
        [
            {},
            {"gate": "mixed", "beta": "any"},
            {"gate": "mixed", "beta": "reflects"},
            *({**ALIKE, "beta": x} for x in BETAS),
        ],
    ),
    (
        "float32",
        replace(BASE, name="key", value_dim=128, **KEY),
        [
            {"beta": "writes nothing"},
            {"gate": "strong", "keys": "equal", "beta": "reflects"},
            {"gate": "resets"},
            {"gate": "shipped"},
            {"gate": "in turn"},
        ],
    ),
    (
        "bfloat16",
        replace(BASE, name="key", **KEY),
        [
            {"keys": "nearly equal"},
            {"gate": "mixed"},
            {"gate": "shipped"},
            {"gate": "all -6"},
            *({**ALIKE, "beta": x} for x in BETAS),
        ],
    ),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype, case, kinds", CASES, ids=[f"{case}-{dtype}" for dtype, case, _ in CASES])
def test_matches_oracle(monkeypatch, dtype, case, kinds):
    if dtype == "bfloat16":
        # which takes less time to compile
        monkeypatch.setattr(pallas, "CHUNKS", 1)
    run = compiled(case)
    for kind in kinds:
        check(run, replace(case, **kind), dtype)


PACKED = [
    replace(BASE, name="head", lengths=(7, 0, 11, 25, 1), padding=6, heads=2, own_heads=(1, 1, 2), **HEAD),
    replace(BASE, name="key", lengths=(7, 0, 11, 25, 1), padding=6, options={"reverse": True}, **KEY),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed(case):
    run = compiled(case)
    clean, arrays = check(run, case, "float32"), inputs(case, "float32")
    # other gates and borders in the same program
    mixed = inputs(replace(case, gate="mixed", beta="any"), "float32")
    check(run, case, "float32", mixed | {"cu_seqlens": jnp.array([0, 1, 20, 20, 37, 40])})
    if case.per_key:
        for kind in ("shipped", "in turn"):
            check(run, case, "float32", inputs(replace(case, gate=kind), "float32"))
    # what would grow beyond all bounds is nothing where there is nothing yet
    first = np.array([6, 17, 42, 43] if case.options else [0, 7, 18, 43])
    burst = {"g": arrays["g"].at[:, first].set(100.0), "initial_state": jnp.zeros_like(arrays["initial_state"])}
    cotangents = cotangents_of(case, arrays)
    found, expected = run(arrays | burst, cotangents), answers(case, arrays | burst, cotangents)
    known = expected.keys() - {"initial_state"}
    assert_matches({n: found[n] for n in known}, {n: expected[n] for n in known}, TOLERANCE["float32"])
    # a NaN stays in its sequence, and in the padding it has no effect
    spoilt = {n: x.at[0, 20].set(jnp.nan).at[0, 44:].set(jnp.nan) if x.shape[:2] == (1, 50) else x
              for n, x in arrays.items()}  # fmt: skip
    dirty = run(spoilt, cotangents)
    for name, x in clean.items():
        rows = (slice(None), np.r_[0:18, 43:50]) if x.shape[1] == 50 else np.array([0, 1, 2, 4])
        np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(dirty[name])[rows], err_msg=name)


@pytest.mark.usefixtures("interpreted")
def test_vmap():
    case = replace(BASE, tokens=20)
    each = [inputs(case, "float32", seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    found = jax.jit(jax.vmap(jax.grad(lambda arrays: ejkernel.delta_rule(**arrays)[0].sum())))(stacked)
    for i, arrays in enumerate(each):
        ones, zeros = (np.full_like(x, fill) for x, fill in zip(cotangents_of(case, arrays), (1, 0), strict=True))
        expected = answers(case, arrays, (ones, zeros))
        expected = {name: x for name, x in expected.items() if name in found}
        assert_matches({name: x[i] for name, x in found.items()}, expected, TOLERANCE["float32"])


@pytest.mark.parametrize("exact, tolerance", [(True, 1e-6), (False, 3e-5)])
def test_inverse_of_a_whole_chunk(exact, tolerance):
    """Of keys that differ, of equal ones, and where tokens reflect."""
    random = np.random.default_rng(0)
    below = random.normal(size=(128, 128)) / 8, np.ones((128, 128)), np.full((128, 128), 2.0)
    found = jax.jit(jax.vmap(functools.partial(inverse, exact=exact)))(jnp.float32(np.tril(below, -1)))
    expected = np.linalg.inv(np.eye(128) + np.tril(below, -1))
    for a, b in zip(np.asarray(found), expected, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_supports_says_why():
    call = Call(1, 40, 2, 64, 64, 1, False, "head", 0.1, False, np.dtype(np.float32))
    assert pallas.supports(call) is None
    for wrong, why in (
        ({"key_dim": 96}, "multiples of 64"),
        ({"value_dim": 320}, "up to 256"),
        ({"dtype": np.dtype(np.float16)}, "float16"),
        ({"decay": "key", "value_dim": 192}, "key gates"),
        ({"decay": "key", "key_dim": 192, "dtype": np.dtype(jnp.bfloat16)}, "up to 128, 256"),
        ({"heads": 0}, "elements"),
        ({"tokens": 1}, "one token"),
        ({"scale": -1.0}, "softmax_scale"),
    ):
        assert why in pallas.supports(replace(call, **wrong))


def test_spread_over_devices_it_leaves_what_is_too_wide_to_xla():
    """Where tokens are sharded, key dims join the value dims."""
    arrays = inputs(replace(BASE, tokens=4, value_dim=256), "float32")
    call = Call(1, 4, 1, 64, 256, 1, False, "none", 0.1, False, np.dtype(np.float32))
    assert pallas.supports(call) is None and pallas.supports(replace(call, value_dim=320))
    given = call, (arrays["query"], arrays["key"], arrays["value"], arrays["beta"], None), None
    found, expected = (
        _phases.phases_of(each, call).begin(*given)[1] for each in (IMPLEMENTATIONS[0], IMPLEMENTATIONS[-1])
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule", "kda"])
def test_exports_hold_the_kernels(monkeypatch, op):
    monkeypatch.setattr(_pallas, "INTERPRET", None)
    # 192 key dims are more than a chunk has tokens, and no multiple of these
    options = {"delta_rule": {}, "kda": KEY, "gated_delta_rule": HEAD | {"key_dim": 192}}[op]
    case = replace(BASE, tokens=300, **options)
    arrays = inputs(case, "bfloat16")

    def gradient(arrays):
        return jax.grad(lambda arrays: getattr(ejkernel, op)(**arrays)[0].astype(jnp.float32).sum())(arrays)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        exported = jax.export.export(jax.jit(gradient), platforms=["tpu"])(arrays)
    assert exported.mlir_module().count("tpu_custom_call") == 2
