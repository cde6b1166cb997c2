"""Compiles every kernel of a call of attention for a GPU that need not be there, and prints its shared memory.

python tests/triton_compile_attention.py [CAPABILITY DTYPE DIM KIND]...
"""

import jax
import jax.numpy as jnp
from triton_compile import launches, print_each, shared_memory

from ejkernel.attention import flash_attention

KINDS = {
    "causal": {"causal": True},
    "window": {"sliding_window": (40, 10), "logits_soft_cap": 20.0, "return_lse": True},
    "packed": {"causal": True, "cu_seqlens": jnp.array([0, 100, 256])},
    "segments": {"causal": True, "segment_ids": jnp.zeros((1, 256), jnp.int32)},
    "masked": {},
    "biased": {"causal": True},
    "pairs": {"deterministic": False, "dropout_prob": 0.1, "dropout_rng": jnp.zeros(2, jnp.uint32)},
    "decoding": {"causal": True, "query_offset": jnp.array([100])},
}


def program(dtype, dim, kind):
    """A call with everything that `kind` has, its gradients and its tangents."""
    queries = 1 if kind == "decoding" else 256
    arrays = {"query": (1, queries, 4, dim), "key": (1, 256, 2, dim), "value": (1, 256, 2, dim)}
    arrays = {name: jnp.zeros(shape, dtype) for name, shape in arrays.items()}
    if kind == "biased":
        arrays["bias"] = jnp.zeros((1, 2, 256, 256), dtype)
    if kind == "pairs":
        arrays |= {"bias": jnp.zeros((1, 2, 256, 256), jnp.float32), "softmax_aux": jnp.zeros((4, 2), dtype)}
    masks = {"decoding": (1, 1, 1, 256), "masked": (1, 4, 256, 256), "pairs": (1, 1, 256, 256)}
    mask = {"attention_mask": jnp.ones(masks[kind], bool)} if kind in masks else {}

    def run(arrays):
        call = lambda arrays: flash_attention(**arrays, **mask, **KINDS[kind], dtype=None, platform="triton")  # noqa: E731
        results, pull = jax.vjp(call, arrays)
        return pull(results), jax.jvp(call, (arrays,), (arrays,))

    jax.jit(run).lower(arrays)


def main(capability, dtype, dim, kind):
    found = launches(int(capability), lambda: program(dtype, int(dim), kind))
    return [(each[0].fn.__name__, shared_memory(int(capability), *each)) for each in found]


if __name__ == "__main__":
    print_each(main)
