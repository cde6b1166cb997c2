"""Every op on every kind of mesh, whatever is sharded: parts of `parallel_checks.py` and `properties_parallel.py`.

A row names the dimensions of its arrays and results by letters, each of which has its mesh axis if it is sharded. What
comes back, gradients too, is compared with the same call on one device.
"""

import collections
import contextlib
import functools
import itertools
import warnings
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close

import ejkernel
from benchmarks import hlo
from ejkernel import _mesh, convolution, parallel, xla_utils

AXES = {"B": "batch", "T": "time", "H": "heads", "G": "heads"}
SIZES = {"B": 2, "T": 8, "L": 8, "H": 4, "G": 2, "K": 4, "V": 2, "N": 3, "Z": 2, "O": 1, "W": 3, "P": 2}
INTEGERS = {
    "cu_seqlens": np.array([0, 3, 3, 7]),
    "ids": np.array([[1, 1, 2, 2, 2, 3, 3, 3], [3, 3, 3, 3, 5, 5, 5, 7]]),
    "segment_ids": np.array([[1, 1, 2, 2, 2, -1, 3, 3], [-1, 3, 3, 3, 5, 5, 7, -1]], np.int32),
}
GATES = ("g", "g_gamma", "gk", "gv")
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit

ROWS = {"query": "BTHK", "key": "BTGK", "value": "BTGV"}
STREAM = {"query": "THK", "key": "TGK", "value": "TGV", "cu_seqlens": ""}
MAMBA = {"query": "BTOK", "key": "BTOK", "value": "BTHV"}
STEP = {"query": "BOHK", "key": "BOGK", "value": "BOGV"}


@dataclass(frozen=True)
class Op:
    """A call: the op's name, its arrays and results by their dimensions."""

    name: str
    arrays: dict[str, str]
    results: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    module: ModuleType = ejkernel
    what: str = ""

    def __str__(self):
        return f"{self.name} {self.what}".strip()

    def __call__(self, arrays, **over):
        module = parallel if over else self.module
        results = getattr(module, self.name)(**arrays, **self.options, **over)
        return results if isinstance(results, tuple) else (results,)

    def values(self):
        random = np.random.default_rng(0)

        def one(name, dims):
            if name in INTEGERS:
                return INTEGERS[name]
            x = random.normal(size=[SIZES[each] for each in dims]).astype(np.float32)
            x = np.tanh(abs(x)) if name == "beta" else x
            return x > 0 if name in ("mask", "attention_mask") else -abs(x) if name in GATES else x

        return {name: one(name, dims) for name, dims in self.arrays.items()}


def linear(name, more=None, arrays=ROWS, results=("BTHV", "BHKV"), what="", **options):
    return Op(name, arrays | (more or {}), results, options, what=what)


def packed(name, more=None, what="packed", **options):
    return linear(name, more, STREAM, ("THV", "NHKV"), what, **options)


def softmax(name, more=None, arrays=ROWS, results=("BTHV",), what="", **options):
    return Op(name, arrays | (more or {}), results, {"dtype": None} | options, what=what)


# what `parallel` has too, each with and without a state where there is one
SPREADABLE = [
    linear("recurrent", {"g": "BTHK", "g_gamma": "H"}),
    linear("recurrent", {"g_gamma": "H", "initial_state": "HKV"}, what="state for all", reverse=True),
    linear("recurrent", {"gk": "BTHK", "gv": "BTHV", "initial_state": "BHKV"}, what="state each"),
    linear("recurrent_gla", {"g": "BTHK"}),
    linear("recurrent_gla", {"g": "BTHK", "initial_state": "HKV"}, what="state for all"),
    linear("simple_gla", {"g": "BTH", "initial_state": "BHKV"}, what="state each", softmax_scale=0.5),
    linear("simple_gla", {"g": "BTH"}),
    linear("retention"),
    linear("retention", {"initial_state": "HKV"}, what="state for all"),
    linear("lightning_attn", layer_idx=1, num_layers=4),
    linear("linear_attention"),
    linear("linear_attention", {"softmax_scale": "", "initial_state": "BHKV"}, what="state each, scale", reverse=True),
    linear("simple_gla", {"g": "BTH"}, MAMBA, what="shared queries"),
    linear("retention", None, MAMBA, what="shared queries"),
    packed("recurrent", {"g": "THK", "g_gamma": "H"}),
    packed("recurrent", {"g_gamma": "NH", "initial_state": "HKV"}, what="packed, state for all", reverse=True),
    packed("simple_gla", {"g": "TH", "initial_state": "NHKV"}, what="packed, state each"),
    packed("retention"),
    packed("linear_attention", {"initial_state": "NHKV"}, what="packed, state each"),
    softmax("flash_attention"),
    softmax("flash_attention", {"softmax_aux": "HZ"}, what="sinks", causal=True),
    softmax("flash_attention", {"softmax_scale": ""}, what="window, scale", sliding_window=(2, 1)),
    softmax("flash_attention", {"softmax_aux": "Z"}, STREAM, ("THV",), what="packed", causal=True),
    linear("kda", {"g": "BTHK", "beta": "BTH", "initial_state": "HKV"}, what="state for all", normalize=True),
    linear("gated_delta_rule", {"g": "BTH", "beta": "BTH", "initial_state": "BHKV"}, what="state each", reverse=True),
    packed("delta_rule", {"beta": "TH", "softmax_scale": ""}, normalize=True),
    packed("kda", {"g": "THK", "beta": "TH", "initial_state": "NHKV"}, what="packed, state each"),
    softmax("flash_attention", {"segment_ids": "BT", "softmax_aux": "HZ"}, what="segments", causal=True),
]
ALONE = [
    linear("recurrent", {"g": "BOHK", "g_gamma": "H", "initial_state": "BHKV"}, STEP, ("BOHV", "BHKV"), "step"),
    linear("retention", None, STEP, ("BOHV", "BHKV"), "step"),
    linear("recurrent", {"g_gamma": "H", "initial_state": "BHKV", "segment_ids": "BT"}, what="segments"),
    linear("kda", {"g": "BTHK", "beta": "BTH", "segment_ids": "BT"}, what="segments", normalize=True),
    softmax("attention", {"attention_mask": "BHTL"}, results=("BTHV", "BHTL"), what="mask"),
    softmax("attention", {"bias": "BHTL", "softmax_aux": "HZ"}, results=("BTHV", "BHTL"), what="bias", causal=True),
    softmax("flash_attention", {"bias": "BHTL", "softmax_aux": "GZ"}, what="bias"),
    softmax("flash_attention", {"attention_mask": "BHTL"}, results=("BTHV", "BTH"), what="mask", return_lse=True),
    softmax("flash_attention", {"query": "BOHK"}, results=("BOHV",), what="step", causal=True, query_offset=5),
]
# channels are sharded as heads are
CONVOLUTION = {"weight": "WH", "bias": "H"}
ALONE += [
    Op("causal_conv1d", {"x": "BTH", **CONVOLUTION}, ("BTH", "BPH"), {"activation": "silu"}),
    Op("causal_conv1d", {"x": "BTH", **CONVOLUTION, "initial_state": "BPH"}, ("BTH", "BPH"), what="state"),
    Op(
        "causal_conv1d",
        {"x": "TH", **CONVOLUTION, "initial_state": "NPH", "cu_seqlens": ""},
        ("TH", "NPH"),
        what="packed",
    ),
    Op(
        "causal_conv1d",
        {"x": "BTH", **CONVOLUTION, "initial_state": "BPH", "segment_ids": "BT"},
        ("BTH", "BPH"),
        what="segments",
    ),
    Op(
        "unit_conv1d",
        {"x": "BTH", **CONVOLUTION, "initial_state": "BPH"},
        ("BTH", "BPH"),
        {"activation": "silu", "unit_dim": 2},
        convolution,
        "norms of heads",
    ),
]
SCALAR, VECTOR = {False: "BTH", True: "BHT"}, {False: "BTHK", True: "BHTK"}
UTILITIES = [
    *(
        Op(
            name,
            {"g": dims[first]},
            (dims[first],),
            {"chunk_size": 2, "head_first": first},
            xla_utils,
            f"first={first}",
        )
        for name, dims in (("chunk_local_cumsum", SCALAR), ("chunk_local_cumsum", VECTOR))
        for first in (False, True)
    ),
    *(
        Op("chunk_global_cumsum", {"s": dims[first]}, (dims[first],), {"head_first": first, "reverse": True}, xla_utils)
        for dims in (SCALAR, VECTOR)
        for first in (False, True)
    ),
    *(
        Op(name, {x: dims, "cu_seqlens": ""}, (dims,), {"head_first": first} | options, xla_utils, f"packed, {first=}")
        for name, x, options in (("chunk_local_cumsum", "g", {"chunk_size": 2}), ("chunk_global_cumsum", "s", {}))
        for first, dims in ((False, "OTHK"), (True, "OHT"))
    ),
    *(Op(name, {"x": "BTHK"}, ("BTHK",), {"devices": 2}, parallel) for name in ("to_balanced", "from_balanced")),
    Op("prepare_lens_from_mask", {"mask": "BT"}, ("B",), {}, xla_utils),
    Op("prepare_cu_seqlens_from_mask", {"mask": "BT"}, ("",), {}, xla_utils),
    Op("prepare_cu_seqlens_from_segment_ids", {"ids": "BT"}, ("",), {"sequences": 7}, xla_utils),
    *(
        Op(f"prepare_{name}", {"cu_seqlens": dims}, ("",), options, xla_utils, f"sharded={dims!r}")
        for dims in ("", "B")
        for name, options in (
            ("lens", {}),
            ("sequence_ids", {"total_tokens": 8}),
            ("position_ids", {"total_tokens": 8}),
            ("token_indices", {"total_tokens": 8}),
            ("chunk_offsets", {"chunk_size": 2}),
            ("chunk_indices", {"chunk_size": 2, "total_chunks": 6}),
        )
    ),
]

OPS = SPREADABLE + ALONE + UTILITIES


def mesh_of(kind):
    devices = len(jax.devices())
    return jax.make_mesh((2, 2, devices // 4), ("batch", "time", "heads"), axis_types=(kind,) * 3)


def spec(dims, letters):
    """How an array with these dimensions is sharded where these `letters` are."""
    return jax.P(*(AXES[each] if each in letters else None for each in dims)) if dims else jax.P()


def with_gradients(call):
    """`call`'s results and gradients, given the arrays that have gradients and those that do not."""

    def run(floating, others):
        def loss(floating):
            results = call(floating | others)
            sums = (jnp.sin(3 * x).sum() for x in results if jnp.issubdtype(x.dtype, jnp.floating))
            return sum(sums, jnp.float32(0)), results

        grads, results = jax.grad(loss, has_aux=True)(floating)
        return results, grads

    return run


def split(arrays):
    return tuple(
        {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating) == floating}
        for floating in (True, False)
    )


@functools.cache
def on_one_device(number):
    """Results and gradients of `OPS[number]`."""
    return jax.jit(with_gradients(OPS[number]))(*split(OPS[number].values()))


def compare(found, op, what):
    wanted = on_one_device(OPS.index(op))
    names = [*(f"result {i}" for i in range(len(op.results))), *sorted(split(op.values())[0])]
    for name, x, y in zip(names, jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close(x, y, 1e-5, f"{op}, {what}: {name}")


def check_own_shard_map(op, letters, tracked=True):
    """`parallel`'s op inside a `shard_map` over the axes of these `letters`."""
    specs = {name: spec(dims, letters) for name, dims in op.arrays.items()}
    run = jax.shard_map(
        lambda arrays: op(arrays, axis_name="time"),
        mesh=mesh_of(AUTO),
        in_specs=(specs,),
        out_specs=tuple(spec(dims, letters) for dims in op.results),
        check_vma=tracked,
    )
    compare(jax.jit(with_gradients(run))(*split(op.values())), op, f"shard_map over {letters}, {tracked=}")


def check_on_mesh(op, letters, kind, entered, spread, eager=False):
    """The op on arrays that are sharded by these `letters`, or on plain ones; `entered` says whether by `set_mesh`."""
    mesh = mesh_of(kind)
    what = f"{'parallel, ' if spread else ''}{letters or 'nothing'} sharded, {kind.name}, {entered=}"
    placed = op.values()
    if letters:
        placed = {
            name: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec(op.arrays[name], letters)))
            for name, x in placed.items()
        }
    over = {"axis_name": "time", "mesh": mesh} if spread else {}

    def call(arrays):
        return op(arrays, **over)

    # tokens that are sharded are gathered, which a warning says once a process
    gathers = "T" in letters and not spread
    ignored = warnings.catch_warnings(action="ignore", category=ejkernel.GatheredWarning)
    with ignored if gathers else contextlib.nullcontext(), jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        program = jax.jit(with_gradients(call)).lower(*split(placed)).compile()
        results, grads = program(*split(placed))
        plain = call(placed) if eager else ()
    compare((results, grads), op, what)
    if spread and set("BTHG") <= set(letters):
        check_collectives(op, hlo.collectives(program.as_text()), mesh, what)
    if not spread and op not in UTILITIES and "T" not in letters:
        # sums of what devices share, and nothing else
        moved = {each for each, _ in hlo.collectives(program.as_text())}
        assert moved <= {"all-reduce"}, f"{op}, {what}: {moved}"
    for x, y in zip(plain, results, strict=eager):
        assert_close(x, y, 1e-5, f"{op}, {what}: not compiled")
    if kind == EXPLICIT and letters:
        for x, dims in zip((*results, *plain), op.results * (2 if eager else 1), strict=True):
            expected = jax.sharding.NamedSharding(mesh, spec(dims, {*letters, "T"} if spread else letters))
            assert x.sharding.is_equivalent_to(expected, x.ndim), f"{op}, {what}: {jax.typeof(x)}"


def check_collectives(op, found, mesh, what):
    """Between two slices of time a device's own share of states or keys travels, each way, and nothing else does.

    What is the same on all devices is summed: final states, and the gradients of initial ones, decays and sinks.
    """
    assert {kind for kind, _ in found} <= {"collective-permute", "all-reduce"}, f"{op}, {what}: {found}"
    share = {each: size // mesh.shape.get(AXES.get(each), 1) for each, size in SIZES.items()}
    K, V = share["K"], share["V"]
    if op.name == "flash_attention":
        tokens = share["B"] * share["T"] if "B" in op.arrays["query"] else share["T"]
        expected = collections.Counter()
        for dim in (K, V):
            # forward, and back with the gradients; a window's keys go to both sides at once
            expected["collective-permute", 4 * tokens * share["G"] * dim] += 3
        moved = {key: times for key, times in found.items() if key[0] == "collective-permute"}
        if "segment_ids" in op.arrays:  # of the keys, with them
            assert moved.pop(("collective-permute", 4 * tokens)) <= 2, f"{op}, {what}: {found}"
        assert "sliding_window" in op.options or moved == expected, f"{op}, {what}: {found}"
        return
    states = (share["B"] if op.results[1][0] == "B" else SIZES["N"]) * share["H"]
    effect = K * (K + V) if "beta" in op.arrays else (K + 1) * (V + 1)
    moved = {key: times for key, times in found.items() if key[0] == "collective-permute"}
    assert moved == {("collective-permute", 4 * states * effect): 2}, f"{op}, {what}: {found}"
    summed = sum(times for (kind, size), times in found.items() if size == 4 * states * K * V)
    assert summed <= 1 + 2 * ("initial_state" in op.arrays), f"{op}, {what}: {found}"


# letters that are sharded together; key and value heads go with those of queries
PLACEMENTS = ("B", "T", "HG", "BT", "BHG", "THG", "BTHG")


def own_shard_map_calls():
    """All arguments of `check_own_shard_map` that make sense, each op's most sharded one first."""
    for op in SPREADABLE:
        # heads that are not all there have other default decays
        absent = {"H"} if op.name in ("retention", "lightning_attn") else set()
        absent |= {"B"} - set("".join(op.arrays.values()))
        fitting = [each for each in PLACEMENTS if "T" in each and not absent & set(each)]
        yield from ((op, letters) for letters in reversed(fitting))


def mesh_calls():
    """All arguments of `check_on_mesh` that make sense."""
    for op, letters, kind, entered in itertools.product(OPS, ("", *PLACEMENTS), (AUTO, EXPLICIT), (False, True)):
        if not letters or set(letters) & set("".join(op.arrays.values())):
            for spread in (False, True)[: 1 + (op in SPREADABLE)]:
                yield op, letters, kind, entered, spread


# What is left out below is among what `properties_parallel.py` draws from.


def own_shard_map():
    """`parallel` inside the caller's own `shard_map`, over as many axes as the op allows, tracked or not."""
    calls = {str(op): (op, letters) for op, letters in reversed(list(own_shard_map_calls()))}
    for i, call in enumerate(list(calls.values())[::2]):
        check_own_shard_map(*call, tracked=i % 4 > 0)


def explicit_time():
    """`parallel` given a mesh, entered or not, and arrays sharded over all of its axes or none."""
    for i, op in enumerate(SPREADABLE[1::2]):
        kind = AUTO if i % 3 == 2 else EXPLICIT
        check_on_mesh(op, "BTHG" if i % 4 else "", kind, entered=i % 2 > 0, spread=True, eager=i % 5 == 0)


def explicit_heads():
    """The other ops there, over batch and heads."""
    for i, op in enumerate([*ALONE, *SPREADABLE[::4], SPREADABLE[-1]]):
        check_on_mesh(op, "BHG", EXPLICIT, entered=i % 3 == 0, spread=False, eager=i % 5 == 0)


def auto_heads():
    """Every op on a mesh with `Auto` axes, over batch, heads or both."""
    for i, op in enumerate([*ALONE, *SPREADABLE[1::2]]):
        fitting = [each for each in ("B", "HG", "BHG") if set(each) & set("".join(op.arrays.values()))]
        check_on_mesh(op, fitting[i % len(fitting)], AUTO, entered=i % 2 > 0, spread=False)
    for op in (ALONE[0], SPREADABLE[1], SPREADABLE[-1]):
        # of plain arrays XLA says what every device has without the mesh's axes
        check_on_mesh(op, "", AUTO, entered=True, spread=False)


def gathers():
    """What no device has whole is brought together, and a warning says what and why; answers stay right."""
    query, key = (np.random.default_rng(3).normal(size=(2, 8, heads, 4)).astype(np.float32) for heads in (12, 6))

    def check(kind, message, query_spec, key_spec):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
        put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        sharded = put(query, query_spec), put(key, key_spec)
        _mesh._warn.cache_clear()  # it says so once a process
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = jax.jit(lambda q, k: ejkernel.flash_attention(q, k, k, causal=True))(*sharded)
        said = [str(each.message) for each in caught if each.category is ejkernel.GatheredWarning]
        assert said, message
        assert all(message in each and "ejkernel.parallel" in each for each in said), said
        whole = ejkernel.flash_attention(query, key, key, causal=True)
        assert_close(output, whole, 1e-6, message)
        if kind == EXPLICIT and query_spec == jax.P(None, "x"):
            # tokens come back as the query's were
            assert jax.typeof(output).sharding.spec == jax.P(None, "x", None, None), jax.typeof(output)

    for kind in (AUTO, EXPLICIT):
        check(kind, "key: 6 heads, which axis 'x' of 4 devices does not divide", jax.P(None, None, "x"), jax.P())
        check(kind, "dimension 1 is sharded over axis 'x'", jax.P(), jax.P(None, "x"))
        check(kind, "query: dimension 1 is sharded over axis 'x'", jax.P(None, "x"), jax.P())
        gathers_heads_with_norms(kind)

        gathers_heads_of_states(kind)


def gathers_heads_of_states(kind):
    """A state for all rows may have its heads over the axis that rows are over."""
    random = np.random.default_rng(3)
    x, state = (random.normal(size=shape).astype(np.float32) for shape in ((4, 5, 4, 2), (4, 2, 2)))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    sharded = (jax.device_put(each, jax.sharding.NamedSharding(mesh, jax.P("x"))) for each in (x, state))

    def run(x, state):
        output, final = ejkernel.linear_attention(x, x, x, initial_state=state)
        return jnp.sin(output).sum() + jnp.sin(final).sum()

    with warnings.catch_warnings(action="ignore", category=ejkernel.GatheredWarning):
        found = jax.jit(jax.grad(run, (0, 1)))(*sharded)
    for a, b in zip(found, jax.grad(run, (0, 1))(x, state), strict=True):
        assert_close(a, b, 1e-6, f"{kind}")


def gathers_heads_with_norms(kind):
    """No two devices share a head of the convolution that is divided by its norm."""
    x = np.random.default_rng(3).normal(size=(2, 5, 16)).astype(np.float32)
    run = functools.partial(convolution.unit_conv1d, weight=np.ones((3, 16), np.float32), unit_dim=8)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(None, None, "x")))
    _mesh._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = jax.jit(lambda x: run(x)[0])(sharded)
    said = [str(each.message) for each in caught if each.category is ejkernel.GatheredWarning]
    assert any("x: 2 heads, which axis 'x' of 4 devices does not divide" in each for each in said), said
    assert_close(output, run(x)[0], 1e-6)


def dropout():
    """Weights are drawn as on one device, whatever a device has of them, forward and backward."""
    x = np.random.default_rng(4).normal(size=(2, 16, 4, 8)).astype(np.float32)

    def run(x):
        options = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(0)}
        return jnp.sin(ejkernel.flash_attention(x, x[:, :, :2], x[:, :, :2], **options)).sum()

    whole = jax.jit(jax.grad(run))(x)
    for kind in (AUTO, EXPLICIT):
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("a", None, "b" if kind == AUTO else None)))
        assert_close(jax.jit(jax.grad(run))(sharded), whole, 1e-6, f"dropout, {kind}")


def parts():
    """A device takes its share of memory, moves nothing, and finds what it would find alone, to the bit."""
    shape, few, gate = (8, 128, 4, 16), (8, 128, 2, 16), (8, 128, 4)
    calls = {
        "recurrent_gla": (ejkernel.recurrent_gla, shape, few, few, shape),
        "gated_delta_rule": (ejkernel.gated_delta_rule, shape, few, few, gate, gate),
        "flash_attention": (functools.partial(ejkernel.flash_attention, causal=True), shape, few, few),
    }

    def with_gradients(op, *arrays):
        results, pull = jax.vjp(op, *arrays)
        return results, pull(jax.tree.map(jnp.cos, results))

    for name, (op, *shapes) in calls.items():
        random = np.random.default_rng(5)
        arrays = [random.normal(size=each).astype(np.float32) for each in shapes]
        arrays = [-abs(x) if i == 3 else np.tanh(abs(x)) if i == 4 else x for i, x in enumerate(arrays)]
        run = jax.jit(functools.partial(with_gradients, op))
        one = run.lower(*arrays).compile().memory_analysis().temp_size_in_bytes
        first = jax.tree.leaves(run(*(x[:4, :, : x.shape[2] // 2] for x in arrays)))
        for kind, (rows, heads) in itertools.product((AUTO, EXPLICIT), ((4, 1), (1, 2), (2, 2))):
            mesh = jax.make_mesh(
                (rows, heads), ("rows", "heads"), axis_types=(kind,) * 2, devices=jax.devices()[: rows * heads]
            )
            sharding = jax.sharding.NamedSharding(mesh, jax.P("rows", None, "heads"))
            placed = [jax.device_put(x, sharding) for x in arrays]
            program = run.lower(*placed).compile()
            what = f"{name}, {kind.name}, {rows} by {heads}"
            assert not hlo.collectives(program.as_text()), what
            share = program.memory_analysis().temp_size_in_bytes * rows * heads / one
            assert share < 1.05, f"{what}: {share} of one device's memory"
            if (rows, heads) == (2, 2):
                found = [x.addressable_shards[0].data for x in jax.tree.leaves(program(*placed))]
                for x, y in zip(found, first, strict=True):
                    np.testing.assert_array_equal(x, y, what)


def shared_heads():
    """Where an axis has more devices than keys have heads, each device reads the one of its queries."""
    random = np.random.default_rng(6)
    query, key = (random.normal(size=(2, 12, heads, 4)).astype(np.float32) for heads in (8, 2))
    for op in (ejkernel.flash_attention, ejkernel.linear_attention):

        def run(query, key, op=op):
            return sum(jnp.sin(x).sum() for x in jax.tree.leaves(op(query, key, key)))

        whole = jax.jit(jax.grad(run, (0, 1)))(query, key)
        for kind in (AUTO, EXPLICIT):
            mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
            put = [jax.device_put(query, jax.NamedSharding(mesh, jax.P(None, None, "x"))), key]
            put[1] = jax.device_put(key, jax.NamedSharding(mesh, jax.P()))
            program = jax.jit(jax.grad(run, (0, 1))).lower(*put).compile()
            moved = {each for each, _ in hlo.collectives(program.as_text())}
            assert moved == {"all-reduce"}, f"{op.__name__}, {kind}: {moved}"
            for x, y in zip(program(*put), whole, strict=True):
                assert_close(x, y, 1e-5, f"{op.__name__}, {kind}")


def transformed():
    """Derivatives in both modes and of derivatives, loops, `checkpoint` and `vmap`, on a mesh with `Auto` axes."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AUTO,) * 2)
    x = np.random.default_rng(7).normal(size=(2, 24, 2, 4)).astype(np.float32)

    def gla(x):
        return ejkernel.recurrent_gla(x, x, x, -abs(x))[0]

    def attend(x):
        return ejkernel.flash_attention(x, x, x, causal=True)

    def layers(op, x):
        step = jax.checkpoint(lambda x, _: (x + op(x), None))
        return jnp.sin(jax.lax.scan(step, x, length=2)[0]).sum()

    def check(what, run, may_move=()):
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", None, "heads")))
        program = jax.jit(run).lower(sharded).compile()
        moved = {each for each, _ in hlo.collectives(program.as_text())}
        assert moved <= set(may_move), f"{what}: {moved}"
        assert_close(program(sharded), jax.jit(run)(x), 1e-5, what)

    for op in (gla, attend):
        check("scan and checkpoint", jax.grad(functools.partial(layers, op)))
        check("forward mode", lambda x, op=op: jax.jvp(op, (x,), (jnp.cos(x),))[1])
        check("vmap", jax.grad(lambda x, op=op: jnp.sin(jax.vmap(op)(jnp.stack([x, 2 * x]))).sum()))
        second = lambda x, op=op: jax.jvp(jax.grad(lambda x: jnp.sin(op(x)).sum()), (x,), (jnp.cos(x),))[1]  # noqa: E731
        check("second derivatives", second)

    # keeps booleans for its gradient
    masked = lambda x: jnp.sin(ejkernel.attention(x, x, x, causal=True, dtype=None)[0]).sum()  # noqa: E731
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(EXPLICIT,) * 2)
    check("second derivatives, Explicit", lambda x: jax.jvp(jax.grad(masked), (x,), (jnp.cos(x),))[1])


def mapped():
    """`vmap` over an axis that is sharded over an `Explicit` axis, beside rows and heads over others."""
    mesh = mesh_of(EXPLICIT)
    shared = {"g_gamma", "weight", "bias", "softmax_aux", "cu_seqlens"}  # by all of the calls

    def put(x, dims, letters, *first):
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*first, *spec(dims, letters))))

    for i, op in enumerate([*ALONE, *SPREADABLE[::2]]):
        letters, axes = ("B", "BHG", "")[i % 3], {}
        one, placed = op.values(), {}
        for name, x in one.items():
            axes[name] = None if name in shared and "B" not in op.arrays[name] else 0
            if axes[name] == 0:
                one[name] = np.stack([x, x if x.dtype == bool or name == "segment_ids" else x / 2])
            placed[name] = put(one[name], op.arrays[name], letters, *(("time",) if axes[name] == 0 else ()))

        run = jax.jit(with_gradients(jax.vmap(op, (axes,))))
        entered = jax.set_mesh(mesh) if i % 2 else contextlib.nullcontext()
        with entered:
            program = run.lower(*split(placed)).compile()
            found = program(*split(placed))
        what = f"{op}, {letters or 'nothing else'} sharded"
        moved = {each for each, _ in hlo.collectives(program.as_text())}
        # XLA moves heads of mapped softmax attention, which it splits by itself
        assert moved <= {"all-reduce"} or ("attention" in op.name and "H" in letters), f"{what}: {moved}"
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(run(*split(one))), strict=True):
            assert_close(x, y, 1e-5, what)
        for x, dims in zip(found[0], op.results, strict=True):
            expected = jax.NamedSharding(mesh, jax.P("time", *spec(dims, letters)))
            assert x.sharding.is_equivalent_to(expected, x.ndim), f"{what}: {jax.typeof(x)}"


def short_rows():
    """Rows of several sequences keep as many states on a device as they do among others, whatever their length."""
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AUTO,), devices=jax.devices()[:2])
    x = np.random.default_rng(8).normal(size=(2, 17, 2, 4)).astype(np.float32)
    ids = np.repeat(np.array([[1, 2], [1, 1]], np.int32), [8, 9], axis=1)

    def run(x):
        return jnp.sin(ejkernel.linear_attention(x, x, x, segment_ids=ids)[0]).sum()

    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows")))
    assert_close(jax.jit(jax.grad(run))(sharded), jax.grad(run)(x), 1e-5)


def decoding():
    """A step with a donated state writes it in place, whoever has it."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(AUTO,) * 2)
    x, state = np.ones((2, 1, 2, 4), np.float32), np.ones((2, 2, 4, 4), np.float32)
    token = jax.device_put(x, jax.NamedSharding(mesh, jax.P("rows", None, "heads")))
    state = jax.device_put(state, jax.NamedSharding(mesh, jax.P("rows", "heads")))
    step = jax.jit(lambda x, state: ejkernel.recurrent_gla(x, x, x, -x, initial_state=state), donate_argnums=1)
    program = step.lower(token, state).compile()
    assert not hlo.collectives(program.as_text())
    assert program.memory_analysis().alias_size_in_bytes == state.nbytes // 4


def one_program():
    """An op and ops whose tokens are sharded, rows of several sequences too, on a mesh with some `Explicit` axes."""
    random = np.random.default_rng(9)
    x, heads = (random.normal(size=(2, 8, 2, 4)).astype(np.float32) for _ in range(2))
    ids = INTEGERS["segment_ids"]

    def run(x, heads, **over):
        module = parallel if over else ejkernel
        outputs = (
            module.recurrent_gla(x, x, x, -abs(x), segment_ids=ids, **over)[0],
            module.flash_attention(x, x, x, causal=True, segment_ids=ids, **over),
            ejkernel.recurrent_gla(heads, heads, heads, -abs(heads))[0],
        )
        return sum(jnp.sin(each).sum() for each in outputs)

    whole = jax.jit(jax.grad(run, (0, 1)))(x, heads)
    for kinds in ((EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)):
        mesh = jax.make_mesh((2, 2), ("time", "heads"), axis_types=kinds, devices=jax.devices()[:4])
        placed = (
            jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "time", "heads"))),
            jax.device_put(heads, jax.NamedSharding(mesh, jax.P(None, None, "heads"))),
        )
        spread = functools.partial(run, axis_name="time", mesh=mesh)
        for one, wanted in zip(jax.jit(jax.grad(spread, (0, 1)))(*placed), whole, strict=True):
            assert_close(one, wanted, 1e-5, f"{kinds}")


def pools():
    """Calls with pools have the bits that they have on one device, with heads, rows or both sharded."""
    random = np.random.default_rng(8)
    slots = {"reads": np.array([0, -1, 2, 5], np.int32), "writes": np.array([1, 3, -1, 0], np.int32)}
    shapes = (4, 3, 4, 8), (4, 3, 4), (6, 4, 8, 8), (6, 2, 4)
    x, gate, states, inputs = (random.normal(size=each).astype(np.float32) for each in shapes)

    def recurrence(x, gate, states, **slots):
        return ejkernel.kda(x, x, x, -abs(x), jax.nn.sigmoid(gate), normalize=True, states=states, **slots)

    def convolution(x, states, **slots):
        return ejkernel.causal_conv1d(x, jnp.ones((3, 4), np.float32), states=states, **slots)

    for kind, rows, heads in itertools.product((AUTO, EXPLICIT), (None, "rows"), (None, "heads")):
        mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
        tokens = jax.P(rows, None, heads)
        for run, arrays, specs in (
            (recurrence, (x, gate, states), (tokens, tokens, jax.P(None, heads))),
            (convolution, (gate, inputs), (tokens, jax.P(None, None, heads))),
        ):
            places = [jax.NamedSharding(mesh, each) for each in specs]
            placed = jax.device_put(arrays, tuple(places)), jax.device_put(slots, jax.NamedSharding(mesh, jax.P(rows)))
            with warnings.catch_warnings(action="ignore", category=ejkernel.GatheredWarning):
                program = jax.jit(run).lower(*placed[0], **placed[1]).compile()
            what = f"{run.__name__}, {kind.name}, {rows} by {heads}"
            assert rows or not hlo.collectives(program.as_text()), what
            wanted = jax.jit(run)(*arrays, **slots)
            for one, expected in zip(program(*placed[0], **placed[1]), wanted, strict=True):
                np.testing.assert_array_equal(one, expected, what)


def serving():
    """Pools and pages stay in place with heads sharded; what is gathered for rows or too few heads is said."""
    random = np.random.default_rng(10)
    x, states, few, pages = (
        random.normal(size=each).astype(np.float32) for each in ((4, 4, 8), (4, 4, 8, 8), (4, 2, 8), (4, 2, 2, 8))
    )
    slots = np.array([0, 1, 3, -1], np.int32)

    def recurrence(x, states):
        rows = (x[:, None],) * 3
        return ejkernel.recurrent_gla(*rows, -abs(rows[0]), states=states, reads=slots, writes=slots)

    def paged(x, few, key_pages):
        cache, table = ejkernel.PagedCache(key_pages, key_pages + 1), np.arange(4, dtype=np.int32)[:, None]
        lengths, borders = np.zeros(4, np.int32), np.arange(5, dtype=np.int32)
        output, (keys, values) = ejkernel.paged_attention(x, few, few, cache, table, lengths, borders)
        return output, values, keys

    heads, rows, pool = jax.P(None, "x"), jax.P("x"), jax.P(None, "x")
    for kind, (run, arrays, specs, devices, message) in itertools.product(
        (AUTO, EXPLICIT),
        (
            (recurrence, (x, states), (heads, pool), 4, None),
            (recurrence, (x, states), (rows, jax.P()), 4, "dimension 1 is sharded over axis 'x'"),
            (recurrence, (x, states), (jax.P(), rows), 4, "states: dimension 0 is sharded over axis 'x'"),
            (paged, (x, few, pages), (heads, heads, jax.P(None, None, "x")), 2, None),
            (paged, (x, few[:, :1], pages[:, :, :1]), (heads, jax.P(), jax.P()), 4, None),
            (paged, (x, few, pages), (heads, jax.P(), jax.P()), 4, "key_pages: 2 heads, which axis 'x' of 4"),
            (paged, (x, few, pages), (rows, rows, jax.P()), 4, "query: dimension 1 is sharded over axis 'x'"),
        ),
    ):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(kind,), devices=jax.devices()[:devices])
        placed = [jax.device_put(each, jax.NamedSharding(mesh, at)) for each, at in zip(arrays, specs, strict=True)]
        what = f"{run.__name__}, {kind.name}, {specs}"
        _mesh._warn.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = jax.jit(run, donate_argnums=len(arrays) - 1).lower(*placed).compile()
        said = [str(each.message) for each in caught if each.category is ejkernel.GatheredWarning]
        wanted = jax.jit(run)(*arrays)
        for one, expected in zip(program(*placed), wanted, strict=True):
            assert_close(one, expected, 1e-6, what)
        if message is None:
            assert not said and not hlo.collectives(program.as_text()), f"{what}: {said}"
            held = arrays[-1].nbytes // (devices if specs[-1] else 1)
            assert program.memory_analysis().alias_size_in_bytes == held, what
        else:
            assert any(message in each and "jax.shard_map" in each for each in said), f"{what}: {said}"


def explicit_utilities():
    """Sums over sharded time, packing of sharded rows, and reordered tokens."""
    for i, op in enumerate(UTILITIES):
        check_on_mesh(op, "BT", EXPLICIT, entered=i % 2 == 0, spread=False, eager=i % 3 == 0)


PARTS = {
    each.__name__: each
    for each in (
        *(own_shard_map, explicit_time, explicit_heads, explicit_utilities, auto_heads),
        *(
            gathers,
            dropout,
            parts,
            shared_heads,
            transformed,
            mapped,
            short_rows,
            decoding,
            pools,
            serving,
            one_program,
        ),
    )
}
