"""A recurrence on XLA: a whole call and its gradient, from what one chunk and one token of the recurrence are."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._mapping import fold_rows
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.chunks import layout, segment_walk, token_walk, walk
from ejkernel.kernels.chunks.first_gates import initial_states, start_states

Results = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Recurrence:
    """What one recurrence is; `inputs` below are its `Inputs`, the arrays of a call that have gradients, by name.

    Attributes:
        inputs: The type `Inputs` itself. The initial state is its last field, and `gates` are its log decays.
        arrays: `arrays(call, inputs, cu_seqlens)`: the arrays of all tokens, `[B, T, heads, ·]`, by name. Log decays
            are named `log_decay` `[B, T, H, 1 or K]` and `value_log_decay` `[B, T, H, V]`.
        math: `math(call)`: the mathematics of one chunk of these.
        write: `write(call, token, state)`: see `token_walk`.
    """

    inputs: Callable[..., Any]
    arrays: Callable[..., Any]
    math: Callable[[Any], walk.ChunkMath]
    write: token_walk.Write

    def run(self, call: Any, *arrays: jax.Array | None) -> Results:
        """Output and final states; see `Call` for the arrays."""
        *aligned, sequences = _varying.align(arrays)
        inputs = self.inputs(*aligned)
        if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
            output = jnp.zeros((call.batch, call.tokens, call.heads, call.value_dim), call.dtype)
            return output, initial_states(call, inputs)
        if call.segmented and call.tokens == 1:
            return self.by_tokens(call, inputs, sequences)
        if call.tokens == 1 and not call.packed:
            return token_walk.step(call, self.write, self.arrays(call, inputs, None), initial_states(call, inputs))
        return _differentiable.call(SEGMENTED if call.segmented else OP, (self, call), (inputs, sequences))

    def forward(self, call: Any, inputs: Any, sequences: Any) -> Results:
        """The results in the fastest way; `_reference` is the one that JAX itself can differentiate."""

        def by_tokens() -> Results:
            if call.segmented:
                arrays = self.arrays(call, inputs, None)
                return token_walk.forward_of_segments(call, self.write, arrays, inputs, sequences)
            return token_walk.forward(call, self.write, *self._prepare(call, sequences, inputs), sequences)

        def by_chunks() -> Results:
            if call.segmented:
                return self.forward_of_segments(call, inputs, sequences, keep_states=False)[0]
            return self.forward_by_chunks(call, inputs, sequences)

        if token_walk.applies(call, inputs):
            return lax.platform_dependent(cpu=by_tokens, default=by_chunks)
        return by_chunks()

    def forward_by_chunks(self, call: Any, inputs: Any, cu_seqlens: jax.Array | None) -> Results:
        """The results in plain JAX, which differentiates it forwards and backwards."""
        prepared = self._prepare(call, cu_seqlens, inputs)
        return walk.forward(call, self.math(call), *prepared, cu_seqlens, keep_states=False)[0]

    def forward_with_residuals(self, call: Any, inputs: Any, cu_seqlens: jax.Array | None) -> tuple[Results, Any]:
        """The results, and for `backward` the states at chunks' starts `[chunks, rows, H, K, V]`."""
        prepared = self._prepare(call, cu_seqlens, inputs)
        return walk.forward(call, self.math(call), *prepared, cu_seqlens, keep_states=True)

    def backward(
        self,
        call: Any,
        inputs: Any,
        cu_seqlens: jax.Array | None,
        residuals: jax.Array,
        cotangents: Results,
        passed: Any = None,
    ) -> Any:
        """Cotangents of the inputs; `passed` is as in `walk.backward`."""
        (arrays, starts), pull = jax.vjp(functools.partial(self._prepare, call, cu_seqlens), inputs)
        d_arrays, d_starts = walk.backward(
            call, self.math(call), arrays, residuals, cu_seqlens, cotangents, starts is not None, passed
        )
        (d_inputs,) = pull((d_arrays, None if starts is None else d_starts))
        return d_inputs

    def by_tokens(self, call: Any, inputs: Any, ids: jax.Array) -> Results:
        """The results of rows that hold several sequences, in plain JAX."""
        arrays = self.arrays(call, inputs, None)
        return token_walk.segments(call, self.write, arrays, inputs, ids, layout.chunk_size(call))

    def forward_of_segments(self, call: Any, inputs: Any, ids: jax.Array, *, keep_states: bool) -> tuple[Results, Any]:
        """The results of rows that hold several sequences and, if kept, states for `backward_of_segments`."""
        arrays, starts = self._prepare_segments(call, ids, inputs)
        return segment_walk.forward(call, self.math(call), arrays, starts, ids, keep_states)

    def backward_of_segments(self, call: Any, inputs: Any, ids: jax.Array, kept: jax.Array, cotangents: Results) -> Any:
        """Cotangents of the inputs of rows that hold several sequences."""
        (arrays, starts), pull = jax.vjp(functools.partial(self._prepare_segments, call, ids), inputs)
        d_arrays, d_starts = segment_walk.backward(call, self.math(call), arrays, starts, kept, ids, cotangents)
        (d_inputs,) = pull((d_arrays, None if starts is None else d_starts))
        return d_inputs

    def _prepare_segments(self, call: Any, ids: jax.Array, inputs: Any) -> tuple[Any, jax.Array | None]:
        return self.arrays(call, inputs, None), start_states(call, inputs, ids)

    def _prepare(self, call: Any, cu_seqlens: jax.Array | None, inputs: Any) -> tuple[Any, jax.Array | None]:
        """The arrays of all tokens, and the states that sequences start from."""
        return self.arrays(call, inputs, cu_seqlens), start_states(call, inputs, cu_seqlens)


def _forward(static: tuple[Recurrence, Any], operands: Any) -> Results:
    (recurrence, call), (inputs, sequences) = static, operands
    return recurrence.forward(call, inputs, sequences)


def _with_residuals(static: tuple[Recurrence, Any], operands: Any) -> tuple[Results, Any]:
    (recurrence, call), (inputs, sequences) = static, operands
    if call.segmented:
        return recurrence.forward_of_segments(call, inputs, sequences, keep_states=True)
    return recurrence.forward_with_residuals(call, inputs, sequences)


def _backward(static: tuple[Recurrence, Any], operands: Any, residuals: Any, cotangents: Any, wanted: Any) -> Any:
    (recurrence, call), (inputs, sequences), (d_output, d_final) = static, operands, cotangents
    query = inputs.query
    if d_output is None:
        shape = (call.batch, call.tokens, call.heads, call.value_dim)
        d_output = _varying.like(jnp.zeros(shape, call.dtype), query)
    d_final = walk.zero_states(call, query) if d_final is None else d_final
    backward = recurrence.backward_of_segments if call.segmented else recurrence.backward
    return backward(call, inputs, sequences, residuals, (d_output, d_final)), None


def _reference(static: tuple[Recurrence, Any], operands: Any) -> Results:
    recurrence, call = static
    return (recurrence.by_tokens if call.segmented else recurrence.forward_by_chunks)(call, *operands)


def _tangent(static: tuple[Recurrence, Any], operands: Any) -> Results:
    """The results in the form whose tangents a CPU is fastest at; JAX can differentiate all of them forwards."""
    (recurrence, call), (inputs, sequences) = static, operands
    decays_dims = call.decay == "key" or inputs.gates[1] is not None
    if decays_dims or call.packed or call.segmented:
        return recurrence.forward(call, inputs, sequences)
    return recurrence.forward_by_chunks(call, inputs, sequences)


def _fold(static: tuple[Recurrence, Any], size: int, operands: Any, mapped: Any, wanted: Any) -> Any:
    recurrence, call = static
    larger = replace(call, batch=call.batch * size, sequences=call.sequences * size)
    return (recurrence, larger), fold_rows(operands, size, mapped)


OP = Op(_forward, _reference, _with_residuals, _backward, tangent=by_jvp(_tangent))
# the number of steps depends on values: mapped calls of them would all run as long as the longest
SEGMENTED = replace(OP, fold=_fold)
