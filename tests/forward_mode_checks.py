"""Forward mode with the tokens sharded, against the op on one device: parts of `parallel_checks.py`."""

import importlib
import warnings
from dataclasses import replace
from functools import partial

import delta_rule_cases
import jax
import jax.numpy as jnp
import linear_attention_cases
import numpy as np
import ring_checks
from attention_cases import QUICK
from conftest import assert_close
from gradients import split

import ejkernel
from benchmarks import hlo
from ejkernel import _dispatch, parallel
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS
from ejkernel.parallel import ring_attention

DEVICES = len(jax.devices())
AUTO = jax.sharding.AxisType.Auto
MESH = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
ALONG = {"axis_name": "time", "mesh": MESH}
LinearCase, DeltaCase = linear_attention_cases.Case, delta_rule_cases.Case
GATES = {"g": "ordinary", "g_gamma": "tiny"}
LINEAR = [
    LinearCase("key", tokens=40, gates=GATES, state="each", heads=4, kv_heads=2),
    LinearCase("reverse, resets", tokens=16, gates={"g": "mixed"}, state="all", options={"reverse": True}),
    LinearCase("value gates", tokens=16, gates={"gk": "strong", "gv": "ordinary"}, state="each"),
    LinearCase("packed", lengths=(5, 0, 4, 2, 13, 1, 10), padding=5, gates=GATES, state="each", unbatched=True),
]
DELTA = [
    DeltaCase("head", tokens=16, gate="ordinary", state="all", options={"reverse": True, "softmax_scale": 0.3}),
    DeltaCase("key packed", gate="mixed", per_key=True, lengths=(5, 0, 4, 2, 24), padding=5, heads=4, state="each"),
]
RING = [
    ring_checks.Case("causal", {"causal": True}, heads=4, sinks=(4, 3)),
    ring_checks.Case("balanced", {"causal": True, "logits_soft_cap": 2.0}, "balanced", sinks=(2, 1)),
    ring_checks.Case("window", {"sliding_window": (6, 3)}, sinks=(2,)),
    # the last devices' queries see no key
    ring_checks.Case("window, more queries", {"sliding_window": 2, "causal": True}, queries=80, keys=40, sinks=(1, 2)),
    ring_checks.Case("packed", {"causal": True}, lengths=((3, 13, 0, 32), (0, 48, 0, 0), (5, 36, 1, 0))),
    ring_checks.Case("segments, balanced", ring_checks.WINDOW, "balanced", segments=True),
]
# of these a Hessian's product too, which takes long to trace
TWICE = {"packed", "key packed", "segments, balanced"}


def directions(arrays, seed=3):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=x.shape), x.dtype) for name, x in arrays.items()}


def derivatives(run, second=True):
    """Results of `run(arrays, *rest)` with their tangents, and a Hessian's product, as one compiled function."""

    def loss(arrays, *rest):
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(run(arrays, *rest)))

    @partial(jax.jit, compiler_options=QUICK)
    def both(arrays, moved, *rest):
        first = jax.jvp(lambda x: run(x, *rest), (arrays,), (moved,))
        return first, jax.jvp(jax.grad(lambda x: loss(x, *rest)), (arrays,), (moved,))[1] if second else None

    return both


def compare(many, one, arrays, *rest, tolerance=1e-11, what=""):
    moved = directions(arrays)
    found, expected = (each(arrays, moved, *rest) for each in (many, one))
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, tolerance, f"{what}: {jax.tree_util.keystr(path)}")


def forward_mode():
    """Tangents, and products with a Hessian, are those of one device."""
    with jax.enable_x64(True):
        for case in (*LINEAR, *DELTA):
            name = getattr(case, "op", "recurrent")
            one, many = (
                derivatives(
                    lambda x, borders, op=op, case=case: op(**x, **borders, **case.options), second=case.name in TWICE
                )
                for op in (getattr(ejkernel, name), partial(getattr(parallel, name), **ALONG))
            )
            arrays, borders = split(case.arrays())
            compare(many, one, arrays, borders, what=str(case))


def tangents_of_kernels():
    """Where kernels serve a recurrence, XLA serves its tangents, and says so."""
    module = importlib.import_module("ejkernel.parallel.linear_attention")
    recurrence, plain = module.RECURRENCE, IMPLEMENTATIONS[-1]
    kernels = replace(plain, name="kernels", run=lambda *_: 1 / 0)
    arrays = LINEAR[2].arrays(np.float32)
    op = lambda x, **over: (parallel if over else ejkernel).recurrent(**x, **over)  # noqa: E731
    module.RECURRENCE = replace(recurrence, implementations=(kernels, plain))
    _dispatch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as said:
        many, one = derivatives(partial(op, **ALONG), second=False), derivatives(op, second=False)
        compare(many, one, arrays, tolerance=1e-5)
        jax.jit(jax.grad(lambda x: op(x, **ALONG)[0].sum()))(arrays)
    assert ["'xla' serves tangents of a recurrence whose tokens" in str(each.message) for each in said] == [True], said
    module.RECURRENCE = recurrence


def forward_mode_in_shard_map():
    """The same inside the caller's own `shard_map`, with the varying axes tracked or not."""
    mesh = jax.make_mesh((2, DEVICES // 2), ("batch", "time"), axis_types=(AUTO, AUTO))
    tokens = jax.P("batch", "time")
    random = np.random.default_rng(1)
    arrays = {name: random.normal(size=(2, 16, 2, 3)).astype(np.float32) for name in ("query", "key", "value")}
    ops = {"simple_gla": {"g": -np.abs(arrays["query"][..., 0])}, "flash_attention": {}}
    for name, more in ops.items():
        options = {"causal": True, "dtype": None} if name == "flash_attention" else {}
        one = derivatives(
            lambda x, name=name, options=options: jax.tree.leaves(getattr(ejkernel, name)(**x, **options))
        )
        for tracked in (True, False):

            def run(x, name=name, options=options, tracked=tracked):
                local = lambda x: jax.tree.leaves(getattr(parallel, name)(**x, **options, axis_name="time"))  # noqa: E731
                results = [tokens] if name == "flash_attention" else [tokens, jax.P("batch")]
                specs = {each: tokens for each in x}
                return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=tracked)(x)

            compare(derivatives(run), one, arrays | more, tolerance=1e-5, what=f"{name}, {tracked=}")


def forward_mode_explicit():
    """The same on a mesh with `Explicit` axes that is not entered; tangents are sharded as results are."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((DEVICES // 2, 2), ("time", "heads"), axis_types=kinds)
    query, key, value, more = np.random.default_rng(2).normal(size=(4, 1, 2 * DEVICES, 2, 3)).astype(np.float32)
    placed = jax.NamedSharding(mesh, jax.P(None, "time", "heads"))
    for name, op in (
        ("recurrent_gla", lambda module, q, k, v, g, **over: module.recurrent_gla(q, k, v, -jnp.abs(g), **over)[0]),
        (
            "flash_attention",
            lambda module, q, k, v, g, **over: module.flash_attention(q, k, v + g, causal=True, **over),
        ),
    ):
        arrays = (query, key, value, more)
        expected = jax.jvp(partial(op, ejkernel), arrays, arrays[::-1])
        many = partial(op, parallel, axis_name="time", mesh=mesh)
        on_mesh = tuple(jax.device_put(x, placed) for x in arrays)
        for result, right in zip(jax.jit(partial(jax.jvp, many))(on_mesh, on_mesh[::-1]), expected, strict=True):
            assert_close(result, right, 1e-5, name)
            assert result.sharding.is_equivalent_to(placed, 4), f"{name}: {result.sharding}"


def collectives_of_tangents():
    """Of a recurrence, states travel: as many bytes whatever the number of tokens."""

    def compiled(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 4), jnp.float32, sharding=jax.NamedSharding(MESH, jax.P(None, "time")))
        run = lambda *x: jax.jvp(partial(parallel.retention, **ALONG), x, x)  # noqa: E731
        return hlo.collectives(jax.jit(run).lower(x, x, x).compile().as_text())

    few, many = compiled(64), compiled(256)
    assert few and few == many, (few, many)


def ring_forward_mode():
    """Tangents and products with a Hessian of ring attention are those of one device, and a NaN stays where it is."""
    with jax.enable_x64(True):
        for case in RING:
            case = replace(case, options=case.options | {"dtype": case.dtype})
            one, many = (
                derivatives(lambda x, borders, run=run, case=case: run(case, x, borders), second=case.name in TWICE)
                for run in (ring_checks.alone, ring_checks.spread)
            )
            for borders in case.borders():
                compare(many, one, case.arrays(), borders, what=f"{case.name} {borders}")
        case = replace(RING[4], options=RING[4].options | {"dtype": np.float64})
        tangents = jax.jit(lambda x, t, b: jax.jvp(lambda x: ring_checks.spread(case, x, b), (x,), (t,))[1])
        arrays, borders = case.arrays(), {"cu_seqlens": np.array([0, 10, 10, 33, 40])}
        inside = np.zeros((48, 1, 1), bool)
        inside[10:33] = inside[40:] = True
        moved = directions(arrays)
        clean = tangents(arrays, moved, borders)
        spoilt = ({name: jnp.where(inside, jnp.nan, x) for name, x in each.items()} for each in (arrays, moved))
        outside = ~inside[:, 0, 0]
        np.testing.assert_array_equal(tangents(*spoilt, borders)[outside], clean[outside])


def ring_tangents_of_kernels():
    """Where kernels serve the blocks, XLA serves the tangents, and says so."""
    case = replace(RING[0], dtype=np.float32, options={"causal": True, "dtype": None})
    blocks = ring_attention.BLOCKS
    ring_attention.BLOCKS = (replace(blocks[-1], name="kernels"), blocks[-1])
    _dispatch._warn_once.cache_clear()
    with warnings.catch_warnings(record=True, action="always") as said:
        one, many = (
            derivatives(lambda x, run=run: run(case, x, {}), second=False)
            for run in (ring_checks.alone, ring_checks.spread)
        )
        compare(many, one, case.arrays(), tolerance=1e-5)
    assert ["'xla' serves tangents of parallel.flash_att" in str(each.message) for each in said] == [True], said
    ring_attention.BLOCKS = blocks


PARTS = {
    each.__name__: each
    for each in (
        forward_mode,
        tangents_of_kernels,
        forward_mode_in_shard_map,
        forward_mode_explicit,
        collectives_of_tangents,
        ring_forward_mode,
        ring_tangents_of_kernels,
    )
}
