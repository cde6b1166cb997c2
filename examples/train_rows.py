"""Trains a small hybrid on rows of several sequences, in batches as grain and seqio make them.

A batch is a dict of arrays `[rows, tokens]`: `inputs` and `targets`, `inputs_segmentation` that numbers the sequences
of a row from 1 on and is 0 where a row is padded, and `inputs_position` that counts from 0 in each. Both kinds of
layers, the gated delta rule and softmax attention, take these ids; only padding is a negative id here.

A sequence is a random word, repeated. The loss on repeated symbols falls far below that of guessing; on new ones it
never does, as nothing leaks from the sequences before.

    python examples/train_rows.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ejkernel

SYMBOLS, HEADS = 16, 2


def documents(random):
    """Sequences of symbols 1, 2, …, and from where on each repeats itself; 0 is left for padding."""
    while True:
        word = random.integers(1, SYMBOLS + 1, size=random.integers(3, 9))
        yield np.resize(word, random.integers(10, 40)), len(word)


def batches(random, rows, tokens):
    """Sequences packed into rows, first fit, as the packing of grain or seqio would hand them over."""
    source, held = documents(random), None
    while True:
        names = ("inputs", "targets", "inputs_segmentation", "inputs_position", "repeated")
        batch = {name: np.zeros((rows, tokens), np.int32) for name in names}
        used, count = np.zeros(rows, int), np.zeros(rows, int)
        while True:
            document, new = held or next(source)
            length, held = len(document) - 1, None
            fitting = np.flatnonzero(used + length <= tokens)
            if not fitting.size:
                held = document, new  # the first of the next batch
                break
            row = fitting[0]
            here = row, slice(used[row], used[row] + length)
            count[row] += 1
            batch["inputs"][here], batch["targets"][here] = document[:-1], document[1:]
            batch["inputs_segmentation"][here] = count[row]
            batch["inputs_position"][here] = np.arange(length)
            batch["repeated"][here] = np.arange(1, length + 1) >= new
            used[row] += length
        yield batch


def parameters(key, width, depth):
    """One layer of the delta rule and one of attention in turn."""

    def matrix(*shape):
        nonlocal key
        key, mine = jax.random.split(key)
        return jax.random.normal(mine, shape) * shape[0] ** -0.5

    layers = [{"qkv": matrix(width, 3 * width), "gates": matrix(width, 2 * HEADS)} for _ in range(depth)]
    for layer in layers:
        layer["out"] = matrix(width, width)
    return {"embed": matrix(SYMBOLS + 1, width), "layers": layers, "head": matrix(width, SYMBOLS + 1)}


def norm(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def rotated(x, position):
    """Rotary embedding: positions begin anew with every sequence, as `inputs_position` has them."""
    half = x.shape[-1] // 2
    angle = position[..., None, None] * 100.0 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], -1
    )


def logits(params, batch):
    # padding is 0 in the batch and negative here
    ids = jnp.where(batch["inputs_segmentation"] == 0, -1, batch["inputs_segmentation"])
    x = params["embed"][batch["inputs"]]
    for number, layer in enumerate(params["layers"]):
        normed = norm(x)
        heads = (normed @ layer["qkv"]).reshape(*ids.shape, 3, HEADS, -1)
        query, key, value = (heads[:, :, i] for i in range(3))
        if number % 2 == 0:
            decay, beta = jnp.split(normed @ layer["gates"], 2, -1)
            decay, beta = jax.nn.log_sigmoid(decay + 4), jax.nn.sigmoid(beta)
            mixed, _ = ejkernel.gated_delta_rule(query, key, value, decay, beta, normalize=True, segment_ids=ids)
        else:
            query, key = (rotated(x, batch["inputs_position"]) for x in (query, key))
            mixed = ejkernel.flash_attention(query, key, value, causal=True, segment_ids=ids)
        x = x + mixed.reshape(x.shape) @ layer["out"]
    return norm(x) @ params["head"]


def losses(params, batch):
    """Mean loss on all, on repeated and on new symbols; padding does not count."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits(params, batch), batch["targets"])

    def mean(counted):
        return jnp.where(counted, nats, 0).sum() / jnp.maximum(counted.sum(), 1)

    there, repeated = batch["inputs_segmentation"] > 0, batch["repeated"] > 0
    return mean(there), (mean(there & repeated), mean(there & ~repeated))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    params = parameters(jax.random.key(0), arguments.width, depth=2)
    optimizer = optax.adam(3e-3)
    state = optimizer.init(params)

    @jax.jit
    def train_step(params, state, batch):
        gradients, found = jax.grad(losses, has_aux=True)(params, batch)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, found

    print(f"guessing among {SYMBOLS} symbols costs {np.log(SYMBOLS):.2f} nats")
    packed = batches(np.random.default_rng(0), arguments.rows, arguments.tokens)
    for step in range(1, arguments.steps + 1):
        params, state, (on_repeated, on_new) = train_step(params, state, next(packed))
        if step == 1 or step % max(arguments.steps // 10, 1) == 0:
            print(f"step {step:4}   repeated {on_repeated:.3f}   new {on_new:.3f}", flush=True)


if __name__ == "__main__":
    main()
