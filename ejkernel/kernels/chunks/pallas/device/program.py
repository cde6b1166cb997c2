"""The kernels of a recurrence: forward over a sequence's blocks of tokens, and backward from the last to the first.

A block has several chunks, a program several heads. With key gates, a block is computed as if its gates were mild, so
that no product waits for the check. A block in which some are not is computed once more, by the exact path.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.chunks.pallas.device.view import View, decayed
from ejkernel.kernels.chunks.pallas.plan import Sizes


class Program(View, ABC):
    """A recurrence says what one chunk of a head does to a state; the loops over chunks and heads are here."""

    def head_operands(self) -> Sequence[Any]:
        """What is computed for all heads at once, by chunk."""
        return self.decays()

    @abstractmethod
    def chunk(self, head: int, i: Any, operands: Any) -> Any:
        """A chunk from its `head_operands`; key gates are taken to be mild, and `strong` is above 0 if they are not."""

    @abstractmethod
    def exact_chunk(self, head: int, i: Any, use: Callable[[Any, jax.Array | None], None]) -> None:
        """Calls `use(chunk, first)` with the chunk for any key gates.

        `first` is the gate of a sequence's first token, if the chunk has left it out: only the state meets it.
        """

    @abstractmethod
    def output_and_next(self, head: int, i: Any, chunk: Any, state: jax.Array) -> jax.Array:
        """Stores the chunk's output; the state at its end."""

    def residual(self, chunk: Any, state: jax.Array) -> Any:
        """What both `next_state` and `gradients` need of the state at the chunk's start."""
        return None

    @abstractmethod
    def next_state(self, head: int, i: Any, chunk: Any, residual: Any, state: jax.Array) -> jax.Array:
        """The state at the chunk's end."""

    @abstractmethod
    def gradients(
        self, head: int, i: Any, chunk: Any, residual: Any, state: jax.Array, d_state: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Stores the chunk's gradients, but for that of the gates; that or its parts, and the cotangent of `state`."""

    @classmethod
    def forward(cls, sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
        """Output, final states and, if there is a place for them, the states before visits."""
        program = cls.of(sizes, names, table, refs, backward=False)
        states, old, new = program.arrays["states"], program.old, program.new
        program.begin()
        operands = program.head_operands()
        strong = []
        for h in range(sizes.heads):
            state = states[old, h]
            for i in program._order():
                chunk = program.chunk(h, i, operands[i])
                if sizes.decay == "key":
                    strong.append(chunk.strong)
                state = program.output_and_next(h, i, chunk, state)
            states[new, h] = state
        if sizes.decay == "key":
            pl.when(any_above_zero(strong))(program._forward_exactly)
        program.end()

    def _forward_exactly(self) -> None:
        states, new = self.arrays["states"], self.new
        for h in range(self.sizes.heads):
            states[new, h] = states[self.old, h]

            @pl.loop(0, self.sizes.chunks)
            def _(j: Any, h: int = h) -> None:
                i = self._at(j)

                def use(chunk: Any, first: jax.Array | None) -> None:
                    states[new, h] = self.output_and_next(h, i, chunk, decayed(states[new, h], first))

                self.exact_chunk(h, i, use)

    @classmethod
    def backward(cls, sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
        """Gradients of all arrays: each visit computes its chunks' states again from the one before it."""
        program = cls.of(sizes, names, table, refs, backward=True)
        arrays, d_states = program.arrays, program.arrays["d_states"]
        program.begin_backward()
        operands = program.head_operands()
        strong = []
        flows: dict[int, list[Any]] = {i: [] for i in range(sizes.chunks)}
        for h in range(sizes.heads):
            state = arrays["block_states"][0, 0, h]
            done: dict[int, tuple[Any, Any, jax.Array]] = {}
            for i in program._order():
                chunk = program.chunk(h, i, operands[i])
                if sizes.decay == "key":
                    strong.append(chunk.strong)
                residual = program.residual(chunk, state)
                done[i] = chunk, residual, state
                state = program.next_state(h, i, chunk, residual, state)
            d_state = d_states[program.old, h]
            for i in program._order()[::-1]:
                flow, d_state = program._gradients(h, i, *done[i], d_state)
                flows[i].append(flow)
            d_states[program.new, h] = d_state
        if sizes.decay == "key":
            pl.when(any_above_zero(strong))(program._backward_exactly)
        elif "d_log_decay" in arrays:
            program.write_gate_gradients(flows)
        program.end_backward()

    def _backward_exactly(self) -> None:
        states, d_states, chunks = self.arrays["states"], self.arrays["d_states"], self.sizes.chunks
        for h in range(self.sizes.heads):
            d_states[self.new, h] = d_states[self.old, h]
            states[0] = self.arrays["block_states"][0, 0, h]

            @pl.loop(0, chunks)
            def _(j: Any, h: int = h) -> None:
                i = self._at(j)

                def use(chunk: Any, first: jax.Array | None) -> None:
                    states[j] = state = decayed(states[j], first)
                    states[j + 1] = self.next_state(h, i, chunk, self.residual(chunk, state), state)

                self.exact_chunk(h, i, use)

            @pl.loop(0, chunks)
            def _(j: Any, h: int = h) -> None:
                at = chunks - 1 - j
                i = self._at(at)

                def use(chunk: Any, first: jax.Array | None) -> None:
                    state = states[at]
                    residual = self.residual(chunk, state)
                    _, d_state = self._gradients(h, i, chunk, residual, state, d_states[self.new, h])
                    d_states[self.new, h] = decayed(d_state, first)

                self.exact_chunk(h, i, use)

    def _gradients(self, head: int, i: Any, *others: Any) -> tuple[Any, jax.Array]:
        """As `gradients`; stores that of key gates too."""
        flow, d_state = self.gradients(head, i, *others)
        if self.sizes.decay == "key" and "d_log_decay" in self.arrays:
            self.write_key_gate_gradient(head, i, flow)
        return flow, d_state

    def _order(self) -> list[int]:
        """A block's chunks in the order of the recurrence."""
        return [self._at(j) for j in range(self.sizes.chunks)]

    def _at(self, j: Any) -> Any:
        """The chunk that comes as the `j`-th one."""
        return self.sizes.chunks - 1 - j if self.sizes.reverse else j


def any_above_zero(rows: Sequence[jax.Array]) -> jax.Array:
    return jnp.max(functools.reduce(jnp.maximum, rows)) > 0
