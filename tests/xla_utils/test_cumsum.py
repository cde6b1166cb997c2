"""Chunked cumulative sums against their oracle, their derivatives, and what must not leak."""

import functools
import inspect
import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from jax.sharding import AxisType, PartitionSpec

from ejkernel.xla_utils import chunk_global_cumsum, chunk_local_cumsum
from ejkernel.xla_utils import cumsum as module
from ejkernel.xla_utils.cumsum import (
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
)

TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}
FORMS = (chunk_local_cumsum_scalar, chunk_local_cumsum_vector, chunk_global_cumsum_scalar, chunk_global_cumsum_vector)


@dataclass(frozen=True)
class Case:
    """A call; global if there is no chunk size."""

    shape: tuple[int, ...]
    chunk_size: int | None = None
    reverse: bool = False
    cu: tuple[int, ...] | None = None
    softmax_scale: float | None = None
    head_first: bool = False

    def __str__(self):
        words = ["x".join(map(str, self.shape)), f"chunk{self.chunk_size}" if self.chunk_size else "global"]
        words += [word for word in ("reverse", "head_first") if getattr(self, word)]
        words += ["packed_" + "_".join(map(str, self.cu))] if self.cu else []
        return "-".join(words + (["scaled"] if self.softmax_scale is not None else []))

    def run(self, x, cu=None, **more):
        options = dict(reverse=self.reverse, softmax_scale=self.softmax_scale, head_first=self.head_first, **more)
        options["cu_seqlens"] = cu if cu is not None or self.cu is None else jnp.asarray(self.cu)
        if self.chunk_size is None:
            return chunk_global_cumsum(x, **options)
        return chunk_local_cumsum(x, self.chunk_size, **options)

    def options(self):
        scale = 1.0 if self.softmax_scale is None else self.softmax_scale
        return dict(
            chunk_size=self.chunk_size,
            reverse=self.reverse,
            cu_seqlens=self.cu,
            softmax_scale=scale,
            head_first=self.head_first,
        )

    def arrays(self, dtype="float64", count=2):
        random = np.random.default_rng(0)
        return [jnp.asarray(random.normal(size=self.shape), dtype) for _ in range(count)]

    @functools.partial(jax.jit, static_argnums=0)
    def both(self, x, weights):
        """The value, and the gradient of `Σ weights · value`."""
        value, back = jax.vjp(self.run, x)
        return value, back(weights)[0]


LOCAL = Case((2, 37, 3, 5), 8)
LOCAL_HEAD_FIRST = Case((2, 3, 37, 5), 4, head_first=True)
LOCAL_PACKED = Case((1, 37, 3, 5), 4, cu=(0, 3, 3, 8, 17, 33))
LOCAL_PACKED_REVERSE = Case((1, 37, 3, 5), 4, reverse=True, cu=(0, 0, 3, 8, 17, 37), softmax_scale=0.5)
GLOBAL = Case((2, 3, 37), softmax_scale=-0.3, head_first=True)
CASES = [
    LOCAL,
    LOCAL_HEAD_FIRST,
    LOCAL_PACKED,
    LOCAL_PACKED_REVERSE,
    GLOBAL,
    Case((2, 37, 3, 5), 8, reverse=True),
    Case((2, 4, 3), 1),
    Case((2, 37, 3), 64, reverse=True, softmax_scale=-0.3),
    Case((2, 8, 3), 4),
    Case((2, 3, 37), 4, reverse=True, head_first=True),
    Case((2, 9, 16, 64), 4, reverse=True, softmax_scale=2.0),
    Case((1, 3, 37), 8, cu=(0, 21, 37, 37), head_first=True),
    Case((1, 9, 16, 64), 2, reverse=True, cu=(0, 3, 8)),
    Case((1, 1, 1), 2),
    Case((2, 37, 3, 5)),
    Case((2, 9, 16, 64), reverse=True),
    Case((1, 101, 1)),
    Case((1, 37, 3), cu=(0, 3, 3, 8, 17, 33)),
    Case((1, 37, 3, 5), reverse=True, cu=(0, 36, 37)),
    Case((1, 3, 37, 5), reverse=True, cu=(0, 1, 20), head_first=True),
    Case((1, 9, 16, 64), cu=(0, 4, 4, 9)),
    Case((1, 5, 2), cu=(0,)),
]
EVERY_DTYPE = [LOCAL, LOCAL_PACKED_REVERSE, GLOBAL]
PACKED = [case for case in CASES if case.cu and len(case.cu) > 3]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_oracle(case, x64):
    x, weights = case.arrays()
    value, gradient = case.both(x, weights)
    assert value.dtype == gradient.dtype == x.dtype
    assert_close(value, oracle.cumsum(x, **case.options()), TOLERANCE["float64"], "value")
    assert_close(gradient, oracle.cumsum_gradient(weights, **case.options()), TOLERANCE["float64"], "gradient")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("case", EVERY_DTYPE, ids=str)
def test_dtypes(case, dtype):
    x, weights = case.arrays(dtype)
    value, gradient = case.both(x, weights)
    assert value.dtype == gradient.dtype == dtype
    assert_close(value, oracle.cumsum(x, **case.options()), TOLERANCE[dtype])
    assert_close(gradient, oracle.cumsum_gradient(weights, **case.options()), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_accumulates_in_float32(dtype):
    """4096 ones: a bfloat16 sum stops at 256, a float16 one at 2048."""
    ones = jnp.ones((1, 4097, 1), dtype)
    assert float(chunk_global_cumsum(ones)[0, 4095, 0]) == 4096
    assert float(chunk_local_cumsum(ones, 4096, reverse=True, output_dtype=jnp.float32)[0, 1, 0]) == 4095


def test_float64_output_of_float32_input(x64):
    x = jnp.full((1, 50, 1), 0.1, jnp.float32)
    value = chunk_global_cumsum(x, output_dtype=jnp.float64)
    assert value.dtype == jnp.float64
    assert_close(value, oracle.cumsum(x), 1e-14)


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_sequences_never_touch(case):
    """A bad value or cotangent in one sequence changes that sequence alone."""
    tokens = case.shape[2 if case.head_first else 1]
    _unchanged_outside(case, oracle.token_indices(case.cu, tokens)[:, 0])


@pytest.mark.parametrize("case", [LOCAL, LOCAL_HEAD_FIRST, GLOBAL], ids=str)
def test_rows_heads_and_chunks_never_touch(case):
    time = 2 if case.head_first else 1
    tokens = case.shape[time]
    _unchanged_outside(case, np.arange(tokens) // (case.chunk_size or tokens))


def _unchanged_outside(case, owner):
    time = 2 if case.head_first else 1
    x, weights = case.arrays("float32")
    clean = case.both(x, weights)
    for token, bad in itertools.product(range(0, len(owner), 5), (np.nan, np.inf, 1e30)):
        spoilt_x, spoilt_weights = np.array(x), np.array(weights)
        for array in (spoilt_x, spoilt_weights):
            array[tuple(token if axis == time else -1 for axis in range(x.ndim))] = bad
        touched = np.zeros(case.shape, bool)
        touched[tuple(owner == owner[token] if axis == time else -1 for axis in range(x.ndim))] = True
        for before, after in zip(clean, case.both(spoilt_x, spoilt_weights), strict=True):
            same = np.asarray(before).view(np.uint32) == np.asarray(after).view(np.uint32)
            assert same[~touched].all()
            if case.cu is None or token < case.cu[-1]:
                assert not same[touched].all()


@pytest.mark.parametrize("reverse", [False, True])
def test_a_bad_value_stays_on_its_side(reverse):
    x = jnp.ones((1, 20, 2)).at[0, 7].set(np.nan)
    finite = np.isfinite(chunk_global_cumsum(x, reverse))[0, :, 0]
    np.testing.assert_array_equal(finite, np.arange(20) > 7 if reverse else np.arange(20) < 7)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_tree_and_loop_agree(reverse, restarts):
    """Which of the two runs depends on the device; this test runs both here."""
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (2, 70, 3)), jnp.float32)
    cu = (0, 3, 3, 40, 61)
    first = module._first(70, jnp.array(cu), 8, reverse) if restarts else None
    expected = oracle.cumsum(x, 8, reverse, (*cu, 70)) if restarts else oracle.cumsum(x, reverse=reverse)
    for function in (module._tree, lambda x, first, reverse: module._loop(x, first, None, reverse)):
        implementation = jax.jit(function, static_argnums=2)
        np.testing.assert_array_equal(implementation(x, first, reverse), expected)
        if restarts:
            # token 30 is the fourth of its sequence's fourth chunk, 27…34
            spoilt = np.isnan(implementation(x.at[:, 30].set(np.nan), first, reverse)).any(axis=(0, 2))
            assert spoilt.nonzero()[0].tolist() == ([27, 28, 29, 30] if reverse else [30, 31, 32, 33, 34])


def test_traced_borders_compile_once():
    traces = []

    @jax.jit
    def run(x, cu):
        traces.append(cu)
        return chunk_local_cumsum(x, 4, cu_seqlens=cu), chunk_global_cumsum(x, True, cu)

    x = LOCAL_PACKED.arrays("float32")[0]
    for cu in [(0, 5, 20, 37), (0, 0, 0, 0), (0, 37, 37, 37), (0, 1, 2, 30)]:
        local, whole = run(x, jnp.array(cu))
        assert_close(local, oracle.cumsum(x, 4, cu_seqlens=cu), TOLERANCE["float32"])
        assert_close(whole, oracle.cumsum(x, reverse=True, cu_seqlens=cu), TOLERANCE["float32"])
    assert len(traces) == 1


def test_plain_calls_compile_once():
    x = jnp.ones((1, 11, 2))
    sizes = []
    for scale, cu in enumerate([(0, 5, 11), (0, 0, 3), (0, 11, 11)]):
        chunk_local_cumsum(x, 4, cu_seqlens=jnp.array(cu), softmax_scale=float(scale))
        sizes.append(module._cumsum._cache_size())
    assert sizes[0] == sizes[-1]


def test_vmap_scan_and_checkpoint():
    case = LOCAL_PACKED
    xs = jnp.stack(case.arrays("float32"))
    cus = jnp.array([(0, 3, 3, 8, 17, 33), (0, 9, 20, 20, 30, 37)])
    expected = [oracle.cumsum(x, 4, cu_seqlens=np.asarray(cu)) for x, cu in zip(xs, cus, strict=True)]

    @jax.jit
    def run(xs, cus):
        in_vmap = jax.vmap(case.run)(xs, cus)
        _, in_scan = jax.lax.scan(lambda _, each: (None, case.run(*each)), None, (xs, cus))
        gradient = jax.vmap(jax.grad(lambda x, cu: jax.checkpoint(case.run)(x, cu).sum()))(xs, cus)
        return in_vmap, in_scan, gradient

    in_vmap, in_scan, gradient = run(xs, cus)
    assert_close(in_vmap, expected, TOLERANCE["float32"], "vmap")
    assert_close(in_scan, expected, TOLERANCE["float32"], "scan")
    expected = [oracle.cumsum_gradient(np.ones(case.shape), 4, cu_seqlens=np.asarray(cu)) for cu in cus]
    assert_close(gradient, expected, TOLERANCE["float32"], "gradient")


def test_shard_map():
    """Alone on one device: what is checked is that JAX can follow which values vary over the mesh."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    for case in (LOCAL, LOCAL_PACKED_REVERSE):
        x, weights = case.arrays("float32")
        run = jax.shard_map(case.run, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
        value, gradient = jax.jit(lambda x, w, run=run: (run(x), jax.vjp(run, x)[1](w)[0]))(x, weights)
        assert_close(value, oracle.cumsum(x, **case.options()), TOLERANCE["float32"])
        assert_close(gradient, oracle.cumsum_gradient(weights, **case.options()), TOLERANCE["float32"])


def test_second_derivatives_in_every_mode(x64):
    """Of `Σ sum³`, whose second derivative is `Mᵀ diag(6 sum) M`."""
    x = jnp.arange(1.0, 8.0)
    cu = (0, 3, 6)
    matrix = oracle.cumsum_matrix(7, 2, False, cu)
    expected = matrix.T @ np.diag(6 * matrix @ np.asarray(x)) @ matrix

    def cubes(x):
        return (chunk_local_cumsum(x[None, :, None], 2, cu_seqlens=jnp.array(cu)) ** 3).sum()

    for outer, inner in [(jax.jacrev, jax.grad), (jax.jacfwd, jax.grad), (jax.jacrev, jax.jacfwd)]:
        assert_close(jax.jit(outer(inner(cubes)))(x), expected, 1e-14)


def test_scale_may_be_an_array():
    x = jnp.ones((1, 4, 1))
    gradient = jax.grad(lambda scale: chunk_global_cumsum(x, softmax_scale=scale).sum())(jnp.float32(2.0))
    assert float(gradient) == 10


@pytest.mark.parametrize("shape", [(2, 0, 3), (0, 4, 3), (2, 4, 3, 0)])
def test_nothing_to_sum(shape):
    x = jnp.ones(shape, jnp.float16)
    for run in (chunk_global_cumsum, functools.partial(chunk_local_cumsum, chunk_size=2)):
        value = run(x, output_dtype=jnp.float32)
        assert value.shape == shape
        assert value.dtype == jnp.float32
        assert jax.grad(lambda x, run=run: run(x).sum())(x).shape == shape


def test_forms_are_the_main_functions():
    random = np.random.default_rng(0)
    for form, rank in zip(FORMS, (3, 4, 3, 4), strict=True):
        x = jnp.asarray(random.normal(size=(2, 6, 3, 2)[:rank]), jnp.float32)
        local = form.__name__.startswith("chunk_local")
        main = chunk_local_cumsum if local else chunk_global_cumsum
        least = {"chunk_size": 4} if local else {}
        for more in ({}, dict(reverse=True, softmax_scale=0.5, head_first=True, output_dtype=jnp.bfloat16)):
            np.testing.assert_array_equal(form(x, **least, **more), main(x, **least, **more))
        # and of one rank only
        wrong = x[..., None] if rank == 3 else x[..., 0]
        with pytest.raises(ValueError, match=f"^{'g' if local else 's'}: got shape"):
            form(wrong, **least)


@pytest.mark.parametrize("run", [lambda x, **o: chunk_local_cumsum(x, 2, **o), chunk_global_cumsum])
def test_errors_name_the_argument(run):
    x = np.ones((2, 4, 3), np.float32)
    name = "s" if run is chunk_global_cumsum else "g"
    for argument, array, options in (
        (name, x[0], {}),
        ("cu_seqlens", x, {"cu_seqlens": [0, 4]}),
        ("cu_seqlens", x[:1], {"cu_seqlens": [0, 5]}),
        ("reverse", x, {"reverse": 1}),
        ("head_first", x, {"head_first": 1}),
        ("softmax_scale", x, {"softmax_scale": "1"}),
        ("output_dtype", x, {"output_dtype": int}),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{argument}: got "):
            run(array, **options)
    with pytest.raises(ValueError, match=r"^chunk_size: got 3"):
        chunk_local_cumsum(x, 3)


def test_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)

    local = ["g", "chunk_size", "reverse", "softmax_scale", "head_first", "output_dtype"]
    whole = ["s", "reverse", "cu_seqlens", "softmax_scale", "head_first", "output_dtype"]
    assert names(chunk_local_cumsum) == [*local[:4], "cu_seqlens", *local[4:], "kwargs"]
    for function, expected in zip((chunk_global_cumsum, *FORMS), (whole, local, local, whole, whole), strict=True):
        assert names(function) == expected
    assert chunk_local_cumsum(jnp.ones((1, 2, 1)), 2, anything=1).shape == (1, 2, 1)


def test_time_first_layout_is_not_transposed():
    x = jnp.ones((2, 64, 4, 8))
    cu = jnp.array([0, 5, 64])
    for run in (
        lambda x: chunk_local_cumsum(x, 8),
        lambda x: chunk_local_cumsum(x[:1], 8, cu_seqlens=cu),
    ):
        compiled = jax.jit(lambda x, run=run: jax.vjp(run, x)[1](run(x))).lower(x).compile()
        assert " transpose(" not in compiled.as_text()
