"""Pools of states on the Pallas kernel of both recurrences, in Pallas' interpreter."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pallas_interpreter
import pytest
from test_pools import GATES, OPTIONS, H, K, V, pool, rng, tokens

import ejkernel
from ejkernel.kernels.chunks.pallas import pools
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE as DELTA
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE as LINEAR

DELTAS = ("delta_rule", "gated_delta_rule", "kda")


@pytest.fixture
def served(monkeypatch):
    def dispatch(implementations, pooled, *arrays, platform=None):
        assert isinstance(pooled, PooledCall)
        return pools.run(DELTA if "beta" in pooled.dims() else LINEAR, pooled, *arrays)

    monkeypatch.setattr("ejkernel._pools.dispatch", dispatch)
    # these dims are so small that keys would always be last
    monkeypatch.setattr(pools, "keys_last", lambda call: False)
    with pallas_interpreter.interpreted(monkeypatch):
        yield


def call(name, **arrays):
    # jitted, so that slots that are none are no errors
    return jax.jit(functools.partial(getattr(ejkernel, name), **OPTIONS.get(name, {})))(**arrays)


def definition(name, **arrays):
    """The float64 loop."""
    if arrays.get("g", np.zeros(4)).ndim == 3 and name != "gated_delta_rule":
        arrays["g"] = arrays["g"][..., None]
    return (oracle.delta_rule if name in DELTAS else oracle.recurrent)(**arrays)[:2]


@pytest.mark.parametrize("name", GATES)
def test_as_xla(name, served, monkeypatch):
    """An empty sequence, one that reads what another writes, a slot that is none; states inside, twice, nowhere."""
    lengths, padding = (5, 0, 6, 1), 2
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    given, states = tokens(name, borders[-1] + padding), pool()
    states[4] = np.nan  # nobody reads it
    slots = {
        "reads": np.array([3, 0, -1, 9], np.int32),
        "writes": np.array([[3, -1, 5], [1, 1, -1], [0, 2, 6], [4, 3, 12]], np.int32),
        "at": np.array([[2, 5, 6], [0, 1, 0], [3, 6, 1], [1, -1, 1]], np.int32),
    }
    output, after = call(name, **given, cu_seqlens=borders, states=states, **slots)
    monkeypatch.undo()
    expected, after_xla = call(name, **given, cu_seqlens=borders, states=states, **slots)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)
    assert not np.asarray(output)[borders[-1] :].any()
    changed = np.array([3, 1, 0, 2, 6, 4])
    np.testing.assert_allclose(after[changed], after_xla[changed], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[5], states[5])


DECODING = ["linear_attention", "simple_gla", "recurrent", "recurrent_gla", "delta_rule", "gated_delta_rule", "kda"]
ONE_TOKEN = [(name, np.float32, keys_last) for name in DECODING for keys_last in (False, True)]


@pytest.mark.parametrize(
    ("name", "dtype", "keys_last"), [*ONE_TOKEN, ("recurrent", jnp.bfloat16, True), ("kda", jnp.bfloat16, False)]
)
def test_one_token(name, dtype, keys_last, served, monkeypatch):
    """Decoding: slots that others write, before and after; the same slot twice; nothing read, nothing written."""
    monkeypatch.setattr(pools, "keys_last", lambda call: keys_last)
    given = {each: x[:, None] for each, x in tokens(name, 6).items()}
    states = pool(9, dtype)
    states[[5, 7]] = np.nan
    reads, writes = np.array([1, 2, 1, -1, 2, 0]), np.array([2, 1, 3, 3, -1, 0])
    output, after = call(name, **given, states=states, reads=reads, writes=writes)
    starts = np.where((reads >= 0)[:, None, None, None], states[reads].astype(np.float32), 0)
    if OPTIONS.get(name):
        given |= {each: given[each] / np.linalg.norm(given[each], axis=-1, keepdims=True) for each in ("query", "key")}
    wanted, final = definition(name, **given, initial_state=starts)
    close = {"rtol": 0, "atol": 2e-5} if dtype == np.float32 else {"rtol": 2**-8, "atol": 2e-5}
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-5)
    after = np.asarray(after)
    assert after.dtype == dtype
    np.testing.assert_allclose(after[[2, 1, 0]].astype(np.float32), final[[0, 1, 5]], **close)
    assert any(np.allclose(after[3].astype(np.float32), each, **close) for each in final[2:4])
    assert after[4:].tobytes() == states[4:].tobytes()


@pytest.mark.parametrize("name", ["recurrent", "retention", "gated_delta_rule", "kda"])
def test_bits_do_not_depend_on_the_call(name, served):
    """One prompt whole, and in pieces of any length beside others, in other slots, as a row of a batch."""
    length = 7
    given = tokens(name, length)

    def part(low, high, states, read, write, others=0, padding=0):
        extra, end = tokens(name, 2 * others), tokens(name, padding)
        parts = {each: np.concatenate([extra[each], x[low:high], end[each]]) for each, x in given.items()}
        borders = np.array([*range(0, 2 * others + 1, 2), 2 * others + high - low], np.int32)
        reads, writes = (np.array([-1] * others + [each], np.int32) for each in (read, write))
        output, states = call(name, **parts, cu_seqlens=borders, states=states, reads=reads, writes=writes)
        return np.asarray(output)[2 * others : 2 * others + high - low], states

    whole, states = part(0, length, pool(3), -1, 2)
    first, after = part(0, 4, pool(9), -1, 5, others=2)
    second, after = part(4, 6, after, 5, 8, others=1, padding=3)
    rows = {each: np.stack([rng.normal(size=x[6:].shape).astype(x.dtype), x[6:]]) for each, x in given.items()}
    last, after = call(name, **rows, states=after, reads=np.array([8, 8]), writes=np.array([8, 0]))
    np.testing.assert_array_equal(np.concatenate([first, second, last[1]]), whole)
    np.testing.assert_array_equal(after[0], states[2])


def test_half_precision(served):
    given = {each: x.astype(jnp.bfloat16) for each, x in tokens("recurrent_gla", 5).items()}
    slots = {"cu_seqlens": np.array([0, 5]), "states": pool(), "reads": np.array([1]), "writes": np.array([2])}
    output, after = call("recurrent_gla", **given, **slots)
    exact = {each: np.asarray(x, np.float64)[None] for each, x in given.items()}
    wanted, final = oracle.recurrent(**exact, initial_state=slots["states"][1:2])[:2]
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float32), wanted[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(after[2], final[0], rtol=0, atol=2e-5)


def test_gates_that_overflow_and_reset(served):
    given = tokens("recurrent_gla", 6)
    given["g"][0], given["g"][3], given["g"][4] = 120.0, -np.inf, -1e4
    slots = {"cu_seqlens": np.array([0, 6]), "states": pool(), "reads": np.array([-1]), "writes": np.array([0])}
    output, after = call("recurrent_gla", **given, **slots)
    since = {each: x[None, 4:] for each, x in given.items()}  # nothing before is left
    wanted, final = oracle.recurrent(**since)[:2]
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output[4:], wanted[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(after[0], final[0], rtol=0, atol=2e-5)


def test_borders_out_of_order_end(served):
    """They are not legal, and nobody can tell when tracing; a program must not wait for tokens that never come."""
    given = tokens("linear_attention", 5)
    slots = {"states": pool(), "reads": np.array([-1, -1, -1]), "writes": np.array([0, 1, 2])}
    output, _ = call("linear_attention", **given, cu_seqlens=np.array([0, 3, 2, 5], np.int32), **slots)
    assert output.shape == (5, H, V)


@pytest.fixture
def pooled():
    """A `PooledCall` of `kda`, packed."""
    found = []

    def keep(implementations, call, *arrays, platform=None):
        found.append(call)
        return arrays[2], arrays[-4]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ejkernel._pools.dispatch", keep)
        slots = {"cu_seqlens": np.array([0, 4]), "states": pool(), "reads": np.array([1]), "writes": np.array([2])}
        ejkernel.kda(**tokens("kda", 4), **slots)
    return replace(found[0], call=replace(found[0].call, key_dim=128, value_dim=128))


def test_what_is_not_served(pooled):
    assert pools.supports(pooled) is None

    def refusal(**changes):
        return pools.supports(replace(pooled, call=replace(pooled.call, **changes)))

    assert refusal(key_dim=64) is refusal(value_dim=64) is refusal(value_dim=256) is None
    assert refusal(key_dim=K) == "head dims K=8, V=128; it takes multiples of 64 up to 256"
    assert refusal(dtype=np.dtype(np.float64)) == "float64 arrays"
    assert refusal(tokens=0) == "an array without elements"
    assert "do not fit the scalar memory" in refusal(sequences=20_000)


@pytest.mark.parametrize("name", ["recurrent_gla", "kda"])
def test_programs_for_tpus_alias_the_pool(name):
    shape = {"query": (H, 64), "key": (H, 64), "value": (H, 64), "g": (H, 64), "beta": (H,)}
    names = ["query", "key", "value", *GATES[name]]
    arrays = {each: jax.ShapeDtypeStruct((4, 1, *shape[each]), jnp.float32) for each in names}
    states, ints = jax.ShapeDtypeStruct((9, H, 64, 64), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, arrays, reads, writes):
        return getattr(ejkernel, name)(**arrays, states=states, reads=reads, writes=writes)

    text = jax.export.export(step, platforms=["tpu"])(states, arrays, ints, ints).mlir_module()
    (kernel,) = [line for line in text.splitlines() if "tpu_custom_call" in line]
    assert "output_tuple_indices = [1]" in kernel and "tensor<9x4x64x64xf32>" in kernel
