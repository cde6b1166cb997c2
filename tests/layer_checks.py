"""Every layer on a mesh, rows along one axis and heads along the other: a part of `parallel_checks.py`."""

import functools

import jax
import jax.numpy as jnp
from conftest import assert_close
from flax import nnx
from layer_cases import PUBLISHED, WIDTH

from benchmarks import hlo

ROWS, TOKENS = 4, 5
MADE = {name: nnx.split(each.make()) for name, each in PUBLISHED.items()}


def call(parameters, x, states):
    """Outputs and states of all layers."""
    return {name: nnx.merge(graph, parameters[name])(x, states.get(name)) for name, (graph, _) in MADE.items()}


def caches():
    made = {name: nnx.merge(*each) for name, each in MADE.items()}
    return {name: layer.empty_cache(ROWS, TOKENS + 1) for name, layer in made.items() if hasattr(layer, "empty_cache")}


@jax.jit
def prompt(parameters, x):
    """Outputs with their gradients, and the states."""

    def loss(parameters, x):
        results = call(parameters, x, caches())
        return sum(jnp.sin(output).sum() for output, _ in results.values()), results

    gradients, results = jax.grad(loss, (0, 1), has_aux=True)(parameters, x)
    return (
        {name: each[0] for name, each in results.items()},
        gradients,
        {name: each[1] for name, each in results.items()},
    )


def check():
    """Outputs, gradients and a step from donated states, parameters lying as they say: the same as on one device."""
    step = jax.jit(lambda states, parameters, x: call(parameters, x, states), donate_argnums=0)

    def run(parameters, x, token):
        *found, states = prompt(parameters, x)
        found.append(step(states, parameters, token))
        assert all(each.is_deleted() for each in jax.tree.leaves(states))
        return found

    parameters = {name: each for name, (_, each) in MADE.items()}
    x, token = (jax.random.normal(jax.random.key(i), (ROWS, n, WIDTH)) for i, n in enumerate((TOKENS, 1)))
    expected = run(parameters, x, token)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        rows = jax.NamedSharding(mesh, jax.P("data"))
        places = jax.tree.map(functools.partial(jax.NamedSharding, mesh), nnx.get_partition_spec(parameters))
        found = run(jax.device_put(parameters, places), *jax.device_put((x, token), rows))
        for (path, one), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
            assert_close(one, wanted, 1e-5, f"{kind}: {jax.tree_util.keystr(path)}")
        for name, (output, _) in found[-1].items():
            assert output.addressable_shards[0].data.shape[0] == ROWS // 2, f"{name}: {output.sharding}"


def check_collectives():
    """Devices that share rows add up a layer's output and its input's gradient; all else that moves is small.

    It is gradients of parameters that every device has.
    """
    rows, tokens = 4, 128
    for name, (graph, parameters) in MADE.items():
        auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
        # for both kinds of axes the products around ops are split alike
        for kind in (auto, explicit) if name in ("gdn", "mamba") else (explicit,):
            mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
            along_rows = jax.NamedSharding(mesh, jax.P("data"))
            x = jax.ShapeDtypeStruct((rows, tokens, WIDTH), jnp.float32, sharding=along_rows)
            ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=along_rows)
            places = jax.tree.map(functools.partial(jax.NamedSharding, mesh), nnx.get_partition_spec(parameters))
            put = jax.device_put(parameters, places)

            def loss(parameters, x, ids, graph=graph):
                return jnp.sin(nnx.merge(graph, parameters)(x, segment_ids=ids)[0]).sum()

            text = jax.jit(jax.grad(loss, (0, 1))).lower(put, x, ids).compile().as_text()
            found = hlo.collectives(text)
            large = {key for key in found if key[1] > tokens * WIDTH // 4}  # a sixteenth of a device's rows
            assert large and {each for each, _ in large} == {"all-reduce"}, f"{name}, {kind}: {found}"
