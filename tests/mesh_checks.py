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
from ejkernel import parallel, xla_utils

AXES = {"B": "batch", "T": "time", "H": "heads", "G": "heads"}
SIZES = {"B": 2, "T": 8, "L": 8, "H": 4, "G": 2, "K": 4, "V": 2, "N": 3, "Z": 2, "O": 1}
INTEGERS = {"cu_seqlens": np.array([0, 3, 3, 7]), "ids": np.array([[1, 1, 2, 2, 2, 3, 3, 3], [3, 3, 3, 3, 5, 5, 5, 7]])}
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
]
ALONE = [
    linear("recurrent", {"g": "BOHK", "g_gamma": "H", "initial_state": "BHKV"}, STEP, ("BOHV", "BHKV"), "step"),
    linear("retention", None, STEP, ("BOHV", "BHKV"), "step"),
    softmax("attention", {"attention_mask": "BHTL"}, results=("BTHV", "BHTL"), what="mask"),
    softmax("attention", {"bias": "BHTL", "softmax_aux": "HZ"}, results=("BTHV", "BHTL"), what="bias", causal=True),
    softmax("flash_attention", {"bias": "BHTL", "softmax_aux": "GZ"}, what="bias"),
    softmax("flash_attention", {"attention_mask": "BHTL"}, results=("BTHV", "BTH"), what="mask", return_lse=True),
    softmax("flash_attention", {"query": "BOHK"}, results=("BOHV",), what="step", causal=True, query_offset=5),
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
    gathers = kind == EXPLICIT and "T" in letters and not spread
    ignored = warnings.catch_warnings(action="ignore", category=ejkernel.GatheredWarning)
    with ignored if gathers else contextlib.nullcontext(), jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        program = jax.jit(with_gradients(call)).lower(*split(placed)).compile()
        results, grads = program(*split(placed))
        plain = call(placed) if eager else ()
    compare((results, grads), op, what)
    if spread and set("BTHG") <= set(letters):
        check_collectives(op, hlo.collectives(program.as_text()), what)
    if kind == EXPLICIT and not spread and op not in UTILITIES and "T" not in letters:
        # sums of what devices share, and nothing else
        moved = {each for each, _ in hlo.collectives(program.as_text())}
        assert moved <= {"all-reduce"}, f"{op}, {what}: {moved}"
    for x, y in zip(plain, results, strict=eager):
        assert_close(x, y, 1e-5, f"{op}, {what}: not compiled")
    if kind == EXPLICIT and letters:
        for x, dims in zip((*results, *plain), op.results * (2 if eager else 1), strict=True):
            expected = jax.sharding.NamedSharding(mesh, spec(dims, {*letters, "T"} if spread else letters))
            assert x.sharding.is_equivalent_to(expected, x.ndim), f"{op}, {what}: {jax.typeof(x)}"


def check_collectives(op, found, what):
    """Between two slices of time a device's own share of states or keys travels, each way, and nothing else does.

    What is the same on all devices is summed: final states, and the gradients of initial ones, decays and sinks.
    """
    assert {kind for kind, _ in found} <= {"collective-permute", "all-reduce"}, f"{op}, {what}: {found}"
    share = {each: SIZES[each] // (2 if each in AXES else 1) for each in SIZES}
    K, V = share["K"], share["V"]
    if op.name == "flash_attention":
        tokens = share["B"] * share["T"] if "B" in op.arrays["query"] else share["T"]
        expected = collections.Counter()
        for dim in (K, V):
            # forward, and back with the gradients; a window's keys go to both sides at once
            expected["collective-permute", 4 * tokens * share["G"] * dim] += 3
        moved = {key: times for key, times in found.items() if key[0] == "collective-permute"}
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
    for i, op in enumerate([*ALONE, *SPREADABLE[::4]]):
        check_on_mesh(op, "BHG", EXPLICIT, entered=i % 3 == 0, spread=False, eager=i % 5 == 0)


def explicit_gathers():
    """What no device has whole is brought together, and a warning says what and why; answers stay right."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(EXPLICIT,))
    query, key = (np.random.default_rng(3).normal(size=(2, 8, heads, 4)).astype(np.float32) for heads in (12, 6))

    def check(message, query_spec, key_spec):
        put = lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))  # noqa: E731
        sharded = put(query, query_spec), put(key, key_spec)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = jax.jit(lambda q, k: ejkernel.flash_attention(q, k, k, causal=True))(*sharded)
        said = [str(each.message) for each in caught if each.category is ejkernel.GatheredWarning]
        assert said, message
        assert all(message in each and "ejkernel.parallel" in each for each in said), said
        whole = ejkernel.flash_attention(query, key, key, causal=True)
        assert_close(output, whole, 1e-6, message)

    check("key: 6 heads, which axis 'x' of 4 devices does not divide", jax.P(None, None, "x"), jax.P())
    check("dimension 1 is sharded over axis 'x'", jax.P(), jax.P(None, "x"))


def explicit_dropout():
    """Every device draws its own weights."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(EXPLICIT,))
    x = np.ones((2, 16, 1, 4), np.float32)
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("x")))
    options = {"dropout_prob": 0.5, "deterministic": False, "dropout_rng": jax.random.key(0)}
    output = np.asarray(ejkernel.flash_attention(sharded, sharded, sharded, **options))
    assert not np.array_equal(output[0], output[1])


def explicit_utilities():
    """Sums over sharded time, packing of sharded rows, and reordered tokens."""
    for i, op in enumerate(UTILITIES):
        check_on_mesh(op, "BT", EXPLICIT, entered=i % 2 == 0, spread=False, eager=i % 3 == 0)


PARTS = {
    each.__name__: each
    for each in (own_shard_map, explicit_time, explicit_heads, explicit_gathers, explicit_dropout, explicit_utilities)
}
