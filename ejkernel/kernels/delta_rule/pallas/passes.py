"""A call's forward and backward on a TPU, each one walk over its tokens."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.pallas.wiring import Wiring
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32

Lists = Callable[..., Sequence[jax.Array]]


def forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> tuple[Any, ...]:
    """Output and final states, and the states that visits meet, if they are kept."""
    B, T, H, K, V = call.batch, call.tokens, call.heads, call.key_dim, call.value_dim
    results = [jax.ShapeDtypeStruct((B, T, H, V), call.dtype), jax.ShapeDtypeStruct((call.sequences, H, K, V), F32)]
    if keep:
        visits = plan.number_of_visits(call, sizes)  # type: ignore[arg-type]
        results.append(jax.ShapeDtypeStruct((B, visits, H, V, K), F32))

    def instead(*arrays: Any) -> list[jax.Array]:
        return [*xla.run(call, *arrays), *(jnp.zeros(each.shape, each.dtype) for each in results[2:])]

    found = _launch(functools.partial(_forward, keep, call, sizes), instead, results, arrays)
    return found[0], found[1], found[2] if keep else None


def backward(
    call: Call, sizes: Sizes, arrays: Any, met: Any, d_output: jax.Array, d_final: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, beta, log decay and initial state."""
    inputs = arrays[:6]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs if x is not None]

    def instead(*arrays: Any) -> list[jax.Array]:
        *inputs, cu_seqlens, _, d_output, d_final = arrays
        (_, last), pull = jax.vjp(lambda *inputs: xla.run(call, *inputs, cu_seqlens), *inputs)
        found = pull((d_output, jnp.zeros_like(last) if d_final is None else d_final))
        return [x for x in found if x is not None]

    given = (*arrays, met, d_output, d_final)
    found = iter(_launch(functools.partial(_backward, call, sizes), instead, results, given))
    return tuple(None if x is None else next(found) for x in inputs)


def _launch(run: Lists, instead: Lists, results: Any, arrays: Any) -> Sequence[jax.Array]:
    """`run(*arrays)`, of which some may be absent, or `instead`."""
    leaves, tree = jax.tree.flatten(arrays)

    def filled(function: Lists, *leaves: jax.Array) -> Sequence[jax.Array]:
        return function(*jax.tree.unflatten(tree, leaves))

    return _pallas.launch(functools.partial(filled, run), functools.partial(filled, instead), results, *leaves)


def _wiring(call: Call, sizes: Sizes, back: bool, inputs: Any, cu_seqlens: jax.Array | None) -> Wiring:
    """A kernel that reads all but the states."""
    query, key, value, beta, log_decay = inputs
    visits = plan.visits(call, sizes, cu_seqlens)  # type: ignore[arg-type]
    wiring = Wiring(call, sizes, plan.table(visits, call.reverse != back))  # type: ignore[arg-type]
    for name, x in (("query", query), ("key", key), ("value", value)):
        wiring.read_tokens(name, x)
    wiring.read_along("beta", beta)
    if log_decay is not None:
        wiring.read_gates(log_decay)
    return wiring


def _forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *inputs, initial, cu_seqlens = arrays
    wiring = _wiring(call, sizes, False, inputs, cu_seqlens)
    if initial is not None:
        wiring.read_states("initial", initial)
    wiring.write_tokens("output", call.value_dim, call.dtype)
    wiring.write_states("final", F32)
    if keep:
        wiring.write_met()
    results = wiring.run("forward", {"states": (2, sizes.heads, call.value_dim, call.key_dim)})
    return [wiring.by_head(results.pop("output")), *results.values()]


def _backward(call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *inputs, initial, cu_seqlens, met, d_output, d_final = arrays
    *tokens, beta, log_decay = inputs
    wiring = _wiring(call, sizes, True, inputs, cu_seqlens)
    wiring.read_tokens("d_output", d_output)
    wiring.read_met(met)
    if d_final is not None:
        wiring.read_states("d_final", d_final)
    names = "d_query", "d_key", "d_value"
    for name, x in zip(names, tokens, strict=True):
        # those of heads that share an array are added up in float32
        wiring.write_tokens(name, x.shape[3], x.dtype if x.shape[2] == call.heads else F32)
    wiring.write_along("d_beta")
    if log_decay is not None:
        wiring.write_gates(log_decay)
    if initial is not None:
        wiring.write_states("d_initial", initial.dtype)
    state = call.value_dim, call.key_dim
    scratch: dict[str, tuple[int, ...]] = {"d_states": (2, sizes.heads, *state)}
    if call.decay == "key":
        scratch["states"] = (sizes.chunks + 1, *state)
    results = wiring.run("backward", scratch)
    for name, x in zip(names, tokens, strict=True):
        results[name] = results[name].reshape(*x.shape[:3], -1, x.shape[3]).sum(3).astype(x.dtype)
    results["d_beta"] = _heads_last(call, results["d_beta"]).astype(beta.dtype)
    if call.decay == "head":
        results["d_gates"] = _heads_last(call, results["d_gates"]).astype(log_decay.dtype)
    if call.decay == "key":
        results["d_gates"] = results["d_gates"].reshape(log_decay.shape)
    return list(results.values())


def _heads_last(call: Call, x: jax.Array) -> jax.Array:
    """`[B, programs, heads, T]` as `[B, T, H]`."""
    return x.reshape(call.batch, call.heads, call.tokens).swapaxes(1, 2)
