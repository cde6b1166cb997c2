"""A call's forward and backward on a TPU, each one walk over its tokens."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas
from ejkernel.kernels.delta_rule import xla
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.pallas.wiring import Wiring
from ejkernel.kernels.linear_recurrence.pallas import plan
from ejkernel.kernels.linear_recurrence.pallas.passes import walk_backward, walk_forward, wired
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32


def forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> tuple[Any, ...]:
    """Output and final states, and the states that visits meet, if they are kept."""
    B, T, H, K, V = call.batch, call.tokens, call.heads, call.key_dim, call.value_dim
    results = [jax.ShapeDtypeStruct((B, T, H, V), call.dtype), jax.ShapeDtypeStruct((call.sequences, H, K, V), F32)]
    if keep:
        visits = plan.number_of_visits(call, sizes)  # type: ignore[arg-type]
        results.append(jax.ShapeDtypeStruct((B, visits, H, V, K), F32))

    def instead(*arrays: Any) -> list[jax.Array]:
        return [*xla.run(call, *arrays), *(jnp.zeros(each.shape, each.dtype) for each in results[2:])]

    found = _pallas.launch(functools.partial(_forward, keep, call, sizes), instead, results, *arrays)
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
    found = iter(_pallas.launch(functools.partial(_backward, call, sizes), instead, results, *given))
    return tuple(None if x is None else next(found) for x in inputs)


def _forward(keep: bool, call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *tokens, beta, log_decay, initial, cu_seqlens = arrays
    wiring = wired(Wiring, call, sizes, (*tokens, log_decay), cu_seqlens, back=False)
    wiring.read_along("beta", beta)
    return walk_forward(wiring, initial, keep)


def _backward(call: Call, sizes: Sizes, *arrays: Any) -> list[jax.Array]:
    *tokens, beta, log_decay, initial, cu_seqlens, met, d_output, d_final = arrays
    wiring = wired(Wiring, call, sizes, (*tokens, log_decay), cu_seqlens, back=True)
    wiring.read_along("beta", beta)
    wiring.write_along("d_beta")
    results = walk_backward(wiring, tokens, log_decay, initial, met, d_output, d_final, cu_seqlens)
    d_beta = wiring.heads_last(results.pop("d_beta")).astype(beta.dtype)
    d_query, d_key, d_value, *rest = results.values()
    return [d_query, d_key, d_value, d_beta, *rest]
