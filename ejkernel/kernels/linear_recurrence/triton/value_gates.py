"""Gates of value dims: with key and value in each other's place they are gates of key dims, and so is all else.

Let `q' = do`, `k' = v`, `v' = k`, `do' = q` and let states be transposed. Then the output is the gradient of `q'`, and
the gradients of query, key, value and gates are the output and the gradients of `v'`, `k'` and gates. So every kernel
that serves key gates serves value gates, exact path included.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.gates import fold_key_gates, unfold_queries
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.walks import starts, walk


def swapped(call: Call) -> Call:
    """The call with key and value in each other's place, whose gates are of key dims."""
    return replace(call, key_dim=call.value_dim, value_dim=call.key_dim, decay="key", value_decay=False)


def _transposed(state: jax.Array | None) -> jax.Array | None:
    return None if state is None else jnp.swapaxes(state, -1, -2)


def forward(keep: bool, call: Call, plan: Plan, *arrays: Any) -> tuple[jax.Array, jax.Array, None]:
    """Output and final states, as `passes.forward`; arrays as in `backward`."""
    del keep  # nothing can be used again
    query, key, value, log_decay, initial_state, cu_seqlens = arrays
    if passes.has_few_tokens(call):
        launcher = Launcher.of(call, plan, cu_seqlens)
        return (*passes.step(launcher, query, key, value, None, log_decay, initial_state), None)
    launcher, state = Launcher.of(swapped(call), plan, cu_seqlens), _transposed(initial_state)
    # there is no q' yet, and nothing asks for it
    _, folded, gates = fold_key_gates(launcher, value, value, log_decay, start=state is not None)
    first = starts(launcher, folded, key, gates, state)
    operands = query, key, folded, gates, first
    done = walk(launcher, "dquery", *operands, tile=plan.config.gradient, dtype=F32, last=True)
    output = unfold_queries(launcher, (value, value, key, log_decay, state), gates, query, done.output, folded)
    last = _transposed(done.last)
    assert last is not None
    return output, last, None


def backward(
    wanted: bool, call: Call, plan: Plan, arrays: Any, kept: None, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay of the value dims and initial state."""
    del wanted, kept
    query, key, value, log_decay, initial_state, cu_seqlens = arrays
    other = swapped(call)
    given = doutput, value, key, log_decay, _transposed(initial_state), cu_seqlens
    dquery, _, found = passes.forward(True, other, plan, *given)
    _, dvalue, dkey, dgate, dstate = passes.backward(True, other, plan, given, found, query, _transposed(dlast))
    return passes.sum_shared(call, query, dquery), dkey, dvalue, dgate, _transposed(dstate)
