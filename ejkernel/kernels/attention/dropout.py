"""Which weights dropout keeps: a hash of the random key and of the weight's place, and of nothing else.

So blocks of any shape, forward and backward, draw the same mask, and no mask is stored.
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


def keep_mask(call: Call, key: Array, query: Array, keys: Array) -> Array:
    """Bool `[B, Hkv, G, queries, keys]` for these query and key positions, True with probability `1 - dropout`.

    `key` is a call's `dropout_key`: two words, or four.
    """
    rows = jnp.arange(call.batch, dtype=jnp.uint32).reshape(-1, 1, 1, 1, 1)
    heads = jnp.arange(call.heads, dtype=jnp.uint32).reshape(1, call.kv_heads, call.groups, 1, 1)
    first, in_all = (key[2], key[3]) if is_placed(key) else (np.uint32(0), np.uint32(call.heads))
    row = (first + rows * in_all + heads) * np.uint32(call.queries) + query.astype(jnp.uint32).reshape(1, 1, 1, -1, 1)
    bits, _ = _threefry(key[0], key[1], row, keys.astype(jnp.uint32).reshape(1, 1, 1, 1, -1))
    return bits >= np.uint32(threshold(call))


def threshold(call: Call) -> int:
    """The least word of random bits that keeps a weight; 0 without dropout."""
    return min(round(call.dropout * 2**32), 2**32 - 1)


def is_placed(key: Array) -> bool:
    """Whether `key` is that of one device's part of a call, see `_mesh`.

    Its two words are then followed by the number of the part's first head in the whole call, and by how many heads a
    row of the whole call has.
    """
    return key.shape[0] == 4


def words(key: Array) -> Array:
    """A random key, typed or raw, as two words."""
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
