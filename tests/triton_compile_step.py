"""Compiles the kernels of a layer's step, as `triton_compile.py` does those of the linear recurrence.

python tests/triton_compile_step.py [CAPABILITY DTYPE KEY_DIMxVALUE_DIM LAYER]...
"""

import jax
import jax.numpy as jnp
from flax import nnx
from triton_compile import launches, print_each, shared_memory

from ejkernel import layers

MAKE = {
    "gla": lambda K, V, **more: layers.GatedLinearAttention(
        64, 2, key_width=2 * K, value_width=2 * V, convolution=4, **more
    ),
    "delta": lambda K, V, **more: layers.GatedDeltaNet(64, key_heads=1, value_heads=2, key_dim=K, value_dim=V, **more),
    "kda": lambda K, V, **more: layers.KimiDeltaAttention(64, 1, head_dim=K, value_dim=V, **more),
    "mamba": lambda K, V, **more: layers.Mamba2(64, 2, head_dim=V, state_dim=K, **more),
    "softmax": lambda K, V, **more: layers.MultiHeadAttention(64, 2, head_dim=K, norm=True, rotary_dim=K // 2, **more),
}


def main(capability, dtype, dims, kind):
    dims, dtype = map(int, dims.split("x")), jnp.dtype(dtype)
    x = jax.ShapeDtypeStruct((2, 1, 64), dtype)
    # weights that are shapes alone, which need no program that draws them
    made, weights = nnx.split(nnx.eval_shape(lambda: MAKE[kind](*dims, dtype=dtype, rngs=nnx.Rngs(0))))

    def call(weights, *arrays):
        return nnx.merge(made, weights)(*arrays)

    if kind == "softmax":
        state = jax.eval_shape(lambda weights: nnx.merge(made, weights).empty_cache(2, 64), weights)
    else:
        state = jax.eval_shape(call, weights, x)[1]

    def program():
        jax.jit(call).trace(weights, x, state).lower(lowering_platforms=("cuda",))

    found = launches(int(capability), program)
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
