"""The kernels of a recurrence: forward over a sequence's blocks of tokens, and backward from the last to the first.

A block has several chunks, a program several heads. With key gates, a block is computed as if its gates were what those
of the last block were, so that no product waits for the check. If they are not, it is computed once more, each chunk by
itself. So what a chunk gives depends on its own gates alone.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.chunks.pallas.device.key_gates import BOUNDED, MILD, STRONG, kinds
from ejkernel.kernels.chunks.pallas.device.view import View, decayed
from ejkernel.kernels.chunks.pallas.plan import Sizes

KINDS = MILD, BOUNDED, STRONG


class Program(View, ABC):
    """A recurrence says what one chunk of a head does to a state; the loops over chunks and heads are here."""

    @abstractmethod
    def operands(self, i: Any) -> Any:
        """What is computed for all heads of a chunk at once."""

    @abstractmethod
    def chunk(self, head: int, i: Any, operands: Any, kind: int) -> Any:
        """A chunk from its `operands`, for key gates of a kind; of strong ones a sequence's first is left out."""

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
        program.begin()
        program._by_kind(program._forward, program._forward_by_chunk)
        program.end()

    def _forward(self, kind: int) -> list[jax.Array]:
        """All of a block's chunks, as if key gates were of a kind; what they are."""
        states, found = self.arrays["states"], []
        operands = [self.operands(i) for i in range(self.sizes.chunks)]
        for h in range(self.sizes.heads):
            state = states[self.old, h]
            for i in self._order():
                chunk = self.chunk(h, i, operands[i], kind)
                if self.sizes.decay == "key":
                    found.append(chunk.kinds)
                state = self.output_and_next(h, i, chunk, state)
            states[self.new, h] = state
        return found

    def _forward_by_chunk(self) -> None:
        states, new = self.arrays["states"], self.new
        for h in range(self.sizes.heads):
            states[new, h] = states[self.old, h]

            @pl.loop(0, self.sizes.chunks)
            def _(j: Any, h: int = h) -> None:
                i = self._at(j)

                def use(chunk: Any, first: jax.Array | None) -> None:
                    states[new, h] = self.output_and_next(h, i, chunk, decayed(states[new, h], first))

                self._with_chunk(h, i, use)

    @classmethod
    def backward(cls, sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
        """Gradients of all arrays: each visit computes its chunks' states again from the one before it."""
        program = cls.of(sizes, names, table, refs, backward=True)
        program.begin_backward()
        program._by_kind(program._backward, program._backward_by_chunk)
        program.end_backward()

    def _backward(self, kind: int) -> list[jax.Array]:
        """As `_forward`."""
        d_states, chunks = self.arrays["d_states"], self.sizes.chunks
        operands = [self.operands(i) for i in range(chunks)]
        flows: dict[int, list[Any]] = {i: [] for i in range(chunks)}
        found = []
        for h in range(self.sizes.heads):
            state = self.arrays["block_states"][0, 0, h]
            done: dict[int, tuple[Any, Any, jax.Array]] = {}
            for i in self._order():
                chunk = self.chunk(h, i, operands[i], kind)
                if self.sizes.decay == "key":
                    found.append(chunk.kinds)
                residual = self.residual(chunk, state)
                done[i] = chunk, residual, state
                state = self.next_state(h, i, chunk, residual, state)
            d_state = d_states[self.old, h]
            for i in self._order()[::-1]:
                flow, d_state = self._gradients(h, i, *done[i], d_state)
                flows[i].append(flow)
            d_states[self.new, h] = d_state
        if self.sizes.decay != "key" and "d_log_decay" in self.arrays:
            self.write_gate_gradients(flows)
        return found

    def _backward_by_chunk(self) -> None:
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

                self._with_chunk(h, i, use)

            @pl.loop(0, chunks)
            def _(j: Any, h: int = h) -> None:
                at = chunks - 1 - j
                i = self._at(at)

                def use(chunk: Any, first: jax.Array | None) -> None:
                    state = states[at]
                    residual = self.residual(chunk, state)
                    _, d_state = self._gradients(h, i, chunk, residual, state, d_states[self.new, h])
                    d_states[self.new, h] = decayed(d_state, first)

                self._with_chunk(h, i, use)

    def _gradients(self, head: int, i: Any, *others: Any) -> tuple[Any, jax.Array]:
        """As `gradients`; stores that of key gates too."""
        flow, d_state = self.gradients(head, i, *others)
        if self.sizes.decay == "key" and "d_log_decay" in self.arrays:
            self.write_key_gate_gradient(head, i, flow)
        return flow, d_state

    def _by_kind(self, whole: Callable[[int], list[jax.Array]], by_chunk: Callable[[], None]) -> None:
        """Computes a block as a whole, if its chunks' key gates are all of one kind and not strong; else by chunk."""
        if self.sizes.decay != "key":
            whole(MILD)
            return
        # of the block, as far as is known, `STRONG` if it is to be computed by chunk; then the least and the most of
        # its chunks, which are found on the way
        ref = self.arrays["kinds"]

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            each = [self.key_gates(h, i) for h in range(self.sizes.heads) for i in range(self.sizes.chunks)]
            ref[0] = _kind([kinds(gates, self.sizes.limits, self.sizes.reverse) for gates in each])

        for kind in (MILD, BOUNDED):

            @pl.when(ref[0] == kind)
            def _(kind: int = kind) -> None:
                ref[0] = jnp.where(_are(kind, whole(kind)), kind, STRONG)

        @pl.when(ref[0] == STRONG)
        def _() -> None:
            ref[1], ref[2] = STRONG, MILD
            by_chunk()
            ref[0] = jnp.where(ref[1] == ref[2], ref[1], STRONG)

    def _with_chunk(self, head: int, i: Any, use: Callable[[Any, jax.Array | None], None]) -> None:
        """Calls `use(chunk, first)` with a chunk for the kind of its key gates, and takes that down.

        `first` is the gate of a sequence's first token, if the chunk has left it out: only the state meets it.
        """
        ref, sizes = self.arrays["kinds"], self.sizes
        found = jnp.max(kinds(self.key_gates(head, i), sizes.limits, sizes.reverse)).astype(jnp.int32)
        ref[1], ref[2] = jnp.minimum(ref[1], found), jnp.maximum(ref[2], found)
        for kind in KINDS:

            @pl.when(found == kind)
            def _(kind: int = kind) -> None:
                first = self.exact_key_gates(head, i)[1] if kind == STRONG else None
                use(self.chunk(head, i, self.operands(i), kind), first)

    def _order(self) -> list[int]:
        """A block's chunks in the order of the recurrence."""
        return [self._at(j) for j in range(self.sizes.chunks)]

    def _at(self, j: Any) -> Any:
        """The chunk that comes as the `j`-th one."""
        return self.sizes.chunks - 1 - j if self.sizes.reverse else j


def _are(kind: int, rows: Sequence[jax.Array]) -> jax.Array:
    """Whether all chunks' gates are of a kind, from rows by chunk."""
    if kind == MILD:
        return jnp.max(functools.reduce(jnp.maximum, rows)) == MILD
    return _kind(rows) == kind


def _kind(rows: Sequence[jax.Array]) -> jax.Array:
    """The kind that all chunks' gates are of, else `STRONG`; from rows by chunk."""
    each = jnp.concatenate(rows, 0).max(1, keepdims=True)
    most = jnp.max(each)
    return jnp.where(jnp.min(each) == most, most, STRONG).astype(jnp.int32)
