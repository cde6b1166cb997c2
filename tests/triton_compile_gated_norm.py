"""Compiles the kernels of norm and output gate, as `triton_compile.py` does those of the linear recurrence.

python tests/triton_compile_gated_norm.py [CAPABILITY DTYPE HEADSxDIM KIND]...
"""

import jax
import jax.numpy as jnp
import numpy as np
from triton_compile import launches, print_each, shared_memory

from ejkernel.kernels.gated_norm import triton
from ejkernel.kernels.gated_norm.call import Call


def main(capability, dtype, dims, kind):
    (heads, dim), groups, dtype = map(int, dims.split("x")), kind == "groups", jnp.dtype(dtype)
    call = Call(2, 96, heads, dim, 1e-5, "silu", groups, not groups, np.dtype(dtype))
    tokens, scale = jnp.zeros((2, 96, heads, dim), dtype), jnp.ones((heads, dim) if groups else dim)
    arrays = (tokens, tokens, scale, tokens, scale) if groups else (tokens, tokens, scale, None, None)

    def program():
        gradient = jax.grad(lambda arrays: triton.run(call, *arrays).astype(jnp.float32).sum())
        jax.jit(gradient).trace(arrays).lower(lowering_platforms=("cuda",))

    found = launches(int(capability), program)
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
