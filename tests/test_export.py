"""Ops exported with sizes that are known only when the program runs, against plain calls."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import QUICK
from conftest import assert_close
from jax import export

import ejkernel
from ejkernel.xla_utils import chunk_global_cumsum, chunk_local_cumsum


def long(arrays):
    """Of more tokens: several chunks, and some left."""
    return [jnp.tile(x, (1, 12, 1, 1))[:, :70] for x in arrays]


def gates(x):
    """`g` and `beta`, one a head each."""
    return -jnp.abs(x[..., 0]), jax.nn.sigmoid(x[..., 1])


MASK = np.tri(6, 6, 2, dtype=bool)[None, None]
# as a function of query, key and value of the same shape
SYMBOLIC_BATCH = {
    "attention": lambda *x: ejkernel.attention(*x, causal=True, dtype=None)[0],
    "flash_attention": partial(ejkernel.flash_attention, causal=True),
    "flash_attention, mask": lambda *x: ejkernel.flash_attention(*x, MASK, softmax_aux=jnp.ones((2, 1))),
}
LINEAR_BATCH = {
    "linear_attention": lambda *x: ejkernel.linear_attention(*x)[0],
    "retention, 70 tokens": lambda *x: ejkernel.retention(*long(x), reverse=True)[0],
    "lightning_attn": lambda *x: ejkernel.lightning_attn(*x, 1, 3)[0],
    "simple_gla, 70 tokens": lambda *x: ejkernel.simple_gla(*long(x), -jnp.abs(long(x)[0][..., 0]))[0],
    "recurrent_gla, grouped": lambda q, k, v: ejkernel.recurrent_gla(q, k[:, :, :1], v[:, :, :1], -jnp.abs(q))[1],
    "recurrent, all gates": lambda q, k, v: ejkernel.recurrent(
        *long((q, k, v)),
        *(-jnp.abs(long((q,))[0]), -jnp.ones(2)),
        gv=-jnp.abs(long((v,))[0]),
        initial_state=jnp.ones((q.shape[0], 2, 4, 4)),
    )[0],
    "recurrent, one token": lambda q, k, v: ejkernel.recurrent_gla(q[:, :1], k[:, :1], v[:, :1], -jnp.abs(q[:, :1]))[0],
    "delta_rule": lambda q, k, v: ejkernel.delta_rule(q, k, v, jnp.cos(q[..., 0]), normalize=True)[0],
    "gated_delta_rule, one token": lambda q, k, v: ejkernel.gated_delta_rule(
        q[:, :1], k[:, :1], v[:, :1], *gates(k[:, :1]), initial_state=jnp.ones((q.shape[0], 2, 4, 4))
    )[0],
    "kda, 70 tokens": lambda q, k, v: ejkernel.kda(
        *long((q, k[:, :, :1], v)), -jnp.abs(long((q,))[0]), gates(long((v,))[0])[1], normalize=True, reverse=True
    )[0],
    "causal_conv1d": lambda q, k, v: ejkernel.causal_conv1d(
        q[:, :, 0], v[0, :3, 0], k[0, 0, 0], "silu", initial_state=jnp.ones((q.shape[0], 2, 4))
    )[0],
    "causal_conv1d, segments": lambda q, k, v: (
        ejkernel.causal_conv1d(
            q[:, :, 0], jnp.ones((3, 4)), segment_ids=jnp.broadcast_to(jnp.arange(6)[None] // 3, q.shape[:2])
        )[0]
        + k[:, :, 0] * v[:, :, 0]
    ),
    "chunk_local_cumsum": lambda q, k, v: chunk_local_cumsum(q + k * v, 4),
    "chunk_global_cumsum, heads first": lambda q, k, v: chunk_global_cumsum((q + k * v)[..., 0], head_first=True),
}
SYMBOLIC_TOKENS = {
    "attention": lambda *x: ejkernel.attention(*x, dtype=None)[0],
    "attention, causal": lambda *x: ejkernel.attention(*x, causal=True, dtype=None)[0],
    "attention, window": lambda *x: ejkernel.attention(*x, sliding_window=(2, 1), dtype=None)[0],
}
SYMBOLIC = "a symbolic size; expected a size known when exporting; the batch alone may be symbolic"
REFUSED = {
    **{
        name: (op, f"query: got t tokens, {SYMBOLIC}")
        for name, op in {
            "retention": lambda *x: ejkernel.retention(*x)[0],
            "recurrent_gla": lambda *x: ejkernel.recurrent_gla(*x, x[0])[0],
        }.items()
    },
    "kda": (lambda q, k, v: ejkernel.kda(q, k, v, q, q[..., 0])[0], f"beta: got t tokens, {SYMBOLIC}"),
    "chunk_local_cumsum": (lambda q, k, v: chunk_local_cumsum(q, 4), f"g: got t tokens, {SYMBOLIC}"),
    "causal_conv1d": (
        lambda q, k, v: ejkernel.causal_conv1d(q[:, :, 0], jnp.ones((3, 4)))[0],
        f"x: got t tokens, {SYMBOLIC}",
    ),
    "flash_attention": (
        ejkernel.flash_attention,
        f"query: got t tokens, {SYMBOLIC}",
    ),
}


def exported(op, shape):
    """`op` with its gradients as a program for arrays of that shape."""

    def run(*x):
        output, pull = jax.vjp(op, *x)
        return output, pull(jnp.cos(output))

    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), np.float32)
    return run, export.export(jax.jit(run))(x, x, x)


@pytest.mark.parametrize("name", SYMBOLIC_BATCH | LINEAR_BATCH)
def test_symbolic_batch(name):
    """One program for any number of rows, none of which depends on the others."""
    run, program = exported((SYMBOLIC_BATCH | LINEAR_BATCH)[name], "b, 6, 2, 4")
    arrays = np.random.default_rng(0).normal(size=(3, 3, 6, 2, 4)).astype(np.float32)
    expected = jax.jit(run, compiler_options=QUICK)(*arrays)
    # with one row too, though what would be wrong with that alone would be JAX's refinement of shapes
    for rows in (1, 3) if name in ("flash_attention, mask", "recurrent, all gates", "delta_rule") else (3,):
        found = program.call(*arrays[:, :rows])
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(one, other[:rows], 1e-6)


@pytest.mark.parametrize("name", SYMBOLIC_TOKENS)
def test_symbolic_tokens(name):
    run, program = exported(SYMBOLIC_TOKENS[name], "2, t, 2, 4")
    for tokens in (1, 3):
        arrays = np.random.default_rng(tokens).normal(size=(3, 2, tokens, 2, 4)).astype(np.float32)
        expected = jax.jit(run, compiler_options=QUICK)(*arrays)
        for one, other in zip(jax.tree.leaves(program.call(*arrays)), jax.tree.leaves(expected), strict=True):
            assert_close(one, other, 1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_symbolic_tokens_are_refused_by_name(name):
    op, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        exported(op, "2, t, 2, 4")
