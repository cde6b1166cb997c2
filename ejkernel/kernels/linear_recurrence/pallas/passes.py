"""A call's forward and backward on a TPU, each one walk over its tokens."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas
from ejkernel.kernels._pallas import Dims
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32, Wiring

Results = list[tuple[tuple[int, ...], Any, Dims]]
TOKENS, MET, NEITHER = Dims(0, 2), Dims(0, 2), Dims()


def _states(call: Call) -> Dims:
    return Dims(None if call.packed else 0, 1)


def _gates(call: Call) -> Dims:
    return _states(call) if call.decay == "constant" else TOKENS


def forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> tuple[Any, ...]:
    """Output and final states, and the states that visits meet, if they are kept."""
    operands = (TOKENS, TOKENS, TOKENS, _gates(call), _states(call), NEITHER)
    B, T, H, K, V = call.batch, call.tokens, call.heads, call.key_dim, call.value_dim
    results: Results = [((B, T, H, V), call.dtype, TOKENS), ((call.sequences, H, K, V), F32, _states(call))]
    if keep:
        results.append(((B, plan.number_of_visits(call, sizes), H, V, K), F32, MET))
    output, final, *met = _launch(functools.partial(_forward, keep), call, operands, results, arrays)
    return output, final, met[0] if keep else None


def backward(
    wanted: bool, call: Call, sizes: Sizes, arrays: Any, met: Any, d_output: jax.Array, d_final: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay (zeros unless `wanted`) and initial state."""
    query, key, value, log_decay, initial, cu_seqlens = arrays
    states = _states(call)
    operands = (TOKENS, TOKENS, TOKENS, _gates(call), states, NEITHER, MET, TOKENS, states)
    B, T, H = call.batch, call.tokens, call.heads
    # each head's: those of heads that share an array are added up after, in float32
    results: Results = [
        ((B, T, H, x.shape[3]), x.dtype if x.shape[2] == H else F32, TOKENS) for x in (query, key, value)
    ]
    by_token = wanted and log_decay is not None
    if by_token and call.decay == "key":
        results.append((log_decay.shape, log_decay.dtype, TOKENS))
    elif by_token:
        results.append(((B, H, T), F32, Dims(0, 1)))
    if initial is not None:
        results.append((initial.shape, initial.dtype, states))
    given = (*arrays, met, d_output, d_final)
    gradients = list(_launch(functools.partial(_backward, wanted), call, operands, results, given))
    d_initial = gradients.pop() if initial is not None else None
    dq, dk, dv, *flow = gradients
    d_decay = None if log_decay is None else jnp.zeros_like(log_decay)
    if by_token:
        d_decay = _gate_gradient(call, log_decay, flow[0], cu_seqlens)
    dq, dk, dv = (_sum_shared(x, dx) for x, dx in ((query, dq), (key, dk), (value, dv)))
    return dq, dk, dv, d_decay, d_initial


def _launch(run: Any, call: Call, operands: Any, results: Results, arrays: Any) -> Any:
    """`run(call, sizes, *arrays)` on each device's part of the arrays, of which some may be absent."""
    present = [x is not None for x in arrays]

    def part(*given: jax.Array) -> Any:
        rest = iter(given)
        arrays: list[Any] = [next(rest) if there else None for there in present]
        heads = max(x.shape[2] for x in arrays[:3])
        rows = given[0].shape[0]
        local = replace(call, batch=rows, heads=heads, sequences=call.sequences if call.packed else rows)
        return run(local, plan.sizes(local, *arrays[:3]), *arrays)

    made = [(jax.ShapeDtypeStruct(shape, dtype), dims) for shape, dtype, dims in results]
    kept = [dims for dims, there in zip(operands, present, strict=True) if there]
    return _pallas.launch(part, kept, made, *(x for x in arrays if x is not None))


def _forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    query, key, value, log_decay, initial, cu_seqlens = arrays
    wiring = Wiring(call, sizes, plan.table(plan.visits(call, sizes, cu_seqlens), call.reverse))
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
    return [wiring.by_head(results.pop("output")), *results.values()]


def _backward(wanted: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    query, key, value, log_decay, initial, cu_seqlens, met, d_output, d_final = arrays
    wiring = Wiring(call, sizes, plan.table(plan.visits(call, sizes, cu_seqlens), not call.reverse))
    for name, x in (("query", query), ("key", key), ("value", value), ("d_output", d_output)):
        wiring.read_tokens(name, x)
    if log_decay is not None:
        wiring.read_gates(log_decay)
    wiring.read_met(met)
    if d_final is not None:
        wiring.read_states("d_final", d_final)
    for name, x in (("d_query", query), ("d_key", key), ("d_value", value)):
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
    for name in ("d_query", "d_key", "d_value", *(["d_gates"] if call.decay == "key" and wanted else [])):
        results[name] = wiring.by_head(results[name])
    if "d_gates" in results and call.decay != "key":
        results["d_gates"] = results["d_gates"].reshape(call.batch, call.heads, call.tokens)
    return list(results.values())


def _sum_shared(x: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of `x` from each head's `[B, T, H, D]`: heads that share it are added up."""
    if x.shape == dx.shape:
        return dx
    return dx.reshape(*x.shape[:3], -1, x.shape[3]).sum(3).astype(x.dtype)


def _gate_gradient(call: Call, log_decay: jax.Array, flow: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gradient of the gates as they came, from that of each token's, `[B, H, T]` for one a head."""
    if call.decay == "key":
        return flow
    if call.decay == "head":
        return flow.swapaxes(1, 2).astype(log_decay.dtype)
    if cu_seqlens is None:
        summed = flow.sum(2)
    else:
        token = jnp.arange(call.tokens)
        inside = (token >= cu_seqlens[:-1, None]) & (token < cu_seqlens[1:, None])
        summed = jnp.where(inside[:, None], flow, 0).sum(2)
    return jnp.where(jnp.isneginf(log_decay), 0, summed).astype(log_decay.dtype)
