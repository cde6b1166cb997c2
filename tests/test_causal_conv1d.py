"""`causal_conv1d` against its definition in float64: values, gradients, bits, and what must not leak."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from convolution_cases import (
    CASES,
    DIFFERENTIABLE,
    RAGGED,
    ROWS_OF_SEVERAL,
    UNITS,
    Case,
    check,
    check_sizes,
    results_and_gradients,
    spoilt,
)

import ejkernel
from ejkernel.convolution import unit_conv1d
from ejkernel.kernels import _xla

# of the backward pass, with tails of all kinds
SEVERAL_BLOCKS = (
    Case("one block", tokens=128),
    Case("one block and a short tail", tokens=130, batch=1),
    Case("several blocks", tokens=300, taps=3, bias=False),
    Case("several blocks, packed", lengths=(120, 1, 0, 8, 2, 125, 140), padding=9, channels=3),
    Case(
        "several blocks, segments", ids=((-1, *[3] * 130, *[4] * 127, 5), (*[0] * 128, *[-1] * 129, 1, 1)), channels=3
    ),
    Case("several blocks, norms", tokens=300, batch=1, channels=6, unit_dim=3),
)


@pytest.mark.parametrize("case", (*CASES, *UNITS, *SEVERAL_BLOCKS), ids=str)
def test_results_and_gradients(case):
    check(case)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (np.float16, 2e-3), (np.float64, 1e-13)])
def test_dtypes(dtype, tolerance):
    with jax.enable_x64(dtype == np.float64):
        check(Case("ragged", lengths=RAGGED, padding=3), dtype, tolerance)
        check(Case("ragged, norms", lengths=RAGGED, padding=3, channels=8, unit_dim=4), dtype, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (jnp.bfloat16, 2e-2), (np.float64, 1e-12)])
def test_norms_of_heads_of_any_size(dtype, tolerance):
    with jax.enable_x64(dtype == np.float64):
        check_sizes(Case("sizes", channels=24, unit_dim=4, bias=False), dtype, tolerance)


def test_a_norm_is_rounded_once():
    arrays = Case("once", channels=8, unit_dim=4).arrays(jnp.bfloat16)
    given = {name: arrays[name] for name in ("x", "weight", "bias", "initial_state")}
    found, _ = unit_conv1d(**given, activation="silu", unit_dim=4)
    wide, _ = unit_conv1d(
        **{name: jnp.asarray(x, jnp.float32) for name, x in given.items()}, activation="silu", unit_dim=4
    )
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wide.astype(jnp.bfloat16)))


def test_sums_are_in_float32_whatever_the_weights_are_in():
    arrays = Case("plain").arrays(np.float32)
    x, weight = jnp.asarray(arrays["x"], jnp.bfloat16), arrays["weight"]
    output, state = ejkernel.causal_conv1d(x, weight, initial_state=arrays["initial_state"])
    states = jnp.asarray(arrays["initial_state"], jnp.bfloat16)
    exact = oracle.causal_conv1d(x, weight, initial_state=states)
    assert output.dtype == state.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(output), np.asarray(jnp.asarray(exact[0], jnp.bfloat16)))


def test_the_path_that_is_always_xla():
    check(CASES[0], front=_xla.causal_conv1d)


def test_split_calls_have_the_bits_of_a_whole_one():
    arrays = Case("bits", tokens=40, channels=37).arrays(np.float32)
    x, given = arrays["x"], (arrays["weight"], arrays["bias"], "silu")
    whole, state = ejkernel.causal_conv1d(x, *given)
    for cuts in ([0, 1, 3, 40], [0, 17, 40], [0, 2, 4, 6, 40]):
        pieces, carried = [], None
        for start, end in itertools.pairwise(cuts):
            piece, carried = ejkernel.causal_conv1d(x[:, start:end], *given, carried)
            pieces.append(piece)
        np.testing.assert_array_equal(np.concatenate(pieces, 1), whole)
        np.testing.assert_array_equal(carried, state)


@pytest.mark.parametrize("state", [False, True])
def test_packing_changes_no_bits(state):
    case = Case("packed", lengths=(7, 0, 1, 19, 2), channels=37, state=state)
    arrays = case.arrays(np.float32)
    given, states = (arrays["weight"], arrays["bias"], "silu"), arrays.get("initial_state")
    borders = arrays["cu_seqlens"]
    output, final = ejkernel.causal_conv1d(arrays["x"], *given, states, borders)
    for n, (start, end) in enumerate(itertools.pairwise(borders)):
        own = None if states is None else states[n : n + 1]
        alone, last = ejkernel.causal_conv1d(arrays["x"][:, start:end], *given, own)
        np.testing.assert_array_equal(output[:, start:end], alone)
        np.testing.assert_array_equal(final[n : n + 1], last)
    ids = np.repeat([1, 0, 2, 3], [7, 1, 19, 2])[None]
    by_ids, last = ejkernel.causal_conv1d(arrays["x"], *given, None if states is None else states[:1], segment_ids=ids)
    np.testing.assert_array_equal(by_ids[:, :7], output[:, :7])
    if not state:
        np.testing.assert_array_equal(by_ids, output)
        np.testing.assert_array_equal(last, final[-1:])


@pytest.mark.parametrize("unit_dim", [0, 2])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nothing_leaks_between_packed_sequences_or_from_padding(number, unit_dim):
    case = Case("leaks", lengths=RAGGED, padding=3, channels=4, unit_dim=unit_dim)
    arrays = case.arrays(np.float32)
    owner = np.repeat(np.arange(len(RAGGED) + 1), (*RAGGED, 3))
    bad = np.isin(owner, [0, 3, len(RAGGED)])
    clean = results_and_gradients(case, arrays)
    changed = {name: spoilt(arrays[name], (0, bad), number) for name in ("x", "d_output")}
    changed |= {name: spoilt(arrays[name], [0, 1, 3], number) for name in ("initial_state", "d_final_state")}
    found = results_and_gradients(case, arrays | changed)
    for name in ("output", "x"):
        np.testing.assert_array_equal(found[name][0, ~bad], clean[name][0, ~bad], name)
        assert not np.asarray(found[name][0, owner == len(RAGGED)]).any(), name
    for name in ("final_state", "initial_state"):
        np.testing.assert_array_equal(found[name][np.array([2, 4, 5, 6])], clean[name][np.array([2, 4, 5, 6])], name)
    assert not np.isfinite(found["output"][0, bad & (owner < len(RAGGED))]).all()
    # what is in padding and in the state of an empty sequence does not reach what all share
    padding = owner == len(RAGGED)
    changed = {name: spoilt(arrays[name], (0, padding), number) for name in ("x", "d_output")}
    changed |= {name: spoilt(arrays[name], [1], number) for name in ("initial_state", "d_final_state")}
    found = results_and_gradients(case, arrays | changed)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(found[name], clean[name], name)


@pytest.mark.parametrize("unit_dim", [0, 2])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nothing_leaks_between_segments(number, unit_dim):
    case = Case("leaks", ids=ROWS_OF_SEVERAL, channels=4, unit_dim=unit_dim)
    arrays = case.arrays(np.float32)
    ids = arrays["segment_ids"]
    clean = results_and_gradients(case, arrays)
    # padding, and the middle sequences of two rows
    padding = ids < 0
    bad = padding.copy()
    bad[0, 3:5] = bad[6, 2:7] = True
    found = results_and_gradients(
        case, arrays | {name: spoilt(arrays[name], bad, number) for name in ("x", "d_output")}
    )
    for name in ("output", "x"):
        np.testing.assert_array_equal(found[name][~bad], clean[name][~bad], name)
        assert not np.asarray(found[name])[padding].any(), name
    for name in ("final_state", "initial_state"):
        np.testing.assert_array_equal(found[name], clean[name], name)
    only_padding = {name: spoilt(arrays[name], padding, number) for name in ("x", "d_output")}
    found = results_and_gradients(case, arrays | only_padding)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(found[name], clean[name], name)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_holds_no_array_as_large_as_its_inputs(packed):
    shape = (1, 8192, 16)
    x, weight = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct((4, 16), np.float32)
    borders = np.array([0, 3000, 8000], np.int32) if packed else None

    def gradients(x, weight, d_output):
        pull = jax.vjp(lambda *given: ejkernel.causal_conv1d(*given, None, "silu", None, borders)[0], x, weight)[1]
        return pull(d_output)

    memory = jax.jit(gradients).lower(x, weight, x).compile().memory_analysis()
    # positions of packed tokens are integers, one a token
    assert memory.temp_size_in_bytes < 0.3 * x.size * 4


SMALL = (
    Case("rows", tokens=5, channels=2, taps=3),
    Case("packed", lengths=(1, 3, 0), padding=1, channels=2, taps=3),
    Case("segments", ids=((-1, 0, 0, 1), (2, 2, -1, -1)), channels=2, taps=3),
    Case("norms, packed", lengths=(1, 3, 0), padding=1, channels=4, taps=3, unit_dim=2),
)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_forward_mode_and_second_derivatives(case):
    with jax.enable_x64(True):
        arrays = case.arrays(np.float64)
        moved = {name: jnp.asarray(arrays[name]) for name in DIFFERENTIABLE}
        places = {name: arrays[name] for name in ("cu_seqlens", "segment_ids") if name in arrays}
        direction = {name: jnp.asarray(x) for name, x in case.arrays(np.float64, seed=1).items() if name in moved}

        def loss(moved):
            front = functools.partial(unit_conv1d, unit_dim=case.unit_dim) if case.unit_dim else ejkernel.causal_conv1d
            output, state = front(**moved, **places, activation="silu")
            return (output * arrays["d_output"]).sum() + (state**2 * arrays["d_final_state"]).sum()

        @jax.jit
        def derivatives(moved, direction):
            gradient, twice = jax.jvp(jax.grad(loss), (moved,), (direction,))
            along = jax.jvp(loss, (moved,), (direction,))[1]
            back = jax.grad(
                lambda moved: sum(
                    (a * b).sum()
                    for a, b in zip(*map(jax.tree.leaves, (jax.grad(loss)(moved), direction)), strict=True)
                )
            )
            return gradient, twice, along, back(moved)

        gradient, twice, along, back = derivatives(moved, direction)
        product = sum((gradient[name] * direction[name]).sum() for name in moved)
        np.testing.assert_allclose(along, product, rtol=1e-12)
        step = 1e-5
        ahead, behind = (
            jax.jit(jax.grad(loss))({name: moved[name] + sign * step * direction[name] for name in moved})
            for sign in (1, -1)
        )
        for name in moved:
            np.testing.assert_allclose(twice[name], (ahead[name] - behind[name]) / (2 * step), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(back[name], twice[name], rtol=1e-10, atol=1e-12)


def test_vmap():
    arrays = [Case("mapped", batch=1, tokens=6, channels=3).arrays(np.float32, seed) for seed in range(3)]
    stacked = {name: np.stack([each[name] for each in arrays]) for name in DIFFERENTIABLE}

    def loss(moved):
        output, state = ejkernel.causal_conv1d(**moved, activation="silu")
        return (output**2).sum() + state.sum()

    found = jax.jit(jax.vmap(jax.value_and_grad(loss)))(stacked)
    first = {name: arrays[0][name] for name in DIFFERENTIABLE}
    shared = jax.jit(jax.vmap(lambda x: jax.grad(loss)({**first, "x": x})["x"]))(stacked["x"])
    single = jax.jit(jax.value_and_grad(loss))
    for i, each in enumerate(arrays):
        value, gradient = single({name: each[name] for name in DIFFERENTIABLE})
        np.testing.assert_allclose(found[0][i], value, rtol=1e-6)
        for name in DIFFERENTIABLE:
            np.testing.assert_allclose(found[1][name][i], gradient[name], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shared[0], single(first)[1]["x"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_arrays_without_elements(shape):
    state = jnp.ones((shape[0], 2, shape[2]))
    output, final = ejkernel.causal_conv1d(jnp.zeros(shape), jnp.ones((3, shape[2])), initial_state=state)
    assert output.shape == shape
    np.testing.assert_array_equal(final, state if shape[1] == 0 else np.zeros(state.shape))
    no_sequences = ejkernel.causal_conv1d(jnp.ones((5, 3)), jnp.ones((3, 3)), cu_seqlens=[0])
    assert not no_sequences[0].any() and no_sequences[1].shape == (0, 2, 3)


def test_new_borders_and_ids_do_not_compile_anew():
    x, weight, count = jnp.ones((1, 6, 2)), jnp.ones((3, 2)), 0

    @jax.jit
    def run(cu_seqlens, ids):
        nonlocal count
        count += 1
        packed = ejkernel.causal_conv1d(x, weight, cu_seqlens=cu_seqlens)
        return packed[0] + ejkernel.causal_conv1d(x, weight, segment_ids=ids)[0]

    for borders, ids in (([0, 2, 6], [0, 0, 1, 1, 1, 1]), ([0, 6, 6], [1, 1, 1, 1, 1, 1])):
        found = run(jnp.array(borders), jnp.array([ids]))
        expected = oracle.causal_conv1d(x, weight, cu_seqlens=borders)[0]
        np.testing.assert_allclose(found, 2 * expected)
    assert count == 1
