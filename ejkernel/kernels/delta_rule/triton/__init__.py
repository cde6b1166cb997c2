"""The delta rule on NVIDIA GPUs, as Triton kernels."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch, _varying
from ejkernel.kernels.chunks.kernels import Kernels, recurrence
from ejkernel.kernels.chunks.pools import PooledCall
from ejkernel.kernels.chunks.triton import pools
from ejkernel.kernels.chunks.triton.launching import at_most_float32
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton import passes
from ejkernel.kernels.delta_rule.triton.launcher import Plan

_KERNELS = Kernels(passes.forward, passes.backward, lambda call, inputs: xla.run(call, *inputs))
_LARGEST_KEY_DIM = 256


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.key_dim > _LARGEST_KEY_DIM:
        return f"a key dim above {_LARGEST_KEY_DIM} (K={call.key_dim})"
    sizes = (call.batch, call.tokens, call.heads, call.key_dim, call.value_dim, call.sequences)
    return _launch.refusal([call.dtype], sizes)


def run(call: Call, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    inner, operands = _cast(call, *arrays)
    output, last = recurrence(_KERNELS, inner, Plan.of(inner), passes.Inputs(*operands))
    return output.astype(call.dtype), last


supports_pooled = pools.supports(supports)


def run_pooled(pooled: PooledCall, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output and pool; arrays as `PooledCall` lists them."""
    call, operands = _cast(pooled.call, *arrays)
    kernels = pools.Kernels(passes.pooled_launcher, passes.step, passes.walk_prompts)
    output, states = pools.run(kernels, pooled, call, *operands)
    return output.astype(pooled.call.dtype), states


def _cast(call: Call, *arrays: jax.Array | None) -> tuple[Call, tuple[Any, ...]]:
    """A call and its arrays in dtypes that the kernels have."""
    query, key, value, *rest = arrays
    # A query or key that was normalized or scaled comes in float32, and may be rounded as the values are: bfloat16 has
    # the range. float16 has not, so states and what is added to them are carried in float32.
    wide = call.dtype != jnp.bfloat16 or value.dtype != jnp.bfloat16  # type: ignore[union-attr]
    dtype = np.dtype(np.float32 if wide else jnp.bfloat16)
    tokens = [each.astype(dtype) for each in (query, key, value)]  # type: ignore[union-attr]
    return replace(call, dtype=dtype), _varying.align((*tokens, *map(at_most_float32, rest)))
