"""Generates from a cache of states: prompts of different lengths at once, then one token at a time.

Three prompts are read in one packed call. Their states go into a cache by name; each is as large as any other, however
long its prompt was. Generation goes on from them as a batch, each step updating its states in place. Then one prompt is
continued otherwise from the cached state, without being read again. All of it is compared with one pass over prompt
and continuation. The model has learnt nothing, so what it writes makes no sense; that it is the same does.

    python examples/decode.py
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel.layers import GatedLinearAttention

SYMBOLS = 64


class Model(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.embed = nnx.Embed(SYMBOLS, width, rngs=rngs)
        self.layers = nnx.List([GatedLinearAttention(width, heads=2, convolution=4, rngs=rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, SYMBOLS, rngs=rngs)

    def __call__(self, tokens, states=None, cu_seqlens=None):
        x, after = self.embed(tokens), []
        for layer, state in zip(self.layers, states or [None] * len(self.layers), strict=True):
            mixed, state = layer(x, state, cu_seqlens)
            x = x + mixed
            after.append(state)
        return self.head(x), after


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40, help="how many to generate")
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    graph, parameters = nnx.split(Model(arguments.width, 2, nnx.Rngs(0)))
    random = np.random.default_rng(0)
    prompts = {name: random.integers(SYMBOLS, size=length) for name, length in (("a", 7), ("b", 90), ("c", 31))}

    room = sum(map(len, prompts.values())) + len(prompts) * (arguments.tokens + 1)

    @jax.jit
    def read_packed(parameters, tokens, cu_seqlens):
        return nnx.merge(graph, parameters)(tokens, cu_seqlens=cu_seqlens)

    def read(*sequences):
        """Each sequence's logits and the states after them; one program for all, as padding and empty ones are free."""
        ends = np.cumsum([len(each) for each in sequences] + [0] * (len(prompts) - len(sequences)))
        tokens = np.zeros(room, np.int32)
        tokens[: ends[-1]] = np.concatenate(sequences)
        logits, states = read_packed(parameters, tokens, np.concatenate([[0], ends]))
        return np.split(np.asarray(logits), ends)[: len(sequences)], states

    @partial(jax.jit, donate_argnums=1)
    def step(parameters, states, token):
        logits, states = nnx.merge(graph, parameters)(token[:, None], states)
        return states, logits[:, 0]

    def generate(states, logits):
        """Continues a batch from its states and the logits of its next token; the tokens and their logits."""
        written, scores = [], []
        for _ in range(arguments.tokens):
            written.append(logits.argmax(-1))
            scores.append(logits)
            states, logits = step(parameters, states, written[-1])
        return np.stack(written, 1), np.stack(scores, 1)

    logits, states = read(*prompts.values())
    cache = {name: jax.tree.map(lambda x, n=n: x[n : n + 1], states) for n, name in enumerate(prompts)}
    for name, state in cache.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        print(f"prompt {name}: {len(prompts[name]):3} tokens, state of {size:,} bytes")

    written, scores = generate(states, jnp.stack([each[-1] for each in logits]))
    whole, _ = read(*map(np.append, prompts.values(), written))
    for (name, prompt), expected, score in zip(prompts.items(), whole, scores, strict=True):
        error = np.abs(expected[len(prompt) - 1 : -1] - score).max()
        print(f"prompt {name}: wrote {len(score)} tokens, {error:.1e} from one pass over everything")

    question = random.integers(SYMBOLS, size=1)
    copied = jax.tree.map(jnp.copy, cache["b"])  # a step consumes the states it is given; the cache keeps its own
    (tokens,), (score,) = generate(*step(parameters, copied, question))
    (expected,), _ = read(np.concatenate([prompts["b"], question, tokens]))
    error = np.abs(expected[len(prompts["b"]) : -1] - score).max()
    print(f"prompt b: continued otherwise from its cached state, {error:.1e} from one pass")


if __name__ == "__main__":
    main()
