"""The TPU kernels of `causal_conv1d` in Pallas' interpreter, against its definition in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from convolution_cases import CASES, RAGGED, ROWS_OF_SEVERAL, UNITS, Case, check, results_and_gradients, spoilt

import ejkernel
from ejkernel._dispatch import SlowerImplementationWarning, _warn_once
from ejkernel.kernels.convolution.pallas import plan


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    # so that few tokens are several blocks
    monkeypatch.setattr(plan, "TOKENS", 128)
    monkeypatch.setattr(plan, "ROWS", 64)
    with pallas_interpreter.interpreted(monkeypatch):
        yield


# what is served in another way than these is left to XLA's tests
NAMES = ("plain", "bare", "one token", "one tap", "many taps", "packed", "segments", "segments, many taps")
SEVERAL_BLOCKS = (
    Case("several blocks", batch=2, tokens=256, channels=130),
    Case("a ragged end", batch=2, tokens=260, channels=3, bias=False),
    Case("several blocks, packed", lengths=(120, 1, 0, 8, 5), padding=9, channels=3),
    Case("several blocks, segments", ids=((-1, *[3] * 130, 4), (*[0] * 128, -1, -1, 1, 1)), channels=3, state=False),
)


@pytest.mark.parametrize(
    "case", [*(each for each in CASES if each.name in NAMES), *UNITS[:1], *SEVERAL_BLOCKS], ids=str
)
def test_results_and_gradients(case):
    check(case, platform="pallas")


def test_bfloat16():
    check(Case("ragged", lengths=RAGGED, padding=3), jnp.bfloat16, 2e-2, platform="pallas")


def test_split_calls_and_packing_have_the_bits_of_whole_ones():
    run = jax.jit(functools.partial(ejkernel.causal_conv1d, platform="pallas"), static_argnums=3)
    arrays = Case("bits", batch=1, tokens=140, channels=5).arrays(np.float32)
    x, given = arrays["x"], (arrays["weight"], arrays["bias"], "silu")
    whole, state = run(x, *given)
    cuts = [0, 3, 100, 140]
    carried = jnp.zeros((1, 3, 5))
    for start, end in itertools.pairwise(cuts):
        piece, carried = run(x[:, start:end], *given, carried)
        np.testing.assert_array_equal(piece, whole[:, start:end])
    np.testing.assert_array_equal(carried, state)
    packed, finals = run(x, *given, arrays["initial_state"].repeat(3, 0), cu_seqlens=np.array(cuts))
    for n, (start, end) in enumerate(itertools.pairwise(cuts)):
        alone, last = run(x[:, start:end], *given, arrays["initial_state"])
        np.testing.assert_array_equal(packed[:, start:end], alone)
        np.testing.assert_array_equal(finals[n : n + 1], last)


def test_nothing_leaks():
    """From one sequence or from padding into another, packed and in rows of several."""
    for case, bad_states in (
        (Case("packed", lengths=RAGGED, padding=3), [0, 1, 3]),
        (Case("segments", ids=ROWS_OF_SEVERAL), []),
    ):
        arrays = case.arrays(np.float32)
        if case.ids is None:
            owner = np.repeat(np.arange(len(RAGGED) + 1), (*RAGGED, 3))[None]
            bad, padding = np.isin(owner, [0, 3, len(RAGGED)]), owner == len(RAGGED)
        else:
            padding = arrays["segment_ids"] < 0
            bad = padding.copy()
            bad[0, 3:5] = bad[6, 2:7] = True
        changed = {name: spoilt(arrays[name], bad, np.nan) for name in ("x", "d_output")}
        changed |= {name: spoilt(arrays[name], bad_states, np.nan) for name in ("initial_state", "d_final_state")}
        only = {name: spoilt(arrays[name], padding, np.inf) for name in ("x", "d_output")}
        clean, found, of_padding = (
            results_and_gradients(case, arrays | each, platform="pallas") for each in ({}, changed, only)
        )
        kept = [n for n in range(len(arrays["d_final_state"])) if n not in bad_states]
        for name in ("output", "x"):
            np.testing.assert_array_equal(np.asarray(found[name])[~bad], np.asarray(clean[name])[~bad], name)
            assert not np.asarray(found[name])[padding].any(), name
        for name in ("final_state", "initial_state"):
            np.testing.assert_array_equal(np.asarray(found[name])[kept], np.asarray(clean[name])[kept], name)
        for name in ("weight", "bias"):
            np.testing.assert_array_equal(of_padding[name], clean[name], name)


def test_vmap_and_second_derivatives():
    arrays = Case("mapped", batch=2, tokens=6, channels=3).arrays(np.float32)
    x, state, weight = (jnp.asarray(arrays[name]) for name in ("x", "initial_state", "weight"))

    def loss(x, state, weight, platform):
        output, final = ejkernel.causal_conv1d(x, weight, None, "silu", state, platform=platform)
        return (output**2).sum() + final.sum()

    def derivatives(platform):
        # folded where the weights' gradients are not asked for, one by one where they are
        of_row = jax.vmap(jax.grad(loss, (0, 1)), (0, 0, None, None))(x[:, None], state[:, None], weight, platform)
        own = jax.vmap(jax.grad(loss, 2), (0, 0, None, None))(x[:, None], state[:, None], weight, platform)
        along = jax.jvp(lambda x: jax.grad(loss)(x, state, weight, platform), (x,), (x,))
        return of_row, own, along

    run = jax.jit(derivatives, static_argnums=0)
    _warn_once.cache_clear()
    with pytest.warns(SlowerImplementationWarning, match="'xla' serves tangents of causal_conv1d"):
        found = run("pallas")
    expected = run("xla")
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_serve():
    x = jax.ShapeDtypeStruct((1, 8, 4), jnp.float32)
    explained = ejkernel.explain(ejkernel.causal_conv1d, x, jax.ShapeDtypeStruct((10, 4), jnp.float32), device="v5e")
    assert explained.chosen == {"tpu": "xla"} and explained.refused == {"pallas": "more than 9 taps (W=10)"}
    explained = ejkernel.explain(ejkernel.causal_conv1d, x, jax.ShapeDtypeStruct((4, 4), jnp.float32), device="v5e")
    assert explained.chosen == {"tpu": "pallas"}
