"""Trains a small hybrid, Gated DeltaNet and softmax attention in turn, on packed text over 8 devices.

On a CPU the devices are virtual. Rows lie along the mesh axis `"data"`, heads and the columns of MLPs along `"model"`.
Each row holds several documents, which `segment_ids` tell apart. Parameters are float32, what is computed bfloat16, the
loss float32; it leaves out the last byte of every document, after which something unrelated begins. Half-way the
parameters and the optimiser's state are saved by Orbax and restored on a mesh of another shape, which goes on to the
same losses.

    python examples/train_hybrid.py
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from demo import text
from flax import nnx

from ejkernel.layers import GatedDeltaNet, MultiHeadAttention

HALF = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
MLP = {"use_bias": False, **HALF}


def along(*axes):
    """Initial values of a kernel whose rows and columns lie along these axes of a mesh."""
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes, eager_sharding=False)


class Block(nnx.Module):
    def __init__(self, mixer, width, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, **HALF, rngs=rngs) for _ in range(2)])
        self.mixer = mixer
        self.up = nnx.Linear(width, 2 * width, kernel_init=along(None, "model"), **MLP, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, kernel_init=along("model", None), **MLP, rngs=rngs)

    def __call__(self, x, segment_ids):
        x = x + self.mixer(self.norms[0](x), segment_ids=segment_ids)[0]
        # a sum over the devices of a row's axis, which axes that are `Explicit` want said
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))), out_sharding=jax.P("data"))


class Model(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.embed = nnx.Embed(256, width, **HALF, rngs=rngs)
        self.blocks = nnx.List([Block(self.mixer(number, width, rngs), width, rngs) for number in range(depth)])
        self.norm = nnx.RMSNorm(width, **HALF, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, **HALF, rngs=rngs)

    @staticmethod
    def mixer(number, width, rngs):
        if number % 2:
            return MultiHeadAttention(width, heads=4, kv_heads=4, window=64, **HALF, rngs=rngs)
        dims = {"key_dim": width // 4, "value_dim": width // 4}
        return GatedDeltaNet(width, key_heads=4, value_heads=4, **dims, **HALF, rngs=rngs)

    def __call__(self, tokens, segment_ids):
        """Logits, `[rows, T, 256]`."""
        x = self.embed(tokens, out_sharding=jax.P("data"))
        for block in self.blocks:
            x = block(x, segment_ids)
        return self.head(self.norm(x)).astype(jnp.float32)


def batch(step, rows, tokens, mesh):
    """Bytes, what follows each (-1 where a document ends) and their documents' numbers (-1 is padding)."""
    made = [text.batch(row, step, tokens) for row in range(rows)]
    numbers = [np.searchsorted(each.cu_seqlens, np.arange(tokens), side="right") for each in made]
    ids = [np.where(np.arange(tokens) < each.cu_seqlens[-1], n, -1) for each, n in zip(made, numbers, strict=True)]
    arrays = [each.tokens for each in made], [each.targets for each in made], ids
    return [jax.device_put(np.stack(each).astype(np.int32), jax.NamedSharding(mesh, jax.P("data"))) for each in arrays]


def initial(parameters, optimizer):
    return {"parameters": parameters, "optimizer": optimizer.init(parameters)}


def placed(state, mesh):
    """Shapes of parameters and of the optimiser's state, and where they lie: heads along the axis `"model"`."""
    shapes = jax.eval_shape(lambda: state)
    places = jax.tree.map(partial(jax.NamedSharding, mesh), nnx.get_partition_spec(shapes))
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def stepper(graph, optimizer):
    @partial(jax.jit, donate_argnums=0)
    def step(state, tokens, targets, segment_ids):
        def loss(parameters):
            logits = nnx.merge(graph, parameters)(tokens, segment_ids)
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            return jnp.where(targets >= 0, nats, 0).sum() / (targets >= 0).sum()

        found, gradients = jax.value_and_grad(loss)(state["parameters"])
        change, after = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], change), "optimizer": after}, found

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices; others are what they are

    meshes = [jax.make_mesh(shape, ("data", "model")) for shape in ((4, 2), (2, 4))]
    graph, parameters = nnx.split(Model(arguments.width, arguments.depth, nnx.Rngs(0)))
    optimizer = optax.adamw(3e-3)
    step = stepper(graph, optimizer)
    first, other = (placed(initial(parameters, optimizer), mesh) for mesh in meshes)
    rows, half = 8, arguments.steps // 2

    def go_on(state, steps, mesh):
        losses = []
        with jax.set_mesh(mesh):
            for number in steps:
                state, loss = step(state, *batch(number, rows, arguments.tokens, mesh))
                losses.append(float(loss))
        return state, losses

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        state = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), initial(parameters, optimizer), first)
        state, losses = go_on(state, range(half), meshes[0])
        checkpointer.save(Path(folder) / "half-way", state)
        checkpointer.wait_until_finished()
        state, more = go_on(state, range(half, arguments.steps), meshes[0])
        restored = checkpointer.restore(Path(folder) / "half-way", other)
    restored, again = go_on(restored, range(half, arguments.steps), meshes[1])
    for mesh, held in zip(meshes, (state, restored), strict=True):
        kernel = held["parameters"]["blocks"][0]["mixer"]["out"]["kernel"].get_value()
        part = kernel.addressable_shards[0].data.shape
        print(f"mesh {dict(mesh.shape)}: {part} of a kernel {kernel.shape} in {kernel.dtype} on each device")
    print(f"loss {losses[0]:.3f} at first, {more[-1]:.3f} at last; guessing costs {np.log(256):.3f} nats")
    print(f"restored on another mesh, losses differ by {np.abs(np.subtract(more, again)).max():.1e}")


if __name__ == "__main__":
    main()
