"""Gates of value dims, as the contract promises: `gv` is a key gate once key and value have changed places.

Let `q' = do`, `k' = v`, `v' = k`, `do' = q` and let states be transposed. Then the output is the gradient of `q'`, and
the gradients of query, key, value and gates are the output and the gradients of `v'`, `k'` and gates. So every kernel
of key gates serves value gates, exact path included.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32, has_few_tokens
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.gates import fold_key_gates, unfold_queries
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.walks import starts, walk


def swap(call: Call) -> Call:
    """The call with key and value in each other's place, whose gates are of key dims."""
    return replace(call, key_dim=call.value_dim, value_dim=call.key_dim, decay="key", value_decay=False)


def _transposed(state: jax.Array | None) -> jax.Array | None:
    return None if state is None else jnp.swapaxes(state, -1, -2)


def forward(keep: bool, call: Call, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array, None]:
    """Output and final states, as `passes.forward`."""
    del keep  # there are no residuals
    if has_few_tokens(call):
        return (*passes.step(Launcher.of(call, plan, x.cu_seqlens), x), None)
    launcher, state = Launcher.of(swap(call), plan, x.cu_seqlens), _transposed(x.initial_state)
    # the value stands for q', the output's cotangent, which is not known yet and not used
    swapped = Inputs(x.value, x.value, x.key, x.value_log_decay, None, state)
    _, folded, gates = fold_key_gates(launcher, x.value, x.value, x.value_log_decay, start=state is not None)
    first = starts(launcher, folded, x.key, gates, state)
    operands = x.query, x.key, folded, gates, first
    walked = walk(launcher, "dquery", *operands, tile=plan.config.gradient, dtype=F32, last=True)
    output = unfold_queries(launcher, swapped, gates, x.query, walked.output, folded)
    return output, jnp.swapaxes(walked.final, -1, -2), None


def backward(
    wanted: Inputs, call: Call, plan: Plan, x: Inputs, residuals: None, d_output: jax.Array, d_final: jax.Array | None
) -> Inputs:
    """Cotangents of the inputs, whose value dims decay."""
    del residuals
    other, state = swap(call), _transposed(x.initial_state)
    swapped = Inputs(d_output, x.value, x.key, x.value_log_decay, None, state, x.cu_seqlens)
    d_query, _, prepared = passes.forward(True, other, plan, swapped)
    d = passes.backward(wanted, other, plan, swapped, prepared, x.query, _transposed(d_final))
    d_query = passes.sum_shared(call, x.query, d_query)
    return Inputs(d_query, d.value, d.key, None, d.log_decay, _transposed(d.initial_state))
