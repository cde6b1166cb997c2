"""What `test_properties_parallel.py` runs on virtual devices: drawn calls against one device, and leaks."""

import functools
from dataclasses import replace

import jax
import mesh_checks
import numpy as np
import test_bits
from attention_cases import Case as SoftmaxCase
from attention_cases import results_and_gradients
from conftest import assert_close, run_parts
from hypothesis import given
from hypothesis import strategies as st
from linear_attention_cases import Case
from properties import THOROUGH, cotangents_of, examples, linear_shapes, linear_values, run, split
from test_properties_attention import Shape, calls

import ejkernel
from ejkernel import parallel

DEVICES = len(jax.devices())
MESH = jax.make_mesh((DEVICES,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
ALONG = {"axis_name": "time", "mesh": MESH}
GATES = {"gates": {"g": "", "g_gamma": ""}, "heads": 2, "kv_heads": 1, "key_dim": 3, "state": "each"}
STREAM = Case("stream", lengths=(0,) * 5, padding=40, unbatched=True, **GATES)
ROWS = Case("rows", tokens=40, **GATES | {"gates": {"gk": "", "gv": ""}}, options={"reverse": True})


@functools.partial(jax.jit, static_argnames=("front", "reverse", "softmax_scale"))
def spread(arrays, borders, cotangents, front="recurrent", reverse=False, softmax_scale=None):
    """`properties.run` with the tokens over all devices."""

    def call(arrays):
        options = {"reverse": reverse, "softmax_scale": softmax_scale}
        return getattr(parallel, front)(**arrays, **borders, **options, **ALONG)

    results, pull = jax.vjp(call, arrays)
    return results, pull(tuple(c.astype(x.dtype) for c, x in zip(cotangents, results, strict=True)))[0]


def whole_slices(case):
    """`case` with as many tokens, at least one each, as the devices can share evenly."""
    tokens = max(case.tokens, 1)
    tokens += -tokens % DEVICES
    return replace(case, tokens=tokens, padding=tokens if case.lengths is not None else 0)


@examples(ci=8, thorough=120)
@given(
    (linear_shapes().map(whole_slices) if THOROUGH else st.sampled_from([STREAM, ROWS])).flatmap(linear_values),
)
def recurrence(drawn):
    """Sharded is whole, in values and gradients, whatever the gates and wherever sequences are cut."""
    case, seed = drawn
    with jax.enable_x64(True):
        arrays, borders = split(case.arrays(np.float64, seed))
        cotangents = cotangents_of(case, arrays, seed, "both")
        wanted = run(arrays, borders, cotangents, **case.options)
        found = spread(arrays, borders, cotangents, **case.options)
        for name, x, y in zip(("output", "final state"), found[0], wanted[0], strict=True):
            assert_close(x, y, 1e-12, name)
        for name, x in wanted[1].items():
            assert_close(found[1][name], x, 1e-11, name)


RING = [
    Shape(SoftmaxCase("ring", batch=1, queries=40, keys=40, sink_shape=(2, 1), options=options), sequences=4)
    for options in ({"causal": True}, {"sliding_window": (5, 2)})
]


@functools.cache
def softmax(op, options):
    more = ALONG if op is parallel.flash_attention else {}
    return lambda **arrays: op(**arrays, **dict(options), **more, dtype=None)


@examples(ci=8, thorough=60)
@given(calls(st.sampled_from(RING)))
def attention(drawn):
    """Sharded is whole for packed sequences, however they lie on the devices."""
    shape, arrays = drawn
    options = tuple(shape.case.options.items())
    cotangent = np.random.default_rng(0).normal(size=arrays["query"].shape)
    with jax.enable_x64(True):
        one, many = (
            results_and_gradients(softmax(op, options), arrays, cotangent)
            for op in (ejkernel.flash_attention, parallel.flash_attention)
        )
        for x, y in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            assert_close(x, y, 1e-12)


@examples(ci=6, thorough=200)
@given(st.sampled_from(list(mesh_checks.mesh_calls())))
def meshes(call):
    """An op's numbers do not depend on the kind of mesh, on whether it is entered, or on what is sharded over it."""
    mesh_checks.check_on_mesh(*call)


@examples(ci=3, thorough=80)
@given(st.sampled_from(list(mesh_checks.own_shard_map_calls())), st.booleans())
def shard_maps(call, tracked):
    """Nor, for what `parallel` has, on which axes the caller's own `shard_map` goes over."""
    mesh_checks.check_own_shard_map(*call, tracked)


def leaks():
    """Rubbish in one row or sequence changes no bit of another, on whatever device that is."""
    for packed in (False, True):
        test_bits.check(*test_bits.linear("recurrent_gla", packed, run=spread))
        test_bits.check(*test_bits.linear("recurrent", packed, reverse=True, run=spread))
        test_bits.check(*test_bits.linear("kda", packed, run=spread))
        op = softmax(parallel.flash_attention, (("causal", True),))
        test_bits.check(*test_bits.softmax(op, packed, tokens=(12, 20)))


if __name__ == "__main__":
    run_parts({each.__name__: each for each in (recurrence, attention, meshes, shard_maps, leaks)})
