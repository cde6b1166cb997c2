"""The gated linear recurrence on NVIDIA GPUs, as Triton kernels."""

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
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call, Decay
from ejkernel.kernels.linear_recurrence.triton import both_gates, passes, value_gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.xla_utils.utils import prepare_sequence_ids

_LARGEST_DIM = 512  # of dims that gates are folded into


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.key_dim > _LARGEST_DIM:
        return f"a key dim above {_LARGEST_DIM} (K={call.key_dim})"
    if call.value_decay and call.value_dim > _LARGEST_DIM:
        return f"a value dim above {_LARGEST_DIM} that decays (V={call.value_dim})"
    if call.segmented and call.value_decay and call.decay == "key":
        # strong gates in one sequence would move the whole row to XLA, and change other sequences' bits
        return "rows of several sequences (segment_ids) whose key dims and value dims decay"
    if call.scale == 0 or not np.isfinite(call.scale):
        return f"softmax_scale {call.scale}: the gradient kernels divide by it"
    sizes = (call.batch, call.tokens, call.heads, call.key_dim, call.value_dim, call.sequences)
    return _launch.refusal([call.dtype], sizes)


def run(
    call: Call,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    value_log_decay: jax.Array | None,
    initial_state: jax.Array | None,
    cu_seqlens: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The call's output and final states; arrays as `Call` lists them."""
    decay: Decay = call.decay
    if value_log_decay is not None and decay != "key":
        # a head's decay joins that of its value dims
        value_log_decay = _of_value_dims(call, log_decay, value_log_decay, cu_seqlens)
        log_decay, decay = None, "none"
    others = log_decay, value_log_decay, initial_state, cu_seqlens
    inner, arrays = cast_inputs(replace(call, decay=decay), query, key, value, *others)
    kernels, plan = _kernels(inner)
    output, final = recurrence(kernels, inner, plan, Inputs(*arrays))
    return output.astype(call.dtype), final


supports_pooled = pools.supports(supports)


def run_pooled(pooled: PooledCall, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Output and pool; arrays as `PooledCall` lists them."""
    call, operands = cast_inputs(pooled.call, *arrays)
    # value dims that decay have no walk
    kernels = pools.Kernels(passes.pooled_launcher, passes.step, None if call.value_decay else passes.walk_prompts)
    output, states = pools.run(kernels, pooled, call, *operands)
    return output.astype(pooled.call.dtype), states


def cast_inputs(call: Call, query: jax.Array, key: jax.Array, value: jax.Array, *others: Any) -> tuple[Call, list[Any]]:
    """A call and its arrays, cast to dtypes that the kernels support."""
    dtype = _common_dtype(call, query, key, value)
    arrays = [*(each.astype(dtype) for each in (query, key, value)), *map(at_most_float32, others)]
    return replace(call, dtype=dtype), list(_varying.align(tuple(arrays)))


def _by_xla(call: Call, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    return xla.run(call, *inputs)


_KEY_GATES, _VALUE_GATES, _BOTH_GATES = (
    Kernels(module.forward, module.backward, _by_xla) for module in (passes, value_gates, both_gates)
)


def _kernels(call: Call) -> tuple[Kernels, Plan]:
    """The kernels for the dims that decay, and their plan."""
    if call.value_decay and call.decay != "key":
        return _VALUE_GATES, Plan.of(value_gates.swap(call))
    return _BOTH_GATES if call.value_decay else _KEY_GATES, Plan.of(call)


def _of_value_dims(
    call: Call, log_decay: jax.Array | None, value_log_decay: jax.Array, cu_seqlens: jax.Array | None
) -> jax.Array:
    """Log decays of the value dims, plus that of the head if it has one: `[B, T, H, V]`."""
    if log_decay is None:
        return value_log_decay
    if call.decay == "constant" and not call.packed:
        log_decay = log_decay[:, None]
    elif call.decay == "constant":
        assert cu_seqlens is not None
        sequence = prepare_sequence_ids(cu_seqlens, total_tokens=call.tokens)
        log_decay = log_decay[jnp.minimum(sequence, call.sequences - 1)][None]
    return value_log_decay.astype(np.float32) + log_decay[..., None].astype(np.float32)


def _common_dtype(call: Call, query: jax.Array, key: jax.Array, value: jax.Array) -> np.dtype:
    """The one dtype that the kernels cast query, key and value to."""
    if call.dtype == key.dtype == value.dtype == jnp.bfloat16:
        # a query that was scaled is float32, and may be rounded as its keys are: bfloat16 has the range
        return call.dtype
    dtypes = {each.dtype for each in (query, key, value)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {*_launch.DTYPES} else np.dtype(np.float32)
