"""Ring attention against the op on one device: parts of `parallel_checks.py`."""

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close

import ejkernel
from benchmarks import hlo
from ejkernel import _dispatch, parallel

DEVICES = len(jax.devices())
AUTO = jax.sharding.AxisType.Auto


def ring_of(devices):
    return jax.make_mesh((devices,), ("time",), axis_types=(AUTO,), devices=jax.devices()[:devices])


MESH = ring_of(DEVICES)


@dataclass(frozen=True)
class Case:
    """A call; devices have 6 of the 48 tokens each, in two slices of 3 if balanced."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"
    batch: int = 2
    queries: int = 48
    keys: int = 48
    heads: int = 2
    kv_heads: int = 2
    sinks: tuple[int, ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()  # of packed sequences, in several ways
    key_lengths: tuple[int, ...] = ()
    segments: bool = False  # rows of several sequences, told apart by ids
    dtype: Any = np.float64
    devices: int = DEVICES
    integers: bool = False  # small ones for queries and keys, so that logits of any scale are exact

    def arrays(self):
        random = np.random.default_rng(0)
        lead = () if self.lengths else (self.batch,)
        shapes = {
            "query": (*lead, self.queries, self.heads, 5),
            "key": (*lead, self.keys, self.kv_heads, 5),
            "value": (*lead, self.keys, self.kv_heads, 3),
        }
        shapes |= {"softmax_aux": self.sinks} if self.sinks else {}
        found = {name: jnp.asarray(random.normal(size=shape), self.dtype) for name, shape in shapes.items()}
        if self.integers:
            found |= {name: jnp.round(2 * found[name]) for name in ("query", "key")}
        return found

    def borders(self):
        """`cu_seqlens` and perhaps `cu_seqlens_kv`, in each of the ways; or ids of segments."""
        if self.segments:
            rows = ([4, 0, 4, -1, 9], [2, 2, -2, 1, 0])  # one comes back
            ids = {"segment_ids": np.stack([np.repeat(each, [7, 13, 9, 3, 16]) for each in rows])}
            return [ids if self.keys == 48 else ids | {"segment_ids_kv": np.repeat(np.array(rows), 16, axis=1)}]
        key_borders = {"cu_seqlens_kv": np.cumsum((0, *self.key_lengths))} if self.key_lengths else {}
        return [{"cu_seqlens": np.cumsum((0, *each)), **key_borders} for each in self.lengths] or [{}]


WINDOW = {"sliding_window": (7, 2)}
CASES = [
    Case("plain", {"logits_soft_cap": 2.0}, heads=4),
    Case("causal", {"causal": True, "softmax_scale": 0.7}, heads=4, sinks=(4, 3)),
    Case("balanced", {"causal": True, "logits_soft_cap": 2.0}, "balanced", heads=4, sinks=(2, 1)),
    Case("half precision", {"causal": True, "dtype": None}, dtype=jnp.bfloat16),
    Case("huge logits", {"softmax_scale": 2.0**30}, sinks=(2, 1), dtype=np.float32, integers=True),
]
WINDOWS = [
    Case("window to the left", {"sliding_window": (8, 0)}, sinks=(2,)),
    Case("window within neighbours", {"sliding_window": (6, 3)}, sinks=(2,)),
    Case("window on two devices", {"sliding_window": (9, 0)}, devices=2),
    Case("window to the right, balanced", {"sliding_window": (0, 4)}, "balanced"),
    Case("window, more keys", {"sliding_window": (3, 14)}, keys=80),
    # the last devices' queries see no key
    Case("window, more queries", {"sliding_window": 2, "causal": True}, queries=80, keys=40, sinks=(1, 2)),
]
# borders in every place relative to those of devices, empty sequences, padding, one sequence over all devices
LENGTHS = (
    *((n, 13, 0, 48 - 13 - n) for n in range(7)),
    (1, 2, 1, 1),
    (0, 48, 0, 0),
    (0, 0, 0, 0),
    (5, 36, 1, 0),
)
PACKED = [
    Case("packed", {"causal": True}, heads=4, lengths=LENGTHS, sinks=(3,)),
    Case("packed, balanced, window", WINDOW, "balanced", lengths=LENGTHS),
    Case("packed, window within neighbours", {"sliding_window": (4, 1)}, lengths=LENGTHS),
    Case("packed, other keys", WINDOW, lengths=LENGTHS[3:], key_lengths=(11, 0, 9, 20), keys=40),
]


SEGMENTED = [
    Case("segments", {"causal": True}, heads=4, sinks=(3,), segments=True),
    Case("segments, balanced", WINDOW, "balanced", segments=True),
    Case("segments, other keys", {"logits_soft_cap": 2.0}, keys=80, segments=True),
]


def alone(case, arrays, borders):
    return ejkernel.flash_attention(**arrays, **borders, **case.options)


def spread(case, arrays, borders):
    devices, axis = case.devices, 0 if case.lengths else 1
    tokens = {name: x for name, x in arrays.items() if name != "softmax_aux"}
    if case.layout == "balanced":
        tokens = {name: parallel.to_balanced(x, devices, axis) for name, x in tokens.items()}
        if case.segments:
            borders = {name: parallel.to_balanced(x, devices) for name, x in borders.items()}
    options = case.options | {"layout": case.layout, "axis_name": "time", "mesh": ring_of(devices)}
    output = parallel.flash_attention(**(arrays | tokens), **borders, **options)
    return parallel.from_balanced(output, devices, axis) if case.layout == "balanced" else output


def with_gradients(function, case):
    """`function`'s output and gradients as one compiled function of arrays and borders."""

    @jax.jit
    def run(arrays, borders):
        output, pull = jax.vjp(lambda x: function(case, x, borders), arrays)
        return output, pull(jnp.cos(jnp.arange(output.size)).reshape(output.shape).astype(output.dtype))[0]

    return run


def compare(case):
    wide = {} if "dtype" in case.options else {"dtype": case.dtype}
    case = Case(**(vars(case) | {"options": case.options | wide}))
    tolerance = {np.float64: 1e-12, np.float32: 1e-5, jnp.bfloat16: 1e-2}[case.dtype]
    one, many = with_gradients(alone, case), with_gradients(spread, case)
    arrays = case.arrays()
    for borders in case.borders():
        expected, actual = one(arrays, borders), many(arrays, borders)
        assert actual[0].dtype == expected[0].dtype
        assert_close(actual[0], expected[0], tolerance, f"{case.name} {borders}: output")
        for name, grad in expected[1].items():
            assert_close(actual[1][name], grad, tolerance, f"{case.name} {borders}: gradient of {name}")
    return many, arrays


def ring_values():
    """Results and gradients equal those of one device, and a NaN stays in its row."""
    with jax.enable_x64(True):
        for case in CASES:
            many, arrays = compare(case)
            if case.name == "plain":
                clean = many(arrays, {})
                broken = many({name: x.at[0, 20].set(jnp.nan) for name, x in arrays.items()}, {})
                for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(broken), strict=True):
                    np.testing.assert_array_equal(a[1], b[1])


def ring_windows():
    """The same for windows."""
    with jax.enable_x64(True):
        for case in WINDOWS:
            compare(case)


def ring_packed():
    """The same for packed sequences, where a NaN stays in its sequence."""
    with jax.enable_x64(True):
        for case in PACKED:
            many, arrays = compare(case)
            if case.name != "packed, other keys":
                borders = {"cu_seqlens": np.array([0, 10, 10, 33, 40])}
                inside = np.zeros((48, 1, 1), bool)
                inside[10:33] = inside[40:] = True
                sinks = arrays.pop("softmax_aux", None)
                broken = {name: jnp.where(inside, jnp.nan, x) for name, x in arrays.items()}
                more = {} if sinks is None else {"softmax_aux": sinks}
                clean, broken = many(arrays | more, borders), many(broken | more, borders)
                outside = ~inside[:, 0, 0]
                assert_close(broken[0][outside], clean[0][outside], 0, case.name)
                for name in arrays:
                    assert_close(broken[1][name][outside], clean[1][name][outside], 0, f"{case.name}: {name}")


def ring_segments():
    """The same for ids that travel with the keys, where a NaN stays in its sequence."""
    with jax.enable_x64(True):
        for case in SEGMENTED:
            many, arrays = compare(case)
            (borders,) = case.borders()
            inside = {name: np.isin(ids, [4, 2, -1, -2]) for name, ids in borders.items()}
            of_keys = inside.get("segment_ids_kv", inside["segment_ids"])
            where = {"query": inside["segment_ids"], "key": of_keys, "value": of_keys}
            broken = {name: jnp.where(each[..., None, None], jnp.nan, arrays[name]) for name, each in where.items()}
            clean, broken = many(arrays, borders), many(arrays | broken, borders)
            outside = ~where["query"]
            assert_close(broken[0][outside], clean[0][outside], 0, case.name)
            for name, each in where.items():
                assert_close(broken[1][name][~each], clean[1][name][~each], 0, f"{case.name}: {name}")


def ring_shard_map():
    """Inside the caller's own `shard_map`, over two axes or packed, with the varying axes tracked or not."""
    mesh = jax.make_mesh((2, DEVICES // 2), ("batch", "time"), axis_types=(AUTO, AUTO))
    rows = Case("rows", {"causal": True, "dtype": None}, sinks=(2, 1), dtype=np.float32)
    packed = Case("packed", {"causal": True, "dtype": None}, lengths=((3, 17, 0, 20),), dtype=np.float32)
    for case, tokens, ways in ((rows, jax.P("batch", "time"), (True, False)), (packed, jax.P("time"), (True,))):
        arrays, borders = case.arrays(), case.borders()[0]
        specs = {name: jax.P() if name == "softmax_aux" else tokens for name in arrays}
        expected = with_gradients(alone, case)(arrays, borders)
        for tracked in ways:

            def ring(case, arrays, borders, tokens=tokens, specs=specs, tracked=tracked):
                run = jax.shard_map(
                    lambda x, borders: parallel.flash_attention(**x, **borders, **case.options, axis_name="time"),
                    mesh=mesh,
                    in_specs=(specs, jax.P()),
                    out_specs=tokens,
                    check_vma=tracked,
                )
                return run(arrays, borders)

            actual = with_gradients(ring, case)(arrays, borders)
            for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
                assert_close(a, e, 1e-5, f"{case.name}, tracked={tracked}")


def compiled(case, devices, gradients=False):
    """The program for global arrays that are sharded as the ring wants them."""
    mesh = ring_of(devices)
    sharded = jax.sharding.NamedSharding(mesh, jax.P(None, "time"))
    options = case.options | {"layout": case.layout, "dtype": None, "axis_name": "time", "mesh": mesh}

    def run(arrays, d_output):
        output, pull = jax.vjp(lambda x: parallel.flash_attention(**x, **options), arrays)
        return pull(d_output) if gradients else output

    arrays = case.arrays()
    return jax.jit(run, in_shardings=sharded).lower(arrays, jnp.zeros((*arrays["query"].shape[:-1], 3))).compile()


def ring_collectives():
    """Nothing but permutes of a slice of keys or values, as many as the window reaches; memory as for fewer devices."""
    sizes = {"batch": 1, "dtype": np.float32}
    tokens = 48 // DEVICES

    def permutes(times, tokens=tokens):
        return {("collective-permute", 4 * tokens * 2 * dim): times for dim in (5, 3) if times}

    for case, expected in (
        (Case("causal", {"causal": True}, **sizes), permutes(DEVICES - 1)),
        (Case("balanced", {"causal": True}, "balanced", **sizes), permutes(DEVICES - 1)),
        # three slices beside its own, and one hop more to begin on the right
        (Case("both sides", {"sliding_window": (7, 1)}, **sizes), permutes(4)),
        (Case("neighbours", {"sliding_window": (4, 1)}, **sizes), permutes(1, 4) | permutes(1, 1)),
        (Case("own slice", {"sliding_window": 0}, **sizes), {}),
    ):
        found = hlo.collectives(compiled(case, DEVICES).as_text())
        assert found == expected, (case, found)

    causal = Case("causal", {"causal": True}, **sizes)
    program = compiled(causal, DEVICES, gradients=True)
    # forward, backward, and gradients, which go one further: home
    assert hlo.collectives(program.as_text()) == permutes(3 * DEVICES - 2)
    fewer = compiled(Case("fewer", causal.options, **sizes | {"queries": 24, "keys": 24}), DEVICES // 2, gradients=True)
    memory, less = (each.memory_analysis().temp_size_in_bytes for each in (program, fewer))
    assert memory <= 1.05 * less, (memory, less)


def ring_platforms():
    """The dispatcher chooses what computes blocks: it explains its choice, and forces or refuses one."""
    case = Case("causal", {"causal": True, "dtype": None}, "balanced", sinks=(2, 1), dtype=np.float32)
    arrays, along = case.arrays(), {"axis_name": "time", "mesh": MESH}
    explanation = ejkernel.explain(parallel.flash_attention, **arrays, **along)
    assert explanation.chosen == {"default": "xla"}, explanation
    assert "NVIDIA GPU" in explanation.refused["triton"], explanation
    with (
        mock.patch.object(_dispatch, "_default_platform", lambda: "cuda"),
        warnings.catch_warnings(record=True, action="always") as said,
    ):
        parallel.flash_attention(**arrays, **along)
    assert [each.category for each in said] == [ejkernel.SlowerImplementationWarning], said
    local = jax.shard_map(
        partial(parallel.flash_attention, axis_name="time"),
        mesh=MESH,
        in_specs=jax.P(None, "time"),
        out_specs=jax.P(None, "time"),
    )
    assert ejkernel.explain(local, *[arrays["key"]] * 3) == explanation
    forced = Case(**(vars(case) | {"options": case.options | {"platform": "xla"}}))
    found, expected = (with_gradients(spread, each)(arrays, {}) for each in (forced, case))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    for platform, message in (
        ("triton", f"'triton' cannot serve this call: {explanation.refused['triton']}"),
        ("splash", "got 'splash'; expected one of 'triton', 'xla'"),
    ):
        try:
            parallel.flash_attention(**arrays, **along, platform=platform)
        except ejkernel.PlatformError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")


def ring_errors():
    x = jnp.ones((1, 3 * DEVICES, 2, 4))
    ring = partial(parallel.flash_attention, axis_name="time")
    local = jax.shard_map(
        lambda x: ring(x, x, x, layout="balanced"), mesh=MESH, in_specs=jax.P(None, "time"), out_specs=jax.P()
    )
    for call, message in (
        (lambda: ring(x, x, x), "axis_name: got 'time'; expected an axis of the shard_map"),
        (lambda: parallel.flash_attention(x, x, x, axis_name="space", mesh=MESH), "axis_name: got 'space'; expected"),
        (lambda: ring(*[x[:, 1:]] * 3, mesh=MESH), f"a multiple of {DEVICES}, the {DEVICES} devices: pad"),
        (lambda: ring(x, *[x[:, 1:]] * 2, mesh=MESH), f"key: got {3 * DEVICES - 1} tokens; expected a multiple"),
        (lambda: ring(x, x, x, layout="balanced", mesh=MESH), f"a multiple of {2 * DEVICES}, twice the"),
        (lambda: local(x), "query: got 3 tokens; expected an even number on each device"),
        (lambda: ring(x, x, x, layout="striped", mesh=MESH), "layout: got 'striped'; expected 'contiguous' or"),
        (lambda: parallel.to_balanced(x, DEVICES), f"x: got {3 * DEVICES} tokens"),
    ):
        try:
            call()
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"no error: {message}")


def scaling():
    """Prints the table of `docs/scaling.md`: the collectives of a forward and of a training step, and their bytes."""
    options = {"dtype": None, "causal": True}
    ops = {
        "recurrent_gla": lambda q, k, v, **over: parallel.recurrent_gla(q, k, v, g=-abs(q), **over)[0],
        "flash_attention": partial(parallel.flash_attention, **options),
        "flash_attention, window 256": partial(parallel.flash_attention, sliding_window=256, **options),
    }
    for name, op in ops.items():
        for devices, tokens in ((2, 4096), (4, 4096), (8, 4096), (2, 1024), (4, 2048)):
            mesh = ring_of(devices)
            sharded = jax.sharding.NamedSharding(mesh, jax.P(None, "time"))
            run = partial(op, axis_name="time", mesh=mesh)
            cells = []
            for function in (lambda *x, run=run: run(*x[:3]), lambda *x, run=run: jax.vjp(run, *x[:3])[1](x[3])):
                x = [jax.ShapeDtypeStruct((1, tokens, 4, 64), jnp.float32)] * 4
                text = jax.jit(function, in_shardings=sharded).lower(*x).compile().as_text()
                count, size = hlo.totals(hlo.collectives(text))
                cells.append(f"{count} · {size / 2**20:.2f} MiB")
            print(f"| `{name}` | {devices} | {tokens} | {' | '.join(cells)} |", flush=True)


PARTS = {
    each.__name__: each
    for each in (
        ring_values,
        ring_windows,
        ring_packed,
        ring_segments,
        ring_shard_map,
        ring_collectives,
        ring_platforms,
        ring_errors,
        scaling,
    )
}
