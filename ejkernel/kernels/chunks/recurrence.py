"""A recurrence on XLA: a whole call and its gradient, from what one chunk and one token of the recurrence are."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._differentiable import Op
from ejkernel.kernels.chunks import token_walk, walk
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
        *aligned, cu_seqlens = _varying.align(arrays)
        inputs = self.inputs(*aligned)
        if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
            output = jnp.zeros((call.batch, call.tokens, call.heads, call.value_dim), call.dtype)
            return output, initial_states(call, inputs)
        if call.tokens == 1 and not call.packed:
            return token_walk.step(call, self.write, self.arrays(call, inputs, None), initial_states(call, inputs))
        return _differentiable.call(OP, (self, call), (inputs, cu_seqlens))

    def forward(self, call: Any, inputs: Any, cu_seqlens: jax.Array | None) -> Results:
        """The results in the fastest way; `forward_by_chunks` is the one that JAX itself can differentiate."""

        def by_tokens() -> Results:
            return token_walk.forward(call, self.write, *self._prepare(call, cu_seqlens, inputs), cu_seqlens)

        def by_chunks() -> Results:
            return self.forward_by_chunks(call, inputs, cu_seqlens)

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

    def _prepare(self, call: Any, cu_seqlens: jax.Array | None, inputs: Any) -> tuple[Any, jax.Array | None]:
        """The arrays of all tokens, and the states that sequences start from."""
        return self.arrays(call, inputs, cu_seqlens), start_states(call, inputs, cu_seqlens)


def _forward(static: tuple[Recurrence, Any], operands: Any) -> Results:
    recurrence, call = static
    return recurrence.forward(call, *operands)


def _with_residuals(static: tuple[Recurrence, Any], operands: Any) -> tuple[Results, Any]:
    recurrence, call = static
    return recurrence.forward_with_residuals(call, *operands)


def _backward(static: tuple[Recurrence, Any], operands: Any, residuals: Any, cotangents: Any, wanted: Any) -> Any:
    (recurrence, call), (inputs, cu_seqlens), (d_output, d_final) = static, operands, cotangents
    query = inputs.query
    if d_output is None:
        shape = (call.batch, call.tokens, call.heads, call.value_dim)
        d_output = _varying.like(jnp.zeros(shape, call.dtype), query)
    d_final = walk.zero_states(call, query) if d_final is None else d_final
    return recurrence.backward(call, inputs, cu_seqlens, residuals, (d_output, d_final)), None


def _reference(static: tuple[Recurrence, Any], operands: Any) -> Results:
    recurrence, call = static
    return recurrence.forward_by_chunks(call, *operands)


OP = Op(_forward, _with_residuals, _backward, _reference, tangent=_forward)
