"""What each of several GPUs or TPUs runs, moves and holds of a sharded call, compiled ahead of time without any.

XLA compiles for devices of a topology that is only described, and so do Triton and Pallas. What is read off the
compiled programs: collectives and their bytes, the kernels that a device launches, and its temporaries beside those of
one device that has the whole call. No time: only chips can tell. GPUs need JAX's CUDA plugin (`jax[cuda12]`) and the
extra `cuda`, but no driver; TPUs need `jax[tpu]`. Both need the extra `layers` and `orbax-checkpoint`.

    JAX_PLATFORMS=cpu python -m benchmarks.mesh gpu --json benchmarks/results/gpu_mesh.json
    JAX_PLATFORMS=cpu python -m benchmarks.mesh tpu --json benchmarks/results/tpu_mesh.json
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import ejkernel
from benchmarks import hlo
from benchmarks.described import PLATFORMS, Platform, described
from ejkernel import parallel

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit


B, T, H, K = 8, 1024, 8, 128
HALF, FULL = jnp.bfloat16, jnp.float32
X = ("BTHK", HALF)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call and its arrays, whose dimensions are letters; those of `results` say how they lie."""

    name: str
    function: Callable[..., Any]
    arrays: tuple[tuple[str, Any], ...]
    with_gradients: bool = True
    donated: int | None = None


SIZES = {"B": B, "T": T, "H": H, "K": K, "V": K, "G": 4, "O": 1, "W": 4, "D": 6144, "1": 1, "P": 3}


def calls() -> list[Call]:
    """What people shard: every op, shared heads and parameters, states, options, and a step of decoding."""
    gates, gate = ("BTHK", FULL), ("BTH", FULL)
    few, state, token = ("BTGK", HALF), ("BHKV", FULL), ("BOHK", HALF)
    sinks, ids = ("H1", FULL), ("BT", jnp.int32)
    return [
        Call("recurrent_gla", ejkernel.recurrent_gla, (X, X, X, gates)),
        Call("simple_gla", ejkernel.simple_gla, (X, X, X, gate)),
        Call("retention", ejkernel.retention, (X, X, X)),
        Call(
            "recurrent, `g_gamma`, one state for all",
            lambda q, k, v, g, s: ejkernel.recurrent(q, k, v, g_gamma=g, initial_state=s),
            (X, X, X, ("H", FULL), ("HKV", FULL)),
        ),
        Call("gated_delta_rule", ejkernel.gated_delta_rule, (X, X, X, gate, gate)),
        Call("kda", ejkernel.kda, (X, X, X, gates, gate)),
        Call(
            "flash_attention, soft cap",
            lambda q, k, v: ejkernel.flash_attention(q, k, v, causal=True, logits_soft_cap=30.0),
            (X, few, few),
        ),
        Call(
            "flash_attention, sinks, `segment_ids`",
            lambda q, k, v, s, ids: ejkernel.flash_attention(q, k, v, causal=True, softmax_aux=s, segment_ids=ids),
            (X, X, X, sinks, ids),
        ),
        Call(
            "causal_conv1d",
            lambda x, w: ejkernel.causal_conv1d(x, w, activation="silu"),
            (("BTD", HALF), ("WD", FULL)),
        ),
        Call(
            "recurrent_gla, a token, donated state",
            lambda q, k, v, g, s: ejkernel.recurrent_gla(q, k, v, g, initial_state=s),
            (token, token, token, ("BOHK", FULL), state),
            with_gradients=False,
            donated=4,
        ),
    ]


def over_time() -> list[Call]:
    """What `ejkernel.parallel` shards along tokens."""
    gates, gate = ("BTHK", FULL), ("BTH", FULL)

    def of(op: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *arrays, **where: op(*arrays, **options, **where)

    return [
        Call("parallel.recurrent_gla", of(parallel.recurrent_gla), (X, X, X, gates)),
        Call("parallel.simple_gla", of(parallel.simple_gla), (X, X, X, gate)),
        Call("parallel.retention", of(parallel.retention), (X, X, X)),
        Call("parallel.gated_delta_rule", of(parallel.gated_delta_rule), (X, X, X, gate, gate)),
        Call("parallel.kda", of(parallel.kda), (X, X, X, gates, gate)),
        Call("parallel.flash_attention", of(parallel.flash_attention, causal=True), (X, X, X)),
    ]


@dataclasses.dataclass
class Row:
    """A compiled program: what a device moves, launches and holds, beside one device with the whole call."""

    call: str
    devices: int
    axes: str
    sharded: str
    direction: str
    collectives: dict[str, int]
    moved: int
    kernels: int
    temporaries: int
    of_one: int

    def __str__(self) -> str:
        moved = ", ".join(f"{times} {kind}" for kind, times in self.collectives.items()) or "nothing"
        share = f", {self.temporaries * self.devices / self.of_one:.3f} of one device's" if self.of_one else ""
        return (
            f"{self.call:40} {self.devices:2} devices, {self.axes:8} {self.sharded:16} {self.direction:14} "
            f"moves {moved} ({self.moved / 2**20:.2f} MiB), {self.kernels} kernels, "
            f"{self.temporaries / 2**20:.1f} MiB{share}"
        )


PLACES = {"batch": {"B": "batch"}, "heads": {"H": "heads", "G": "heads", "D": "heads"}}
PLACES["batch and heads"] = PLACES["batch"] | PLACES["heads"]


def shapes(count: int) -> dict[str, tuple[int, int]]:
    """Meshes of so many devices, by what is sharded over them."""
    rows = 4 if count == 16 else 2
    alone = {"batch": (count, 1), "heads": (1, count)} if count <= H else {}
    return {**alone, "batch and heads": (rows, count // rows)}


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its results and the cotangents of its floating arrays, where those of the results are the results themselves."""

    def run(*arrays: Any) -> Any:
        moving = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_moving(*some: Any) -> Any:
            given = list(arrays)
            for i, x in zip(moving, some, strict=True):
                given[i] = x
            return function(*given)

        results, pull = jax.vjp(of_moving, *(arrays[i] for i in moving))
        return results, pull(results)

    return run


DIRECTIONS = {"forward": lambda function: function, "with gradients": with_gradients}


def compiled(platform: Platform, function: Callable[..., Any], call: Call, mesh: Any, places: dict[str, str]) -> Any:
    def axis(letter: str) -> str | None:
        """Fewer heads than devices are whole on each."""
        name = places.get(letter)
        return None if name is None or SIZES[letter] % mesh.shape[name] else name

    structs = [
        jax.ShapeDtypeStruct(
            tuple(SIZES[each] for each in letters), dtype, sharding=jax.NamedSharding(mesh, jax.P(*map(axis, letters)))
        )
        for letters, dtype in call.arrays
    ]
    donated = () if call.donated is None else (call.donated,)
    jitted = jax.jit(function, donate_argnums=donated)
    return jitted.trace(*structs).lower(lowering_platforms=(platform.lowering,)).compile(platform.options)


def row(platform: Platform, program: Any, call: Call, count: int, axes: str, sharded: str, direction: str) -> Row:
    text = program.as_text()
    found, kinds = hlo.collectives(text), collections.Counter[str]()
    for (kind, _), times in found.items():
        kinds[kind] += times
    kernels = platform.kernels(text)
    held = program.memory_analysis().temp_size_in_bytes
    return Row(call.name, count, axes, sharded, direction, dict(kinds), hlo.totals(found)[1], kernels, held, 0)


def rows_and_heads(platform: Platform, call: Call) -> Iterator[Row]:
    """The call with rows, heads or both sharded over meshes of either kind."""
    for direction, derived in DIRECTIONS.items():
        if direction != "forward" and not call.with_gradients:
            continue
        function = derived(call.function)
        alone = compiled(platform, function, call, platform.mesh((1, 1), ("batch", "heads"), AUTO), {})
        of_one = alone.memory_analysis().temp_size_in_bytes
        for count in platform.counts:
            for (sharded, shape), kind in itertools.product(shapes(count).items(), (AUTO, EXPLICIT)):
                mesh = platform.mesh(shape, ("batch", "heads"), kind)
                program = compiled(platform, function, call, mesh, PLACES[sharded])
                found = row(platform, program, call, count, kind.name, sharded, direction)
                yield dataclasses.replace(found, of_one=of_one)


def tokens(platform: Platform, call: Call) -> Iterator[Row]:
    """A call of `parallel` with its tokens sharded."""
    for (direction, derived), count in itertools.product(DIRECTIONS.items(), platform.counts):
        mesh = platform.mesh((count,), ("time",), AUTO)
        function = derived(functools.partial(call.function, axis_name="time", mesh=mesh))
        program = compiled(platform, function, call, mesh, {"T": "time"})
        yield row(platform, program, call, count, "Auto", "time", direction)


# Of a training step of `examples/train_hybrid.py`: devices for rows and for heads, rows, tokens, width.
STEP = {"gpu": (2, 2), "tpu": (4, 4)}
ROWS, TOKENS, WIDTH = 16, 2048, 512


def training_step(name: str) -> dict[str, Any]:
    """Collectives of a training step of the hybrid in `examples`, rows over one axis and heads over the other."""
    import optax
    from flax import nnx

    example = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "train_hybrid.py"))
    platform, optimizer = PLATFORMS[name], optax.adamw(3e-3)
    mesh = platform.mesh(STEP[name], ("data", "model"), EXPLICIT)
    model = nnx.eval_shape(lambda: example["Model"](WIDTH, 2, nnx.Rngs(0)))
    graph, parameters = nnx.split(model)
    state = jax.eval_shape(lambda: example["initial"](parameters, optimizer))
    row = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P("data")))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = example["stepper"](graph, optimizer).trace(example["placed"](state, mesh), row, row, row)
        text = traced.lower(lowering_platforms=(platform.lowering,)).compile(platform.options).as_text()
    moved = sorted((kind, size, times) for (kind, size), times in hlo.collectives(text).items())
    tokens = ROWS * TOKENS * WIDTH * 2 // STEP[name][0]  # of what a device has between layers, bytes
    return {"mesh": STEP[name], "between_layers": tokens, "moved": moved, "kernels": platform.kernels(text)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", choices=PLATFORMS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="calls whose name has this")
    options = parser.parse_args()
    platform, found = PLATFORMS[options.platform], []
    with described(platform), warnings.catch_warnings():
        warnings.simplefilter("error", ejkernel.GatheredWarning)
        for kind, each in [*((rows_and_heads, each) for each in calls()), *((tokens, each) for each in over_time())]:
            for one in kind(platform, each) if options.only in each.name else ():
                print(one, flush=True)
                found.append(dataclasses.asdict(one))
        step = training_step(options.platform) if options.only in "training step" else None
        print("training step", step)
    if options.json:
        report = {"jax": jax.__version__, "rows": found, "training_step": step}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
