"""Gates of key dims and of value dims at once, as the contract promises: `g` or `gk` beside `gv`.

Gates are folded into queries and keys, and into values and outputs; the state decays along both of its sides. There is
no exact path here: a call in which any chunk is flagged runs on XLA, which is decided on the device.
"""

from typing import Any, NamedTuple

import jax
from jax import lax

from ejkernel.kernels._launch import shape
from ejkernel.kernels.chunks.triton.launching import F32, has_few_tokens
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.gates import Gates, Hats, fold_key_gates, unfold_all, unfold_rows
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.value_gates import swap
from ejkernel.kernels.linear_recurrence.triton.walks import starts, walk

# Bits of decay in half a chunk. A key dim's and a value dim's together must be in float32's range.
LIMIT = 62.0


class Folded(NamedTuple):
    """Operands with their gates folded in, and the gates as walks read them."""

    query: jax.Array
    key: jax.Array
    read: jax.Array  # the output's cotangent, as a query of values
    value: jax.Array
    of_keys: Gates
    of_values: Gates

    @property
    def is_strong(self) -> jax.Array:
        """Whether any gates are too strong to be folded."""
        keys, values = self.of_keys.flag, self.of_values.flag
        assert keys is not None
        assert values is not None
        return (keys.max() | values.max()) != 0


def _fold(launcher: Launcher, swapped: Launcher, x: Inputs, d_output: jax.Array) -> Folded:
    limit, start = min(LIMIT, launcher.config.limit), x.initial_state is not None
    q, k, keys = fold_key_gates(launcher, x.query, x.key, x.log_decay, start, limit)
    do, v, values = fold_key_gates(swapped, d_output, x.value, x.value_log_decay, start, limit)
    return Folded(q, k, do, v, keys, values)


def forward(keep: bool, call: Call, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array, None]:
    """Output and final states, as `passes.forward`."""
    del keep  # there are no residuals
    launcher, swapped = (Launcher.of(each, plan, x.cu_seqlens) for each in (call, swap(call)))
    if has_few_tokens(call):
        return (*passes.step(launcher, x), None)
    # the value stands for the output's cotangent, which is not known yet and not used
    q, k, _, v, keys, values = folded = _fold(launcher, swapped, x, x.value)

    def by_kernels() -> tuple[jax.Array, jax.Array]:
        first = starts(launcher, k, v, keys, x.initial_state, other=values)
        operands = q, k, v, keys, first
        walked = walk(launcher, "output", *operands, tile=plan.config.output, dtype=F32, last=True, other=values)
        return unfold_rows(swapped, x.value_log_decay, values, walked.output), walked.final

    return (*lax.cond(folded.is_strong, lambda: xla.run(call, *x), by_kernels), None)


def backward(
    wanted: Inputs, call: Call, plan: Plan, x: Inputs, residuals: None, d_output: jax.Array, d_final: jax.Array | None
) -> Inputs:
    """Cotangents of the inputs."""
    del wanted, residuals
    launcher, swapped = (Launcher.of(each, plan, x.cu_seqlens) for each in (call, swap(call)))
    folded = _fold(launcher, swapped, x, d_output)

    def by_kernels() -> Inputs:
        return _gradients(launcher, swapped, x, folded, d_final)

    def by_xla() -> Inputs:
        (_, final), pull = jax.vjp(lambda *inputs: xla.run(call, *inputs, x.cu_seqlens), *x[:-1])
        return Inputs(*pull((d_output, jax.numpy.zeros_like(final) if d_final is None else d_final)))

    return lax.cond(folded.is_strong, by_xla, by_kernels)


def _gradients(launcher: Launcher, swapped: Launcher, x: Inputs, folded: Folded, d_final: jax.Array | None) -> Inputs:
    q, k, do, v, keys, values = folded
    call, plan = launcher.call, launcher.plan
    first = starts(launcher, k, v, keys, x.initial_state, other=values)
    scale = 1.0 / call.scale
    ends = starts(launcher, q, do, keys, d_final, reverse=True, scale=scale, other=values)
    common: dict[str, Any] = {"dtype": F32, "other": values}
    forth = common | {"gate_gradient": x.query}
    back = common | {"gate_gradient": x.key, "start_scale": 1.0 if plan.segmented(call) else scale}
    back_to_start = back | {"last": x.initial_state is not None, "last_scale": call.scale}
    of_value = walk(launcher, "dvalue", k, q, do, keys, ends, tile=plan.config.output, **back_to_start)
    of_key = walk(launcher, "dkey", v, do, q, keys, ends, tile=plan.config.gradient, **back)
    forth_to_value = forth | {"tile": plan.config.output, "stored": of_value.border}
    of_output = walk(launcher, "output", q, k, v, keys, first, **forth_to_value)
    forth_to_key = forth | {"tile": plan.config.gradient, "stored": of_key.border}
    of_query = walk(launcher, "dquery", do, v, k, keys, first, **forth_to_key)
    hats = Hats(q, k, of_query.output, of_key.output, of_query.border)
    hat = shape(*q.shape, dtype=call.dtype)
    d_query, d_key, d_gate = unfold_all(launcher, x.log_decay, keys, hats, hat, hat)
    hats = Hats(do, v, of_output.output, of_value.output, of_output.border)
    hat = shape(*v.shape, dtype=call.dtype)
    _, d_value, d_value_gate = unfold_all(swapped, x.value_log_decay, values, hats, hat, hat)
    of_tokens = (x.query, d_query), (x.key, d_key), (x.value, d_value)
    d_start = None if x.initial_state is None else of_value.final.astype(x.initial_state.dtype)
    d_query, d_key, d_value = (passes.sum_shared(call, each, d_each) for each, d_each in of_tokens)
    return Inputs(d_query, d_key, d_value, d_gate, d_value_gate, d_start)
