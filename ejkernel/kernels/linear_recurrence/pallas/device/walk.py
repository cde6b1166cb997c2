"""The walks over a call's blocks of tokens: forward, and backward from the last to the first.

A block has several chunks, a program several heads. With key gates, blocks are done as if their gates were mild, so
nothing waits for what decides it. A block in which some are not is gone through once more, where each chunk of a head
asks for itself and is done exactly if it has to be.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.linear_recurrence.pallas.device import chunk as chunks
from ejkernel.kernels.linear_recurrence.pallas.device.head_gates import Decays, Flow, Gated
from ejkernel.kernels.linear_recurrence.pallas.device.key_gates import LOWEST, Exact, Mild
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32, index
from ejkernel.kernels.linear_recurrence.pallas.plan import Item, Sizes


@dataclass(frozen=True)
class Walk:
    """One program's view of its arrays."""

    sizes: Sizes
    item: Item
    arrays: dict[str, Any]
    old: Any  # which state is read
    new: Any  # while the other is written

    @classmethod
    def of(cls, sizes: Sizes, names: Sequence[str], table: Any, refs: Sequence[Any], back: bool = False) -> Self:
        """From what a kernel is given; `back` is the way back of a walk."""
        number = pl.program_id(2)
        item = Item.read(table, number, sizes)
        if back:
            # the visit that is made last is the first one of the forward's
            item = item._replace(first=item.last, last=item.first)
        return cls(sizes, item, dict(zip(names, refs, strict=True)), number & 1, 1 - (number & 1))

    def lanes(self, name: str, head: int) -> Any:
        """The lanes of an array that a head of the program reads."""
        dim = self.sizes.value_dim if name in ("value", "output", "d_output", "d_value") else self.sizes.key_dim
        mine = head * self.sizes.block_heads(name) // self.sizes.heads
        return pl.ds(mine * dim, dim)

    def tokens(self, i: Any) -> Any:
        C = self.sizes.chunk
        return pl.ds(i * C if isinstance(i, int) else pl.multiple_of(i * C, C), C)

    def rows_of(self, name: str, head: int, i: Any) -> jax.Array:
        """A chunk of an array, 0 where a token is not the item's."""
        x = self.arrays[name][0, self.tokens(i), self.lanes(name, head)]
        return jnp.where(self.own(i, x.shape), x, jnp.zeros_like(x)) if self.sizes.masked else x

    def store(self, name: str, head: int, i: Any, x: jax.Array) -> None:
        at = 0, self.tokens(i), self.lanes(name, head)
        ref = self.arrays[name]
        x = x.astype(ref.dtype)
        ref[at] = jnp.where(self.own(i, x.shape), x, ref[at]) if self.sizes.masked else x

    def store_along(self, name: str, heads: Any, i: Any, x: jax.Array) -> None:
        """Stores numbers of a chunk's tokens that lie along the lanes, of one head or of several."""
        at, ref = (0, 0, heads, self.tokens(i)), self.arrays[name]
        ref[at] = jnp.where(self.own(i, x.shape, 1), x, ref[at]) if self.sizes.masked else x

    def own(self, i: Any, shape: Sequence[int], axis: int = 0) -> jax.Array:
        token = self.item.start + i * self.sizes.chunk + index(tuple(shape), axis)
        return (token >= self.item.low) & (token < self.item.high)

    def is_first(self, i: Any, shape: Sequence[int], axis: int = 0) -> jax.Array:
        """Whether a token is the first of its sequence to be visited."""
        token = self.item.start + i * self.sizes.chunk + index(tuple(shape), axis)
        first = self.item.high - 1 if self.sizes.reverse else self.item.low
        return (token == first) & (self.item.first != 0) & (self.item.low < self.item.high)

    def gates(self, head: int, i: Any) -> jax.Array:
        """A head's key gates in a chunk."""
        return self.rows_of("gates", head, i).astype(F32)

    def mild(self, head: int, i: Any) -> Mild:
        """A chunk with key gates as if they were mild."""
        query, key, sizes = self.rows_of("query", head, i), self.rows_of("key", head, i), self.sizes
        return Mild.of(query, key, self.gates(head, i), sizes.scale, sizes.limit, sizes.reverse)

    def exact(self, head: int, i: Any) -> tuple[Exact, jax.Array]:
        """A chunk with key gates, that of a sequence's first token apart, which only a state there meets `[1, K]`."""
        gates = jnp.maximum(self.gates(head, i), LOWEST)
        is_first = self.is_first(i, gates.shape)
        query, key = self.rows_of("query", head, i), self.rows_of("key", head, i)
        exact = Exact.of(query, key, jnp.where(is_first, 0, gates), self.sizes.scale, self.sizes.reverse)
        return exact, jnp.where(is_first, gates, 0).sum(0, keepdims=True)

    def decays(self, i: int) -> Decays | None:
        """All heads' decays in a chunk, for one gate a head."""
        if self.sizes.decay == "none":
            return None
        return Decays.of(jnp.where(self.is_first(i, self._shape, 1), 0, self.head_gates(i)), self.sizes.reverse)

    def all_decays(self) -> list[Decays | None]:
        """Those of all chunks; key gates are multiplied with where their chunk is."""
        return [None if self.sizes.decay == "key" else self.decays(i) for i in range(self.sizes.chunks)]

    @property
    def _shape(self) -> tuple[int, int]:
        return self.sizes.heads, self.sizes.chunk

    def head_gates(self, i: int) -> jax.Array:
        """All heads' gates in a chunk, for one gate a head `[heads, C]`."""
        constant = self.sizes.decay == "constant"
        at = pl.ds(0, self.sizes.chunk) if constant else self.tokens(i)
        x = self.arrays["gates"][0, 0, :, at].astype(F32)
        return jnp.where(self.own(i, x.shape, 1), x, 0) if self.sizes.masked else x

    def first_gates(self) -> jax.Array:
        """The gates of the visit's first token, one a head `[heads, 1]`, 0 if no sequence begins here."""
        found = jnp.zeros((self.sizes.heads, 1), F32)
        for i in range(self.sizes.chunks):
            gates = jnp.where(self.is_first(i, self._shape, 1), self.head_gates(i), 0)
            # a first gate of -inf beside zeros
            found = found + gates.sum(1, keepdims=True)
        return found

    def order(self, backward: bool = False) -> list[int]:
        """A visit's chunks as they come."""
        order = list(range(self.sizes.chunks))
        return order[::-1] if self.sizes.reverse != backward else order

    def in_order(self, j: Any) -> Any:
        """The chunk that comes as the `j`-th one."""
        return self.sizes.chunks - 1 - j if self.sizes.reverse else j

    def begin(self) -> None:
        """Before a visit: the state that a sequence starts from is put in place, and what the visit meets is kept."""
        sizes, arrays, states, old = self.sizes, self.arrays, self.arrays["states"], self.old

        @pl.when(self.item.first != 0)
        def _() -> None:
            for h in range(sizes.heads):
                state = jnp.zeros((sizes.value_dim, sizes.key_dim), F32)
                if "initial" in arrays:
                    state = self._through_first_gate(h, arrays["initial"][0, h].astype(F32).T)
                states[old, h] = state

        self._clear("output")
        if "met" in arrays:
            for h in range(sizes.heads):
                arrays["met"][0, 0, h] = states[old, h]

    def end(self) -> None:
        """After it: the state that the sequence ends with."""

        @pl.when(self.item.last != 0)
        def _() -> None:
            for h in range(self.sizes.heads):
                self.arrays["final"][0, h] = self.arrays["states"][self.new, h].T

    def begin_back(self) -> None:
        """Before a visit of the way back: likewise the cotangent of the state that a sequence ends with."""
        sizes, arrays = self.sizes, self.arrays

        @pl.when(self.item.last != 0)
        def _() -> None:
            for h in range(sizes.heads):
                state = jnp.zeros((sizes.value_dim, sizes.key_dim), F32)
                if "d_final" in arrays:
                    state = arrays["d_final"][0, h].T
                arrays["d_states"][self.old, h] = state

        self._clear("d_query", "d_key", "d_value", "d_beta", "d_gates")

    def store_flows(self, flows: dict[int, list[Flow]]) -> None:
        """The gradient of gates of heads, from what crosses them by chunk and head."""
        for i, found in flows.items():
            flow = Flow(*(jnp.concatenate(each, 0) for each in zip(*found, strict=True))).across(self.sizes.reverse)
            # across a gate that forgets everything nothing flows
            self.store_along("d_gates", slice(None), i, jnp.where(self.head_gates(i) <= LOWEST, 0, flow))

    def store_key_flow(self, head: int, i: Any, flow: jax.Array) -> None:
        """The gradient of a head's key gates in a chunk."""
        # across a gate that forgets everything nothing flows, nor does what cancels leave its rounding there
        self.store("d_gates", head, i, jnp.where(self.gates(head, i) <= LOWEST, 0, flow))

    def end_back(self) -> None:
        """After it: the cotangent of the state that the sequence started from."""
        arrays = self.arrays
        if "d_initial" in arrays:

            @pl.when(self.item.first != 0)
            def _() -> None:
                for h in range(self.sizes.heads):
                    d_state = self._through_first_gate(h, arrays["d_states"][self.new, h])
                    arrays["d_initial"][0, h] = d_state.T.astype(arrays["d_initial"].dtype)

    def _through_first_gate(self, head: int, state: jax.Array) -> jax.Array:
        """Key gates are multiplied with where their chunk is; those of heads leave their first one out there."""
        by_head = self.sizes.decay in ("head", "constant")
        return grown(state, self.first_gates()[head : head + 1]) if by_head else state

    def _clear(self, *names: str) -> None:
        """What the block's tokens that are nobody's will have in these arrays."""
        if self.sizes.masked:

            @pl.when(self.item.fresh != 0)
            def _() -> None:
                for name in names:
                    if name in self.arrays:
                        self.arrays[name][...] = jnp.zeros_like(self.arrays[name])


def grown(x: jax.Array, log_decay: jax.Array | None) -> jax.Array:
    """`x · exp(log_decay)`, in two factors where `exp` has no number for one: so a zero stays zero."""
    if log_decay is None:
        return x
    log_decay = jnp.maximum(log_decay, LOWEST)
    within = jnp.minimum(log_decay, 88.0)
    return x * jnp.exp(within) * jnp.exp(jnp.minimum(log_decay - within, 88.0))


def forward(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """Output and final states, and the states that visits meet if there is a place for them."""
    walk = Walk.of(sizes, names, table, refs)
    states, heads, old, new = walk.arrays["states"], range(sizes.heads), walk.old, walk.new
    walk.begin()

    def visit(h: int, i: Any, chunk: chunks.Chunk, state: jax.Array) -> jax.Array:
        value = walk.rows_of("value", h, i)
        walk.store("output", h, i, chunks.read(chunk, value, state))
        return chunks.written(chunk, value, state)

    by_key, strong = sizes.decay == "key", []
    decays = walk.all_decays()
    for h in heads:
        state = states[old, h]
        for i in walk.order():
            if by_key:
                mild = walk.mild(h, i)
                strong.append(mild.strong)
                chunk = mild.chunk
            else:
                query, key = walk.rows_of("query", h, i), walk.rows_of("key", h, i)
                chunk = Gated.of(query, key, decays[i], h, sizes.scale, sizes.reverse).chunk
            state = visit(h, i, chunk, state)
        states[new, h] = state

    if by_key:

        @pl.when(any_of(strong))
        def exactly() -> None:
            for h in heads:
                states[new, h] = states[old, h]

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    i = walk.in_order(j)

                    def go_on(found: Mild | Exact, first: jax.Array | None) -> None:
                        states[new, h] = visit(h, i, found.chunk, grown(states[new, h], first))

                    as_needed(walk, h, i, go_on)

    walk.end()


def as_needed(walk: Walk, head: int, i: Any, go_on: Callable[[Mild | Exact, jax.Array | None], None]) -> None:
    """Goes on with a chunk as its own gates ask for: mild, or exact and the gate that a state at its start meets."""
    mild = walk.mild(head, i)
    strong = any_of([mild.strong])

    @pl.when(strong)
    def _() -> None:
        go_on(*walk.exact(head, i))

    @pl.when(~strong)
    def _() -> None:
        go_on(mild, None)


def any_of(rows: Sequence[jax.Array]) -> jax.Array:
    """Whether one of them has a number above 0."""
    return jnp.max(functools.reduce(jnp.maximum, rows)) > 0


def backward(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """Gradients of all arrays: each visit finds its chunks' states again, from the one that the forward has met."""
    walk = Walk.of(sizes, names, table, refs, back=True)
    arrays, heads, old, new = walk.arrays, range(sizes.heads), walk.old, walk.new
    d_states = arrays["d_states"]
    by_key = sizes.decay == "key"
    wanted = "d_gates" in arrays
    walk.begin_back()

    def visit(h: int, i: Any, chunk: Any, state: jax.Array, d_state: jax.Array) -> tuple[Any, jax.Array]:
        """Stores a chunk's gradients; gives what crosses its gates, and the cotangent of the state at its start."""
        value, d_output = walk.rows_of("value", h, i), walk.rows_of("d_output", h, i)
        mirrored = chunks.mirrored(chunk.chunk, value, state, d_output, d_state)
        dq, dk, flow = chunk.gradients(mirrored, d_state, state, sizes.reverse)
        walk.store("d_query", h, i, dq)
        walk.store("d_key", h, i, dk)
        walk.store("d_value", h, i, mirrored.value)
        if by_key and wanted:
            walk.store_key_flow(h, i, flow)
        return flow, mirrored.state

    strong = []
    decays = walk.all_decays()
    flows: dict[int, list[Any]] = {i: [] for i in range(sizes.chunks)}
    for h in heads:
        state = arrays["met"][0, 0, h]
        done: dict[int, Any] = {}
        met: dict[int, jax.Array] = {}
        for i in walk.order():
            if by_key:
                done[i] = walk.mild(h, i)
                strong.append(done[i].strong)
            else:
                query, key = walk.rows_of("query", h, i), walk.rows_of("key", h, i)
                done[i] = Gated.of(query, key, decays[i], h, sizes.scale, sizes.reverse)
            met[i] = state
            state = chunks.written(done[i].chunk, walk.rows_of("value", h, i), state)
        d_state = d_states[old, h]
        for i in walk.order(backward=True):
            flow, d_state = visit(h, i, done[i], met[i], d_state)
            flows[i].append(flow)
        d_states[new, h] = d_state

    if wanted and not by_key:
        walk.store_flows(flows)

    if by_key:

        @pl.when(any_of(strong))
        def exactly() -> None:
            states = arrays["states"]
            for h in heads:
                d_states[new, h] = d_states[old, h]
                states[0] = arrays["met"][0, 0, h]

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    i = walk.in_order(j)

                    def go_on(found: Mild | Exact, first: jax.Array | None) -> None:
                        states[j] = grown(states[j], first)
                        states[j + 1] = chunks.written(found.chunk, walk.rows_of("value", h, i), states[j])

                    as_needed(walk, h, i, go_on)

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    at = sizes.chunks - 1 - j
                    i = walk.in_order(at)

                    def go_on(found: Mild | Exact, first: jax.Array | None) -> None:
                        _, d_state = visit(h, i, found, states[at], d_states[new, h])
                        d_states[new, h] = grown(d_state, first)

                    as_needed(walk, h, i, go_on)

    walk.end_back()
