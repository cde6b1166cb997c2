"""Chunked cumulative sums against `g + 1`, the least any function that reads and writes the array can cost."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Row, compare
from ejkernel.xla_utils import chunk_global_cumsum, chunk_local_cumsum

LOCAL_BAR = 2.5
GLOBAL_BAR = 5.0
CHUNK = 64


def run() -> list[Row]:
    g = jax.random.normal(jax.random.key(0), (4, 8192, 16, 64), jnp.float32)
    stream = g.reshape(1, 4 * 8192, 16, 64)  # a packed batch has one row
    ends = np.sort(np.random.default_rng(0).integers(1, stream.shape[1], 15))
    cu = jnp.asarray([0, *ends, stream.shape[1]], jnp.int32)

    add = jax.jit(lambda g: g + 1)
    local = jax.jit(lambda g: chunk_local_cumsum(g, CHUNK))
    local_reverse = jax.jit(lambda g: chunk_local_cumsum(g, CHUNK, reverse=True))
    local_packed = jax.jit(lambda g, cu: chunk_local_cumsum(g, CHUNK, cu_seqlens=cu))
    whole = jax.jit(chunk_global_cumsum)
    whole_reverse = jax.jit(lambda g: chunk_global_cumsum(g, reverse=True))
    whole_packed = jax.jit(lambda g, cu: chunk_global_cumsum(g, cu_seqlens=cu))
    return compare(
        "cumsum [4, 8192, 16, 64] float32",
        {
            "g + 1": lambda: add(g),
            "local": lambda: local(g),
            "local, reverse": lambda: local_reverse(g),
            "local, packed": lambda: local_packed(stream, cu),
            "global": lambda: whole(g),
            "global, reverse": lambda: whole_reverse(g),
            "global, packed": lambda: whole_packed(stream, cu),
        },
        bars={
            "local": LOCAL_BAR,
            "local, reverse": LOCAL_BAR,
            "local, packed": GLOBAL_BAR,
            "global": GLOBAL_BAR,
            "global, reverse": GLOBAL_BAR,
            "global, packed": GLOBAL_BAR,
        },
    )
