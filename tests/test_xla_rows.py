"""The forward of a CPU that takes every row and head on its own, with chunks small enough for short sequences."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from linear_attention_cases import CASES, Case

from ejkernel import recurrent
from ejkernel.kernels import _xla
from ejkernel.kernels.chunks import layout
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla import one_chunk, rows

TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def always_by_rows(monkeypatch):
    """Chunks of 8 tokens, eight a step: two chunks of four rows and heads, or four of two; with key decays, half."""
    monkeypatch.setattr(layout, "LARGEST_CHUNK", 8)
    monkeypatch.setattr(one_chunk, "BASE", 2)
    monkeypatch.setattr(rows, "LANES", 8)
    monkeypatch.setattr(rows, "pays", lambda call: not call.packed and not call.value_decay and call.tokens > 8)


def check(arrays, options=None, tolerance=TOLERANCE):
    output, final = jax.jit(lambda x: recurrent(**x, **(options or {})))(arrays)
    expected = oracle.recurrent(**arrays, **(options or {}))
    assert_close(output, expected[0], tolerance, "output")
    assert_close(final, expected[1], tolerance, "final state")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.lengths is None and "gv" not in case.gates and case.tokens > 16],
    ids=str,
)
def test_matches_oracle(case):
    check(case.arrays(np.float32), case.options)


@pytest.mark.parametrize("tokens, reverse", [(9, False), (16, True), (17, True), (31, False), (33, True), (48, False)])
def test_any_length(tokens, reverse):
    """What is left behind the last whole step, or before it."""
    case = Case("length", tokens=tokens, batch=1, gates={"g": "ordinary"}, state="each")
    check(case.arrays(np.float32), {"reverse": reverse})


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_any_number_of_rows_and_heads(heads):
    """More than a step takes at once, and numbers that nothing divides."""
    check(Case("rows", batch=3, heads=heads, kv_heads=1, gates={"g": "ordinary"}, narrow=("g",)).arrays(np.float32))


@pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
def test_in_full_size(narrow, monkeypatch):
    """Chunks as large as they are, chosen as they are."""
    monkeypatch.undo()
    sizes = {"batch": 1, "tokens": 530, "heads": 1, "kv_heads": 1, "key_dim": 128, "value_dim": 128}
    check(Case("full", **sizes, gates={"g": "ordinary"}, narrow=narrow, state="each").arrays(np.float32))


def mild(call, query, key, gates):
    return bool(rows.are_mild(call, query, key, jnp.asarray(gates, np.float32)))


@pytest.mark.parametrize("decay", ["head", "key"])
def test_which_calls_are_mild(decay):
    """By both halves of every chunk, and by the largest query or key."""
    shape = (1, 39, 2, 2)
    call = Call(1, 39, 2, 2, 2, 2, 1, False, decay, False, 1.0, False, np.dtype(np.float32))  # steps take 32 tokens
    ones, gates = jnp.ones(shape), np.zeros(shape if decay == "key" else shape[:3])
    gates[0, 10:14, 1] = -20.1  # 40.2 before the middle of a chunk, 40.2 after it
    assert mild(call, ones, ones, gates)
    for other in (1e13, jnp.nan):
        assert not mild(call, ones.at[0, 38].set(other), ones, gates)
        assert not mild(call, ones, ones.at[0, 38].set(other), gates)
    for other in (-20.1, 20.1, np.nan, -np.inf):
        assert not mild(
            call, ones, ones, np.where(np.arange(39).reshape(39, *(1,) * (gates.ndim - 2)) == 9, other, gates)
        )
    gates[0, 32:] = -np.inf  # not in a whole step
    assert mild(call, ones, ones, gates)
    assert not mild(replace(call, reverse=True), ones, ones, gates)


def test_a_batch_is_mild_if_all_of_it_is():
    """And asks once, not once each: then only one of the two ways is computed."""
    call = Call(1, 16, 2, 2, 2, 2, 1, False, "key", False, 1.0, False, np.dtype(np.float32))
    ones, gates = jnp.ones((1, 16, 2, 2)), -jnp.ones((3, 1, 16, 2, 2))
    ask = jax.vmap(lambda gates: rows.are_mild(call, ones, ones, gates), out_axes=None)
    twice = jax.vmap(ask, out_axes=None)
    assert ask(gates) and twice(gates[None])
    strong = gates.at[1].multiply(100)
    assert not ask(strong) and not twice(strong[None])


@pytest.mark.parametrize("strength", [-59.0, -2.0])
def test_factors_as_large_as_they_may_be(strength):
    """Both halves of a chunk at the limit: pairs that nobody reads would overflow."""
    arrays = Case("limit", batch=1, tokens=32, gates={"g": "none"}, state="each").arrays(np.float32)
    arrays["g"][:] = strength / 4
    arrays["query"] *= 1e5
    arrays["key"] *= 1e5
    check(arrays)


@pytest.mark.parametrize("size", [1e11, 1e13, 1e25])
def test_huge_queries(size):
    """Times a factor of e^58 they would be infinite."""
    arrays = Case("huge", batch=1, tokens=32, gates={"g": "none"}).arrays(np.float32)
    arrays["g"][:] = -14.5
    arrays["query"] *= size
    arrays["key"] /= size
    check(arrays)


def test_small_gates_keep_their_digits():
    """Beside larger ones in the same half of a chunk: sums of the two are exact."""
    arrays = Case("digits", batch=1, tokens=32, gates={"g": "tiny"}, state="each").arrays(np.float32)
    arrays["g"][:, ::4] = -50.0
    check(arrays, tolerance=3e-7)


@pytest.mark.parametrize("narrow", [("g",), ()], ids=["head", "key"])
def test_states_do_not_drift(narrow):
    """Over many chunks with decays just below 1."""
    case = Case("drift", batch=1, tokens=8192, key_dim=2, value_dim=2, heads=1, kv_heads=1, narrow=narrow)
    arrays = replace(case, gates={"g": "tiny"}).arrays(np.float32)
    arrays["g"] /= 1000
    check(arrays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    arrays = Case("half", gates={"g": "ordinary"}, tokens=64).arrays(np.float32)
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    output, final = recurrent(**arrays)
    assert output.dtype == dtype and final.dtype == jnp.float32
    expected = oracle.recurrent(**arrays)
    assert_close(output, expected[0], 1e-2 if dtype == "bfloat16" else 2e-3, "output")
    assert_close(final, expected[1], TOLERANCE, "final state")


def test_vmap():
    arrays = Case("vmap", gates={"g": "ordinary"}, tokens=40, state="each").arrays(np.float32)
    other = arrays | {"g": arrays["g"] / 2}
    outputs, finals = jax.vmap(lambda x: recurrent(**x))(jax.tree.map(lambda *x: np.stack(x), arrays, other))
    for x, output, final in zip((arrays, other), outputs, finals, strict=True):
        expected = oracle.recurrent(**x)
        assert_close(output, expected[0], TOLERANCE, "output")
        assert_close(final, expected[1], TOLERANCE, "final state")


@pytest.mark.parametrize("gates", [{}, {"g": "ordinary"}], ids=["none", "key"])
def test_shard_map(gates):
    arrays = Case("sharded", gates=gates, tokens=40).arrays(np.float32)
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec("rows")
    run = jax.shard_map(lambda x: recurrent(**x), mesh=mesh, in_specs=rows, out_specs=(rows, rows))
    assert_close(jax.jit(run)(arrays)[0], oracle.recurrent(**arrays)[0], TOLERANCE)


@pytest.mark.parametrize("platform, by_rows", [("cpu", True), ("cuda", False)])
def test_who_takes_rows_one_by_one(platform, by_rows):
    x = jnp.ones((2, 64, 3, 4))
    text = jax.jit(lambda x: _xla.recurrent(x, x, x)).trace(x).lower(lowering_platforms=(platform,)).as_text()
    assert (text.count("dot_general") >= 4 * 2 * 3) == by_rows  # four products each


def test_pays(monkeypatch):
    """Not where there is little to gain for a longer compilation, nor where it cannot be right."""
    monkeypatch.undo()  # the real one
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    large = Call(1, 8192, 8, 8, 128, 128, 1, False, "key", False, 1.0, False, np.dtype(np.float32))
    assert rows.pays(large)
    others = [
        {"tokens": 511},
        {"key_dim": 64},
        {"packed": True},
        {"value_decay": True},
        {"dtype": np.dtype(np.float64)},
    ]
    assert not any(rows.pays(replace(large, **other)) for other in others)
    for name, other in (("__version_info__", (0, 12, 0)), ("default_backend", lambda: "gpu")):
        with monkeypatch.context() as patch:
            patch.setattr(jax, name, other)
            assert not rows.pays(large)
