"""The gated linear recurrence, drawn by Hypothesis: what must be the same whatever the gates, through gradients.

A shorter sequence is one with padding behind it, so that all cuts of a stream run in one compiled function.
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close
from hypothesis import given
from hypothesis import strategies as st
from linear_attention_cases import Case
from properties import THOROUGH, cotangents_of, examples, linear_shapes, linear_values, run, split

import ejkernel

GATES = {"gates": {"g": "", "g_gamma": ""}, "heads": 2, "kv_heads": 1, "key_dim": 3, "state": "each"}
STREAM = Case("stream", lengths=(0,) * 4, padding=40, unbatched=True, **GATES)
ROWS = Case("rows", batch=3, tokens=40, **GATES)


def drawn(case):
    """`case`, or in `thorough` any other that is packed if it is, with values drawn."""
    shapes = linear_shapes(packed=case.lengths is not None) if THOROUGH else st.just(case)
    whole = shapes.map(lambda c: replace(c, state=c.state and "each", gamma_shape="BH", unbatched=case.unbatched))
    return whole.flatmap(linear_values)


def prepare(case, seed, reverse=None):
    """Arrays, borders and cotangents in float64, and the options."""
    arrays, borders = split(case.arrays(np.float64, seed))
    options = case.options if reverse is None else case.options | {"reverse": reverse}
    return arrays, borders, cotangents_of(case, arrays, seed, "both"), options


def compare(actual, expected, what):
    """Output, final state and gradients by name."""
    (output, final), gradients = actual
    (right, right_final), right_gradients = expected
    assert_close(output, right, 1e-12, f"{what}: output")
    assert_close(final, right_final, 1e-12, f"{what}: final state")
    for name, x in right_gradients.items():
        assert_close(gradients[name], x, 1e-12, f"{what}: {name}")


def some(results, tokens, sequences):
    """The part of results and gradients that belongs to some tokens and sequences; each function picks."""
    (output, final), gradients = results
    parts = {n: sequences(x) if n in ("initial_state", "g_gamma") else tokens(x) for n, x in gradients.items()}
    return (tokens(output), sequences(final)), parts


@functools.partial(jax.jit, static_argnames="softmax_scale")
def in_two(arrays, cut, cotangents, softmax_scale):
    """Results and gradients of one sequence, run up to `cut` and then on from the state there."""
    tokens = arrays["query"].shape[0]

    def part(arrays, start, end, state):
        rolled = {name: x if name == "g_gamma" else jnp.roll(x, -start, 0) for name, x in arrays.items()}
        borders = jnp.stack([jnp.int32(0), end - start])
        output, state = ejkernel.recurrent(
            **rolled, initial_state=state, cu_seqlens=borders, softmax_scale=softmax_scale
        )
        return jnp.roll(output, start, 0), state

    def both(arrays):
        rest = {name: x for name, x in arrays.items() if name != "initial_state"}
        first, state = part(rest, jnp.int32(0), cut, arrays.get("initial_state"))
        second, state = part(rest, cut, jnp.int32(tokens), state)
        return first + second, state

    results, pull = jax.vjp(both, arrays)
    return results, pull(cotangents)[0]


@functools.partial(jax.jit, static_argnames="softmax_scale")
def by_steps(arrays, cotangents, softmax_scale):
    """Results and gradients of rows, one token at a time."""
    batch, _, heads, key_dim = arrays["query"].shape

    def every(arrays):
        rest = dict(arrays)
        gamma = {"g_gamma": rest.pop("g_gamma")} if "g_gamma" in rest else {}
        nothing = jnp.zeros((batch, heads, key_dim, arrays["value"].shape[-1]))
        state = rest.pop("initial_state", nothing)

        def step(state, token):
            token = {name: x[:, None] for name, x in token.items()}
            output, state = ejkernel.recurrent(**token, **gamma, initial_state=state, softmax_scale=softmax_scale)
            return state, output[:, 0]

        state, outputs = jax.lax.scan(step, state, {name: jnp.moveaxis(x, 1, 0) for name, x in rest.items()})
        return jnp.moveaxis(outputs, 0, 1), state

    results, pull = jax.vjp(every, arrays)
    return results, pull(cotangents)[0]


@examples(ci=8, thorough=120)
@given(drawn(STREAM))
def test_packed_is_each_alone(drawn):
    case, seed = drawn
    with jax.enable_x64(True):
        arrays, borders, (d_output, d_final), options = prepare(case, seed)
        whole = run(arrays, borders, (d_output, d_final), **options)
        for n, (start, end) in enumerate(itertools.pairwise(borders["cu_seqlens"])):
            one = slice(n, n + 1)
            alone = {
                name: x[one] if name in ("initial_state", "g_gamma") else np.roll(x, -start, 0)
                for name, x in arrays.items()
            }
            border = {"cu_seqlens": np.array([0, end - start], np.int32)}
            results = run(alone, border, (np.roll(d_output, -start, 0), d_final[one]), **options)
            compare(
                some(results, lambda x, length=end - start: x[:length], lambda x: x),
                some(whole, lambda x, start=start, end=end: x[start:end], lambda x, one=one: x[one]),
                f"sequence {n}",
            )


@examples(ci=8, thorough=120)
@given(drawn(STREAM), st.data())
def test_split_is_whole(drawn, data):
    case, seed = drawn
    case = replace(case, lengths=(sum(case.lengths) + case.padding,), padding=0)
    cut = data.draw(st.integers(0, case.lengths[0]), "cut")
    with jax.enable_x64(True):
        arrays, borders, cotangents, options = prepare(case, seed, reverse=False)
        whole = run(arrays, borders, cotangents, **options)
        compare(in_two(arrays, np.int32(cut), cotangents, options.get("softmax_scale")), whole, f"cut at {cut}")


@examples(ci=6, thorough=120)
@given(drawn(ROWS))
def test_batched_is_each_row(drawn):
    case, seed = drawn
    with jax.enable_x64(True):
        arrays, _, (d_output, d_final), options = prepare(case, seed)
        whole = run(arrays, {}, (d_output, d_final), **options)
        for row in range(case.batch):
            one = slice(row, row + 1)
            alone = {name: x[one] for name, x in arrays.items()}
            results = run(alone, {}, (d_output[one], d_final[one]), **options)
            compare(results, some(whole, *[lambda x, one=one: x[one]] * 2), f"row {row}")


@examples(ci=6, thorough=80)
@given(drawn(ROWS))
def test_step_by_step_is_whole(drawn):
    case, seed = drawn
    with jax.enable_x64(True):
        arrays, _, cotangents, options = prepare(case, seed, reverse=False)
        whole = run(arrays, {}, cotangents, **options)
        compare(by_steps(arrays, cotangents, options.get("softmax_scale")), whole, "step by step")


@examples(ci=6, thorough=80)
@given(drawn(ROWS))
def test_reverse_is_flip_run_flip(drawn):
    case, seed = drawn
    with jax.enable_x64(True):
        arrays, _, (d_output, d_final), options = prepare(case, seed, reverse=False)
        flipped = {n: x if n in ("initial_state", "g_gamma") else np.flip(x, 1) for n, x in arrays.items()}
        forward = run(flipped, {}, (np.flip(d_output, 1), d_final), **options)
        backward = run(arrays, {}, (d_output, d_final), **options | {"reverse": True})
        compare(backward, some(forward, lambda x: np.flip(x, 1), lambda x: x), "reverse")
