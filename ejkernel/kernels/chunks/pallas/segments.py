"""Rows of several sequences on a TPU, computed as one sequence a row with a gate of `-inf` where a sequence begins.

There kernels multiply the state by exactly 0. But 0 times NaN is NaN. So tokens that hold NaN or inf are treated as
padding, and NaN is written to the results of their sequences afterwards.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks import segments
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.kernels import Kernels
from ejkernel.kernels.chunks.pallas import passes
from ejkernel.kernels.chunks.pallas.kernel_call import F32, Inputs, Recurrence
from ejkernel.kernels.chunks.pallas.plan import TOKENS, Sizes


def kernels(recurrence: Recurrence) -> Kernels:
    """The passes of a recurrence, which serve rows of several sequences too."""
    plain = functools.partial(passes.forward, recurrence)
    plain_backward = functools.partial(passes.backward, recurrence)

    def forward(keep: bool, call: Call, sizes: Sizes, inputs: Inputs) -> Any:
        if not call.segmented:
            return plain(keep, call, sizes, inputs)
        rows = _Rows.of(call, inputs)
        output, final, residuals = plain(keep, one_sequence(call), replace(sizes, joined=True), rows.joined(inputs))
        output = _where_tokens(rows.valid, output, 0)
        output = _where_tokens(rows.bad_query | rows.from_on(rows.bad, call.reverse), jnp.nan, output)
        final = jnp.where(_beside_states((rows.last & rows.bad).any(1)), jnp.nan, final)
        if inputs.initial_state is not None:
            final = jnp.where(_beside_states(rows.valid.any(1)), final, inputs.initial_state.astype(F32))
        return output, final, residuals

    def backward(
        wanted: Inputs, call: Call, sizes: Sizes, inputs: Inputs, residuals: Any, d_output: jax.Array, d_final: Any
    ) -> Inputs:
        if not call.segmented:
            return plain_backward(wanted, call, sizes, inputs, residuals, d_output, d_final)
        rows = _Rows.of(call, inputs)
        joined, pull = jax.vjp(rows.joined, inputs._replace(cu_seqlens=None))
        lost = rows.valid & ~_all_finite(d_output)
        spoilt = rows.sequences_with(rows.bad | rows.bad_query | lost)
        if d_final is not None:
            unknown = ~jnp.isfinite(d_final).all((1, 2, 3))
            spoilt = spoilt | (rows.last & unknown[:, None])
            d_final = jnp.where(_beside_states(unknown), 0, d_final)
        d_output = _where_tokens(rows.valid & ~lost, d_output, 0)
        plan = one_sequence(call), replace(sizes, joined=True)
        cotangents = plain_backward(wanted, *plan, joined, residuals, d_output, d_final)
        d_joined: Any = [_or_zeros(*each) for each in zip(cotangents, joined, strict=True)]
        (d_inputs,) = pull(Inputs(*d_joined))
        return rows.marked(d_inputs, spoilt)

    return Kernels(forward, backward, recurrence.xla)


def one_sequence(call: Any) -> Any:
    """The call as the kernels run it: one sequence a row, with gates, since one of `-inf` begins a sequence."""
    if not call.segmented:
        return call
    return replace(call, segmented=False, decay="key" if call.decay == "key" else "head")


class _Rows(NamedTuple):
    """Rows of several sequences, and which tokens hold anything but numbers."""

    call: Call
    runs: segments.Runs
    valid: jax.Array  # tokens that are no padding [B, T]
    first: jax.Array  # tokens of the row's first sequence, in the order of the recurrence
    last: jax.Array  # and of its last
    bad: jax.Array  # tokens that would write anything but numbers
    bad_query: jax.Array  # tokens that read with some

    @staticmethod
    def of(call: Call, inputs: Inputs) -> "_Rows":
        assert inputs.cu_seqlens is not None
        runs = segments.runs(inputs.cu_seqlens)
        first, last = runs.begin == runs.row_begin, runs.end == runs.row_end
        if call.reverse:
            first, last = last, first
        bad_query = ~_all_finite(inputs.query)
        bad = ~(_all_finite(inputs.key) & _all_finite(inputs.value))
        if inputs.beta is not None:
            bad = bad | ~_all_finite(inputs.beta)
        if inputs.log_decay is not None and call.decay != "constant":
            # a gate of -inf is one like any other
            bad = bad | ~_all_finite(jnp.maximum(inputs.log_decay, jnp.finfo(inputs.log_decay.dtype).min))
        if inputs.initial_state is not None:
            unknown = ~jnp.isfinite(inputs.initial_state).all((1, 2, 3))
            bad = bad | (runs.first_of_row(call) & unknown[:, None])
        return _Rows(call, runs, runs.valid, *(each & runs.valid for each in (first, last, bad, bad_query)))

    def joined(self, inputs: Inputs) -> Inputs:
        """The inputs with one sequence a row."""
        call, clean = self.call, self.valid & ~(self.bad | self.bad_query)
        first, start = self.runs.first_visited(call), inputs.initial_state
        tokens: dict[str, Any] = {name: _where_tokens(clean, getattr(inputs, name), 0) for name in TOKENS}
        if inputs.beta is not None:
            tokens["beta"] = _where_tokens(clean, inputs.beta, 0)
        B, T, H = call.batch, call.tokens, call.heads
        gates = inputs.log_decay
        if gates is None:
            gates = jnp.zeros_like(inputs.query, F32, shape=(B, T, H))
        elif call.decay == "constant":
            gates = jnp.broadcast_to(gates[:, None], (B, T, H))
        gates = _where_tokens(clean, gates, 0)
        forgets = first
        if start is not None:
            known = _beside_states(jnp.isfinite(start).all((1, 2, 3)))
            of_first = None if inputs.log_decay is None else gates
            # the first gate is the initial state's
            by_token, ids = replace(one_sequence(call), segmented=True), jnp.where(self.valid, 0, -1)
            start = entering_states(by_token, jnp.where(known, start, 0), (of_first, None), ids)
            forgets = first & ~self.runs.first_of_row(call)
            gates = _where_tokens(first, 0, gates)
        gates = _where_tokens(forgets, -jnp.inf, gates)
        return inputs._replace(**tokens, log_decay=gates, initial_state=start, cu_seqlens=None)

    def from_on(self, which: jax.Array, reverse: bool) -> jax.Array:
        """Tokens that are one of these or come after one in their sequence, in the order of the recurrence."""
        token = jnp.arange(self.call.tokens, dtype=jnp.int32)
        if reverse:
            nearest = jax.lax.cummin(jnp.where(which, token, self.call.tokens), axis=1, reverse=True)
            return self.valid & (nearest < self.runs.end)
        nearest = jax.lax.cummax(jnp.where(which, token, -1), axis=1)
        return self.valid & (nearest >= self.runs.begin)

    def sequences_with(self, which: jax.Array) -> jax.Array:
        """All tokens of sequences that have any of these."""
        return self.from_on(which, False) | self.from_on(which, True)

    def marked(self, cotangents: Inputs, spoilt: jax.Array) -> Inputs:
        """The cotangents, with NaN for tokens that are `spoilt` and for the initial states of their sequences."""
        marked: dict[str, Any] = {}
        for name in (*TOKENS, "beta", "log_decay"):
            x = getattr(cotangents, name)
            if x is not None and not (name == "log_decay" and self.call.decay == "constant"):
                marked[name] = _where_tokens(spoilt, jnp.nan, x)
        if cotangents.log_decay is not None and self.call.decay == "constant":
            marked["log_decay"] = jnp.where(spoilt.any(1)[:, None], jnp.nan, cotangents.log_decay)
        if cotangents.initial_state is not None:
            start_spoilt = (spoilt & self.first).any(1)
            marked["initial_state"] = jnp.where(_beside_states(start_spoilt), jnp.nan, cotangents.initial_state)
        return cotangents._replace(**marked)


def _all_finite(x: jax.Array) -> jax.Array:
    """Whether all that a token has is a number: `[B, T]`."""
    return jnp.isfinite(x).all(tuple(range(2, x.ndim)))


def _where_tokens(which: jax.Array, x: Any, y: Any) -> jax.Array:
    """`x` for these tokens `[B, T]`, `y` for the others."""
    ndim = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(which.reshape(*which.shape, *(1,) * (ndim - 2)), x, y)


def _beside_states(which: jax.Array) -> jax.Array:
    return which[:, None, None, None]


def _or_zeros(cotangent: jax.Array | None, x: jax.Array | None) -> jax.Array | None:
    return jnp.zeros_like(x) if cotangent is None and x is not None else cotangent
