"""The TPU kernels in Pallas' interpreter: what was never written is NaN, and races are found."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from conftest import assert_close
from triton_cases import NAMES, Case, assert_matches, burst, make, oracle, results

import ejkernel
from ejkernel.kernels import _pallas, _phases
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS, pallas, xla

BASE = Case("base", B=1, T=40, H=1, Hkv=1, K=64, V=64)
UNEVEN = {"lengths": (7, 0, 11, 25, 1), "T": 50}
TOLERANCE = {"float32": {"decay": 1e-5, "other": 3e-6}, "bfloat16": {"decay": 1e-2, "other": 5e-3}}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    with pallas_interpreter.interpreted(monkeypatch):
        yield


def compiled(case):
    """Results and gradients of a call, compiled once for any arrays."""
    return jax.jit(functools.partial(results, pallas.run, case.call))


def check(run, case, arrays, cotangents):
    found = run(arrays, cotangents)
    assert_matches(found, oracle(case.call, arrays, cotangents), TOLERANCE[case.dtype])
    return found


# one compilation each, for gates that take either path or both
CASES = [
    (
        replace(BASE, name="key-grouped", T=72, H=2, shared=(2, 1, 2), V=128),
        ("mild", "resets", "once", "all -6", "in turn"),
    ),
    (
        replace(BASE, name="key-bfloat16-whole", dtype="bfloat16", T=32, H=2, Hkv=2, state=False),
        ("strong", "once", "shipped"),
    ),
    (replace(BASE, name="head-bfloat16-reverse", decay="head", dtype="bfloat16", reverse=True), ("mild", "fierce")),
    (replace(BASE, name="constant-reverse", decay="constant", B=2, reverse=True), ("mild", "fierce")),
    (replace(BASE, name="none", decay="none", T=32, H=2, shared=(1, 1, 2)), ("mild",)),
]


@pytest.mark.parametrize("case, kinds", CASES, ids=str)
def test_matches_oracle(case, kinds):
    run = compiled(case)
    for kind in kinds:
        check(run, case, *make(replace(case, gate=kind)))


@pytest.mark.parametrize(
    "case",
    [replace(BASE, name="key", reverse=True, **UNEVEN), replace(BASE, name="head", decay="head", H=2, **UNEVEN)],
    ids=str,
)
def test_packed(case):
    run = compiled(case)
    # a gate that forgets everything has no gradient, not even where there is nothing to forget
    arrays, cotangents = make(replace(case, gate="resets"))
    forgetting = arrays[3].at[0, np.array([0, 6, 7, 17, 18, 42, 43])].set(-jnp.inf)
    found = dict(zip(NAMES, check(run, case, (*arrays[:3], forgetting, *arrays[4:]), cotangents), strict=False))
    assert (np.asarray(found["decay"])[np.isneginf(forgetting)] == 0).all()
    # other borders in the same program, and what is past the last one
    arrays, cotangents = make(replace(case, gate="mild"))
    check(run, case, (*arrays[:6], jnp.array([0, 1, 20, 20, 37, 40])), cotangents)
    if case.decay == "key":
        for kind in ("shipped", "in turn"):
            check(run, case, *make(replace(case, gate=kind)))
    arrays, cotangents = make(replace(case, gate="mixed"))
    clean = check(run, case, arrays, cotangents)
    spoilt = [x.at[0, 20].set(jnp.nan) for x in arrays[:4]]
    found = run((*spoilt, *arrays[4:]), cotangents)
    others = np.r_[0:18, 43:50]
    for name, a, b in zip(NAMES[: len(clean)], clean, found, strict=True):
        rows = (slice(None), others) if a.shape[1] == 50 else np.array([0, 1, 2, 4])
        np.testing.assert_array_equal(np.asarray(a)[rows], np.asarray(b)[rows], err_msg=name)
    # what would grow beyond all bounds is nothing where there is nothing yet
    arrays, cotangents = burst(case)
    state = jnp.zeros_like(cotangents[1])
    expected = oracle(case.call, arrays, cotangents)
    assert_matches(run((*arrays[:5], state, arrays[6]), cotangents)[:6], expected[:6], TOLERANCE["float32"])


@pytest.mark.parametrize(
    "case",
    [
        replace(BASE, name="key", H=2, shared=(2, 1, 2), reverse=True, **UNEVEN),
        replace(BASE, name="head", decay="head", B=2, H=2, shared=(1, 2, 2), V=128, dtype="bfloat16"),
        replace(BASE, name="constant", decay="constant", T=20),
    ],
    ids=str,
)
def test_first_phases(case):
    """What a slice of tokens does to states, and to their cotangents, where tokens are sharded."""
    phases = _phases.phases_of(IMPLEMENTATIONS[0], case.call)

    @jax.jit
    def run(arrays, d_output):
        *inputs, state, borders = arrays
        _, added = phases.begin(case.call, tuple(inputs), borders)
        return added, phases.begin_back(case.call, tuple(inputs), borders, state, None, d_output)[1]

    for kind in ("mild", "mixed" if case.decay == "constant" else "resets"):
        arrays, (d_output, d_final) = make(replace(case, gate=kind))
        nothing = (*arrays[:5], jnp.zeros_like(d_final), arrays[6])
        wanted = oracle(case.call, nothing, (d_output, jnp.zeros_like(d_final)))
        for found, expected in zip(run(nothing, d_output), (wanted[1], wanted[6]), strict=True):
            assert_matches((found,), (expected,), TOLERANCE[case.dtype]["other"])


def test_vmap_and_gates_left_alone():
    case = replace(BASE, decay="head", T=20)
    cases = [make(case, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(arrays for arrays, _ in cases))

    def loss(query, rest):
        output, last = pallas.run(case.call, query, *rest)
        return output.sum() + last.sum()

    found = jax.jit(jax.vmap(jax.grad(loss)))(stacked[0], stacked[1:])
    for i, (arrays, cotangents) in enumerate(cases):
        ones = jax.tree.map(jnp.ones_like, cotangents)
        assert_matches((None, None, found[i]), oracle(case.call, arrays, ones)[:3], TOLERANCE["float32"])


def test_supports_says_why():
    call = BASE.call
    assert pallas.supports(call) is None
    for wrong, why in (
        ({"value_decay": True}, "gv"),
        ({"key_dim": 96}, "multiples of 64"),
        ({"value_dim": 320}, "up to 256"),
        ({"dtype": np.dtype(np.float16)}, "float16"),
        ({"tokens": 0}, "elements"),
        ({"tokens": 1}, "one token"),
        ({"scale": -1.0}, "softmax_scale"),
    ):
        assert why in pallas.supports(replace(call, **wrong))


@pytest.mark.parametrize("platforms", [["tpu"], ["cpu", "tpu"]])
def test_exports_hold_the_kernels(monkeypatch, platforms):
    monkeypatch.setattr(_pallas, "INTERPRET", None)
    x, gate = jnp.ones((1, 40, 2, 64), jnp.bfloat16), -jnp.ones((1, 40, 2, 64))

    def gradient(x, gate):
        return jax.grad(lambda x: ejkernel.recurrent_gla(x, x, x, gate)[0].astype(jnp.float32).sum())(x)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        exported = jax.export.export(jax.jit(gradient), platforms=platforms)(x, gate)
    assert exported.mlir_module().count("tpu_custom_call") == 2


@pytest.mark.parametrize("borders", [None, [0, 9, 40]])
def test_few_tokens_of_wide_float32_heads_fill_the_lanes(monkeypatch, borders):
    """Their chunks are half as long, and the TPU's lowering refuses gates of heads in blocks of half the lanes."""
    monkeypatch.undo()  # chunks as long as they are
    x, gate = jnp.ones((1, 40, 2, 256)), -jnp.ones((1, 40, 2))
    options = {} if borders is None else {"cu_seqlens": np.array(borders, np.int32)}

    def run(x, gate):
        return ejkernel.simple_gla(x, x, x, gate, **options)

    arrays = (x, gate) if borders is None else (x[0], gate[0])
    assert "tpu_custom_call" in jax.export.export(jax.jit(run), platforms=["tpu"])(*arrays).mlir_module()


def test_elsewhere_it_says_so(monkeypatch):
    monkeypatch.setattr(_pallas, "INTERPRET", None)
    x = jnp.ones((1, 40, 2, 64))
    with pytest.raises(ejkernel.PlatformError, match="'cpu'"):
        ejkernel.linear_attention(x, x, x, platform="pallas")
    assert ejkernel.explain(ejkernel.linear_attention, x, x, x).chosen == {"tpu": "pallas", "default": "xla"}


def test_explains_what_xla_would_have_to_split(monkeypatch):
    """By the arguments' shardings or the mesh that was entered; inside `shard_map` nothing is left to XLA."""
    monkeypatch.setattr(_pallas, "INTERPRET", None)
    mesh = jax.sharding.AbstractMesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    plain = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    spread = jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=jax.NamedSharding(mesh, jax.P("batch")))

    def mapped(x):
        spec = jax.P("batch")
        # splash does not say how its results vary, which a tracked `shard_map` asks for
        tracked = name != "splash"
        return jax.shard_map(lambda x: op(x, x, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=tracked)(x)

    for op, name in ((ejkernel.linear_attention, "pallas"), (ejkernel.flash_attention, "splash")):
        assert ejkernel.explain(op, plain, plain, plain).chosen["tpu"] == name
        assert ejkernel.explain(mapped, spread).chosen["tpu"] == name
        found = ejkernel.explain(op, spread, spread, spread)
        assert "tpu" not in found.chosen and "jax.shard_map" in found.refused[name]
        with jax.sharding.use_abstract_mesh(mesh):
            assert ejkernel.explain(op, plain, plain, plain) == found
            with pytest.raises(
                ejkernel.PlatformError,
                match=r"several devices; on a mesh with Explicit axes, .* inside jax\.shard_map",
            ):
                jax.eval_shape(functools.partial(op, platform=name), plain, plain, plain)


def test_tangents_of_what_results_are_linear_in():
    """By further runs of the kernels, beside XLA's."""
    case = replace(BASE, decay="constant", H=2, shared=(2, 1, 2))
    (query, key, value, *others, state, borders), _ = make(case)

    def along(run):
        moving = query, key, value, state
        of_moving = lambda q, k, v, s: run(case.call, q, k, v, *others, s, borders)  # noqa: E731
        return jax.jit(lambda *moved: jax.jvp(of_moving, moving, moved))(*(jnp.cos(x) for x in moving))

    for a, b in zip(jax.tree.leaves(along(pallas.run)), jax.tree.leaves(along(xla.run)), strict=True):
        assert_close(a, b, 1e-5)
