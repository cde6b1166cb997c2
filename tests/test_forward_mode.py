"""Forward mode: tangents of every op beside differences in float64, and beside reverse mode in every composition."""

import itertools
from functools import partial

import attention_cases
import delta_rule_cases
import jax
import jax.numpy as jnp
import linear_attention_cases
import numpy as np
import pytest
from conftest import assert_close, token_by_token
from jax.sharding import AxisType, PartitionSpec

import ejkernel
from ejkernel._ops import COMMON, OPS
from ejkernel.kernels.chunks import token_walk

QUICK = attention_cases.QUICK
LINEAR = {
    "no decay grouped",
    "gamma for all rows",
    "gamma packed reverse",
    "one gate a head mixed",
    "g grouped reverse",
    "g mixed",
    "g all reset",
    "g packed of short sequences",
    "all gates packed",
    "one gate a head shared queries and keys",
    "one token",
    "no key dims",
}
DELTA = {
    "no gate reverse",
    "no gate equal keys",
    "head mixed",
    "head packed unbatched reverse",
    "key mixed",
    "key packed shared",
    "one token",
}
SOFTMAX = {
    "causal, more keys",
    "window past the keys",
    "mask by group",
    "bias and mask",
    "sinks by head",
    "everything",
    "packed, everything",
    "packed, padding",
    "segments, everything",
    "few queries, segments",
    "offset by row",
    "one query, everything",
}


def calls():
    """Every case as a function of the arrays that have tangents, and these arrays."""
    for case in linear_attention_cases.CASES:
        if case.name in LINEAR:
            yield pytest.param(ejkernel.recurrent, case.arrays(), case.options, id=f"linear-{case}")
    for case in delta_rule_cases.CASES:
        if case.name in DELTA:
            yield pytest.param(getattr(ejkernel, case.op), case.arrays(), case.options, id=f"delta-{case}")
    for case in (
        *attention_cases.CASES,
        *attention_cases.PACKED,
        *attention_cases.SEGMENTED,
        *attention_cases.OFFSET,
        *attention_cases.FEW,
    ):
        if case.name in SOFTMAX:
            yield pytest.param(ejkernel.flash_attention, case.arrays(), case.options, id=f"softmax-{case}")


def split(arrays):
    """Arrays that have tangents, and the others."""
    moving = {name: x for name, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
    return moving, {name: x for name, x in arrays.items() if name not in moving}


def directions(moving, seed=3):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=x.shape) for name, x in moving.items()}


@pytest.mark.parametrize(("op", "arrays", "options"), list(calls()))
def test_tangents_are_differences(op, arrays, options, x64):
    check_tangents(op, arrays, options)


@pytest.mark.parametrize(("op", "arrays", "options"), [each for each in calls() if "mixed" in each.id])
def test_tangents_token_by_token(op, arrays, options, x64):
    with token_by_token(token_walk.LARGEST_STATE):
        check_tangents(op, arrays, options)


def check_tangents(op, arrays, options):
    """Along a direction of all arrays at once, and along one of each alone."""
    moving, fixed = split(arrays)

    @partial(jax.jit, compiler_options=QUICK)
    def run(moving):
        return jax.tree.leaves(op(**moving, **fixed, **options))

    @partial(jax.jit, compiler_options=QUICK)
    def tangents(moving, moved):
        return jax.jvp(lambda x: jax.tree.leaves(op(**x, **fixed, **options)), (moving,), (moved,))[1]

    whole = directions(moving)
    still = jax.tree.map(np.zeros_like, whole)
    for moved in (whole, *({**still, name: whole[name]} for name in moving)):
        above, below = (run({name: moving[name] + step * moved[name] for name in moving}) for step in (1e-6, -1e-6))
        for actual, a, b in zip(tangents(moving, moved), above, below, strict=True):
            expected = (np.asarray(a) - np.asarray(b)) / 2e-6
            assert_close(actual, expected, 1e-7, "tangent", scale=max(1, np.abs(expected).max(initial=0)))


def small(op):
    """A call of `op` that is small enough for whole Hessians, as a function of its arrays, and these."""
    random = np.random.default_rng(5)
    query, key, value = random.normal(size=(3, 1, 5, 1, 2))
    gates = -random.random((1, 5, 1, 2))
    named = {"query": query, "key": key, "value": value}
    if op == "flash_attention":
        return partial(ejkernel.flash_attention, causal=True), named
    if op == "recurrent_gla":
        return lambda **x: ejkernel.recurrent_gla(**x)[0], {**named, "g": gates}
    return lambda **x: ejkernel.delta_rule(**x)[0], {**named, "beta": random.random((1, 5, 1))}


def compositions(f, arrays):
    """Derivatives of a loss that mix both modes, each beside one that reverse mode alone gives."""
    moved = jax.tree.map(jnp.asarray, directions(arrays))

    def of_results(y):
        return (y**2).sum() + y.sum() ** 2

    def loss(arrays):
        return of_results(f(**arrays))

    def along(gradient):
        return sum((gradient[name] * moved[name]).sum() for name in gradient)

    reverse = jax.grad(lambda x: along(jax.grad(loss)(x)))(arrays)
    slope = along(jax.grad(loss)(arrays))
    mesh, spec = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,)), PartitionSpec("a")
    mapped = jax.shard_map(lambda x: f(**x), mesh=mesh, in_specs=({name: spec for name in arrays},), out_specs=spec)
    scanned = lambda x: jax.lax.scan(lambda total, _: (total + loss(x), None), 0.0, None, length=2)[0]  # noqa: E731
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), (arrays, moved))
    hessian = jax.hessian(loss)(arrays)
    product = {a: sum(jnp.tensordot(hessian[a][b], moved[b], moved[b].ndim) for b in arrays) for a in arrays}
    yield "jvp of grad", jax.jvp(jax.grad(loss), (arrays,), (moved,))[1], reverse
    yield "grad of jvp", jax.grad(lambda x: jax.jvp(loss, (x,), (moved,))[1])(arrays), reverse
    yield "hessian", product, reverse
    yield "linearize", jax.linearize(loss, arrays)[1](moved), slope
    yield "jvp of checkpoint", jax.jvp(jax.checkpoint(loss), (arrays,), (moved,))[1], slope
    yield "jvp of scan", jax.jvp(scanned, (arrays,), (moved,))[1], 2 * slope
    of_mesh = jax.jvp(lambda x: of_results(mapped(x)), (arrays,), (moved,))[1]
    yield "jvp of shard_map", of_mesh, slope
    of_rows = jax.vmap(lambda x, moved: jax.jvp(loss, (x,), (moved,))[1])(*stacked)
    yield "vmap of jvp", of_rows, jnp.stack([slope, slope])


@pytest.mark.parametrize(("op", "most"), [("recurrent_gla", 8), ("delta_rule", 3), ("flash_attention", 8)])
def test_compositions(op, most, x64):
    f, arrays = small(op)
    names = []

    @partial(jax.jit, compiler_options=QUICK)
    def run(arrays):
        found = list(itertools.islice(compositions(f, arrays), most))
        names.extend(name for name, *_ in found)
        return [pair for _, *pair in found]

    pairs = run(arrays)
    assert len(names) == most
    for name, (actual, expected) in zip(names, pairs, strict=True):
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert_close(a, b, 1e-10, name)


TRANSPOSED = [
    (name, lengths)
    for name, op in COMMON.items()
    for lengths in (None, (3, 0, 33, 64, 20))[: 1 if name in ("attention", "lightning_attn") else 2]
    if op.core != "convolution"  # which has tests of its own
]


@pytest.mark.parametrize(("op", "lengths"), TRANSPOSED)
def test_forward_and_reverse_mode_are_transposes(op, lengths, x64):
    """`<u, J v> = <Jᵀ u, v>` over several chunks, for every array, from all results."""
    random = np.random.default_rng(7)
    sizes = {"B": 1, "T": 150, "H": 2, "K": 8}
    dims = {name: "BTHK" for name in ("query", "key", "value")} | OPS[op].gates
    arrays = {name: random.normal(size=[sizes[each] for each in dim]) for name, dim in dims.items()}
    arrays |= {name: -np.abs(arrays[name]) for name in arrays if name == "g"}
    borders = {"cu_seqlens": np.cumsum((0, *lengths))} if lengths else {}
    moved = directions(arrays)

    @partial(jax.jit, compiler_options=QUICK)
    def both(arrays, moved):
        f = lambda x: jax.tree.leaves(OPS[op].function(**x, **borders, **OPS[op].options))  # noqa: E731
        results, tangents = jax.jvp(f, (arrays,), (moved,))
        cotangents = [jnp.cos(jnp.arange(x.size)).reshape(x.shape).astype(x.dtype) for x in results]
        (gradients,) = jax.vjp(f, arrays)[1](cotangents)
        left = [(u * t).sum() for u, t in zip(cotangents, tangents, strict=True)]
        return left, [(gradients[name] * moved[name]).sum() for name in arrays]

    left, right = both(arrays, moved)
    assert_close(sum(left), sum(right), 1e-10, "<u, J v>", scale=sum(map(abs, (*left, *right))))


@pytest.mark.parametrize("op", ["retention", "recurrent_gla", "delta_rule", "kda", "flash_attention"])
def test_memory_is_linear_in_tokens(op):
    """And far from a state a token, which would be 32 times an array."""
    arrays = {name: "BTHK" for name in ("query", "key", "value")} | OPS[op].gates

    def temporaries(tokens):
        sizes = {"B": 1, "T": tokens, "H": 2, "K": 32}
        shapes = {n: jax.ShapeDtypeStruct([sizes[each] for each in dims], jnp.float32) for n, dims in arrays.items()}
        run = lambda x: jax.jvp(lambda x: getattr(ejkernel, op)(**x), (x,), (x,))  # noqa: E731
        compiled = jax.jit(run, compiler_options=QUICK).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * 2 * 32 * tokens)

    short, *longer = map(temporaries, (1024, 2048, 4096, 8192))
    assert max(longer) < 1.1 * short
    assert short < 32, f"{short} times an array"


@pytest.mark.parametrize("op", ["recurrent_gla", "gated_delta_rule", "flash_attention"])
def test_tangents_do_not_leak(op):
    """A NaN in one sequence, or in the padding, changes no bit of another's tangents."""
    random = np.random.default_rng(9)
    query, key, value = random.normal(size=(3, 1, 90, 2, 4)).astype(np.float32)
    options = {"recurrent_gla": {"g": -np.abs(query)}, "flash_attention": {"causal": True}}.get(
        op, {"g": -np.abs(query[..., 0]), "beta": np.abs(np.tanh(key[..., 0]))}
    )
    options["cu_seqlens"] = np.array([0, 17, 17, 70, 80], np.int32)

    @jax.jit
    def tangents(query, key, value):
        moving = (query, key, value)
        return jax.jvp(lambda *x: jax.tree.leaves(getattr(ejkernel, op)(*x, **options))[0], moving, moving)[1]

    clean = np.asarray(tangents(query, key, value))
    bad = np.ones((1, 90, 1, 1), np.float32)
    bad[:, 30], bad[:, 85] = np.nan, np.nan
    dirty = np.asarray(tangents(query * bad, key * bad, value * bad))
    others = np.r_[0:17, 70:90]
    np.testing.assert_array_equal(dirty[:, others], clean[:, others])
    assert np.isnan(dirty[:, 30:70]).any()
