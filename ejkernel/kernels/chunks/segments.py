"""Where the sequences of segmented calls lie: runs of equal ids in a row. Negative ids are padding, of no sequence."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels.chunks.call import Call


class Runs(NamedTuple):
    """The sequences of rows, as their tokens see them: `[B, T]` each, anything where a token is padding."""

    valid: jax.Array  # whether a token is no padding
    begin: jax.Array  # the first token of its sequence
    end: jax.Array  # the first one behind it
    row_begin: jax.Array  # [B, 1]: the row's first token that is no padding; without any, T
    row_end: jax.Array  # [B, 1]: the first one behind the last; without any, 0

    def first_visited(self, call: Call) -> jax.Array:
        """Whether a token is the first of its sequence to be visited."""
        token = jnp.arange(call.tokens, dtype=np.int32)[None]
        return self.valid & (token == (self.end - 1 if call.reverse else self.begin))

    def first_of_row(self, call: Call) -> jax.Array:
        """Whether a token is the first of its row to be visited."""
        token = jnp.arange(call.tokens, dtype=np.int32)[None]
        return token == (self.row_end - 1 if call.reverse else self.row_begin)


def runs(ids: jax.Array) -> Runs:
    """The sequences that rows of ids hold."""
    T = ids.shape[1]
    token, valid = jnp.arange(T, dtype=np.int32)[None], ids >= 0
    change, border = ids[:, 1:] != ids[:, :-1], jnp.ones_like(valid[:, :1])
    begins = valid & jnp.concatenate([border, change], 1)
    ends = valid & jnp.concatenate([change, border], 1)
    begin = lax.cummax(jnp.where(begins, token, 0), axis=1)
    end = lax.cummin(jnp.where(ends, token + 1, T), axis=1, reverse=True)
    row_begin = jnp.where(valid, token, T).min(1, keepdims=True)
    return Runs(valid, begin, end, row_begin, jnp.where(valid, token + 1, 0).max(1, keepdims=True))


def first_tokens(call: Call, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The token of each row that is visited first, and whether there is one: `[B]` both."""
    valid = ids >= 0
    at = call.tokens - 1 - jnp.argmax(valid[:, ::-1], 1) if call.reverse else jnp.argmax(valid, 1)
    return at, valid.any(1)
