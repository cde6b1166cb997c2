"""`ejkernel.debug`: what it sees in values, traced or not, and that nothing of it stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel

X = np.ones((1, 6, 2, 4), np.float32)
LOG = np.full((1, 6, 2), -0.1, np.float32)
BETA = np.full((1, 6, 2), 0.5, np.float32)
HOLE = X.copy()
HOLE[0, 3, 1, 2] = np.nan


def borders(*values):
    return np.array(values, np.int32)


CASES = [
    (ejkernel.recurrent_gla, {"g": 0.9 * X}, r"recurrent_gla: g: got only values in \[0, 1\], as decays are"),
    (ejkernel.recurrent_gla, {"g": np.where(HOLE > 0, X, 0)}, r"recurrent_gla: g: got only values in \[0, 1\]"),
    (ejkernel.recurrent, {"gv": X}, r"recurrent: gv: got only values in \[0, 1\]"),
    (ejkernel.recurrent, {"g_gamma": X[0, 0, :, 0]}, r"recurrent: g_gamma: got only values in \[0, 1\]"),
    (ejkernel.gated_delta_rule, {"g": BETA, "beta": LOG}, "gated_delta_rule: g, beta: got .* as if they were swapped"),
    (ejkernel.retention, {"key": HOLE}, r"retention: key: got NaN in 1 of 48 values, the first at \[0, 3, 1, 2\]"),
    (ejkernel.retention, {"cu_seqlens": borders(1, 6)}, "retention: cu_seqlens: got first value 1; expected 0"),
    (ejkernel.retention, {"cu_seqlens": borders(0, 4, 3)}, "retention: cu_seqlens: got a decrease at index 2"),
    (
        ejkernel.flash_attention,
        {"cu_seqlens": borders(0, 6), "cu_seqlens_kv": borders(0, 9)},
        "flash_attention: cu_seqlens_kv: got last value 9; expected at most the 6 tokens",
    ),
]


@pytest.mark.parametrize("op, changes, message", CASES)
def test_sees_what_tracing_cannot(op, changes, message):
    arguments = {"query": X, "key": X, "value": X} | changes
    compiled = jax.jit(lambda arguments: op(**arguments))
    compiled(arguments)  # compiled before, it is looked at all the same
    with pytest.raises(ValueError, match=f"^{message}"), ejkernel.debug():
        compiled(arguments)
    jax.block_until_ready(compiled(arguments))  # and not any longer


def test_sees_plain_calls_and_gradients():
    with pytest.raises(ValueError, match=r"^simple_gla: g: got only values"), ejkernel.debug():
        ejkernel.simple_gla(X, X, X, -LOG)
    with pytest.raises(ValueError, match=r"^simple_gla: g: got only values"), ejkernel.debug():
        jax.grad(lambda g: ejkernel.simple_gla(X, X, X, g)[0].sum())(jnp.asarray(-LOG))


def test_good_calls_pass():
    with ejkernel.debug():
        jax.jit(ejkernel.gated_delta_rule)(X, X, X, LOG, BETA)
        jax.vmap(lambda g: ejkernel.simple_gla(X, X, X, g))(jnp.stack([LOG, 0 * LOG]))
        ejkernel.flash_attention(X.astype(jnp.bfloat16), X, X, causal=True, cu_seqlens=borders(0, 2, 6))


def test_two_contexts_do_not_hear_each_other():
    compiled = jax.jit(ejkernel.simple_gla)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^simple_gla: g: [^\n]*$"), ejkernel.debug():
            compiled(X, X, X, -LOG)
    with ejkernel.debug():
        compiled(X, X, X, LOG)


def test_an_error_inside_is_kept_and_says_it():
    with pytest.raises(RuntimeError, match="of its own") as error, ejkernel.debug():
        ejkernel.simple_gla(X, X, X, -LOG)
        raise RuntimeError("of its own")
    assert error.value.__notes__[0].startswith("ejkernel.debug: simple_gla: g: got only values")


def test_slices_of_a_mesh_have_borders_of_the_whole_stream():
    mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "time")
    run = jax.shard_map(
        lambda x, cu: ejkernel.parallel.retention(x, x, x, cu_seqlens=cu, axis_name="time")[0],
        mesh=mesh,
        in_specs=(spec, jax.P()),
        out_specs=spec,
    )
    with ejkernel.debug():
        jax.jit(run)(X, borders(0, 6))
    with pytest.raises(ValueError, match="cu_seqlens: got first value 1"), ejkernel.debug():
        jax.jit(run)(X, borders(1, 6))
