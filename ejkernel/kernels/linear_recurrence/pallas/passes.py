"""A call's forward and backward on a TPU, each one walk over its tokens."""

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32, Wiring


def forward(keep: bool, call: Call, plan_: None, *arrays: Any) -> tuple[Any, ...]:
    """Output and final states, and the states that visits meet, if they are kept."""
    query, key, value, log_decay, initial, cu_seqlens = arrays
    sizes = plan.sizes(call, query, key, value)
    visits = plan.visits(call, sizes, cu_seqlens)
    wiring = Wiring(call, sizes, plan.table(visits, call.reverse))
    for name, x in (("query", query), ("key", key), ("value", value)):
        wiring.read_tokens(name, x)
    if log_decay is not None:
        wiring.read_gates(log_decay)
    if initial is not None:
        wiring.read_states("initial", initial)
    wiring.write_tokens("output", call.value_dim, call.dtype)
    wiring.write_states("final", F32)
    if keep:
        wiring.write_met()
    results = wiring.run("forward", {"states": (2, sizes.heads, call.value_dim, call.key_dim)})
    return wiring.by_head(results["output"]), results["final"], results.get("met")


def backward(
    wanted: bool, call: Call, plan_: None, arrays: Any, met: Any, d_output: jax.Array, d_final: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay (zeros unless `wanted`) and initial state."""
    query, key, value, log_decay, initial, cu_seqlens = arrays
    sizes = plan.sizes(call, query, key, value)
    visits = plan.visits(call, sizes, cu_seqlens)
    wiring = Wiring(call, sizes, plan.table(visits, not call.reverse))
    for name, x in (("query", query), ("key", key), ("value", value), ("d_output", d_output)):
        wiring.read_tokens(name, x)
    if log_decay is not None:
        wiring.read_gates(log_decay)
    wiring.read_met(met)
    if d_final is not None:
        wiring.read_states("d_final", d_final)
    for name, x in (("d_query", query), ("d_key", key), ("d_value", value)):
        # heads that share an array are added up in float32
        wiring.write_tokens(name, x.shape[3], x.dtype if x.shape[2] == call.heads else F32)
    if wanted and log_decay is not None:
        wiring.write_gates(log_decay)
    if initial is not None:
        wiring.write_states("d_initial", initial.dtype)
    state = (call.value_dim, call.key_dim)
    scratch: dict[str, tuple[int, ...]] = {"d_states": (2, sizes.heads, *state)}
    if call.decay == "key":
        scratch["states"] = (sizes.chunks + 1, *state)
    results = wiring.run("backward", scratch)
    by_array = [wiring.sum_shared(x, results[f"d_{name}"]) for name, x in (("query", query), ("key", key), ("value", value))]
    d_decay = None
    if log_decay is not None:
        d_decay = wiring.gate_gradient(log_decay, results["d_gates"], cu_seqlens) if wanted else jnp.zeros_like(log_decay)
    return (*by_array, d_decay, results.get("d_initial"))
