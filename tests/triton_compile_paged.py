"""Compiles the kernels of attention over pages for a GPU that need not be there, and prints their shared memory.

python tests/triton_compile_paged.py [CAPABILITY DTYPE DIMxVALUE_DIM KIND]...
"""

import jax
import jax.numpy as jnp
from triton_compile import launches, print_each, shared_memory

from ejkernel import PagedCache, paged_attention

KINDS = {
    "decoding": (8, 8, {}),  # tokens, sequences, options
    "prompts": (4096, 8, {}),
    "window": (8, 8, {"sliding_window": 2000, "logits_soft_cap": 20.0, "softmax_aux": jnp.zeros((16, 1))}),
}


def program(dtype, dims, kind):
    dim, value_dim = map(int, dims.split("x"))
    T, N, options = KINDS[kind]
    latent = dim > 512
    heads = 1 if latent else 4
    new = [jax.ShapeDtypeStruct((T, heads, each), dtype) for each in (dim, value_dim)]
    pages = [jax.ShapeDtypeStruct((1024, 64, heads, each), dtype) for each in (dim, value_dim)]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((N, 64), (N,), (N + 1,))]
    query, cache = jax.ShapeDtypeStruct((T, 16, dim), dtype), PagedCache(*pages)
    if latent:
        new[1], cache, options = None, cache._replace(value=None), options | {"value_dim": value_dim}

    def run(*arrays):
        return paged_attention(*arrays, **options, platform="triton")

    jax.jit(run).lower(query, *new, cache, *ints)


def main(capability, dtype, dims, kind):
    found = launches(int(capability), lambda: program(dtype, dims, kind))
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
