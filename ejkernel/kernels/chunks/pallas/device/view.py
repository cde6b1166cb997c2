"""What one program of a kernel sees of its arrays during one visit to a block of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels.chunks.pallas.device.head_gates import Decays, Flow
from ejkernel.kernels.chunks.pallas.device.key_gates import BOUNDED, Blocks
from ejkernel.kernels.chunks.pallas.device.products import F32, LOWEST, index
from ejkernel.kernels.chunks.pallas.plan import Sizes, Visit


@dataclass(frozen=True)
class View:
    """Arrays by name, some of them optional; `i` is a chunk of the block and `head` one of the program's heads."""

    sizes: Sizes
    visit: Visit
    arrays: dict[str, Any]
    old: Any  # which of the two places for a state is read
    new: Any  # and which is written

    @classmethod
    def of(cls, sizes: Sizes, names: Sequence[str], table: Any, refs: Sequence[Any], backward: bool) -> Self:
        number = pl.program_id(2)
        visit = Visit.read(table, number, sizes)
        if backward:
            # first and last as the forward meets them
            visit = visit._replace(first=visit.last, last=visit.first)
        return cls(sizes, visit, dict(zip(names, refs, strict=True)), number & 1, 1 - (number & 1))

    def _lanes(self, name: str, head: int) -> Any:
        dim = self.sizes.value_dim if name in ("value", "output", "d_output", "d_value") else self.sizes.key_dim
        return pl.ds(head * self.sizes.heads_of(name) // self.sizes.heads * dim, dim)

    def _tokens(self, i: Any) -> Any:
        C = self.sizes.chunk
        return pl.ds(i * C if isinstance(i, int) else pl.multiple_of(i * C, C), C)

    def read(self, name: str, head: int, i: Any) -> jax.Array:
        """A chunk of an array `[C, dim]`, 0 where a token is not the visit's."""
        x = self.arrays[name][0, self._tokens(i), self._lanes(name, head)]
        return jnp.where(self._inside(i, x.shape), x, jnp.zeros_like(x)) if self.sizes.masked else x

    def write(self, name: str, head: int, i: Any, x: jax.Array) -> None:
        at = 0, self._tokens(i), self._lanes(name, head)
        ref = self.arrays[name]
        x = x.astype(ref.dtype)
        ref[at] = jnp.where(self._inside(i, x.shape), x, ref[at]) if self.sizes.masked else x

    def read_by_head(self, name: str, i: Any) -> jax.Array:
        """One number a head and token of a chunk `[heads, C]`."""
        # constant gates are the same for all tokens
        tokens = (
            pl.ds(0, self.sizes.chunk) if name == "log_decay" and self.sizes.decay == "constant" else self._tokens(i)
        )
        x = self.arrays[name][0, 0, :, tokens].astype(F32)
        return jnp.where(self._inside(i, x.shape, 1), x, 0) if self.sizes.masked else x

    def write_by_head(self, name: str, heads: Any, i: Any, x: jax.Array) -> None:
        at, ref = (0, 0, heads, self._tokens(i)), self.arrays[name]
        ref[at] = jnp.where(self._inside(i, x.shape, 1), x, ref[at]) if self.sizes.masked else x

    def _token(self, i: Any, shape: Sequence[int], axis: int) -> jax.Array:
        return self.visit.start + i * self.sizes.chunk + index(tuple(shape), axis)

    def _inside(self, i: Any, shape: Sequence[int], axis: int = 0) -> jax.Array:
        """Whether a token is the visit's."""
        token = self._token(i, shape, axis)
        return (token >= self.visit.low) & (token < self.visit.high)

    def _is_first(self, i: Any, shape: Sequence[int], axis: int = 0) -> jax.Array:
        """Whether a token is the first of its sequence to be visited."""
        token = self._token(i, shape, axis)
        first = self.visit.high - 1 if self.sizes.reverse else self.visit.low
        return (token == first) & (self.visit.first != 0) & (self.visit.low < self.visit.high)

    def key_gates(self, head: int, i: Any) -> jax.Array:
        return self.read("log_decay", head, i).astype(F32)

    def exact_key_gates(self, head: int, i: Any) -> tuple[jax.Array, jax.Array]:
        """Key gates without that of a sequence's first token, and that one `[1, K]`, which only a state meets."""
        gates = jnp.maximum(self.key_gates(head, i), LOWEST)
        is_first = self._is_first(i, gates.shape)
        return jnp.where(is_first, 0, gates), jnp.where(is_first, gates, 0).sum(0, keepdims=True)

    def blocks(self, head: int, i: Any, kind: int) -> Blocks:
        """Decays by blocks, of bounded key gates or any; these without that of a sequence's first token."""
        gates = self.key_gates(head, i) if kind == BOUNDED else self.exact_key_gates(head, i)[0]
        return Blocks.of(gates, kind == BOUNDED, self.sizes.limits, self.sizes.reverse, self.sizes.joined)

    def decays(self, i: Any) -> Decays | None:
        """All heads' decays in a chunk, for one gate a head. Without a sequence's first gate: the state has it."""
        if self.sizes.decay in ("none", "key"):
            return None
        return Decays.of(self._head_gates(i, first=False), self.sizes.reverse, self.sizes.joined)

    def _head_gates(self, i: int, first: bool) -> jax.Array:
        """All heads' gates in a chunk `[heads, C]`: only that of a sequence's first token, or all but that."""
        is_first = self._is_first(i, (self.sizes.heads, self.sizes.chunk), 1)
        gates = self.read_by_head("log_decay", i)
        return jnp.where(is_first, gates, 0) if first else jnp.where(is_first, 0, gates)

    def _through_first_gate(self, head: int, state: jax.Array) -> jax.Array:
        """A state at its sequence's start past the first token's gate; key gates are applied with their chunk."""
        if self.sizes.decay not in ("head", "constant"):
            return state
        gates = jnp.zeros((self.sizes.heads, 1), F32)
        for i in range(self.sizes.chunks):
            gates = gates + self._head_gates(i, first=True).sum(1, keepdims=True)
        return decayed(state, gates[head : head + 1])

    def begin(self) -> None:
        """Puts the state that a sequence starts from in place; keeps the one before this visit, if it is asked for."""
        sizes, arrays, states, old = self.sizes, self.arrays, self.arrays["states"], self.old

        @pl.when(self.visit.first != 0)
        def _() -> None:
            for h in range(sizes.heads):
                state = jnp.zeros((sizes.value_dim, sizes.key_dim), F32)
                if "initial_state" in arrays:
                    state = self._through_first_gate(h, arrays["initial_state"][0, h].astype(F32).T)
                states[old, h] = state

        self._clear("output")
        if "block_states" in arrays:
            for h in range(sizes.heads):
                arrays["block_states"][0, 0, h] = states[old, h]

    def end(self) -> None:
        """Stores the state that a sequence ends with."""

        @pl.when(self.visit.last != 0)
        def _() -> None:
            for h in range(self.sizes.heads):
                self.arrays["final_state"][0, h] = self.arrays["states"][self.new, h].T

    def begin_backward(self) -> None:
        """Puts the cotangent of the state that a sequence ends with in place."""
        sizes, arrays = self.sizes, self.arrays

        @pl.when(self.visit.last != 0)
        def _() -> None:
            for h in range(sizes.heads):
                state = jnp.zeros((sizes.value_dim, sizes.key_dim), F32)
                if "d_final_state" in arrays:
                    state = arrays["d_final_state"][0, h].T
                arrays["d_states"][self.old, h] = state

        self._clear("d_query", "d_key", "d_value", "d_beta", "d_log_decay")

    def end_backward(self) -> None:
        """Stores the cotangent of the state that a sequence starts from."""
        arrays = self.arrays
        if "d_initial_state" in arrays:

            @pl.when(self.visit.first != 0)
            def _() -> None:
                for h in range(self.sizes.heads):
                    d_state = self._through_first_gate(h, arrays["d_states"][self.new, h])
                    arrays["d_initial_state"][0, h] = d_state.T.astype(arrays["d_initial_state"].dtype)

    def write_gate_gradients(self, flows: dict[int, list[Flow]]) -> None:
        """The gradient of gates of heads, from its parts by chunk and head."""
        for i, parts in flows.items():
            flow = Flow(*(jnp.concatenate(each, 0) for each in zip(*parts, strict=True)))
            gates = self.read_by_head("log_decay", i)
            gradient = flow.gate_gradient(gates, self.sizes.reverse, self.sizes.joined)
            # across a gate that forgets everything nothing flows
            gradient = jnp.where(gates <= LOWEST, 0, gradient)
            self.write_by_head("d_log_decay", slice(None), i, gradient)

    def write_key_gate_gradient(self, head: int, i: Any, gradient: jax.Array) -> None:
        """The gradient of a head's key gates in a chunk."""
        # across a gate that forgets everything nothing flows, nor does what cancels leave its rounding there
        self.write("d_log_decay", head, i, jnp.where(self.key_gates(head, i) <= LOWEST, 0, gradient))

    def _clear(self, *names: str) -> None:
        """Zeros for the block's tokens that belong to no sequence."""
        if self.sizes.masked:

            @pl.when(self.visit.fresh != 0)
            def _() -> None:
                for name in names:
                    if name in self.arrays:
                        self.arrays[name][...] = jnp.zeros_like(self.arrays[name])


def decayed(x: jax.Array, log_decay: jax.Array | None) -> jax.Array:
    """`x · exp(log_decay)`, in two factors where `exp` overflows, so that a zero stays zero."""
    if log_decay is None:
        return x
    log_decay = jnp.maximum(log_decay, LOWEST)
    within = jnp.minimum(log_decay, 88.0)
    return x * jnp.exp(within) * jnp.exp(jnp.minimum(log_decay - within, 88.0))
