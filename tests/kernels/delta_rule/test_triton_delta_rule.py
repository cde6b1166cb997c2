"""The Triton kernels of the delta rule, interpreted on the CPU, against float64."""

import contextlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from delta_rule_cases import CASES, SHARED, Case
from triton_delta_rule_cases import (
    answers,
    assert_as_good_as_rounded,
    assert_exact_where_keys_are_alike,
    assert_matches,
    inputs,
    on_triton,
    with_gradients,
)

import ejkernel
from ejkernel._dispatch import SlowerImplementationWarning, _warn_once
from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.delta_rule import triton as triton_gpu
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton import configs, launcher
from ejkernel.kernels.delta_rule.triton.configs import Config
from ejkernel.kernels.delta_rule.triton.launcher import Plan

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted

TOLERANCE = {
    "float32": {"other": 1e-6, "g": 3e-6},
    "float16": {"other": 1e-3},
    "bfloat16": {"other": 1e-2},
}


def small(chunk=16, block=16, fill=0):
    """Small blocks: several chunks, and blocks of dims, in a few dozen tokens."""
    names = ("system", "gated", "forward", "forward_only", "local", "backward", "gradients", "step")
    tiles = dict.fromkeys(names, Tile(block))
    return Config(chunk=chunk, precision="ieee", invert="ieee", heads=2, key_block=block, fill=fill, **tiles)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(configs, "configure", lambda capability, wide, dim: small())
    with interpreted(), on_triton():
        yield


def check(case, dtype="float32"):
    arrays = inputs(case, dtype)
    found, cotangents = with_gradients(case, arrays)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE[dtype])
    if "g" in found:
        assert not np.asarray(found["g"])[np.isneginf(np.asarray(arrays["g"]))].any()


ONE = {"batch": 1, "heads": 1, "own_heads": (1, 1, 1)}
NAMED = {case.name: case for case in CASES}
ROWS = [
    (replace(NAMED["no gate"], tokens=37, key_dim=20, value_dim=20, **ONE), "float32"),
    (replace(NAMED["no gate any beta"], tokens=20, **ONE), "float32"),
    (replace(NAMED["no gate nearly equal keys"], tokens=32, **ONE), "float32"),
    (replace(NAMED["head mixed"], tokens=37, **ONE), "float32"),
    (replace(NAMED["head positive"], tokens=20, **ONE), "float32"),
    (replace(NAMED["head all reset"], tokens=20, **ONE), "float32"),
    (replace(NAMED["head packed unbatched reverse"], lengths=(3, 0, 17, 1)), "float32"),
    (replace(NAMED["head"], tokens=20, **ONE), "bfloat16"),
    (replace(NAMED["head"], tokens=20, **ONE), "float16"),
    (replace(NAMED["key mixed"], tokens=37, **ONE), "float32"),
    (replace(NAMED["key packed shared"], lengths=(3, 0, 17), options={"reverse": True}), "float32"),
    (replace(NAMED["key"], gate="seldom", tokens=50, key_dim=20, **ONE), "bfloat16"),  # too strong in half the chunks
    (replace(NAMED["key packed shared"], gate="ordinary", lengths=(3, 0, 18), options={"reverse": True}), "bfloat16"),
    (replace(NAMED["one token"], batch=1), "float32"),
    (NAMED["one token reset"], "float32"),
    (NAMED["one packed token"], "float32"),
    (Case("few tokens", tokens=3, gate="ordinary", state="each", **SHARED), "float32"),
]


@pytest.mark.parametrize("case, dtype", ROWS, ids=str)
def test_matches_oracle(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("per_key", [False, True])
def test_chunks_of_full_size(monkeypatch, per_key):
    """The chunk of 64 tokens that Hopper uses, on a length that fills none, with keys that are alike."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(64, 32))
    case = Case("large", tokens=75, keys="nearly equal", state="each", key_dim=32, value_dim=32, **ONE)
    check(replace(case, gate="strong" if per_key else "tiny", per_key=per_key))


BOUNDED = Case("bounded", tokens=75, gate="shipped", per_key=True, state="each", key_dim=20, value_dim=20, **ONE)
ROWS_OF_BOUNDED = [
    BOUNDED,
    replace(BOUNDED, name="bounded whole", tokens=64, key_dim=32, value_dim=32),
    replace(BOUNDED, name="bounded without state", tokens=65, state=None, beta="any"),
    replace(BOUNDED, name="bounded all -6", gate="all -6", tokens=130),
    replace(BOUNDED, name="bounded in turn", gate="in turn", tokens=150),
    replace(BOUNDED, name="bounded in turn reverse", gate="in turn", tokens=127, options={"reverse": True}),
    replace(BOUNDED, name="bounded shared", tokens=63, **{**SHARED, "batch": 1}),
    replace(BOUNDED, name="bounded packed", gate="in turn", lengths=(3, 0, 70, 33), padding=2),
    replace(BOUNDED, name="bounded packed reverse", lengths=(63, 1, 65), options={"reverse": True}),
    replace(BOUNDED, name="bounded between", gate="half shipped", tokens=130),
    replace(BOUNDED, name="bounded nearly equal keys", keys="nearly equal", beta="replaces", tokens=130),
]


@pytest.mark.parametrize("chunk", [64, 32])
@pytest.mark.parametrize("case", ROWS_OF_BOUNDED, ids=str)
def test_bounded_gates(monkeypatch, case, chunk):
    """As models ship them: chunks by blocks of 16 tokens, beside others by a middle of their own or exactly."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(chunk, 32))
    check(case, "bfloat16")


@pytest.mark.parametrize(
    "gate, dtype",
    [
        ("shipped", "float32"),
        ("in turn", "float32"),
        ("shipped", "float16"),
        ("all -6", "float16"),
        ("in turn", "float16"),
    ],
)
def test_bounded_gates_in_other_dtypes(monkeypatch, gate, dtype):
    monkeypatch.setattr(configs, "configure", lambda *_: small(32, 32))
    check(replace(BOUNDED, gate=gate, tokens=40), dtype)


def test_bounded_gates_beside_large_numbers(monkeypatch):
    """Up to what docs/numerics.md promises: inverted decays of 70 bits times 2^44."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(32, 32))
    case = replace(BOUNDED, gate="all -6", tokens=40)
    arrays = inputs(case, "bfloat16")
    arrays["value"] *= 2**22
    found, cotangents = with_gradients(case, arrays)
    cotangents = tuple(x * 2**22 for x in cotangents)
    found, _ = with_gradients(case, arrays, cotangents)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE["bfloat16"])


ALIKE = Case("alike", tokens=140, keys="nearly equal", key_dim=32, value_dim=32, **ONE)


@pytest.mark.parametrize(
    "gate, beta",
    [
        ({}, "reflects"),
        *[({"gate": "tiny"}, beta) for beta in ("ordinary", "replaces", "reflects")],
        *[({"gate": "tiny", "per_key": True}, beta) for beta in ("replaces", "reflects")],
    ],
    ids=str,
)
def test_keys_alike_and_gates_next_to_nothing(monkeypatch, gate, beta):
    """Where most of what a chunk adds to its state cancels, on Hopper and on another GPU."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(64, 32))
    monkeypatch.setattr(_launch, "capability", lambda: 100 if beta == "reflects" else 90)
    case = replace(ALIKE, beta=beta, **gate)
    arrays = inputs(case, "bfloat16")
    found, cotangents = with_gradients(case, arrays)
    assert_exact_where_keys_are_alike(case, arrays, found, cotangents)


@pytest.mark.parametrize("op", ["delta_rule", "kda"])
@pytest.mark.parametrize("before", [5, 64, 100])
def test_keys_alike_in_one_of_several_sequences(monkeypatch, op, before):
    """They are found wherever their sequence begins, behind one that holds NaN; alone it has the same bits."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(64, 32))
    gate = {"gate": "tiny", "per_key": True} if op == "kda" else {}
    case = replace(ALIKE, beta="reflects", tokens=50, **gate)
    arrays = inputs(case, "bfloat16")
    alone, cotangents = with_gradients(case, arrays)
    assert_exact_where_keys_are_alike(case, arrays, alone, cotangents)

    def behind(x):
        return jnp.concatenate([jnp.full_like(x[:, :1], jnp.nan).repeat(before, 1), x], 1)

    ids = jnp.asarray([[0] * before + [1] * case.tokens], jnp.int32)
    state = {name: x for name, x in arrays.items() if name == "initial_state"}
    tokens = {name: x for name, x in arrays.items() if name not in state}

    def of_row(front, ids):
        return getattr(ejkernel, case.op)(**front, segment_ids=ids, **case.options)[0]

    rows = {name: behind(x) for name, x in tokens.items()}
    one, pull_one = jax.vjp(lambda x: of_row(x, jnp.ones_like(ids[:, before:])), tokens)
    both, pull_both = jax.vjp(lambda x: of_row(x, ids), rows)
    np.testing.assert_array_equal(both[:, before:], one)
    assert_as_good_as_rounded({"output": one}, answers(case, arrays, cotangents))
    d_output = cotangents[0].astype(one.dtype)
    for expected, found in zip(*map(jax.tree.leaves, (pull_one(d_output), pull_both(behind(d_output)))), strict=True):
        np.testing.assert_array_equal(found[:, before:], expected)


def test_without_gradients():
    """Nothing is kept, and a program takes two heads."""
    case = Case("two heads", tokens=20, gate="ordinary", state="each", **{**ONE, "heads": 2, "own_heads": (1, 2, 2)})
    arrays = inputs(case, "float32")
    found = dict(zip(("output", "final state"), getattr(ejkernel, case.op)(**arrays, **case.options), strict=True))
    expected = dict(zip(found, oracle.delta_rule(**arrays, **case.options)[:2], strict=True))
    assert_matches(found, expected, TOLERANCE["float32"])


SEGMENTED = [
    Case("segments", tokens=75, gate="tiny", state="each", key_dim=20, value_dim=20, **ONE),
    Case("segments packed", lengths=(3, 0, 75, 1), padding=5, gate="tiny", per_key=True, state="each", **ONE),
    Case("segments without state", tokens=64, options={"reverse": True}, **ONE),
]


@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_time_segments(monkeypatch, case):
    monkeypatch.setattr(configs, "configure", lambda *_: small(fill=99))
    monkeypatch.setattr(launcher, "FEWEST_CHUNKS", 1)
    check(case)


@pytest.mark.parametrize("case", SEGMENTED, ids=str)
def test_parts_of_a_call(monkeypatch, case):
    """A device's part is cut in time where the whole call is not, and keeps what the whole call keeps."""
    monkeypatch.setattr(configs, "configure", lambda *_: small(fill=99))
    monkeypatch.setattr(launcher, "FEWEST_CHUNKS", 1)
    arrays, of = inputs(case, "float32"), Plan.of
    plans = []

    def of_part(call):
        whole = replace(call, heads=99)
        plan = of(whole)
        with monkeypatch.context() as patch:
            patch.setattr(Plan, "of", of)
            part = plan.of_part(call)
        assert part.segmented(call) and not plan.segmented(whole)
        plans.append(part)
        return part

    monkeypatch.setattr(Plan, "of", of_part)
    found, cotangents = with_gradients(case, arrays)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE["float32"])
    assert plans


IDLE = [
    (Case("idle", tokens=37, state="each", **ONE), "float32"),
    (Case("idle reverse", tokens=20, gate="ordinary", state="each", options={"reverse": True}, **ONE), "float32"),
    (Case("idle key gates", tokens=20, gate="mixed", per_key=True, state="each", **ONE), "float32"),
    (Case("idle half", tokens=20, gate="ordinary", **ONE), "bfloat16"),
    (Case("idle half key gates", tokens=20, gate="ordinary", per_key=True, **ONE), "bfloat16"),
    (Case("idle half strong key gates", tokens=20, gate="strong", per_key=True, **ONE), "bfloat16"),
    (Case("idle keys alike", tokens=40, keys="nearly equal", beta="reflects", **ONE), "bfloat16"),
]


@pytest.mark.parametrize("case, dtype", IDLE, ids=str)
def test_beta_of_0_writes_nothing(case, dtype):
    """What tokens would have written changes no bit of anything but the gradient of their betas, which is right."""
    arrays, idle = inputs(case, dtype), jnp.asarray([2, 3, 9, 17])
    arrays["beta"] = arrays["beta"].at[:, idle].set(0.0)
    found, cotangents = with_gradients(case, arrays)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE[dtype])
    assert not np.asarray(found["key"])[:, idle].any() and not np.asarray(found["value"])[:, idle].any()
    # large keys would have bfloat16 take more digits
    factors = {"key": 1e10 if dtype == "float32" else -1.0, "value": 1e20}
    others = {name: arrays[name].at[:, idle].multiply(factor) for name, factor in factors.items()}
    again, _ = with_gradients(case, {**arrays, **others}, cotangents)
    for name in found.keys() - {"beta"}:
        np.testing.assert_array_equal(found[name], again[name], err_msg=name)
    writing = np.delete(np.arange(case.tokens), idle)
    np.testing.assert_array_equal(found["beta"][:, writing], again["beta"][:, writing])


def test_segments_of_tokens_that_write_nothing(monkeypatch):
    monkeypatch.setattr(configs, "configure", lambda *_: small(fill=99))
    monkeypatch.setattr(launcher, "FEWEST_CHUNKS", 1)
    test_beta_of_0_writes_nothing(Case("idle", tokens=64, gate="tiny", **ONE), "float32")


def test_beta_of_next_to_nothing():
    """What is written is an ordinary number, as its value is large; and a beta of the number that stands for 0."""
    case = Case("tiny betas", tokens=20, state="each", **ONE)
    arrays = inputs(case, "float32")
    for token, beta in ((2, 1e-20), (5, -1e-25), (11, 2.0**-60), (12, 2.0**-60 + 2.0**-83)):
        arrays["beta"] = arrays["beta"].at[:, token].set(beta)
        arrays["value"] = arrays["value"].at[:, token].multiply(1 / abs(beta))
    found, cotangents = with_gradients(case, arrays)
    expected = answers(case, arrays, cotangents)
    found, expected = ({**x, "beta": x["beta"] * arrays["beta"]} for x in (found, expected))
    assert_matches(found, expected, TOLERANCE["float32"])


def test_sequences_do_not_touch_and_padding_has_no_effect():
    """A NaN in one packed sequence changes no bit of another, and one in the padding none at all."""
    case = Case("leaks", lengths=(17, 5, 9), padding=3, gate="ordinary", state="each", **{**ONE, "batch": 1})
    arrays = inputs(case, "float32")
    clean, cotangents = with_gradients(case, arrays)
    spoilt = {n: x.at[0, 20].set(jnp.nan).at[0, 31:].set(jnp.nan) if x.ndim > 2 and x.shape[0] == 1 else x
              for n, x in arrays.items()}  # fmt: skip
    dirty, _ = with_gradients(case, spoilt, (cotangents[0].at[0, 31:].set(jnp.nan), cotangents[1]))
    others = np.r_[0:17, 22:34]
    for name, x in clean.items():
        rows = np.array([0, 2]) if x.shape[0] == 3 else (slice(None), others)
        np.testing.assert_array_equal(np.asarray(x)[rows], np.asarray(dirty[name])[rows], err_msg=name)
        if x.shape[0] != 3:
            assert not np.asarray(dirty[name])[:, 31:].any(), name


@pytest.mark.parametrize("per_key", [False, True])
def test_nothing_stays_nothing_however_it_grows(per_key):
    """A first gate whose exponential is infinite, where there is no state yet."""
    case = Case("burst", tokens=20, gate="ordinary", per_key=per_key, **ONE)
    arrays = inputs(case, "float32")
    arrays["g"] = arrays["g"].at[:, 0].set(100.0)
    found, cotangents = with_gradients(case, arrays)
    assert_matches(found, answers(case, arrays, cotangents), TOLERANCE["float32"])


def test_gradient_of_gradient():
    """Along a direction, by differences of the float64 gradient."""
    case = Case("twice", tokens=11, gate="ordinary", state="each", key_dim=3, value_dim=2, **ONE)
    arrays = inputs(case, "float32")
    random = np.random.default_rng(3)
    direction = {name: random.normal(size=x.shape) for name, x in arrays.items()}
    cotangents = with_gradients(case, arrays)[1]

    def slope(x):
        found = with_gradients(case, x, cotangents)[0]
        return sum((found[name] * direction[name]).sum() for name in x)

    second = jax.jit(jax.grad(slope))(arrays)

    def exact(step):
        moved = {name: np.asarray(x, np.float64) + step * direction[name] for name, x in arrays.items()}
        found = answers(case, moved, cotangents)
        return sum((found[name] * direction[name]).sum() for name in arrays)

    along = sum((np.asarray(second[name], np.float64) * direction[name]).sum() for name in arrays)
    np.testing.assert_allclose(along, (exact(1e-4) - exact(-1e-4)) / 2e-4, rtol=1e-4)


def test_vmap():
    case = Case("vmap", tokens=10, gate="ordinary", state="each", **ONE)
    each = [inputs(case, "float32", seed) for seed in range(2)]
    one, cotangents = with_gradients(case, each[1])
    found = jax.vmap(lambda x: with_gradients(case, x, cotangents)[0])(jax.tree.map(lambda *x: jnp.stack(x), *each))
    for name, x in found.items():
        np.testing.assert_allclose(x[1], one[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_supports_says_why():
    call = Call(1, 9, 2, 16, 16, 1, False, "head", 0.1, False, np.dtype(np.float32))
    assert triton_gpu.supports(call) is None
    assert triton_gpu.supports(replace(call, value_dim=1000)) is None
    assert triton_gpu.supports(replace(call, decay="key")) is None
    assert "256" in triton_gpu.supports(replace(call, key_dim=272))
    assert "float64" in triton_gpu.supports(replace(call, dtype=np.dtype(np.float64)))
    assert "elements" in triton_gpu.supports(replace(call, tokens=0))


@pytest.mark.parametrize(
    "names, others", [(("query", "value", "initial_state"), None), (("query", "key", "g"), "key and gates")]
)
def test_tangents(names, others):
    """Of what results are linear in, by the kernels; else by XLA, with a warning."""
    case = replace(NAMED["head packed unbatched reverse"], lengths=(3, 0, 17, 1), state="each")
    arrays = inputs(case, "float32")
    random = np.random.default_rng(3)
    moved = {name: random.normal(size=arrays[name].shape).astype(np.float32) for name in names}

    def along(**options):
        run = lambda moving: getattr(ejkernel, case.op)(**{**arrays, **moving}, **case.options, **options)  # noqa: E731
        return jax.jvp(run, ({name: arrays[name] for name in names},), (moved,))

    _warn_once.cache_clear()
    said = f"'xla' serves a recurrence's tangents by {others}"
    with pytest.warns(SlowerImplementationWarning, match=said) if others else contextlib.nullcontext():
        found = along()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(along(platform="xla")), strict=True):
        assert_close(a, b, 1e-5)
