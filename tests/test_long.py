"""Long and large: 131,072 tokens, 20,000 steps of decoding, and shapes past 2³¹ elements that nobody can hold here."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from delta_rule_cases import Case as DeltaCase
from linear_attention_cases import Case
from triton_indices import overflows

import ejkernel
from ejkernel import xla_utils

LONG = 131_072
PIECES = 16


@jax.jit
def whole(arrays, cotangents):
    results, pull = jax.vjp(lambda x: ejkernel.recurrent(**x), arrays)
    return results, pull(cotangents)[0]


@jax.jit
def whole_delta_rule(arrays, cotangents):
    results, pull = jax.vjp(lambda x: ejkernel.gated_delta_rule(**x), arrays)
    return results, pull(cotangents)[0]


@jax.jit
def in_pieces(arrays, cotangents):
    """The same, a sixteenth at a time with the state carried."""

    def pieces(arrays):
        tokens = {name: x for name, x in arrays.items() if name != "initial_state"}
        cut = {name: jnp.moveaxis(x.reshape(1, PIECES, -1, *x.shape[2:]), 1, 0) for name, x in tokens.items()}

        def one(state, piece):
            output, state = ejkernel.recurrent(**piece, initial_state=state)
            return state, output

        state, outputs = jax.lax.scan(one, arrays["initial_state"], cut)
        return jnp.moveaxis(outputs, 0, 1).reshape(1, -1, *outputs.shape[3:]), state

    results, pull = jax.vjp(pieces, arrays)
    return results, pull(cotangents)[0]


@pytest.mark.parametrize("gate", ["tiny", "mixed"])
def test_recurrence_over_long_sequences(gate):
    """One pass in float32 against pieces in float64; tiny gates let the first token count for the last."""
    case = Case("long", batch=1, tokens=LONG, heads=1, kv_heads=1, key_dim=4, gates={"g": gate}, state="each")
    arrays = case.arrays(np.float32)
    random = np.random.default_rng(1)
    cotangents = (
        random.normal(size=(1, LONG, 1, case.value_dim)).astype(np.float32),
        random.normal(size=(1, 1, case.key_dim, case.value_dim)).astype(np.float32),
    )
    found = whole(arrays, cotangents)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents))
        wanted = in_pieces(*double)
    (output, state), gradients = found
    bound = 64 * float(np.finfo(np.float32).eps)
    assert_close(output, wanted[0][0], bound, "output")
    assert_close(state, wanted[0][1], bound, "final state")
    for name, x in gradients.items():
        assert_close(x, wanted[1][name], bound, name)


@jax.jit
def scanned(arrays, cotangents):
    """The delta rule as a scan over tokens, with its gradients."""

    def step(state, token):
        q, k, v, b, g = (token[name][0] for name in ("query", "key", "value", "beta", "g"))
        state = jnp.exp(g)[:, None, None] * state
        state = state + b[:, None, None] * k[:, :, None] * (v - jnp.einsum("hk,hkv->hv", k, state))[:, None]
        return state, jnp.einsum("hk,hkv->hv", q, state)[None] / 2  # of 4 key dims

    def run(arrays):
        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in arrays.items() if name != "initial_state"}
        state, output = jax.lax.scan(step, arrays["initial_state"][0], tokens)
        return jnp.moveaxis(output, 0, 1), state[None]

    results, pull = jax.vjp(run, arrays)
    return results, pull(cotangents)[0]


def test_delta_rule_over_long_sequences():
    """In float32, no further from a float64 scan than a float32 one is."""
    case = DeltaCase("long", batch=1, tokens=LONG, heads=1, own_heads=(1, 1, 1), key_dim=4, gate="tiny", state="each")
    arrays = case.arrays(np.float32)
    random = np.random.default_rng(1)
    cotangents = (
        random.normal(size=(1, LONG, 1, case.value_dim)).astype(np.float32),
        random.normal(size=(1, 1, case.key_dim, case.value_dim)).astype(np.float32),
    )
    with jax.enable_x64(True):
        wanted = scanned(*jax.tree.map(lambda x: x.astype(np.float64), (arrays, cotangents)))
    ours, other = whole_delta_rule(arrays, cotangents), scanned(arrays, cotangents)
    rounding = float(np.finfo(np.float32).eps)
    for x, scan, y in zip(*map(jax.tree.leaves, (ours, other, wanted)), strict=True):
        own = np.abs(np.asarray(scan, np.float64) - np.asarray(y)).max() / np.abs(np.asarray(y)).max()
        assert_close(x, y, 2 * own + 4 * rounding)


def test_attention_over_long_sequences():
    """A window that slides over all of it, against short calls in several places."""
    query, key, value = np.random.default_rng(0).normal(size=(3, 1, LONG, 1, 4)).astype(np.float32)
    left = 100
    run = jax.jit(functools.partial(ejkernel.flash_attention, sliding_window=(left, 0), dtype=None))
    output = np.asarray(run(query, key, value))
    assert np.isfinite(output).all()
    for start in (left, 65_000, LONG - 256):
        seen = slice(start - left, start + 256)
        part = run(query[:, start : start + 256], key[:, seen], value[:, seen], query_offset=left)
        assert_close(output[:, start : start + 256], part, 2e-6, f"from token {start}")


def test_sums_over_long_sequences():
    x = np.random.default_rng(0).normal(size=(1, LONG, 2)).astype(np.float32)
    cu = np.array([0, 5, 100_000, 100_000, LONG - 1])
    found = xla_utils.chunk_global_cumsum(x, cu_seqlens=cu)
    exact = np.cumsum(x.astype(np.float64), 1)
    before = np.concatenate([np.zeros((1, 1, 2)), exact], 1)[:, np.repeat(cu[:-1], np.diff(cu))]
    assert_close(found[:, : cu[-1]], exact[:, : cu[-1]] - before, 1e-5)


@pytest.mark.parametrize("front", ["retention", "linear_attention"])
def test_twenty_thousand_steps_are_one_pass(front):
    """States neither drift nor overflow: steps in float32 against one pass in float64."""
    tokens = 20_000
    arrays = Case("steps", batch=1, tokens=tokens, kv_heads=1, key_dim=4).arrays(np.float32)
    op = getattr(ejkernel, front)

    @jax.jit
    def steps(arrays):
        def step(state, token):
            output, state = op(**{name: x[:, None] for name, x in token.items()}, initial_state=state)
            return state, output[:, 0]

        by_token = {name: jnp.moveaxis(x, 1, 0) for name, x in arrays.items()}
        state, outputs = jax.lax.scan(step, jnp.zeros((1, 2, 4, 3)), by_token)
        return jnp.moveaxis(outputs, 0, 1), state

    output, state = steps(arrays)
    with jax.enable_x64(True):
        wanted, final = jax.jit(op)(**{name: x.astype(np.float64) for name, x in arrays.items()})
    assert_close(output, wanted, 1e-5, "output")
    assert_close(state, final, 1e-5, "state")


TOKENS, HEADS, DIM = 1 << 20, 64, 128  # 2³³ elements an array


def shape(*sizes, dtype=np.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradient(function):
    """`function`'s results and all its gradients, from cotangents of 1."""

    def run(*arrays):
        results, pull = jax.vjp(function, *arrays)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    return run


X = shape(1, TOKENS, HEADS, DIM)
STREAM, CU = shape(TOKENS, HEADS, DIM), shape(1001, dtype=np.int32)
LARGE = {
    "recurrent_gla": (gradient(lambda q, k, v, g: ejkernel.recurrent_gla(q, k, v, g)), (X, X, X, X)),
    "recurrent, all gates": (gradient(lambda q, k, v, g: ejkernel.recurrent(q, k, v, g, gv=g)), (X, X, X, X)),
    "retention": (gradient(ejkernel.retention), (X, X, X)),
    "recurrent_gla, packed": (
        lambda q, cu: gradient(lambda q: ejkernel.recurrent_gla(q, q, q, q, cu_seqlens=cu))(q),
        (STREAM, CU),
    ),
    "kda": (gradient(lambda q, k, v, g, b: ejkernel.kda(q, k, v, g, b)), (X, X, X, X, shape(1, TOKENS, HEADS))),
    "one token": (
        gradient(lambda q, g, s: ejkernel.recurrent(q, q, q, g, initial_state=s)),
        (*[shape(1 << 17, 1, HEADS, DIM)] * 2, shape(1 << 17, HEADS, DIM, DIM)),
    ),
    "flash_attention": (
        gradient(functools.partial(ejkernel.flash_attention, causal=True, dtype=None)),
        (X, X, X),
    ),
    "flash_attention, packed": (
        lambda q, cu: gradient(lambda q: ejkernel.flash_attention(q, q, q, cu_seqlens=cu, dtype=None))(q),
        (STREAM, CU),
    ),
    "attention": (gradient(ejkernel.attention), [shape(1, 1 << 16, 1, DIM)] * 3),
    "chunk_local_cumsum": (gradient(lambda x: xla_utils.chunk_local_cumsum(x, 64)), [X]),
    "chunk_global_cumsum, packed": (
        lambda x, cu: gradient(lambda x: xla_utils.chunk_global_cumsum(x, cu_seqlens=cu))(x),
        (X, CU),
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_indices_stay_below_two_to_the_31(name):
    """Arrays past 2³¹ elements are lowered, and no part of the program has an axis that 32-bit indices cannot count."""
    function, arrays = LARGE[name]
    lowered = jax.jit(function).lower(*arrays)
    sizes = [
        [int(each) for each in dims.split("x")[:-1]]
        for dims in re.findall(r"tensor<((?:\d+x)+\w+)>", lowered.as_text())
    ]
    assert max(int(np.prod(each, dtype=object)) for each in sizes) > 2**31
    assert max(max(each) for each in sizes) < 2**31


def test_triton_indices_stay_within_their_types():
    """Every kernel's arithmetic, followed from shapes of 2³⁵ elements to the offsets of its pointers."""
    pytest.importorskip("triton", reason="Triton is not installed (the extra cuda)")
    # Triton tells the environment when other tests have it interpret
    env = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, Path(__file__).with_name("triton_indices.py")], check=True, env=env)


def test_triton_overflows_are_found():
    kernel = """
  tt.func public @kernel(%arg0: !tt.ptr<f32>, %arg1: i32) {
    %0 = tt.get_program_id x : i32
    %1 = arith.muli %0, %arg1 : i32
    %2 = tt.addptr %arg0, %1 : !tt.ptr<f32>, i32
"""
    assert overflows(kernel, [1 << 16], 1 << 15, 0) == ([], ((1 << 15) - 1) << 16)
    (line,), _ = overflows(kernel, [1 << 16], (1 << 15) + 1, 0)
    assert "muli" in line
    wide = kernel.replace("muli %0, %arg1 : i32", "extsi %0 : i32 to i64")
    assert overflows(wide, [1], 1 << 31, 0) == ([], (1 << 31) - 1)
