"""Calls of the delta rule on its kernels, through the fronts, beside their float64 answers."""

import contextlib
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import ejkernel
from ejkernel import _bind
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.delta_rule import triton as triton_gpu
from ejkernel.kernels.delta_rule.call import Call


@contextlib.contextmanager
def on(kernels):
    """Within this the fronts run these kernels, whatever device that is for."""

    def dispatch(implementations, call, *arrays, platform=None):
        assert kernels.supports(call) is None, kernels.supports(call)
        return kernels.run(call, *arrays)

    with mock.patch.object(_bind, "dispatch", dispatch):
        yield


def on_triton():
    return on(triton_gpu)


def inputs(case, dtype, seed=0):
    """A case's arrays: tokens in `dtype`, the rest in float32."""
    arrays = case.arrays(np.float32, seed)
    return {n: jnp.asarray(x, dtype if n in ("query", "key", "value") else x.dtype) for n, x in arrays.items()}


def with_gradients(case, arrays, cotangents=None, **options):
    """Output, final states and gradients by name, and the cotangents that they are of."""
    rest = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    moving = {name: x for name, x in arrays.items() if name not in rest}
    front = getattr(ejkernel, case.op)
    results, pull = jax.vjp(lambda x: front(**x, **rest, **case.options, **options), moving)
    random = np.random.default_rng(1)
    cotangents = cotangents or tuple(jnp.asarray(random.normal(size=x.shape), x.dtype) for x in results)
    return {"output": results[0], "final state": results[1], **pull(cotangents)[0]}, cotangents


def answers(case, arrays, cotangents):
    """What `with_gradients` should give, in float64."""
    output, final, gradients = oracle.delta_rule(
        **arrays, **case.options, d_output=cotangents[0], d_final_state=cotangents[1]
    )
    return {"output": output, "final state": final, **gradients}


def assert_matches(found, expected, tolerance):
    """Bounds relative RMS errors, all values finite; `tolerance` is by name, or `other`."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = np.asarray(found[name]).astype(np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
        bound = tolerance.get(name, tolerance["other"])
        # where nothing is written the keys' gradient is 0, but for the rounding of what cancels
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6)
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"


def assert_as_good_as_rounded(found, expected, most=2.0):
    """Bounds the output's error by that of the answer's own rounding, so many times."""
    rounded = np.asarray(jnp.asarray(expected["output"]).astype(found["output"].dtype)).astype(np.float64)
    least = np.linalg.norm(rounded - expected["output"])
    error = np.linalg.norm(np.asarray(found["output"]).astype(np.float64) - expected["output"])
    assert error <= most * least, f"output: {error / least:.2f} times the error of rounding"


def assert_exact_where_keys_are_alike(case, arrays, found, cotangents):
    """Outputs within twice their rounding, gradients within 1e-2, a gate's of a head within that of its terms.

    Where every token replaces what the one before it has written, nothing crosses a gate, and those terms cancel.
    """
    found, of_head = dict(found), case.gate and not case.per_key
    if of_head:
        arrays = {**arrays, "g": np.repeat(np.asarray(arrays["g"])[..., None], case.key_dim, -1)}
    expected = answers(case, arrays, cotangents)
    if of_head:
        terms = expected.pop("g")
        error = np.asarray(found.pop("g")).astype(np.float64) - terms.sum(-1)
        size = np.linalg.norm(np.abs(terms).sum(-1))
        assert np.linalg.norm(error) <= 1e-2 * size, f"g: {np.linalg.norm(error) / size:.1e} of the terms"
    assert_matches(found, expected, {"other": 1e-2})
    assert_as_good_as_rounded(found, expected)


def compiled_call(dtype, key_dim, value_dim, decay, tokens=256):
    """A program that launches every kernel of a call of one head, and its gradients.

    `+segments`: rows of several sequences; `+pooled`: without gradients, and with states in slots of a pool.
    """
    decay, _, kind = decay.partition("+")
    call = Call(1, tokens, 1, key_dim, value_dim, 1, False, decay, 0.1, False, np.dtype(jnp.dtype(dtype)))
    call = replace(call, segmented=kind == "segments", packed=kind == "pooled")
    rows = (1, tokens, 1)
    ids = jnp.zeros(rows[:2], jnp.int32) if call.segmented else None
    gate = {"none": None, "head": jnp.zeros(rows), "key": jnp.zeros((*rows, key_dim))}[decay]
    query, value = jnp.zeros((*rows, key_dim), dtype), jnp.zeros((*rows, value_dim), dtype)
    arrays = query, query, value, jnp.zeros(rows), gate, jnp.zeros((1, 1, key_dim, value_dim))

    def program():
        if kind == "pooled":
            slots = jnp.zeros((1, 1), jnp.int32)
            others = jnp.asarray([0, tokens], jnp.int32), jnp.zeros((3, 1, key_dim, value_dim)), slots[0], slots, slots
            return triton_gpu.run_pooled(PooledCall(call, 1, tokens), *arrays[:-1], *others)
        results, pull = jax.vjp(lambda *x: triton_gpu.run(call, *x, ids), *arrays)
        return pull(results)

    return program
