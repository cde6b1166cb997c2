"""Shows what a sequence gets from its neighbour in a packed row: nothing here, and something without resets.

Rows of training data often hold several sequences. A model that carries its state from one token to the next carries
it into the next sequence as well, unless it is told where that begins, and trains on what it will never see again. Here
the loss of one sequence is computed three times: behind a neighbour, behind another one, and behind padding. With
`segment_ids` it has the same bits each time. With the same recurrence as a plain `lax.scan` over the row it has not.

    python examples/packing_leak.py
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel

SYMBOLS, HEADS, DIM = 32, 2, 16


def parameters(random):
    """Random weights; nothing is trained."""
    shapes = {"embed": (SYMBOLS, HEADS * DIM), "mix": (HEADS * DIM, 3 * HEADS * DIM), "head": (HEADS * DIM, SYMBOLS)}
    return {
        name: jnp.asarray(random.normal(size=shape) * shape[0] ** -0.5, jnp.float32) for name, shape in shapes.items()
    }


def projected(params, tokens):
    x = params["embed"][tokens]
    return jnp.split((x @ params["mix"]).reshape(*tokens.shape, HEADS, 3 * DIM), 3, -1)


def with_ids(params, tokens, segment_ids):
    """Linear attention with decay, then softmax attention, each within its sequence."""
    query, key, value = projected(params, tokens)
    linear, _ = ejkernel.retention(query, key, value, segment_ids=segment_ids)
    softmax = ejkernel.flash_attention(query, key, value, causal=True, segment_ids=segment_ids)
    return (linear + softmax).reshape(*tokens.shape, -1) @ params["head"]


def by_scan(params, tokens, segment_ids):
    """The linear attention alone, as a scan over the row, which does not look at the ids."""
    query, key, value = projected(params, tokens)
    decay = 1 - 2.0 ** (-5 - jnp.arange(HEADS))

    def step(state, token):
        query, key, value = token
        state = decay[:, None, None] * state + key[..., None] * value[..., None, :]
        return state, jnp.einsum("hkv,hk->hv", state, query) * DIM**-0.5

    row = (x[0] for x in (query, key, value))
    _, output = jax.lax.scan(step, jnp.zeros((HEADS, DIM, DIM)), tuple(row))
    return output.reshape(*tokens.shape, -1) @ params["head"]


def loss(model, params, tokens, segment_ids, which):
    """Mean loss of the sequence with id `which`, each symbol foretold from those before it."""
    logits = jax.nn.log_softmax(model(params, tokens, segment_ids)[:, :-1])
    nats = -jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    counted = (segment_ids[:, 1:] == which) & (segment_ids[:, :-1] == which)
    return jnp.where(counted, nats, 0).sum() / counted.sum()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96, help="of the sequence and of its neighbour")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    params = parameters(random)
    neighbour, other, sequence = random.integers(SYMBOLS, size=(3, arguments.tokens))
    rows = {"a neighbour": (neighbour, 1), "another": (other, 1), "padding": (0 * neighbour, -1)}
    for name, model in (("segment_ids", with_ids), ("a plain scan", by_scan)):
        run = jax.jit(loss, static_argnums=(0, 4))
        found = {}
        for before, (tokens, number) in rows.items():
            row = jnp.asarray(np.concatenate([tokens, sequence])[None])
            ids = jnp.asarray(np.repeat([number, 2], arguments.tokens)[None])
            found[before] = float(run(model, params, row, ids, 2))
        told = ", ".join(f"{value:.7f} behind {before}" for before, value in found.items())
        verdict = "the same bits" if len(set(found.values())) == 1 else "it leaks"
        print(f"{name}: {told}: {verdict}")


if __name__ == "__main__":
    main()
