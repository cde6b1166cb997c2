"""The Triton kernels of the delta rule on an NVIDIA GPU, against float64: `pytest -m gpu`."""

from dataclasses import replace

import jax
import numpy as np
import oracle
import pytest
from delta_rule_cases import CASES, SHARED, Case
from triton_delta_rule_cases import (
    answers,
    assert_as_good_as_rounded,
    assert_exact_where_keys_are_alike,
    assert_matches,
    inputs,
    with_gradients,
)

import ejkernel
from ejkernel.kernels import _launch
from ejkernel.kernels.delta_rule.triton import configs

pytestmark = pytest.mark.gpu
if _launch.capability() is None:
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
elif reason := _launch.unavailable():
    pytest.skip(reason, allow_module_level=True)

TOLERANCE = {"bfloat16": {"other": 1e-2}, "float16": {"other": 1e-2}, "float32": {"other": 1e-5}}
LARGE = {"batch": 2, "tokens": 333, "heads": 2, "own_heads": (2, 2, 2), "key_dim": 128, "value_dim": 128}
NONE = Case("none", state="each", **LARGE)
HEAD = replace(NONE, name="head", gate="ordinary")
KEY = replace(HEAD, name="key", per_key=True)
UNEVEN = {"lengths": (1, 0, 130, 64, 63, 60), "padding": 15}


def check(case, dtype="bfloat16", seed=0):
    arrays = inputs(case, dtype, seed)
    found, cotangents = with_gradients(case, arrays, platform="triton")
    expected = answers(case, arrays, cotangents)
    assert_matches(found, expected, TOLERANCE[dtype])
    if dtype != "float32":
        # beside the answer's own rounding, that of states, of what they are short of, and of what reads both; in
        # float16 key gates are folded against a chunk's ends, which rounds queries and keys once more
        assert_as_good_as_rounded(found, expected, 2.4 if case.per_key and dtype == "float16" else 2)


SHAPES = [
    {"name": "plain"},
    {"name": "whole-chunks", "tokens": 320},
    {"name": "no-state", "state": None},
    {"name": "shared-heads", "heads": 4, "own_heads": SHARED["own_heads"]},
    {"name": "odd-dims", "key_dim": 72, "value_dim": 40},
    {"name": "long-values", "key_dim": 64, "value_dim": 320},
    {"name": "reverse", "options": {"reverse": True}},
    {"name": "packed", **UNEVEN},
    {"name": "packed-reverse-shared", **UNEVEN, "options": {"reverse": True}, "own_heads": (1, 1, 2), "key_dim": 64},
    {"name": "alike", "keys": "nearly equal"},
    {"name": "few-tokens", "tokens": 5},
    {"name": "segments", "batch": 1, "tokens": 900},
    {"name": "segments-packed-reverse", "lengths": (1, 0, 900, 3), "padding": 5, "options": {"reverse": True}},
]


@pytest.mark.parametrize("base", [NONE, HEAD, KEY], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: x["name"])
def test_contract(shape, base):
    check(replace(base, **{**shape, "name": base.name}))


@pytest.mark.parametrize("base", [NONE, HEAD, KEY], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"name": "whole-chunks", "tokens": 320, "heads": 8, "own_heads": (8, 8, 8), "batch": 1},
        {"name": "packed-shared", **UNEVEN, "heads": 4, "own_heads": SHARED["own_heads"]},
        {"name": "odd-dims", "key_dim": 72, "value_dim": 40, "options": {"reverse": True}},
        {"name": "segments-alike", "batch": 1, "tokens": 900, "keys": "nearly equal"},
    ],
    ids=lambda x: x["name"],
)
def test_without_gradients(shape, base):
    """Nothing is kept, which other tiles are for, and programs that take several heads."""
    case = replace(base, **{**shape, "name": base.name})
    arrays = inputs(case, "bfloat16")
    output, final = getattr(ejkernel, case.op)(**arrays, **case.options, platform="triton")
    found = {"output": output, "final state": final}
    expected = dict(zip(found, oracle.delta_rule(**arrays, **case.options)[:2], strict=True))
    assert_matches(found, expected, TOLERANCE["bfloat16"])
    assert_as_good_as_rounded(found, expected)


WEAK = [replace(base, gate=base.gate and "tiny", keys="nearly equal") for base in (NONE, HEAD, KEY)]


@pytest.mark.parametrize("base", WEAK, ids=str)
@pytest.mark.parametrize(
    "beta, shape",
    [("ordinary", {}), ("replaces", {"batch": 1, "tokens": 900}), ("reflects", UNEVEN)],
    ids=["ordinary", "replaces-segments", "reflects-packed"],
)
def test_keys_alike_and_gates_next_to_nothing(beta, shape, base):
    """Where most of what a chunk adds to its state cancels."""
    check_alike(replace(base, beta=beta, **shape))


def check_alike(case):
    arrays = inputs(case, "bfloat16")
    found, cotangents = with_gradients(case, arrays, platform="triton")
    assert_exact_where_keys_are_alike(case, arrays, found, cotangents)
    alone = getattr(ejkernel, case.op)(**arrays, **case.options, platform="triton")[0]
    assert_exact_where_keys_are_alike(case, arrays, {**found, "output": alone}, cotangents)


@pytest.mark.parametrize("base", [HEAD, KEY], ids=str)
@pytest.mark.parametrize(
    "gate", ["tiny", "strong", "resets", "seldom", "mixed", "half shipped", "shipped", "all -6", "in turn"]
)
def test_any_gate(gate, base):
    check(replace(base, gate=gate))


@pytest.mark.parametrize("gate", ["shipped", "in turn"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: x["name"])
def test_bounded_gates(shape, gate):
    check(replace(KEY, **{**shape, "name": KEY.name, "gate": gate}))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "case",
    [
        *(NONE, HEAD, KEY, replace(KEY, gate="mixed"), replace(NONE, keys="nearly equal")),
        replace(KEY, name="segments", gate="tiny", tokens=500),
    ],
    ids=str,
)
def test_dtypes(case, dtype):
    check(replace(case, batch=1), dtype)


@pytest.mark.parametrize("base", [HEAD, KEY], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("memory", [configs.LARGE, configs.MEDIUM, configs.SMALL])
@pytest.mark.parametrize("gate", ["resets", "in turn"])
def test_every_configuration(monkeypatch, gate, memory, dim, dtype, base):
    """Those for other chips run here too, only not at their best."""
    monkeypatch.setattr(configs, "MEMORY", {_launch.capability(): memory})
    check(replace(base, batch=1, tokens=150, key_dim=dim, value_dim=dim, gate=gate), dtype)


@pytest.mark.parametrize("base", WEAK[1:], ids=str)
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("memory", [configs.LARGE, configs.MEDIUM, configs.SMALL])
def test_keys_alike_in_every_configuration(monkeypatch, memory, dim, base):
    monkeypatch.setattr(configs, "MEMORY", {_launch.capability(): memory})
    check_alike(replace(base, batch=1, tokens=150, key_dim=dim, value_dim=dim, beta="replaces"))


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in (case.key_dim, case.value_dim)], ids=str)
def test_fronts_choose_it(case):
    arrays = inputs(case, "float32")
    front = getattr(ejkernel, case.op)
    assert ejkernel.explain(front, **arrays, **case.options).chosen["cuda"] == "triton"
    found, cotangents = with_gradients(case, arrays)
    assert_matches(found, answers(case, arrays, cotangents), {"other": 1e-4})


@pytest.mark.parametrize("base", [NONE, HEAD, KEY], ids=str)
def test_same_bits_every_time(base):
    arrays = inputs(base, "bfloat16")
    first, cotangents = with_gradients(base, arrays)
    second, _ = with_gradients(base, arrays, cotangents)
    for name, x in first.items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(second[name]), err_msg=name)


def test_step_updates_a_donated_state_in_place():
    case = replace(HEAD, tokens=1, batch=8)
    arrays = inputs(case, "bfloat16")
    state = arrays.pop("initial_state") + 0
    step = jax.jit(lambda x, state: ejkernel.gated_delta_rule(**x, initial_state=state)[1], donate_argnums=1)
    address = state.unsafe_buffer_pointer()
    assert step(arrays, state).unsafe_buffer_pointer() == address
