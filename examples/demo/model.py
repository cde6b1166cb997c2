"""A byte-level language model made of the layers."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

Mixer = Callable[[int, int, nnx.Rngs], Any]


class Block(nnx.Module):
    """A layer that mixes tokens, then an MLP, each with a norm before it and a residual connection around it."""

    def __init__(self, mixer: Mixer, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.mixer_norm = nnx.RMSNorm(width, rngs=rngs)
        self.mixer = mixer(width, heads, rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, state: Any, cu_seqlens: jax.Array | None) -> tuple[jax.Array, Any]:
        mixed, state = self.mixer(self.mixer_norm(x), state, cu_seqlens)
        x = x + mixed
        return x + self.down(jax.nn.silu(self.up(self.norm(x)))), state


class ByteModel(nnx.Module):
    """Logits of the next byte from the bytes so far."""

    def __init__(self, mixer: Mixer, *, width: int, heads: int, depth: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.blocks = nnx.List([Block(mixer, width, heads, rngs) for _ in range(depth)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, use_bias=False, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, states: tuple[Any, ...] | None = None, cu_seqlens: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """`tokens` is `[B, T]`, packed `[T]`; the states, one a block, are what the layers return."""
        x = self.embed(tokens)
        after = []
        for block, state in zip(self.blocks, states or (None,) * len(self.blocks), strict=True):
            x, state = block(x, state, cu_seqlens)
            after.append(state)
        return self.head(self.norm(x)), tuple(after)
