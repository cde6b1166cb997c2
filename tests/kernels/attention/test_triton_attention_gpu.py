"""The Triton kernels of softmax attention on an NVIDIA GPU, against float64: `pytest -m gpu`."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from triton_attention_cases import (
    FEW,
    GROUPED,
    LONG,
    Case,
    differences,
    directions,
    exact,
    options_of,
    scaled,
    tangents,
)

from ejkernel import parallel
from ejkernel.attention import flash_attention
from ejkernel.kernels import _launch

pytestmark = pytest.mark.gpu
if _launch.capability() is None:
    pytest.skip("no NVIDIA GPU", allow_module_level=True)
elif reason := _launch.unavailable():
    pytest.skip(reason, allow_module_level=True)

GRADIENTS = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-5}
# of every kind of walk one, for the other configurations
KINDS = [each for each in LONG if each.name in {"causal", "window", "soft cap", "mask", "bias", "packed", "everything"}]
EVERY = [
    *((case, 128, 128, "bfloat16") for case in (*LONG, *FEW)),
    *((case, 64, 64, "bfloat16") for case in KINDS),
    *((case, 192, 128, "bfloat16") for case in KINDS),
    *((case, dim, dim, "bfloat16") for case in KINDS for dim in (256, 512)),
    *((case, 40, 80, "bfloat16") for case in KINDS[:3]),
    *((case, 128, 128, "float16") for case in (*KINDS, FEW[0])),
    *((case, dim, dim, "float32") for case in (*KINDS, FEW[0]) for dim in (64, 128, 256)),
]


def program(case, **more):
    """Output, log-sum-exp and gradients, jitted."""

    def run(moving, fixed, cotangents):
        results, pull = jax.vjp(
            lambda moving: flash_attention(
                **moving, **fixed, **options_of(case), dtype=None, return_lse=True, platform="triton", **more
            ),
            moving,
        )
        return results, pull(cotangents)[0]

    return jax.jit(run)


def arrays_of(case, dtype):
    """The arrays that have gradients, those that have none, and cotangents."""
    arrays = case.arrays(jnp.dtype(dtype))
    fixed = {name: each for name, each in arrays.items() if each.dtype == bool}
    moving = {name: each for name, each in arrays.items() if each.dtype != bool}
    random = np.random.default_rng(1)
    rows = arrays["query"].shape[:3]
    d_output = random.normal(size=(*rows, case.value_dim)).astype(jnp.dtype(dtype))
    return moving, fixed, (d_output, random.normal(size=rows).astype(np.float32))


def check(case, key_dim, value_dim, dtype):
    case = scaled(case, 5, key_dim=key_dim, value_dim=value_dim)
    check_arrays(case, dtype, *arrays_of(case, dtype))


def check_arrays(case, dtype, moving, fixed, cotangents):
    output, lse, gradients = exact(case, moving | fixed, *cotangents)
    # the gradient of a log-sum-exp that is not there is no one's
    cotangents = cotangents[0], np.where(np.isfinite(lse), cotangents[1], 0)
    mine, found = program(case)(moving, fixed, cotangents)
    finite = np.isfinite(lse)
    assert (np.isfinite(mine[1]) == finite).all()
    assert_close(np.where(finite, mine[1], 0), np.where(finite, lse, 0), 1e-5 if dtype == "float32" else 1e-3)
    if dtype == "float32":
        assert_close(mine[0], output, 1e-5, "output")
    else:
        rounded = np.asarray(jnp.asarray(output).astype(dtype)).astype(np.float64)
        least, error = (np.linalg.norm(np.asarray(each, np.float64) - output) for each in (rounded, mine[0]))
        assert error <= 2 * least, f"output: {error / least:.2f} times the error of rounding"
    for name, each in gradients.items():
        assert_close(found[name], each, GRADIENTS[dtype], name)


@pytest.mark.parametrize("case, key_dim, value_dim, dtype", EVERY, ids=lambda x: str(x))
def test_matches_float64(case, key_dim, value_dim, dtype):
    check(case, key_dim, value_dim, dtype)


MOVED = [
    *((case, 128, "bfloat16") for case in (*LONG, FEW[0])),
    *((case, dim, "bfloat16") for case in KINDS[:2] for dim in (64, 192, 256, 512)),
    *((case, 128, "float16") for case in KINDS[:2]),
    *((case, dim, "float32") for case in (KINDS[0], KINDS[-1]) for dim in (64, 128, 256)),
]


@pytest.mark.parametrize("case, dim, dtype", MOVED, ids=str)
def test_tangents(case, dim, dtype):
    case = scaled(case, 5, key_dim=dim, value_dim=dim)
    arrays = case.arrays(jnp.dtype(dtype))
    moved = directions(arrays)
    run = jax.jit(lambda arrays, moved: tangents(case, arrays, moved, platform="triton"))
    results, found = run(arrays, moved)
    for actual, right in zip(found, differences(case, arrays, moved), strict=True):
        known = np.isfinite(np.asarray(results[1], np.float32)) if actual.ndim == 3 else True
        assert_close(np.where(known, actual, 0), np.where(known, right, 0), GRADIENTS[dtype])


# Shapes of a mask and a bias, and the bias' dtype; of queries and keys, 1 or all.
PAIRS = {
    "mask": ((2, 1, "S", "L"), None, None),
    "mask of keys": ((2, 1, 1, "L"), None, None),
    "mask of queries": ((1, 4, "S", 1), None, None),
    "bias": (None, (1, 4, "S", "L"), "bfloat16"),
    "bias of keys": (None, (1, 4, 1, "L"), "float32"),
    "both": ((1, 2, "S", "L"), (2, 1, "S", "L"), "float32"),
}


@pytest.mark.parametrize(
    "kind, key_dim, value_dim, dtype",
    [
        *((kind, 128, 128, "bfloat16") for kind in PAIRS),
        *(
            (kind, *dims, "bfloat16")
            for kind in ("mask", "bias", "both")
            for dims in ((64, 64), (192, 128), (256, 256))
        ),
        ("both", 64, 64, "float32"),
        ("both", 128, 128, "float16"),
    ],
)
def test_masks_and_biases(kind, key_dim, value_dim, dtype):
    """Of keys whose rows begin where wide loads can, and of others; few queries are decoded, by one kernel more."""
    mask, bias, bias_dtype = PAIRS[kind]
    random = np.random.default_rng(5)
    for queries, keys in ((200, 384), (200, 331), (3, 384)):
        case = Case("", queries=queries, keys=keys, **GROUPED, key_dim=key_dim, value_dim=value_dim)
        case = replace(case, options={"sliding_window": (300, 150)}, sink_shape=(4, 1))
        moving, fixed, cotangents = arrays_of(case, dtype)
        sizes = {"S": queries, "L": keys}
        if mask:
            fixed["attention_mask"] = random.random([sizes.get(each, each) for each in mask]) < 0.8
        if bias:
            moving["bias"] = random.normal(size=[sizes.get(each, each) for each in bias]).astype(jnp.dtype(bias_dtype))
        check_arrays(case, dtype, moving, fixed, cotangents)


def test_equal_bits_every_time():
    case = scaled(Case("", **GROUPED, queries=100, keys=100, options={"causal": True}), 5, key_dim=64, value_dim=64)
    arrays = arrays_of(case, "bfloat16")
    run = program(case)
    for one, other in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*arrays)), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_dropout_drops_what_xla_drops():
    case = scaled(Case("", **GROUPED, queries=50, keys=60, options={"causal": True}), 5, key_dim=64, value_dim=64)
    moving, _, (d_output, _) = arrays_of(case, "float32")

    def run(platform):
        drop = {"deterministic": False, "dropout_prob": 0.3, "dropout_rng": jax.random.key(3)}
        call = lambda moving: flash_attention(**moving, **case.options, **drop, dtype=None, platform=platform)  # noqa: E731
        output, pull = jax.vjp(call, moving)
        return output, pull(d_output)[0]

    with jax.default_matmul_precision("highest"):
        for one, other in zip(jax.tree.leaves(run("triton")), jax.tree.leaves(run("xla")), strict=True):
            assert_close(one, other, 1e-4)


def test_ring_of_one():
    """A ring's blocks are these kernels, which merge as XLA's do."""
    case = Case("", batch=1, queries=200, keys=200, **GROUPED, sink_shape=(4, 1), options={"causal": True})
    case = replace(case, key_dim=64, value_dim=64, options={**case.options, "cu_seqlens": [0, 70, 70, 180]})
    moving, _, (d_output, d_lse) = arrays_of(case, "float32")
    mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))

    def ring(moving):
        return parallel.flash_attention(**moving, **options_of(case), axis_name="time", mesh=mesh, layout="balanced")

    run = jax.jit(lambda moving: jax.vjp(ring, moving)[1](d_output)[0])
    assert "triton_kernel_call" in run.lower(moving).as_text()
    right = exact(case, moving, d_output, 0 * d_lse)
    for name, each in run(moving).items():
        assert_close(each, right[2][name], 2e-5, name)


def test_exported():
    """What is exported has the kernels in it, and runs when it is read back."""
    case = scaled(Case("", **GROUPED, queries=50, keys=50, options={"causal": True}), 5, key_dim=64, value_dim=64)
    moving, fixed, cotangents = arrays_of(case, "bfloat16")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(_launch.target())]
    run = program(case)
    exported = jax.export.export(run, platforms=["cuda"], disabled_checks=allowed)(moving, fixed, cotangents)
    again = jax.export.deserialize(exported.serialize())
    for one, other in zip(
        *map(jax.tree.leaves, (run(moving, fixed, cotangents), again.call(moving, fixed, cotangents))), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_transformations():
    """`vmap`, `shard_map`, `scan` with `checkpoint`, and second derivatives change nothing."""
    case = Case("", batch=2, queries=70, keys=70, **GROUPED, key_dim=32, value_dim=32, options={"causal": True})
    arrays = {name: jnp.asarray(each) for name, each in case.arrays(np.float32).items()}

    def whole(arrays, platform="triton"):
        return flash_attention(**arrays, causal=True, dtype=None, platform=platform)

    def row(arrays):
        return whole({name: each[None] for name, each in arrays.items()})[0]

    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("rows")
    every = {
        "vmap": jax.vmap(row),
        "shard_map": jax.shard_map(whole, mesh=mesh, in_specs=(spec,), out_specs=spec),
        "scan": lambda arrays: jax.lax.scan(lambda _, x: (None, jax.checkpoint(row)(x)), None, arrays)[1],
    }

    def gradients(function):
        return jax.jit(jax.grad(lambda arrays: (function(arrays) ** 2).sum()))(arrays)

    def second(function):
        def product(arrays):
            first = jax.grad(lambda arrays: (function(arrays) ** 2).sum())(arrays)
            return sum((each**2).sum() for each in jax.tree.leaves(first))

        return jax.jit(jax.grad(product))(arrays)

    with jax.default_matmul_precision("highest"):
        right = gradients(lambda arrays: whole(arrays, "xla"))
        for name, function in every.items():
            for one, other in zip(jax.tree.leaves(gradients(function)), jax.tree.leaves(right), strict=True):
                assert_close(one, other, 1e-5, name)
        twice = (second(whole), second(lambda arrays: whole(arrays, "xla")))
        for one, other in zip(*map(jax.tree.leaves, twice), strict=True):
            assert_close(one, other, 1e-4, "second")
