"""The delta rule's chunks, made from the arrays of a visit and taken through the shared loops."""

from typing import Any

import jax
from jax.experimental import pallas as pl

from ejkernel.kernels.chunks.pallas.device.head_gates import Decays, Gated
from ejkernel.kernels.chunks.pallas.device.key_gates import MILD, Blockwise, Mild
from ejkernel.kernels.chunks.pallas.device.products import F32
from ejkernel.kernels.chunks.pallas.device.program import Program
from ejkernel.kernels.delta_rule.pallas.device.chunk import Beta, Delta, Gates
from ejkernel.kernels.delta_rule.pallas.device.parts import digits


class DeltaRule(Program):
    """Chunks are `Delta`, residuals what their tokens add to the state."""

    def operands(self, i: Any) -> tuple[list[Beta], Decays | None]:
        x = self.read_by_head("beta", i)
        down = x.T
        return [Beta(down[:, h : h + 1], x[h : h + 1]) for h in range(self.sizes.heads)], self.decays(i)

    def chunk(self, head: int, i: Any, operands: tuple[list[Beta], Decays | None], kind: int) -> Delta:
        betas, decays = operands
        query, key, sizes = self.read("query", head, i), self.read("key", head, i), self.sizes
        qk: Gates
        kk: Gates
        if sizes.decay != "key":
            qk = Gated.of(query, key, decays, head, sizes.scale, sizes.reverse)
            kk = Gated.of(key, key, decays, head, 1.0, sizes.reverse)
        elif kind == MILD:
            gates = self.key_gates(head, i)
            qk = Mild.of(query, key, gates, sizes.scale, sizes.limits[0], sizes.reverse)
            kk = Mild.of(key, key, gates, 1.0, sizes.limits[0], sizes.reverse)
        else:
            blocks, exact = self.blocks(head, i, kind), query.dtype == F32
            query, key = query.astype(F32) * sizes.scale, key.astype(F32)
            scores, overlaps = blocks.scores((query, key), key, digits(exact))
            qk = Blockwise.of(query, key, scores, blocks, sizes.scale, F32)
            kk = Blockwise.of(key, key, overlaps, blocks, 1.0, F32)
        return Delta.of(qk, kk, self.read("value", head, i), betas[head], sizes.reverse)

    def output_and_next(self, head: int, i: Any, chunk: Delta, state: jax.Array) -> jax.Array:
        self.write("output", head, i, chunk.output(state))
        return chunk.next_state(chunk.added(state), state)

    def residual(self, chunk: Delta, state: jax.Array) -> jax.Array:
        return chunk.added(state)

    def next_state(self, head: int, i: Any, chunk: Delta, residual: jax.Array, state: jax.Array) -> jax.Array:
        return chunk.next_state(residual, state)

    def gradients(
        self, head: int, i: Any, chunk: Delta, residual: jax.Array, state: jax.Array, d_state: jax.Array
    ) -> tuple[Any, jax.Array]:
        d_output = self.read("d_output", head, i)
        gradients = chunk.gradients(residual, state, d_output, d_state, self.sizes.reverse)
        self.write("d_query", head, i, gradients.query)
        self.write("d_key", head, i, gradients.key)
        self.write("d_value", head, i, gradients.value)
        self.write_by_head("d_beta", pl.ds(head, 1), i, gradients.beta)
        return gradients.gates, gradients.state
