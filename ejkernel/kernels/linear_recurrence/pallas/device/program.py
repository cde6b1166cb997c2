"""The gated linear recurrence in one chunk of tokens."""

from typing import Any

import jax

from ejkernel.kernels.chunks.pallas.device.chunk import Chunk, Cotangents, scaled
from ejkernel.kernels.chunks.pallas.device.head_gates import Decays, Gated
from ejkernel.kernels.chunks.pallas.device.key_gates import MILD, Blockwise, Mild
from ejkernel.kernels.chunks.pallas.device.products import F32, matmul, matmul_nt, matmul_tn, rounded
from ejkernel.kernels.chunks.pallas.device.program import Program

Gates = Gated | Mild | Blockwise


class Linear(Program):
    """Chunks are `Gated`, `Mild` or `Blockwise`; values are read where they are multiplied."""

    def operands(self, i: Any) -> Decays | None:
        return self.decays(i)

    def chunk(self, head: int, i: Any, operands: Decays | None, kind: int) -> Gates:
        query, key, sizes = self.read("query", head, i), self.read("key", head, i), self.sizes
        if sizes.decay != "key":
            return Gated.of(query, key, operands, head, sizes.scale, sizes.reverse)
        if kind == MILD:
            return Mild.of(query, key, self.key_gates(head, i), sizes.scale, sizes.limits[0], sizes.reverse)
        blocks, dtype = self.blocks(head, i, kind), query.dtype
        query, key = query.astype(F32) * sizes.scale, key.astype(F32)
        (scores,) = blocks.scores((query,), key, rounded(dtype))
        return Blockwise.of(query, key, scores, blocks, sizes.scale, dtype)

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
