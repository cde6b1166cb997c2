"""Pools of states on the Triton kernels of both recurrences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_pools import (
    GATES,
    OPTIONS,
    PROMPTS,
    H,
    K,
    V,
    check_bits_of_prompts,
    check_prompts,
    exact,
    pool,
    rng,
    tokens,
)

import ejkernel
from ejkernel.kernels import _launch
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.delta_rule import triton as delta_rule
from ejkernel.kernels.linear_recurrence import triton as linear_recurrence

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")

from triton_interpreter import GPU, MARKS, kernels

pytestmark = MARKS
# as models have them, where that does not take minutes
DIMS = (128, 128) if GPU else (K, V)
DELTAS = ("delta_rule", "gated_delta_rule", "kda")


@pytest.fixture
def served(monkeypatch):
    def dispatch(implementations, pooled, *arrays, platform=None):
        assert isinstance(pooled, PooledCall)
        core = delta_rule if "beta" in pooled.dims() else linear_recurrence
        assert core.supports_pooled(pooled) is None, core.supports_pooled(pooled)
        return core.run_pooled(pooled, *arrays)

    monkeypatch.setattr("ejkernel._pools.dispatch", dispatch)
    with kernels():
        yield


def on_triton(name, **arrays):
    return getattr(ejkernel, name)(**arrays, **OPTIONS.get(name, {}))


# an empty sequence, one that reads what another writes, a slot that is none; states inside, twice, nowhere
LENGTHS, PADDING = (5, 0, 19, 1), 2
BORDERS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
READS = np.array([3, 0, -1, 9], np.int32)
WRITES = np.array([[3, -1, 5], [1, 1, -1], [0, 2, 6], [4, 3, 12]], np.int32)
AT = np.array([[2, 5, 6], [0, 1, 0], [7, 19, 3], [1, -1, 1]], np.int32)
CHANGED = [3, 1, 0, 2, 6, 4]


@pytest.mark.parametrize("name", GATES)
def test_as_xla(name, served, monkeypatch):
    given, states = tokens(name, BORDERS[-1] + PADDING), pool()
    states[4] = np.nan  # nobody reads it
    arguments = given | {"cu_seqlens": BORDERS, "states": states, "reads": READS, "writes": WRITES, "at": AT}
    # what cannot be known when tracing is no error
    output, after = jax.jit(functools.partial(on_triton, name))(**arguments)
    monkeypatch.undo()
    expected, after_xla = jax.jit(functools.partial(on_triton, name))(**arguments)
    np.testing.assert_allclose(output, expected, rtol=0, atol=2e-5)
    assert not np.asarray(output)[BORDERS[-1] :].any()
    np.testing.assert_allclose(after[np.array(CHANGED)], after_xla[np.array(CHANGED)], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[5], states[5])


@pytest.mark.parametrize("name", ["recurrent", "gated_delta_rule", "kda"])
def test_rows_and_the_definition(name, served):
    """A batch, against the float64 loop; two sequences swap their slots."""
    given = {each: x.reshape(3, 7, *x.shape[1:]) for each, x in tokens(name, 21).items()}
    states, reads, writes = pool(), np.array([2, 0, 0]), np.array([0, 2, -1])
    output, after = getattr(ejkernel, name)(**given, states=states, reads=reads, writes=writes)
    exact = oracle.delta_rule if name in DELTAS else oracle.recurrent
    wanted, final = exact(**given, initial_state=states[reads])[:2]
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(after[np.array([0, 2])], final[:2], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(after[np.array([1, 3, 4, 5, 6])], states[[1, 3, 4, 5, 6]])


@pytest.mark.parametrize("name, strength, dtype", PROMPTS)
def test_prompts(name, strength, dtype, served):
    check_prompts(jax.jit(functools.partial(on_triton, name)), name, strength, dtype, DIMS)


def test_prompts_with_more_key_dims_than_a_program_has(served):
    check_prompts(jax.jit(ejkernel.linear_attention), "linear_attention", None, np.float32, (272, 5))


@pytest.mark.parametrize("name, strength, dtype", PROMPTS)
def test_bits_of_prompts(name, strength, dtype, served):
    # the last tokens go one by one, or by a chunk that is not full
    length = (261 if dtype == np.float32 else 300) + 768 * GPU
    check_bits_of_prompts(jax.jit(functools.partial(on_triton, name)), name, strength, dtype, length, DIMS)


@pytest.mark.parametrize("name", ["recurrent", "retention", "gated_delta_rule", "kda"])
def test_bits_do_not_depend_on_the_call(name, served):
    """A few tokens at once, and in pieces of any length beside others, in other slots."""
    length = 16
    given = tokens(name, length)

    def call(low, high, states, read, write, others=0, padding=0):
        extra, end = tokens(name, 3 * others), tokens(name, padding)
        parts = {each: np.concatenate([extra[each], x[low:high], end[each]]) for each, x in given.items()}
        borders = np.array([*range(0, 3 * others + 1, 3), 3 * others + high - low], np.int32)
        reads, writes = (np.array([-1] * others + [each], np.int32) for each in (read, write))
        output, states = on_triton(name, **parts, cu_seqlens=borders, states=states, reads=reads, writes=writes)
        return np.asarray(output)[3 * others : 3 * others + high - low], states

    whole, states = call(0, length, pool(3), -1, 2)
    first, after = call(0, 9, pool(9), -1, 5, others=2)
    second, after = call(9, 15, after, 5, 8, others=1, padding=30)
    last, after = call(15, 16, after, 8, 0)
    np.testing.assert_array_equal(np.concatenate([first, second, last]), whole)
    np.testing.assert_array_equal(after[0], states[2])


@pytest.mark.parametrize("name", ["simple_gla", "delta_rule"])
def test_one_token(name, served):
    """Of sequences that start from a slot which another writes, and that write the same one: any of them, whole."""
    given = {each: x[:, None] for each, x in tokens(name, 4).items()}
    states, reads = pool(), np.array([1, 2, 1, -1], np.int32)
    states[5] = np.nan
    writes = np.array([2, 1, 3, 3], np.int32)
    output, after = jax.jit(functools.partial(on_triton, name))(**given, states=states, reads=reads, writes=writes)
    exact = oracle.delta_rule if name in DELTAS else oracle.recurrent
    gate = {"g": given["g"][..., None]} if "g" in given else {}
    starts = np.stack([states[1], states[2], states[1], 0 * states[1]])
    wanted, final = exact(**given | gate, initial_state=starts)[:2]
    np.testing.assert_allclose(output, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(after[np.array([2, 1])], final[:2], rtol=0, atol=2e-5)
    assert min(np.abs(after[3] - each).max() for each in final[2:]) < 2e-5
    np.testing.assert_array_equal(after[np.array([0, 4, 5, 6])], states[[0, 4, 5, 6]])


@pytest.mark.parametrize("length", [9, 40, 133])
def test_pools_of_bfloat16(length, served):
    """States are rounded where they are written, and not between chunks and single tokens."""
    given, states = tokens("kda", length), pool(dtype=jnp.bfloat16)
    slots = {"cu_seqlens": np.array([0, length]), "reads": np.array([1]), "writes": np.array([2])}
    output, after = on_triton("kda", **given, states=states, **slots)
    wide, state = on_triton("kda", **given, states=states.astype(np.float32), **slots)
    assert after.dtype == jnp.bfloat16
    np.testing.assert_array_equal(output, wide)
    np.testing.assert_array_equal(after[2], state[2].astype(jnp.bfloat16))
    np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(states, 2, 0))


def test_half_precision(served):
    given = {each: x.astype(jnp.bfloat16) for each, x in tokens("recurrent_gla", 9).items()}
    slots = {"cu_seqlens": np.array([0, 9]), "states": pool(), "reads": np.array([1]), "writes": np.array([2])}
    output, after = on_triton("recurrent_gla", **given, **slots)
    exact = {each: np.asarray(x, np.float64)[None] for each, x in given.items()}
    wanted, final = oracle.recurrent(**exact, initial_state=slots["states"][1:2])[:2]
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float32), wanted[0], rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(after[2], final[0], rtol=0, atol=2e-5)


def test_mapped_calls(served):
    given, states = tokens("gated_delta_rule", 6), rng.normal(size=(2, 4, H, K, V)).astype(np.float32)
    slots = {"reads": jnp.asarray([1, 2]), "writes": jnp.asarray([2, 0])}

    def call(arrays, states, borders):
        return on_triton("gated_delta_rule", **arrays, cu_seqlens=borders, states=states, **slots)

    borders = jnp.asarray([[0, 2, 6], [0, 3, 4]])
    found = jax.vmap(call, (None, 0, 0))(given, states, borders)
    for i in range(2):
        alone = call(given, states[i], borders[i])
        jax.tree.map(lambda x, y, i=i: np.testing.assert_array_equal(x[i], y), found, alone)


@pytest.mark.parametrize("length", [6, 40])
@pytest.mark.parametrize("name", ["simple_gla", "recurrent_gla", "gated_delta_rule", "kda"])
def test_gates_that_overflow_and_reset(name, length, served):
    """What starts from nothing stays nothing, token by token and by chunks."""
    given = tokens(name, length)
    given["g"][0], given["g"][3], given["g"][4] = 120.0, -np.inf, -1e4
    slots = {"cu_seqlens": np.array([0, length]), "states": pool(), "reads": np.array([-1]), "writes": np.array([0])}
    output, after = on_triton(name, **given, **slots)
    since = {each: x[4:] for each, x in given.items()}  # nothing before is left
    wanted, final = exact(name, since, np.zeros((H, K, V)))
    assert np.isfinite(output).all()
    np.testing.assert_allclose(output[4:], wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(after[0], final, rtol=0, atol=2e-5)


@pytest.mark.skipif(GPU, reason="launches are counted where they are interpreted")
@pytest.mark.parametrize("name", ["recurrent_gla", "gated_delta_rule"])
def test_few_tokens_are_not_cut_in_chunks(name, served):
    launched, launch = [], _launch.launch

    def record(kernel, *arrays, **options):
        launched.append(kernel.fn.__name__)
        return launch(kernel, *arrays, **options)

    given, ends = tokens(name, 48), {"states": pool(), "reads": np.array([1, 2, 3]), "writes": np.array([1, 2, 3])}
    rows = {each: x.reshape(3, 16, *x.shape[1:]) for each, x in given.items()}
    # undone before `served`, which put the interpreter's `launch` there, takes that away
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_launch, "launch", record)
        by_rows, _ = getattr(ejkernel, name)(**rows, **ends)
        assert launched == ["make_tables", "hold", "step"]
        packed, _ = getattr(ejkernel, name)(**given, cu_seqlens=np.array([0, 16, 32, 48]), **ends)
    assert "walk_prompts" in launched
    np.testing.assert_array_equal(by_rows.reshape(packed.shape), packed)
