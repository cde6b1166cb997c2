"""A call's forward and backward on a TPU, each one walk over its tokens."""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32, Wiring

W = TypeVar("W", bound=Wiring)
TOKENS = "query", "key", "value"


def forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> tuple[Any, ...]:
    """Output and final states, and the states that visits meet, if they are kept."""
    B, T, H, K, V = call.batch, call.tokens, call.heads, call.key_dim, call.value_dim
    results = [jax.ShapeDtypeStruct((B, T, H, V), call.dtype), _states(call)]
    if keep:
        results.append(jax.ShapeDtypeStruct((B, plan.number_of_visits(call, sizes), H, V, K), F32))

    def instead(*arrays: Any) -> list[jax.Array]:
        found = xla.run(call, *arrays[:4], None, *arrays[4:])
        return [*found, *(jnp.zeros(each.shape, each.dtype) for each in results[2:])]

    found = _pallas.launch(functools.partial(_forward, keep, call, sizes), instead, results, *arrays)
    return found[0], found[1], found[2] if keep else None


def backward(
    wanted: bool, call: Call, sizes: Sizes, arrays: Any, met: Any, d_output: jax.Array, d_final: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay (zeros unless `wanted`) and initial state."""
    inputs = arrays[:5]
    moving = [x is not None and (wanted or i != 3) for i, x in enumerate(inputs)]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x, moves in zip(inputs, moving, strict=True) if moves]

    def instead(*arrays: Any) -> list[jax.Array]:
        *inputs, cu_seqlens, _, d_output, d_final = arrays

        def run(*inputs: Any) -> Any:
            return xla.run(call, *inputs[:4], None, inputs[4], cu_seqlens)

        (_, last), pull = jax.vjp(run, *inputs)
        found = pull((d_output, jnp.zeros_like(last) if d_final is None else d_final))
        return [x for x, moves in zip(found, moving, strict=True) if moves]

    given = (*arrays, met, d_output, d_final)
    found = iter(_pallas.launch(functools.partial(_backward, wanted, call, sizes), instead, results, *given))
    gradients = [next(found) if moves else None for moves in moving]
    if inputs[3] is not None and not wanted:
        gradients[3] = jnp.zeros_like(inputs[3])
    return tuple(gradients)


def _states(call: Call) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((call.sequences, call.heads, call.key_dim, call.value_dim), F32)


def _forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *inputs, initial, cu_seqlens = arrays
    wiring = wired(Wiring, call, sizes, inputs, cu_seqlens, back=False)
    return walk_forward(wiring, initial, keep)


def _backward(wanted: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *inputs, initial, cu_seqlens, met, d_output, d_final = arrays
    *tokens, log_decay = inputs
    wiring = wired(Wiring, call, sizes, inputs, cu_seqlens, back=True)
    gates = log_decay if wanted else None
    results = walk_backward(wiring, tokens, gates, initial, met, d_output, d_final, cu_seqlens)
    return list(results.values())


def wired(kind: type[W], call: Any, sizes: Sizes, inputs: Sequence[Any], cu_seqlens: jax.Array | None, back: bool) -> W:
    """A kernel that reads query, key, value and gates."""
    *tokens, log_decay = inputs
    wiring = kind(call, sizes, plan.table(plan.visits(call, sizes, cu_seqlens), call.reverse != back))
    for name, x in zip(TOKENS, tokens, strict=True):
        wiring.read_tokens(name, x)
    if log_decay is not None:
        wiring.read_gates(log_decay)
    return wiring


def walk_forward(wiring: Wiring, initial: jax.Array | None, keep: bool) -> list[jax.Array]:
    """Output, final states and, if they are kept, the states that visits meet."""
    call, sizes = wiring.call, wiring.sizes
    if initial is not None:
        wiring.read_states("initial", initial)
    wiring.write_tokens("output", call.value_dim, call.dtype)
    wiring.write_states("final", F32)
    if keep:
        wiring.write_met()
    results = wiring.run("forward", {"states": (2, sizes.heads, call.value_dim, call.key_dim)})
    return [wiring.by_head(results.pop("output")), *results.values()]


def walk_backward(
    wiring: Wiring,
    tokens: Sequence[jax.Array],
    log_decay: jax.Array | None,
    initial: jax.Array | None,
    met: jax.Array,
    d_output: jax.Array,
    d_final: jax.Array | None,
    cu_seqlens: jax.Array | None,
) -> dict[str, jax.Array]:
    """Cotangents by name: of query, key and value, of the log decay and the initial state if these are given."""
    call, sizes = wiring.call, wiring.sizes
    wiring.read_tokens("d_output", d_output)
    wiring.read_met(met)
    if d_final is not None:
        wiring.read_states("d_final", d_final)
    for name, x in zip(TOKENS, tokens, strict=True):
        # those of heads that share an array are added up in float32
        wiring.write_tokens(f"d_{name}", x.shape[3], x.dtype if x.shape[2] == call.heads else F32)
    if log_decay is not None:
        wiring.write_gates(log_decay)
    if initial is not None:
        wiring.write_states("d_initial", initial.dtype)
    state = (call.value_dim, call.key_dim)
    scratch: dict[str, tuple[int, ...]] = {"d_states": (2, sizes.heads, *state)}
    if call.decay == "key":
        scratch["states"] = (sizes.chunks + 1, *state)
    results = wiring.run("backward", scratch)
    for name, x in zip(TOKENS, tokens, strict=True):
        results[f"d_{name}"] = _sum_shared(x, wiring.by_head(results[f"d_{name}"]))
    if log_decay is not None:
        results["d_gates"] = _gate_gradient(wiring, log_decay, results["d_gates"], cu_seqlens)
    return results


def _sum_shared(x: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of `x` from each head's `[B, T, H, D]`: heads that share it are added up."""
    if x.shape == dx.shape:
        return dx
    return dx.reshape(*x.shape[:3], -1, x.shape[3]).sum(3).astype(x.dtype)


def _gate_gradient(wiring: Wiring, log_decay: jax.Array, flow: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gradient of the gates as they came, from that of each token's."""
    call = wiring.call
    if call.decay == "key":
        return flow.reshape(log_decay.shape)
    if call.decay == "head":
        return wiring.heads_last(flow).astype(log_decay.dtype)
    flow = flow.reshape(call.batch, call.heads, call.tokens)
    if cu_seqlens is None:
        summed = flow.sum(2)
    else:
        token = jnp.arange(call.tokens)
        inside = (token >= cu_seqlens[:-1, None]) & (token < cu_seqlens[1:, None])
        summed = jnp.where(inside[:, None], flow, 0).sum(2)
    return jnp.where(jnp.isneginf(log_decay), 0, summed).astype(log_decay.dtype)
