"""Which weights dropout keeps, as a function of the key and of where the weight stands, and of nothing else.

Blocks of any shape, forward or backward, thus find the same answer without anything being stored.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels.attention.call import Call

# Threefry-2x32 (Salmon et al. 2011, table 2); 13 rounds are the fewest that pass BigCrush
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_ROUNDS = 13
_PARITY = np.uint32(0x1BD11BDA)


def kept(call: Call, key: Array, query: Array, keys: Array) -> Array:
    """Bool `[B, Hkv, G, queries, keys]` for these query and key positions, True with probability `1 - dropout`.

    `key` is what a call has: two words, or four.
    """
    rows = jnp.arange(call.batch, dtype=jnp.uint32).reshape(-1, 1, 1, 1, 1)
    heads = jnp.arange(call.heads, dtype=jnp.uint32).reshape(1, call.kv_heads, call.groups, 1, 1)
    first, in_all = (key[2], key[3]) if is_placed(key) else (np.uint32(0), np.uint32(call.heads))
    row = (first + rows * in_all + heads) * np.uint32(call.queries) + query.astype(jnp.uint32).reshape(1, 1, 1, -1, 1)
    bits, _ = _threefry(key[0], key[1], row, keys.astype(jnp.uint32).reshape(1, 1, 1, 1, -1))
    return bits >= np.uint32(least(call))


def least(call: Call) -> int:
    """The least word that keeps a weight; 0 without dropout."""
    return min(round(call.dropout * 2**32), 2**32 - 1)


def is_placed(key: Array) -> bool:
    """Whether the two words are followed by the numbers of the call's first head and of a row's heads.

    Both are counted in the call that this one is a part of, where several devices share that, see `_mesh`.
    """
    return key.shape[0] == 4


def words(key: Array) -> Array:
    """The two words that stand for `key`, typed or raw."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    first, second = data[0], data[1]
    for i in range(2, data.shape[0], 2):
        first, second = _threefry(first, second, data[i], data[i + 1])
    return jnp.stack([first, second])


def _threefry(key_0: Array, key_1: Array, count_0: Array, count_1: Array) -> tuple[Array, Array]:
    keys = (key_0, key_1, key_0 ^ key_1 ^ _PARITY)
    x_0, x_1 = jnp.broadcast_arrays(count_0 + key_0, count_1 + key_1)
    for i in range(_ROUNDS):
        turn = np.uint32(_ROTATIONS[i % 8])
        x_0 = x_0 + x_1
        x_1 = ((x_1 << turn) | (x_1 >> (np.uint32(32) - turn))) ^ x_0
        if i % 4 == 3:
            step = i // 4 + 1
            x_0, x_1 = x_0 + keys[step % 3], x_1 + keys[(step + 1) % 3] + np.uint32(step)
    return x_0, x_1
