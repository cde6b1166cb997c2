"""Trains a stack of 8 blocks that are compiled as one: `lax.scan` over parameters that are stacked.

A block is a recurrent layer and an MLP. Its backward pass computes again what is not kept; what is kept is chosen by
name. Parameters lie on a mesh of virtual devices as their partitioning says, each layer's heads along one axis.

    python examples/train_stacked.py --policy op
"""

import argparse
import functools
import os

DEVICES = 4
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES} " + os.environ.get("XLA_FLAGS", "")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

from ejkernel import layers  # noqa: E402

SYMBOLS = 16
names = jax.checkpoint_policies.save_only_these_names
# what the forward pass keeps for the backward pass, from the least to the most
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "op": names("ejkernel_op"),
    "op and projections": names("ejkernel_op", "ejkernel_projected"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm, self.between = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.mixer = layers.GatedLinearAttention(width, heads=4, convolution=4, rngs=rngs)

        def linear(rows, columns, partition):
            kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), partition, eager_sharding=False)
            return nnx.Linear(rows, columns, use_bias=False, kernel_init=kernel, rngs=rngs)

        self.up, self.down = linear(width, 2 * width, (None, "model")), linear(2 * width, width, ("model", None))

    def __call__(self, x):
        mixed, _ = self.mixer(self.norm(x))
        x = x + mixed
        return x + self.down(jax.nn.silu(self.up(self.between(x))))


class Model(nnx.Module):
    """Blocks of any depth, of which one is compiled."""

    def __init__(self, width, depth, policy, rngs):
        self.embed = nnx.Embed(SYMBOLS, width, rngs=rngs)
        self.blocks = layers.stacked(lambda rngs, number: Block(width, rngs), depth, rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.policy = policy

    def __call__(self, tokens):
        graph, parameters = nnx.split(self.blocks)

        def through(x, parameters):
            return nnx.merge(graph, parameters)(x), None

        # lax.scan keeps the carry of every step; the policy says what else
        through = jax.checkpoint(through, policy=POLICIES[self.policy], prevent_cse=False)
        x, _ = jax.lax.scan(through, self.embed(tokens), parameters)
        return self.embed.attend(self.norm(x))


def repeating(key, rows, tokens):
    """Rows that repeat a word of 8 symbols: what follows can be foreseen from the ninth on."""
    words = jax.random.randint(key, (rows, 8), 0, SYMBOLS)
    return jnp.tile(words, (1, -(-(tokens + 1) // 8)))[:, : tokens + 1]


def trained(model, mesh, steps, rows, tokens):
    """Losses, the last model's parameters, and the bytes that the compiled step keeps besides its arguments."""
    graph, parameters = nnx.split(model)
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), nnx.get_partition_spec(parameters))
    parameters = jax.device_put(parameters, places)
    optimizer = optax.adam(3e-3)
    everywhere = jax.NamedSharding(mesh, jax.P())
    # the moments lie as their parameters; the count of steps is on one device so far
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(parameters))

    def loss(parameters, batch):
        logits = nnx.merge(graph, parameters)(batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses[:, 8:].mean()

    # all that a step gives back lies as what it was given
    @functools.partial(jax.jit, out_shardings=(places, jax.tree.map(lambda each: each.sharding, state), None))
    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, value

    batches = (repeating(jax.random.key(number), rows, tokens) for number in range(steps))
    lying = jax.NamedSharding(mesh, jax.P("data"))
    compiled, losses = None, []
    for batch in batches:
        batch = jax.device_put(batch, lying)
        if compiled is None:
            compiled = step.lower(parameters, state, batch).compile()
        parameters, state, value = compiled(parameters, state, batch)
        losses.append(float(value))
    return losses, parameters, compiled.memory_analysis().temp_size_in_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=POLICIES, default="op")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    automatic = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((DEVICES // 2, 2), ("data", "model"), axis_types=automatic)
    model = Model(arguments.width, arguments.depth, arguments.policy, nnx.Rngs(0))
    losses, parameters, kept = trained(model, mesh, arguments.steps, 8, arguments.tokens)
    kernel = parameters["blocks"]["mixer"]["out"]["kernel"].get_value()
    part = kernel.addressable_shards[0].data.shape
    print(f"{arguments.depth} layers as one: {part} of a kernel {kernel.shape} on each device")
    print(f"keeping {arguments.policy}: {kept / 2**20:.1f} MiB on each device while a step runs")
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last; guessing costs {jnp.log(SYMBOLS):.3f} nats")


if __name__ == "__main__":
    main()
