"""The gated linear recurrence in one chunk of tokens."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

from ejkernel.kernels.chunks.pallas.device.chunk import Chunk, Cotangents, scaled
from ejkernel.kernels.chunks.pallas.device.head_gates import Decays, Gated
from ejkernel.kernels.chunks.pallas.device.key_gates import Exact, Mild
from ejkernel.kernels.chunks.pallas.device.products import matmul, matmul_nt, matmul_tn
from ejkernel.kernels.chunks.pallas.device.program import Program, any_above_zero

Gates = Gated | Mild | Exact


class Linear(Program):
    """Chunks are `Gated`, `Mild` or `Exact`; values are read where they are multiplied."""

    def chunk(self, head: int, i: Any, operands: Decays | None) -> Gated | Mild:
        query, key, sizes = self.read("query", head, i), self.read("key", head, i), self.sizes
        if sizes.decay == "key":
            return Mild.of(query, key, self.key_gates(head, i), sizes.scale, sizes.limit, sizes.reverse)
        return Gated.of(query, key, operands, head, sizes.scale, sizes.reverse)

    def exact_chunk(self, head: int, i: Any, use: Callable[[Any, jax.Array | None], None]) -> None:
        # each chunk asks for itself: the contract wants bits that do not depend on where a prompt was cut
        mild: Any = self.chunk(head, i, None)
        strong = any_above_zero([mild.strong])

        @pl.when(strong)
        def _() -> None:
            gates, first = self.exact_key_gates(head, i)
            query, key = self.read("query", head, i), self.read("key", head, i)
            use(Exact.of(query, key, gates, self.sizes.scale, self.sizes.reverse, self.sizes.joined), first)

        @pl.when(~strong)
        def _() -> None:
            use(mild, None)

    def output_and_next(self, head: int, i: Any, chunk: Gates, state: jax.Array) -> jax.Array:
        value, operands = self.read("value", head, i), chunk.chunk
        start = scaled(state, operands.start_decay).astype(value.dtype)
        self.write("output", head, i, matmul(operands.scores, value) + matmul_nt(operands.query, start))
        return _next_state(operands, value, state)

    def next_state(self, head: int, i: Any, chunk: Gates, residual: None, state: jax.Array) -> jax.Array:
        return _next_state(chunk.chunk, self.read("value", head, i), state)

    def gradients(
        self, head: int, i: Any, chunk: Gates, residual: None, state: jax.Array, d_state: jax.Array
    ) -> tuple[Any, jax.Array]:
        value, d_output = self.read("value", head, i), self.read("d_output", head, i)
        operands, dtype = chunk.chunk, value.dtype
        start = scaled(state, operands.start_decay).astype(dtype)
        d_end = scaled(d_state, operands.end_decay).astype(dtype)
        cotangents = Cotangents(matmul_nt(d_output, value), matmul(d_output, start), matmul(value, d_end))
        d_value = matmul_tn(operands.scores, d_output) + matmul_nt(operands.key, d_end)
        d_start = scaled(d_state, operands.total_decay)
        d_start = d_start + scaled(matmul_tn(d_output, operands.query), operands.start_decay)
        dq, dk, flow = chunk.gradients(cotangents, d_state, state, self.sizes.reverse)
        self.write("d_query", head, i, dq)
        self.write("d_key", head, i, dk)
        self.write("d_value", head, i, d_value)
        return flow, d_start


def _next_state(chunk: Chunk, value: jax.Array, state: jax.Array) -> jax.Array:
    return scaled(state, chunk.total_decay) + scaled(matmul_tn(value, chunk.key), chunk.end_decay)
