"""The Triton kernels of `causal_conv1d`, interpreted, against its definition in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution_cases import (
    CASES,
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
from ejkernel._dispatch import SlowerImplementationWarning, _warn_once
from ejkernel.convolution import unit_conv1d
from ejkernel.kernels import _launch

pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
if _launch.capability() is not None:
    pytest.skip("the kernels run on the GPU itself (-m gpu)", allow_module_level=True)

from triton_interpreter import interpreted


@pytest.fixture(autouse=True)
def interpreter():
    with interpreted():
        yield


# what needs no kernel of its own is left to XLA's tests
SERVED = [case for case in CASES if case.taps <= 8]
LONG = (
    Case("several spans", batch=1, tokens=150, channels=3),
    Case("several spans, packed", lengths=(64, 1, 3, 60, 20), channels=3, padding=2),
    Case("several blocks of channels", tokens=9, channels=515),
    Case("several spans, norms", batch=1, tokens=150, channels=32, unit_dim=16),
    Case("several blocks of channels, norms", tokens=5, channels=640, unit_dim=128),
    Case("norms of heads that no program has whole", tokens=5, channels=9, unit_dim=3),
)


@pytest.mark.parametrize("case", (*SERVED, *UNITS, *LONG), ids=str)
def test_results_and_gradients(case):
    check(case, platform="triton")


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.bfloat16, 2e-2), (np.float16, 2e-3)])
def test_dtypes(dtype, tolerance):
    check(Case("ragged", lengths=RAGGED, padding=3), dtype, tolerance, platform="triton")
    norms = Case("ragged, norms", lengths=RAGGED, padding=3, channels=8, unit_dim=4)
    check(norms, dtype, tolerance, platform="triton")


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (jnp.bfloat16, 2e-2)])
def test_norms_of_heads_of_any_size(dtype, tolerance):
    check_sizes(Case("sizes", channels=24, unit_dim=4, bias=False), dtype, tolerance, platform="triton")


@pytest.mark.parametrize("unit_dim", [0, 4])
def test_split_calls_and_packing_have_the_bits_of_whole_ones(unit_dim):
    front = functools.partial(unit_conv1d, unit_dim=unit_dim) if unit_dim else ejkernel.causal_conv1d
    run = functools.partial(front, platform="triton")
    arrays = Case("bits", batch=1, tokens=70, channels=8).arrays(np.float32)
    x, given = arrays["x"], (arrays["weight"], arrays["bias"], "silu")
    whole, state = run(x, *given)
    cuts = [0, 1, 3, 20, 70]
    carried = None
    for start, end in itertools.pairwise(cuts):
        piece, carried = run(x[:, start:end], *given, carried)
        np.testing.assert_array_equal(piece, whole[:, start:end])
    np.testing.assert_array_equal(carried, state)
    packed, finals = run(x, *given, cu_seqlens=cuts)
    ids = np.repeat(np.arange(4), np.diff(cuts))[None]
    by_ids, final = run(x, *given, segment_ids=ids)
    np.testing.assert_array_equal(by_ids, packed)
    np.testing.assert_array_equal(final, finals[-1:])
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        alone, last = run(x[:, start:end], *given)
        np.testing.assert_array_equal(packed[:, start:end], alone)
        np.testing.assert_array_equal(finals[n : n + 1], last)


@pytest.mark.parametrize("unit_dim", [0, 2])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_nothing_leaks(number, unit_dim):
    """From one sequence or from padding into another, packed and in rows of several."""
    for case, bad_states in (
        (Case("packed", lengths=RAGGED, padding=3, channels=4, unit_dim=unit_dim), [0, 1, 3]),
        (Case("segments", ids=ROWS_OF_SEVERAL, channels=4, unit_dim=unit_dim), []),
    ):
        arrays = case.arrays(np.float32)
        if case.ids is None:
            owner = np.repeat(np.arange(len(RAGGED) + 1), (*RAGGED, 3))[None]
            bad, padding = np.isin(owner, [0, 3, len(RAGGED)]), owner == len(RAGGED)
        else:
            padding = arrays["segment_ids"] < 0
            bad = padding.copy()
            bad[0, 3:5] = bad[6, 2:7] = True
        changed = {name: spoilt(arrays[name], bad, number) for name in ("x", "d_output")}
        changed |= {name: spoilt(arrays[name], bad_states, number) for name in ("initial_state", "d_final_state")}
        clean, found = (results_and_gradients(case, each, platform="triton") for each in (arrays, arrays | changed))
        kept = [n for n in range(len(arrays["d_final_state"])) if n not in bad_states]
        for name in ("output", "x"):
            np.testing.assert_array_equal(np.asarray(found[name])[~bad], np.asarray(clean[name])[~bad], name)
            assert not np.asarray(found[name])[padding].any(), name
        for name in ("final_state", "initial_state"):
            np.testing.assert_array_equal(np.asarray(found[name])[kept], np.asarray(clean[name])[kept], name)
        only = {name: spoilt(arrays[name], padding, number) for name in ("x", "d_output")}
        found = results_and_gradients(case, arrays | only, platform="triton")
        for name in ("weight", "bias"):
            np.testing.assert_array_equal(found[name], clean[name], name)


def test_vmap_and_second_derivatives():
    arrays = Case("mapped", batch=3, tokens=6, channels=3).arrays(np.float32)
    given = {name: jnp.asarray(arrays[name]) for name in ("weight", "bias")}

    def loss(x, state, weight, bias, platform):
        output, final = ejkernel.causal_conv1d(x, weight, bias, "silu", state, platform=platform)
        return (output**2).sum() + final.sum()

    def derivatives(x, state, platform):
        # per row: folded where the weights are not asked for, one by one where they are
        of_row = jax.vmap(jax.grad(loss), (0, 0, None, None, None))
        rows = of_row(x[:, None], state[:, None], *given.values(), platform)
        own = jax.vmap(jax.grad(loss, 2), (0, 0, None, None, None))(
            x[:, None], state[:, None], *given.values(), platform
        )
        along = jax.jvp(lambda x: jax.grad(loss)(x, state, *given.values(), platform), (x,), (x,))
        return rows, own, along

    run = jax.jit(derivatives, static_argnums=2)
    x, state = (jnp.asarray(arrays[name]) for name in ("x", "initial_state"))
    _warn_once.cache_clear()
    with pytest.warns(SlowerImplementationWarning, match="'xla' serves tangents of causal_conv1d"):
        found = run(x, state, "triton")
    expected = run(x, state, "xla")
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_serve():
    x = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32)
    explained = ejkernel.explain(ejkernel.causal_conv1d, x, jax.ShapeDtypeStruct((9, 4), jnp.float32))
    assert "cuda" not in explained.chosen and explained.refused["triton"] == "more than 8 taps (W=9)"
    explained = ejkernel.explain(ejkernel.causal_conv1d, x, jax.ShapeDtypeStruct((4, 4), jnp.float32))
    assert explained.chosen == {"cuda": "triton", "tpu": "pallas", "default": "xla"}
