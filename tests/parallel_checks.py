"""What `test_parallel.py` runs on virtual devices, a part at a time; more in `mesh_checks.py` and others."""

import importlib
import warnings
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from conftest import assert_close, run_parts
from delta_rule_cases import Case as DeltaCase
from forward_mode_checks import PARTS as FORWARD_MODE_PARTS
from gradients import split, with_gradients
from linear_attention_cases import Case
from mesh_checks import PARTS as MESH_PARTS
from ring_checks import PARTS as RING_PARTS

import ejkernel
from benchmarks import hlo
from ejkernel import parallel
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS
from ejkernel.kernels.linear_recurrence.phases import phases_from_reversed_runs
from ejkernel.parallel import _exchange

DEVICES = len(jax.devices())
OF_A_STEP = _exchange.BYTES_OF_A_STEP
AUTO = jax.sharding.AxisType.Auto
GATES = {"g": "ordinary", "g_gamma": "tiny"}
CASES = [
    Case("key", tokens=40, gates=GATES, state="each", heads=4, kv_heads=2),
    Case("shared queries", tokens=16, gates=GATES, state="each", heads=4, shared=(1, 2, 4)),
    Case("reverse", tokens=40, gates=GATES, state="all", options={"reverse": True}),
    Case("resets", tokens=40, gates={"g": "mixed"}, narrow=("g",), state="each"),
    Case("value gates", tokens=16, gates={"gk": "strong", "gv": "ordinary"}, state="each"),
    # borders on, before and after those of devices of 5 tokens; empty ones; one over three devices and one over all
    Case("packed", lengths=(5, 0, 4, 2, 13, 1, 10), padding=5, gates=GATES, state="each", unbatched=True),
    Case("packed reverse", lengths=(3, 36, 1), gates=GATES, state="each", options={"reverse": True}),
    Case("packed whole", lengths=(0, 40, 0), gates={"g_gamma": "ordinary"}, gamma_shape="H"),
    Case("packed resets", lengths=(7, 33), gates={"g": "resets"}, state="each"),
]


# those of XLA, and of kernels that walk a call as a whole: here XLA's walk stands for theirs, beside another platform's
XLA = IMPLEMENTATIONS[-1]
WALKS = replace(XLA, phases=phases_from_reversed_runs(XLA.run))
WHOLE = replace(WALKS, phases=None, devices=("tpu",))


def values():
    """Results and gradients are the oracle's."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    module = importlib.import_module("ejkernel.parallel.linear_attention")
    recurrence = module.RECURRENCE
    kernels = replace(recurrence, implementations=(WHOLE, WALKS))
    with jax.enable_x64(True):
        for case, by in [
            *((case, recurrence) for case in CASES),
            *((case, kernels) for case in (CASES[2], *CASES[4:6])),
        ]:
            arrays = case.arrays()
            module.RECURRENCE = by
            spread = partial(parallel.recurrent, axis_name="time", mesh=mesh)
            actual, grads, (d_output, d_final) = with_gradients(spread, arrays, case.options)
            expected = oracle.recurrent(**arrays, **case.options, d_output=d_output, d_final_state=d_final)
            for what, a, e in zip(("output", "final state"), actual, expected[:2], strict=True):
                assert_close(a, e, 1e-12, f"{case}: {what}")
            for name, e in expected[2].items():
                assert_close(grads[name], e, 1e-11, f"{case}: gradient of {name}")
    module.RECURRENCE, _exchange.BYTES_OF_A_STEP = recurrence, OF_A_STEP


def opaque(function):
    """`function(call, *arrays)` as a kernel is to JAX, which cannot differentiate it."""

    def run(call, *arrays):
        hidden = jax.custom_jvp(partial(function, call))
        hidden.defjvp(lambda *_: (_ for _ in ()).throw(AssertionError("differentiated")))
        return hidden(*arrays)

    return run


def twice():
    """Gradients of gradients, of what has kernels too."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    module = importlib.import_module("ejkernel.parallel.linear_attention")
    recurrence = module.RECURRENCE
    names = ("begin", "finish", "begin_back", "finish_back")
    phases = replace(XLA.phases, **{name: opaque(getattr(XLA.phases, name)) for name in names})
    arrays = Case("twice", tokens=16, gates={"g": "ordinary"}, state="each").arrays()

    def size(arrays, **over):
        op = partial(parallel.recurrent, **over) if over else ejkernel.recurrent

        def loss(arrays):
            output, final = op(**arrays)
            return (output**3).sum() + (final**3).sum()

        return sum((x**2).sum() for x in jax.tree.leaves(jax.grad(loss)(arrays)))

    with jax.enable_x64(True):
        expected = jax.jit(jax.grad(size))(arrays)
        for implementations in ((XLA,), (replace(XLA, name="kernels", phases=phases), XLA)):
            module.RECURRENCE = replace(recurrence, implementations=implementations)
            found = jax.jit(jax.grad(partial(size, axis_name="time", mesh=mesh)))(arrays)
            for name, x in expected.items():
                assert_close(found[name], x, 1e-10, f"{len(implementations)}: {name}")
    module.RECURRENCE = recurrence


def tree():
    """Effects come to the same in a tree as one after the other, whatever the number of devices."""
    algebra = importlib.import_module("ejkernel.parallel.delta_rule").ALGEBRA
    random = np.random.default_rng(0)
    _exchange.BYTES_OF_A_STEP = 0
    for devices, reverse in ((5, False), (6, True), (8, False)):
        exchange = _exchange.Exchange(algebra, "time", devices, reverse)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("time",), axis_types=(AUTO,))
        start, matrices, added = (random.normal(size=(n, 2, 3, 3)).astype(np.float32) for n in (1, devices, devices))

        def run(start, matrix, added, exchange=exchange):
            final, met, _ = exchange.forward(start, matrix, added)
            d_initial, d_met = exchange.backward(start, matrix, added)
            return final, met, d_initial, d_met

        time, whole = jax.P("time"), jax.P()
        spread = jax.shard_map(
            run, mesh=mesh, in_specs=(whole, time, time), out_specs=(whole, time, whole, time), axis_names={"time"}
        )
        found = jax.jit(spread)(start, matrices, added)
        for (last, met), matrix in ((found[:2], matrices), (found[2:], matrices.swapaxes(-1, -2))):
            state, order = start[0], range(devices)
            for i in reversed(order) if reverse else order:
                assert_close(met[i], state, 1e-5, f"{devices=} {reverse=}: what slice {i} meets")
                state = matrix[i] @ state + added[i]
            assert_close(last[0], state, 1e-5, f"{devices=} {reverse=}: the last")
    _exchange.BYTES_OF_A_STEP = OF_A_STEP


def collectives():
    """One collective forward and one more backward, of the same size whatever the number of tokens."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))

    def run(x):
        return parallel.recurrent(**x, axis_name="time", mesh=mesh)

    def step(x):
        return jax.grad(lambda x: sum((y**2).sum() for y in run(x)))(x)

    def compiled(function, tokens):
        case = Case("cost", batch=1, tokens=tokens, gates={"g": "ordinary"}, state="each")
        arrays = {name: jnp.asarray(x) for name, x in case.arrays(np.float32).items()}
        spec = {n: jax.P() if n == "initial_state" else jax.P(None, "time") for n in arrays}
        shardings = {n: jax.sharding.NamedSharding(mesh, s) for n, s in spec.items()}
        return hlo.collectives(jax.jit(function, in_shardings=(shardings,)).lower(arrays).compile().as_text())

    # the loss itself is summed over devices, which is no collective of ours
    for function, most in ((run, 1), (step, 2)):
        found = [compiled(function, tokens) for tokens in (64, 256)]
        assert found[0] == found[1], found
        assert hlo.totals(found[0])[0] == most, found
    # in a tree, steps each way, and one more for the state that is the same on all devices if anybody wants it
    steps, _exchange.BYTES_OF_A_STEP = _exchange.tree_steps(DEVICES), 0
    for function, sums in ((lambda x: run(x)[0], 0), (step, 2)):
        found = compiled(function, 32)
        kinds = Counter({kind: sum(n for (each, _), n in found.items() if each == kind) for kind, _ in found})
        ways = 1 if sums == 0 else 2
        assert kinds == Counter({"collective-permute": ways * steps, "all-reduce": sums}), found
    _exchange.BYTES_OF_A_STEP = OF_A_STEP


SHARED = {"heads": 4, "own_heads": (2, 2, 4), "state": "each", "unbatched": True}
DELTA_RULE = [
    [DeltaCase("no gate", tokens=40, beta="any")],
    [DeltaCase("head", tokens=40, gate="ordinary", state="all", options={"reverse": True, "softmax_scale": 0.3})],
    [
        # borders on, before and after those of devices of 5 tokens; empty ones; one over all
        DeltaCase("key packed", gate="mixed", per_key=True, lengths=lengths, padding=padding, **SHARED)
        for lengths, padding in (((5, 0, 4, 2, 24), 5), ((0, 40, 0, 0, 0), 0), ((3, 1, 7, 28, 1), 0))
    ],
]


def delta_rule():
    """Results and gradients are the oracle's; one collective forward and one backward, of one matrix and state each."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    with jax.enable_x64(True):
        for cases in DELTA_RULE:

            @jax.jit
            def run(arrays, borders, cases=cases):
                along = {"axis_name": "time", "mesh": mesh}
                return getattr(parallel, cases[0].op)(**arrays, **borders, **cases[0].options, **along)

            @jax.jit
            def with_gradients(arrays, borders, cotangents, run=run):
                results, pull = jax.vjp(partial(run, borders=borders), arrays)
                return results, pull(cotangents)[0]

            arrays, borders = split(cases[0].arrays())
            shapes = jax.eval_shape(run, arrays, borders)
            cotangents = tuple(np.cos(np.arange(x.size)).reshape(x.shape) for x in shapes)
            program = with_gradients.lower(arrays, borders, cotangents).compile()
            for number, case in enumerate(cases):
                arrays, borders = split(case.arrays())
                (output, final), grads = program(arrays, borders, cotangents)
                d_output, d_final = cotangents
                wanted = oracle.delta_rule(
                    **arrays, **borders, **case.options, d_output=d_output, d_final_state=d_final
                )
                assert_close(output, wanted[0], 1e-12, f"{case} {number}: output")
                assert_close(final, wanted[1], 1e-12, f"{case} {number}: final state")
                for name, x in wanted[2].items():
                    assert_close(grads[name], x, 1e-11, f"{case} {number}: gradient of {name}")
        # of the last
        text = program.as_text()
        numbers = DEVICES * final.size // case.value_dim  # a device's, over the value dims
        gathered = 8 * numbers * (case.key_dim + case.value_dim)
        assert hlo.collectives(text) == {
            ("all-gather", gathered): 1,
            ("all-gather", 8 * numbers * case.value_dim): 1,
        }, hlo.collectives(text)
        text = run.lower(arrays, borders).compile().as_text()
        assert hlo.collectives(text) == {("all-gather", gathered): 1}


# slices of 5 tokens: sequences within one and over several, padding over whole slices, borders on theirs and beside
IDS = np.stack(
    [
        np.repeat([1, 2, -1, 2, 3, 3, 4], [5, 13, 2, 1, 4, 9, 6]),
        np.repeat([-1, 7, -2], [12, 11, 17]),
        np.full(40, -1),
        np.repeat([0, -1, 0], [10, 11, 19]),
        np.zeros(40, int),
    ]
)


def segments():
    """Rows of several sequences give what they do on one device, and what is NaN in one changes no bit of another."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    random = np.random.default_rng(0)
    shape = (*IDS.shape, 2)
    arrays = {name: random.normal(size=(*shape, 3)) / 2 for name in ("query", "key", "value")}
    arrays["initial_state"] = random.normal(size=(len(IDS), 2, 3, 3))
    gates, beta = -np.abs(random.normal(size=(*shape, 3))), random.random(shape)
    inside = np.zeros(IDS.shape, bool)
    inside[0, 5:18] = True  # over three devices, neither first nor last

    def compiled(op, **options):
        def loss(arrays):
            output, final = op(**arrays, **options, segment_ids=IDS)
            return jnp.sin(output).sum() + jnp.sin(final).sum(), (output, final)

        return jax.jit(jax.grad(loss, has_aux=True))

    with jax.enable_x64(True):
        for name, more, reverse in (
            ("recurrent", {"g": gates, "gv": gates}, False),
            ("recurrent", {"g_gamma": gates[0, 0, :, 0]}, True),
            ("kda", {"g": gates, "beta": beta}, False),
        ):
            one = compiled(getattr(ejkernel, name), reverse=reverse)
            many = compiled(getattr(parallel, name), reverse=reverse, axis_name="time", mesh=mesh)
            expected, found = one(arrays | more), many(arrays | more)
            for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert_close(x, y, 1e-11, f"{name}, {reverse=}")
            for where in (inside, IDS < 0) if not reverse else ():
                spoilt = {
                    each: np.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), np.nan, x)
                    if x.shape[:2] == IDS.shape
                    else x
                    for each, x in (arrays | more).items()
                }
                dirty = many(spoilt)
                for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(dirty), strict=True):
                    x, y = ((z[~where] if z.shape[:2] == IDS.shape else z) for z in map(np.asarray, (x, y)))
                    np.testing.assert_array_equal(x, y)


def sharding():
    """Ops on one device's code partition over batch and heads without any communication, whatever kind the axes are."""
    ops = {
        "recurrent_gla": lambda q, k, v: ejkernel.recurrent_gla(q, k, v, g=-q),
        "simple_gla": lambda q, k, v: ejkernel.simple_gla(q, k, v, g=-q[..., 0]),
        "retention": ejkernel.retention,
        "lightning_attn": lambda q, k, v: ejkernel.lightning_attn(q, k, v, 1, 4),
        "linear_attention": ejkernel.linear_attention,
        "value gates": lambda q, k, v: ejkernel.recurrent(q, k, v, gv=-v),
        "attention": lambda q, k, v: ejkernel.attention(q, k, v, causal=True),
        "flash_attention": lambda q, k, v: ejkernel.flash_attention(q, k, v, causal=True),
    }
    for kind in (AUTO, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, DEVICES // 2), ("batch", "heads"), axis_types=(kind, kind))
        x = jax.device_put(
            jnp.ones((2, 20, DEVICES, 4)), jax.sharding.NamedSharding(mesh, jax.P("batch", None, "heads"))
        )
        for name, op in ops.items():

            def with_gradients(q, k, v, op=op):
                results, pull = jax.vjp(op, q, k, v)
                return results, pull(jax.tree.map(jnp.ones_like, results))

            with jax.set_mesh(mesh):
                program = jax.jit(with_gradients).lower(x, x, x).compile()
                assert not hlo.collectives(program.as_text()), f"{name} communicates over {kind} axes"
                results, grads = program(x, x, x)
                for each in (jax.tree.leaves(results)[0], *grads):
                    assert each.sharding.is_equivalent_to(x.sharding, 4), f"{name}: {each.sharding}"


def tpu_kernels():
    """What XLA would have to split runs without kernels, and says so; inside `shard_map` it has them."""
    mesh = jax.make_mesh((DEVICES,), ("batch",), axis_types=(AUTO,))
    x = jax.device_put(jnp.ones((DEVICES, 128, 2, 64)), jax.NamedSharding(mesh, jax.P("batch")))
    mapped = jax.shard_map(ejkernel.linear_attention, mesh=mesh, in_specs=jax.P("batch"), out_specs=jax.P("batch"))
    for run, kernels in ((mapped, 1), (ejkernel.linear_attention, 0)):
        with warnings.catch_warnings(record=True, action="always") as caught:
            lowered = jax.jit(run).trace(x, x, x).lower(lowering_platforms=("tpu",))
        assert lowered.as_text().count("tpu_custom_call") == kernels
        assert [each.category for each in caught] == [ejkernel.SlowerImplementationWarning] * (1 - kernels), caught


def family():
    """The ops on top of the recurrence are those of one device."""
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(3, 1, 3 * DEVICES, 2, 4)))
    for name, arguments in {
        "recurrent_gla": {"g": -abs(q), "g_gamma": jnp.array([-0.1, -0.2])},
        "simple_gla": {"g": -abs(q[..., 0])},
        "retention": {"cu_seqlens": jnp.array([0, 7, 3 * DEVICES])},
        "lightning_attn": {"layer_idx": 1, "num_layers": 4},
        "linear_attention": {"reverse": True},
    }.items():
        static = {"layer_idx", "num_layers", "reverse"} & set(arguments)
        one = jax.jit(getattr(ejkernel, name), static_argnames=static)
        many = jax.jit(partial(getattr(parallel, name), axis_name="time", mesh=mesh), static_argnames=static)
        for a, e in zip(many(q, k, v, **arguments), one(q, k, v, **arguments), strict=True):
            assert_close(a, e, 1e-5, name)


def errors():
    mesh = jax.make_mesh((DEVICES,), ("time",), axis_types=(AUTO,))
    x = jnp.ones((1, 2 * DEVICES, 2, 4))
    for call, message in (
        (lambda: parallel.recurrent(x, x, x, axis_name="space", mesh=mesh), "axis_name: got 'space'; expected one of"),
        (
            lambda: parallel.recurrent(x, x, x, axis_name="time"),
            "axis_name: got 'time'; expected an axis of the shard_map",
        ),
        (
            lambda: parallel.recurrent(*[x[:, 1:]] * 3, axis_name="time", mesh=mesh),
            "query: got 15 tokens; expected a mult",
        ),
    ):
        try:
            call()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")


def layers():
    from layer_checks import check, check_collectives  # makes layers, and needs Flax

    check()
    check_collectives()


if __name__ == "__main__":
    every = (values, twice, tree, collectives, delta_rule, segments, sharding, family, errors, layers, tpu_kernels)
    run_parts({each.__name__: each for each in every} | MESH_PARTS | RING_PARTS | FORWARD_MODE_PARTS)
