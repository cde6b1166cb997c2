"""Trains one layer of gated linear attention on packed sequences, with Optax.

A sequence is a random word, repeated: its first time cannot be foreseen, everything after it can, by a model that
remembers this sequence and no other. Many sequences of different lengths lie in one stream of fixed length; what is
left of it is padding. The loss on repeated symbols falls far below that of guessing. On new ones it never does:
nothing is known of them, and nothing leaks from the sequences before. It even lies above, for a model that has come to
expect repetition is surprised by something new. New packings do not compile anew.

    python examples/train_packed.py
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ejkernel.layers import GatedLinearAttention

SYMBOLS, TOKENS, SEQUENCES = 16, 512, 24
traced = []


class Model(nnx.Module):
    def __init__(self, width, rngs):
        self.embed = nnx.Embed(SYMBOLS, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.mixer = GatedLinearAttention(width, heads=2, convolution=4, rngs=rngs)
        self.head = nnx.Linear(width, SYMBOLS, rngs=rngs)

    def __call__(self, tokens, cu_seqlens):
        x = self.embed(tokens)
        mixed, _ = self.mixer(self.norm(x), cu_seqlens=cu_seqlens)
        return self.head(x + mixed)


def batch(random):
    """Symbols `[T]`, borders `[N + 1]`, and whether each symbol is a repetition; -1 where it is padding."""
    tokens, repeated, borders = np.zeros(TOKENS, np.int32), np.full(TOKENS, -1), [0]
    for _ in range(SEQUENCES):
        word = random.integers(SYMBOLS, size=random.integers(3, 9))
        length = min(int(random.integers(10, 30)), TOKENS - borders[-1])
        here = slice(borders[-1], borders[-1] + length)
        tokens[here] = np.resize(word, length)
        repeated[here] = np.arange(length) >= len(word)
        borders.append(here.stop)
    return tokens, np.array(borders, np.int32), repeated


def losses(model, tokens, borders, repeated):
    """Mean loss on all, on repeated and on new symbols, each foretold from those before it in its sequence."""
    nats = optax.softmax_cross_entropy_with_integer_labels(model(tokens, borders)[:-1], tokens[1:])
    kind = jnp.asarray(repeated).at[borders[:-1]].set(-1, mode="drop")[1:]  # a first symbol is foretold from nothing

    def mean(counted):
        return jnp.where(counted, nats, 0).sum() / jnp.maximum(counted.sum(), 1)

    return mean(kind >= 0), (mean(kind == 1), mean(kind == 0))


@nnx.jit
def train_step(model, optimizer, packed):
    traced.append("once for each compilation")
    gradients, found = nnx.grad(losses, has_aux=True)(model, *packed)
    optimizer.update(model, gradients)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    model = Model(arguments.width, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    random = np.random.default_rng(0)
    print(f"guessing among {SYMBOLS} symbols costs {np.log(SYMBOLS):.2f} nats")
    for step in range(1, arguments.steps + 1):
        on_repeated, on_new = train_step(model, optimizer, batch(random))
        if step == 1 or step % max(arguments.steps // 10, 1) == 0:
            print(f"step {step:4}   repeated {on_repeated:.3f}   new {on_new:.3f}", flush=True)
    print(f"{arguments.steps} different packings, {len(traced)} compilation")


if __name__ == "__main__":
    main()
