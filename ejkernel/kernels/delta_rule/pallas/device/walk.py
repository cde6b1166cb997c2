"""The walks over a call's blocks of tokens: forward, and backward from the last to the first.

As the linear recurrence's, whose blocks, heads and masks these are: with key gates, a block is done as if its gates
were mild, so nothing waits for what decides it, and once more and exactly if some are not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.delta_rule.pallas.device.chunk import Beta, Delta
from ejkernel.kernels.linear_recurrence.pallas.device.head_gates import Decays, Gated
from ejkernel.kernels.linear_recurrence.pallas.device.key_gates import Exact, Mild
from ejkernel.kernels.linear_recurrence.pallas.device.products import F32
from ejkernel.kernels.linear_recurrence.pallas.device.walk import Walk, any_of, grown
from ejkernel.kernels.linear_recurrence.pallas.plan import Sizes


@dataclass(frozen=True)
class DeltaWalk(Walk):
    """One program's view of its arrays, of which `beta` is one more."""

    def betas(self, i: Any) -> list[Beta]:
        """All heads' betas in a chunk."""
        x = self.arrays["beta"][0, 0, :, self.tokens(i)].astype(F32)
        x = jnp.where(self.own(i, x.shape, 1), x, 0) if self.sizes.masked else x
        down = x.T
        return [Beta(down[:, h : h + 1], x[h : h + 1]) for h in range(self.sizes.heads)]

    def delta(self, head: int, i: Any, betas: list[Beta], decays: Decays | None) -> Delta:
        """A chunk of a head; its key gates, if it has these, are taken to be mild."""
        query, key, sizes = self.rows_of("query", head, i), self.rows_of("key", head, i), self.sizes
        reading: Gated | Mild
        recalling: Gated | Mild
        if sizes.decay == "key":
            gates = self.gates(head, i)
            reading = Mild.of(query, key, gates, sizes.scale, sizes.limit, sizes.reverse)
            recalling = Mild.of(key, key, gates, 1.0, sizes.limit, sizes.reverse)
        else:
            reading = Gated.of(query, key, decays, head, sizes.scale, sizes.reverse)
            recalling = Gated.of(key, key, decays, head, 1.0, sizes.reverse)
        return self._chunk(head, i, betas, reading, recalling)

    def exact_delta(self, head: int, i: Any) -> tuple[Delta, jax.Array]:
        """A chunk with any key gates, that of a sequence's first token apart, which only a state there meets."""
        gated, first = self.exact(head, i)
        query, key = (self.rows_of(name, head, i).astype(F32) for name in ("query", "key"))
        reading = Exact.of(query, key, gated.gates, self.sizes.scale, self.sizes.reverse)
        recalling = Exact.of(key, key, gated.gates, 1.0, self.sizes.reverse)
        return self._chunk(head, i, self.betas(i), reading, recalling), first

    def _chunk(self, head: int, i: Any, betas: list[Beta], reading: Any, recalling: Any) -> Delta:
        value = self.rows_of("value", head, i)
        return Delta.of(reading, recalling, value, betas[head], self.sizes.reverse)


def forward(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """Output and final states, and the states that visits meet if there is a place for them."""
    walk = DeltaWalk.of(sizes, names, table, refs)
    states, heads, old, new = walk.arrays["states"], range(sizes.heads), walk.old, walk.new
    walk.begin()

    def visit(h: int, i: Any, delta: Delta, state: jax.Array) -> jax.Array:
        walk.store("output", h, i, delta.read(state))
        return delta.written(delta.adds(state), state)

    betas, decays = [walk.betas(i) for i in range(sizes.chunks)], walk.all_decays()
    strong = []
    for h in heads:
        state = states[old, h]
        for i in walk.order():
            delta = walk.delta(h, i, betas[i], decays[i])
            if isinstance(delta.reading, Mild):
                strong.append(delta.reading.strong)
            state = visit(h, i, delta, state)
        states[new, h] = state

    if sizes.decay == "key":

        @pl.when(any_of(strong))
        def exactly() -> None:
            for h in heads:
                states[new, h] = states[old, h]

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    i = walk.in_order(j)
                    delta, first = walk.exact_delta(h, i)
                    states[new, h] = visit(h, i, delta, grown(states[new, h], first))

    walk.end()


def backward(sizes: Sizes, names: Sequence[str], table: Any, *refs: Any) -> None:
    """Gradients of all arrays: each visit finds its chunks' states again, from the one that the forward has met."""
    walk = DeltaWalk.of(sizes, names, table, refs, back=True)
    arrays, heads, old, new = walk.arrays, range(sizes.heads), walk.old, walk.new
    d_states = arrays["d_states"]
    walk.begin_back()

    def visit(h: int, i: Any, delta: Delta, u: jax.Array, state: jax.Array, d_state: jax.Array) -> Any:
        """Stores a chunk's gradients; gives what crosses its gates, and the cotangent of the state at its start."""
        found = delta.gradients(u, state, walk.rows_of("d_output", h, i), d_state, sizes.reverse)
        walk.store("d_query", h, i, found.query)
        walk.store("d_key", h, i, found.key)
        walk.store("d_value", h, i, found.value)
        walk.store_along("d_beta", pl.ds(h, 1), i, found.beta)
        if sizes.decay == "key":
            walk.store_key_flow(h, i, found.gates)
        return found.gates, found.state

    betas, decays = [walk.betas(i) for i in range(sizes.chunks)], walk.all_decays()
    strong = []
    flows: dict[int, list[Any]] = {i: [] for i in range(sizes.chunks)}
    for h in heads:
        state = arrays["met"][0, 0, h]
        done: dict[int, tuple[Delta, jax.Array, jax.Array]] = {}
        for i in walk.order():
            delta = walk.delta(h, i, betas[i], decays[i])
            if isinstance(delta.reading, Mild):
                strong.append(delta.reading.strong)
            u = delta.adds(state)
            done[i] = delta, u, state
            state = delta.written(u, state)
        d_state = d_states[old, h]
        for i in walk.order(backward=True):
            flow, d_state = visit(h, i, *done[i], d_state)
            flows[i].append(flow)
        d_states[new, h] = d_state

    if sizes.decay == "head":
        walk.store_flows(flows)

    if sizes.decay == "key":

        @pl.when(any_of(strong))
        def exactly() -> None:
            states = arrays["states"]
            for h in heads:
                d_states[new, h] = d_states[old, h]
                states[0] = arrays["met"][0, 0, h]

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    delta, first = walk.exact_delta(h, walk.in_order(j))
                    states[j] = grown(states[j], first)
                    states[j + 1] = delta.written(delta.adds(states[j]), states[j])

                @pl.loop(0, sizes.chunks)
                def _(j: Any, h: int = h) -> None:
                    at = sizes.chunks - 1 - j
                    i = walk.in_order(at)
                    delta, first = walk.exact_delta(h, i)
                    _, d_state = visit(h, i, delta, delta.adds(states[at]), states[at], d_states[new, h])
                    d_states[new, h] = grown(d_state, first)

    walk.end_back()
