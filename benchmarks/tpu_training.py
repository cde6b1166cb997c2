"""`make tpu-training`: a training step of a 16-layer model over the chips of real topologies, compiled without them.

The tokens of one long sequence lie over all chips, parameters on each. What is read off the compiled programs: whether
they fit in HBM, which collectives run and the bytes a chip gets by them, beside a plan by arithmetic, and what is
computed while they are on their way. No time: only chips can tell.
"""

import argparse
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tpu import prepare

LAYERS, WIDTH, HEADS, HIDDEN, VOCABULARY = 16, 1024, 8, 2816, 32768
HBM = 16 * 2**30  # a v5e's


class Run(NamedTuple):
    topology: str
    tokens: int


RUNS = [Run("v5e:2x2", 32_768), Run("v5e:4x4", 131_072), Run("v5e:16x16", 1_048_576)]


def model() -> tuple[Any, Any]:
    """One block's loss-free body and its parameters' shapes, all layers of them stacked."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from ejkernel import parallel
    from ejkernel.layers import GatedLinearAttention

    half = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}

    class OverTime(GatedLinearAttention):
        """The layer on this device's slice of the tokens."""

        def __call__(self, x: Any) -> Any:  # type: ignore[override]
            query, key, value, _ = self.projected(x, None, None)
            gate = jax.nn.log_sigmoid(self.gate_up(self.gate_down(x)).astype(jnp.float32)) / self.gate_normalizer
            gate = gate.reshape(*gate.shape[:-1], self.heads, -1)
            output, _ = parallel.recurrent_gla(query, key, value, g=gate, axis_name="time")
            return self.finish(x, output, None)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norms = nnx.List([nnx.RMSNorm(WIDTH, **half, rngs=rngs) for _ in range(2)])
            self.mixer = OverTime(WIDTH, HEADS, key_width=WIDTH, **half, rngs=rngs)
            self.up = nnx.Linear(WIDTH, 2 * HIDDEN, use_bias=False, **half, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, use_bias=False, **half, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.mixer(self.norms[0](x))
            gate, up = jnp.split(self.up(self.norms[1](x)), 2, -1)
            return x + self.down(jax.nn.silu(gate) * up)

    graph, one = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    blocks = jax.tree.map(lambda x: jax.ShapeDtypeStruct((LAYERS, *x.shape), x.dtype), nnx.to_pure_dict(one))

    def body(x: Any, parameters: Any) -> Any:
        state = jax.tree.map(lambda x: x, one)
        nnx.replace_by_pure_dict(state, parameters)
        return nnx.merge(graph, state)(x)

    table = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
    return body, {"blocks": blocks, "embed": table, "head": table}


def step(body: Any) -> Any:
    """A step of Adam on one device's slice of the tokens."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def loss(parameters: Any, tokens: Any, targets: Any) -> Any:
        x = parameters["embed"].astype(jnp.bfloat16)[tokens]
        layer = jax.checkpoint(body)
        x, _ = lax.scan(lambda x, each: (layer(x, each), None), x, parameters["blocks"])
        logits = jnp.einsum(
            "btd,vd->btv", x, parameters["head"].astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        return lax.pmean(-picked.mean(), "time")

    def update(parameters: Any, moments: Any, tokens: Any, targets: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, tokens, targets)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
        second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments[1], gradient)
        moved = jax.tree.map(lambda p, m, v: p - 1e-3 * m * lax.rsqrt(v + 1e-8), parameters, first, second)
        return moved, (first, second), value

    return update


def compiled(run: Run) -> tuple[Any, int, int]:
    """The program, and how many chips and parameters it is for."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import Mesh, NamedSharding

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=run.topology).devices)
    # as `jax.make_mesh` lays them: along one axis of the torus, then the other
    line = mesh_utils.create_device_mesh((devices.size,), devices=list(devices.ravel()))
    mesh = Mesh(line, ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    body, parameters = model()

    def place(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    whole, slices = jax.P(), jax.P(None, "time")
    parameters = jax.tree.map(partial(place, spec=whole), parameters)
    tokens = place(jax.ShapeDtypeStruct((1, run.tokens), jnp.int32), slices)
    update = jax.shard_map(
        step(body), mesh=mesh, in_specs=(whole, whole, slices, slices), out_specs=(whole, whole, whole)
    )
    # Pallas asks the mesh in scope which TPU it lowers for
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(update, donate_argnums=(0, 1)).lower(parameters, (parameters, parameters), tokens, tokens)
    count = sum(x.size for x in jax.tree.leaves(parameters))
    return lowered.compile(), devices.size, count


def plan(chips: int, parameters: int) -> dict[str, int]:
    """Bytes a chip gets in a step, by arithmetic."""
    from ejkernel.parallel._exchange import by_tree, tree_steps

    dim = WIDTH // HEADS
    state, effect = 4 * HEADS * dim * dim, 4 * HEADS * (dim + 1) ** 2
    if by_tree(chips, state):
        there = back = tree_steps(chips) * effect
    else:
        there, back = chips * effect, chips * state
    # the forward again on the way back, which keeps the layers' inputs alone; gradients in bfloat16, as they are made
    return {"states": LAYERS * (2 * there + back), "gradients": 2 * parameters}


def overlapped(text: str) -> dict[str, int]:
    """Collectives that are sent before they are waited for, and those of them with work in between."""
    started: dict[str, int] = {}
    between: list[int] = []
    work = re.compile(r" (?:fusion|custom-call|convolution|dot)\(")
    for line in text.splitlines():
        if found := re.match(
            r"\s*%((?:async-collective|collective-permute|all-gather|all-reduce)-start[\w.-]*) = ", line
        ):
            started[found[1]] = 0
        elif re.match(r"\s*%(?:async-collective|collective-permute|all-gather|all-reduce)-done", line):
            # a TPU's own are done by name, the others by what they are given
            given = next((name for name in started if re.search(rf"%{re.escape(name)}\b(?![.\w-])", line)), None)
            name = given or next((name for name in started if name.startswith("async")), None)
            if name:
                between.append(started.pop(name))
        elif work.search(line):
            started = {name: number + 1 for name, number in started.items()}
    return {"sent ahead": len(between), "with work meanwhile": sum(number > 0 for number in between)}


def ring() -> dict[str, Any]:
    """Softmax attention over sixteen chips: hops of keys and values, and those that travel beside a block's work."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding

    from benchmarks import hlo
    from ejkernel import parallel

    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices)
    mesh = Mesh(devices.ravel(), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
    place = NamedSharding(mesh, jax.P(None, "time"))
    x = jax.ShapeDtypeStruct((1, devices.size * 4096, 8, 128), jnp.bfloat16, sharding=place)

    def forward(*arrays: Any) -> Any:
        return parallel.flash_attention(*arrays, causal=True, layout="balanced", axis_name="time", mesh=mesh)

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda arrays: forward(*arrays).astype(jnp.float32).sum())(arrays)

    found = {}
    for name, run in (("forward", forward), ("with gradients", gradients)):
        # Pallas asks the mesh in scope which TPU it lowers for
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(run).lower(x, x, x)
        text = lowered.compile().as_text()
        hops, moved = hlo.totals(hlo.collectives(text))
        found[name] = {"hops": hops, "bytes": moved, **overlapped(text), "kernels": text.count("tpu_custom_call")}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_training", description=str(__doc__).splitlines()[0])
    parser.add_argument("--topologies", default=",".join(run.topology for run in RUNS))
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--text", type=Path, help="a folder for the programs' text")
    arguments = parser.parse_args()
    prepare(None)
    import jax

    from benchmarks import hlo

    rows: list[dict[str, Any]] = []
    for run in RUNS:
        if run.topology not in arguments.topologies.split(","):
            continue
        begun = time.perf_counter()
        program, chips, parameters = compiled(run)
        text, memory = program.as_text(), program.memory_analysis()
        if arguments.text:
            (arguments.text / f"{run.topology.replace(':', '-')}.txt").write_text(text)
        found = hlo.collectives(text)
        counted: dict[str, int] = {"states": 0, "gradients": 0}
        for (kind, size), times in found.items():
            counted["gradients" if kind == "all-reduce" else "states"] += size * times
        peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        rows.append(
            {
                "topology": run.topology,
                "chips": chips,
                "tokens": run.tokens,
                "parameters": parameters,
                "peak bytes": peak,
                "fits": peak <= HBM,
                "planned": plan(chips, parameters),
                "counted": counted,
                "collectives": [[kind, size, times] for (kind, size), times in sorted(found.items())],
                "exchanges a layer": sum(n for (kind, _), n in found.items() if kind != "all-reduce") // LAYERS,
                "kernels": text.count('custom_call_target="tpu_custom_call"'),
                **overlapped(text),
                "seconds to compile": round(time.perf_counter() - begun),
            }
        )
        print(json.dumps(rows[-1], indent=1), flush=True)
    if arguments.json:
        content = {"jax": jax.__version__, "rows": rows, "ring": ring()}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(not all(row["fits"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
