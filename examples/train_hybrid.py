"""Trains a small hybrid, Gated DeltaNet and softmax attention in turn, on packed text over 8 devices.

On a CPU the devices are virtual. Each row of a batch is a stream of packed documents, rows lie along the mesh axis
`"data"`, heads along `"model"`. Parameters are float32, what is computed bfloat16, the loss float32; it leaves out the
last byte of every document, after which something unrelated begins. Half-way the parameters and the optimiser's state
are saved by Orbax and restored on a mesh of another shape, which goes on to the same losses.

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
from flax import nnx

from ejkernel.demo import text
from ejkernel.layers import GatedDeltaNet, MultiHeadAttention

HALF = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}


class Block(nnx.Module):
    def __init__(self, mixer, width, rngs):
        self.norms = nnx.List([nnx.RMSNorm(width, **HALF, rngs=rngs) for _ in range(2)])
        self.mixer = mixer
        self.up = nnx.Linear(width, 2 * width, **HALF, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, **HALF, rngs=rngs)

    def __call__(self, x, cu_seqlens):
        x = x + self.mixer(self.norms[0](x), cu_seqlens=cu_seqlens)[0]
        return x + self.down(jax.nn.silu(self.up(self.norms[1](x))))


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

    def __call__(self, tokens, cu_seqlens):
        """Logits of one stream, `[T, 256]`."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(self.norm(x)).astype(jnp.float32)


def batch(step, rows, tokens, mesh):
    """Bytes, what follows each (-1 where a document ends) and borders, a row of each for every stream."""
    made = [text.batch(row, step, tokens) for row in range(rows)]
    arrays = (np.stack([getattr(each, name) for each in made]) for name in ("tokens", "targets", "cu_seqlens"))
    return [jax.device_put(each, jax.NamedSharding(mesh, jax.P("data"))) for each in arrays]


def start(parameters, optimizer, mesh):
    """Parameters and the optimiser's state, heads along the axis `"model"`."""
    specs = nnx.get_partition_spec(parameters)
    places = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    parameters = jax.device_put(parameters, places)
    everywhere = jax.NamedSharding(mesh, jax.P())
    # what is as large as a parameter lies where that does; a count of steps must be told to be on all devices
    state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(parameters))
    return {"parameters": parameters, "optimizer": state}


def stepper(graph, optimizer, state):
    # what comes out lies where it went in; else the second step would be compiled anew
    places = jax.tree.map(lambda x: x.sharding, state)

    @partial(jax.jit, out_shardings=(places, None), donate_argnums=0)
    def step(state, tokens, targets, cu_seqlens):
        def loss(parameters):
            logits = jax.vmap(nnx.merge(graph, parameters))(tokens, cu_seqlens)
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

    auto = (jax.sharding.AxisType.Auto,) * 2
    meshes = [jax.make_mesh(shape, ("data", "model"), axis_types=auto) for shape in ((4, 2), (2, 4))]
    graph, parameters = nnx.split(Model(arguments.width, arguments.depth, nnx.Rngs(0)))
    optimizer = optax.adamw(3e-3)
    # shapes and places alone, which the checkpoint is read into
    other = jax.tree.map(ocp.utils.to_shape_dtype_struct, start(parameters, optimizer, meshes[1]))
    rows, half = 8, arguments.steps // 2

    def go_on(state, steps, mesh, step):
        losses = []
        for number in steps:
            state, loss = step(state, *batch(number, rows, arguments.tokens, mesh))
            losses.append(float(loss))
        return state, losses

    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        state = start(parameters, optimizer, meshes[0])
        step = stepper(graph, optimizer, state)
        state, losses = go_on(state, range(half), meshes[0], step)
        checkpointer.save(Path(folder) / "half-way", state)
        checkpointer.wait_until_finished()
        state, more = go_on(state, range(half, arguments.steps), meshes[0], step)
        restored = checkpointer.restore(Path(folder) / "half-way", other)
    step = stepper(graph, optimizer, restored)
    restored, again = go_on(restored, range(half, arguments.steps), meshes[1], step)
    for mesh, held in zip(meshes, (state, restored), strict=True):
        kernel = held["parameters"]["blocks"][0]["mixer"]["out"]["kernel"].get_value()
        part = kernel.addressable_shards[0].data.shape
        print(f"mesh {dict(mesh.shape)}: {part} of a kernel {kernel.shape} in {kernel.dtype} on each device")
    print(f"loss {losses[0]:.3f} at first, {more[-1]:.3f} at last; guessing costs {np.log(256):.3f} nats")
    print(f"restored on another mesh, losses differ by {np.abs(np.subtract(more, again)).max():.1e}")


if __name__ == "__main__":
    main()
