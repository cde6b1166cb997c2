"""Gates of key dims and of value dims at once: queries and keys are folded, and so are values and outputs.

The state then decays along both of its sides. Chunks whose gates are too strong for one reference have no exact path
here: a call that has any is left to XLA, which is decided when it runs.
"""

from typing import Any, NamedTuple

import jax
from jax import lax

from ejkernel.kernels.chunks.triton.launching import F32, shape
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import passes
from ejkernel.kernels.linear_recurrence.triton.gates import Gates, fold_key_gates, unfold_all, unfold_rows
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.value_gates import swapped
from ejkernel.kernels.linear_recurrence.triton.walks import starts, walk

# Bits of decay in half a chunk: those of a key dim and of a value dim together are still in float32's range.
LIMIT = 62.0


class Folded(NamedTuple):
    """Operands with their gates folded in, and what is left of these."""

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


def _fold(launcher: Launcher, turned: Launcher, arrays: Any, doutput: jax.Array) -> Folded:
    query, key, value, (by_key, by_value), state, _ = arrays
    limit, start = min(LIMIT, launcher.config.limit), state is not None
    q, k, keys = fold_key_gates(launcher, query, key, by_key, start, limit)
    do, v, values = fold_key_gates(turned, doutput, value, by_value, start, limit)
    return Folded(q, k, do, v, keys, values)


def forward(keep: bool, call: Call, plan: Plan, *arrays: Any) -> tuple[jax.Array, jax.Array, None]:
    """Output and final states, as `passes.forward`; arrays as in `backward`."""
    del keep  # nothing can be used again
    query, key, value, gates, initial_state, cu_seqlens = arrays
    launcher, turned = (Launcher.of(each, plan, cu_seqlens) for each in (call, swapped(call)))
    if passes.has_few_tokens(call):
        output, last = passes.step(launcher, query, key, value, gates[0], gates[1], initial_state)
        return output, last, None
    # there is no cotangent yet, and nothing asks for it
    q, k, _, v, keys, values = folded = _fold(launcher, turned, arrays, value)

    def by_kernels() -> tuple[jax.Array, jax.Array]:
        first = starts(launcher, k, v, keys, initial_state, other=values)
        operands = q, k, v, keys, first
        done = walk(launcher, "output", *operands, tile=plan.config.output, dtype=F32, last=True, other=values)
        return unfold_rows(turned, gates[1], values, done.output), done.last

    def by_xla() -> tuple[jax.Array, jax.Array]:
        return xla.run(call, query, key, value, *gates, initial_state, cu_seqlens)

    return (*lax.cond(folded.is_strong, by_xla, by_kernels), None)


def backward(
    wanted: bool, call: Call, plan: Plan, arrays: Any, kept: None, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decays of key and value dims, and initial state."""
    del wanted, kept
    cu_seqlens = arrays[5]
    launcher, turned = (Launcher.of(each, plan, cu_seqlens) for each in (call, swapped(call)))
    folded = _fold(launcher, turned, arrays, doutput)

    def by_kernels() -> tuple[Any, ...]:
        return _gradients(launcher, turned, arrays, folded, dlast)

    def by_xla() -> tuple[Any, ...]:
        def run(*inputs: Any) -> tuple[jax.Array, jax.Array]:
            return xla.run(call, *inputs[:3], *inputs[3], inputs[4], cu_seqlens)

        (_, last), pull = jax.vjp(run, *arrays[:5])
        return pull((doutput, jax.numpy.zeros_like(last) if dlast is None else dlast))

    return lax.cond(folded.is_strong, by_xla, by_kernels)


def _gradients(
    launcher: Launcher, turned: Launcher, arrays: Any, folded: Folded, dlast: jax.Array | None
) -> tuple[Any, ...]:
    query, key, value, gates, initial_state, _ = arrays
    q, k, do, v, keys, values = folded
    call, plan = launcher.call, launcher.plan
    first = starts(launcher, k, v, keys, initial_state, other=values)
    scale = 1.0 / call.scale
    ends = starts(launcher, q, do, keys, dlast, reverse=True, scale=scale, other=values)
    common: dict[str, Any] = {"dtype": F32, "other": values}
    forth = common | {"gate_gradient": query}
    back = common | {"gate_gradient": key, "start_scale": 1.0 if plan.segmented(call) else scale}
    back_to_start = back | {"last": initial_state is not None, "last_scale": call.scale}
    of_value = walk(launcher, "dvalue", k, q, do, keys, ends, tile=plan.config.output, **back_to_start)
    of_key = walk(launcher, "dkey", v, do, q, keys, ends, tile=plan.config.gradient, **back)
    forth_to_value = forth | {"tile": plan.config.output, "meets": of_value.borders}
    of_output = walk(launcher, "output", q, k, v, keys, first, **forth_to_value)
    forth_to_key = forth | {"tile": plan.config.gradient, "meets": of_key.borders}
    of_query = walk(launcher, "dquery", do, v, k, keys, first, **forth_to_key)
    hats = q, k, of_query.output, of_key.output, of_query.borders
    hat = shape(*q.shape, dtype=call.dtype)
    dquery, dkey, dgate = unfold_all(launcher, gates[0], keys, hats, [hat, hat], None)
    hats = do, v, of_output.output, of_value.output, of_output.borders
    hat = shape(*v.shape, dtype=call.dtype)
    _, dvalue, dvalue_gate = unfold_all(turned, gates[1], values, hats, [hat, hat], None)
    of_tokens = (passes.sum_shared(call, x, dx) for x, dx in ((query, dquery), (key, dkey), (value, dvalue)))
    dstart = None if initial_state is None else of_value.last.astype(initial_state.dtype)
    return (*of_tokens, (dgate, dvalue_gate), dstart)
