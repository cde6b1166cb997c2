"""Every layer on a mesh, rows along one axis and heads along the other: a part of `parallel_checks.py`."""

import jax
import jax.numpy as jnp
from conftest import assert_close
from flax import nnx
from layer_cases import PUBLISHED, WIDTH

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

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    parameters = {name: each for name, (_, each) in MADE.items()}
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), nnx.get_partition_spec(parameters))
    x, token = (jax.random.normal(jax.random.key(i), (ROWS, n, WIDTH)) for i, n in enumerate((TOKENS, 1)))
    expected = run(parameters, x, token)
    found = run(jax.device_put(parameters, places), *jax.device_put((x, token), rows))
    for (path, one), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, wanted, 1e-5, jax.tree_util.keystr(path))
    for name, (output, _) in found[-1].items():
        assert output.addressable_shards[0].data.shape[0] == ROWS // 2, f"{name}: {output.sharding}"
