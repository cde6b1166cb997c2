"""Device code: calls whose sequences start from slots of a pool of states and write slots, token by token."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels.chunks.pallas.pools import PooledSizes

F32 = jnp.float32
# rows of the semaphores, a pair each
START, TOKEN, ROW, WRITE = range(4)


@dataclass(frozen=True)
class Walk:
    """One program: some heads of all sequences, one sequence after the other.

    It starts all transfers itself. While it computes a sequence, the state and the first token of the next one arrive,
    and the state of the one before leaves. So there are two buffers and semaphores of each kind, for even and for odd
    sequences or tokens.

    `refs` by name:
    - in scalar memory the call's `borders`, `reads`, `writes` and, if there is one, `at`; `repeated` and `shared`, see
      `_conflicts`; and `pending`, how many writes are under way,
    - in HBM the `FIELDS` of tokens and the `output`, `[T, programs, heads, ·]`; `pool [slots, H, K, V]` (here and below
      `[…, V, K]` if `keys_last`); and `held [N, H, K, V]`, for states that one sequence reads and another one writes,
    - buffers, two of each: `start`, `state`, `written` (`state` itself in pools of float32), `row`, and one a field.
    """

    sizes: PooledSizes
    refs: Any

    def run(self) -> None:
        refs, T = self.refs, self.sizes.tokens
        self._hold()
        first = jnp.clip(refs.borders[0], 0, T)
        end = jnp.clip(refs.borders[self.sizes.sequences], first, T)
        for i in range(2):
            refs.pending[i] = 0
        self._fetch_start(0)
        pl.when(first < end)(lambda: self._copy_token(first, "start"))

        def visit(n: jax.Array, low: jax.Array) -> jax.Array:
            pl.when(n + 1 < self.sizes.sequences)(lambda: self._fetch_start(n + 1))
            pl.when(self._read(n) >= 0)(lambda: self._start_copy(n, refs.pool.at[0]).wait())
            # borders that are out of order must not make a program wait for what never comes
            high = jnp.clip(refs.borders[n + 1], low, end)
            self._visit_sequence(n, low, high, first, end)
            return high

        lax.fori_loop(0, self.sizes.sequences, visit, first)
        for i in range(2):
            self._drain(i)

            @pl.when(i < end - first)
            def _(i: int = i) -> None:
                self._row_copy(end - 1 - i).wait()

        self._clear(0, first)
        self._clear(end, T)

    def _slot(self, slot: jax.Array) -> jax.Array:
        """The slot, -1 if it is none."""
        return jnp.where(slot < self.sizes.slots, jnp.maximum(slot, -1), -1)

    def _read(self, n: Any) -> jax.Array:
        return self._slot(self.refs.reads[n])

    def _is_held(self, n: Any) -> jax.Array:
        return (self._read(n) >= 0) & (self.refs.shared[n] != 0)

    def _writes(self, n: jax.Array, count: Any, length: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Slots, and whether they get the state after `count` of a sequence's tokens."""
        C, writes = self.sizes.checkpoints, []
        for i in (n * C + c for c in range(C)):
            slot = self._slot(self.refs.writes[i])
            at = self.refs.at[i] if self.sizes.inside else length
            writes.append((slot, (slot >= 0) & (at == count) & (self.refs.repeated[i] == 0)))
        return writes

    def _heads(self, states: Any) -> Any:
        """The program's heads of `[H, K, V]`."""
        return states.at[pl.ds(pl.program_id(0) * self.sizes.heads, self.sizes.heads)]

    def _hold(self) -> None:
        """Copies states that one sequence reads and another one writes, before anything is written."""

        def copy(n: jax.Array, do: str) -> None:
            here, there = self._heads(self.refs.pool.at[self._read(n)]), self._heads(self.refs.held.at[n])
            getattr(self._copy(here, there, START, 0), do)()

        def each(do: str) -> None:
            def visit(n: jax.Array, _: None) -> None:
                pl.when(self._is_held(n))(lambda: copy(n, do))

            lax.fori_loop(0, self.sizes.sequences, visit, None)

        each("start")
        each("wait")

    def _copy(self, source: Any, target: Any, kind: int, i: Any) -> Any:
        return pltpu.make_async_copy(source, target, self.refs.semaphores.at[kind, i])

    def _start_copy(self, n: Any, states: Any) -> Any:
        i = lax.rem(n, 2)
        return self._copy(self._heads(states), self.refs.start.at[i], START, i)

    def _fetch_start(self, n: Any) -> None:
        slot, held = self._read(n), self._is_held(n)
        pl.when(held)(lambda: self._start_copy(n, self.refs.held.at[n]).start())
        pl.when((slot >= 0) & ~held)(lambda: self._start_copy(n, self.refs.pool.at[slot]).start())

    def _copy_token(self, t: jax.Array, do: str) -> None:
        i = lax.rem(t, 2)
        for name in self.sizes.fields:
            x, buffer = getattr(self.refs, name), getattr(self.refs, f"{name}_buffer")
            getattr(self._copy(x.at[t, pl.program_id(0)], buffer.at[i], TOKEN, i), do)()

    def _row_copy(self, t: jax.Array, i: Any = None) -> Any:
        i = lax.rem(t, 2) if i is None else i
        return self._copy(self.refs.row.at[i], self.refs.output.at[t, pl.program_id(0)], ROW, i)

    def _clear(self, low: Any, high: Any) -> None:
        """Writes zeros for tokens of no sequence."""

        @pl.when(low < high)
        def _() -> None:
            self.refs.row[0] = jnp.zeros_like(self.refs.row[0])

        lax.fori_loop(low, high, lambda t, _: self._row_copy(t, 0).start(), None)
        lax.fori_loop(low, high, lambda t, _: self._row_copy(t, 0).wait(), None)

    def _visit_sequence(self, n: jax.Array, low: jax.Array, high: jax.Array, first: jax.Array, end: jax.Array) -> None:
        i, refs, heads, length = lax.rem(n, 2), self.refs, range(self.sizes.heads), high - low
        self._drain(i)
        known = self._read(n) >= 0

        def start(head: int) -> jax.Array:
            # selected, not multiplied: where nothing was read the buffer may hold anything
            return jnp.where(known, refs.start[i, head].astype(F32), 0)

        def state(head: int) -> jax.Array:
            return refs.state[i, head]

        def write_start() -> None:
            for head in heads:
                refs.state[i, head] = start(head)
            self._write(n, 0, length)

        def step(t: jax.Array, before: Callable[[int], jax.Array]) -> None:
            pl.when(t + 1 < end)(lambda: self._copy_token(t + 1, "start"))
            self._copy_token(t, "wait")
            # of the token before the last, from the same buffer
            pl.when(t >= first + 2)(lambda: self._row_copy(t).wait())
            self._step(i, lax.rem(t, 2), before)
            self._row_copy(t).start()
            self._write(n, t + 1 - low, length)

        # the first token takes the state from where it arrived, unless it is to be written as it is
        unchanged = length == 0
        for _, wanted in self._writes(n, 0, length) if self.sizes.inside else []:
            unchanged |= wanted
        pl.when(unchanged)(write_start)
        pl.when(~unchanged)(lambda: step(low, start))

        def visit(t: jax.Array, _: None) -> None:
            self._drain(i)
            step(t, state)

        lax.fori_loop(low + jnp.where(unchanged, 0, 1), high, visit, None)

    def _step(self, i: jax.Array, i_token: jax.Array, before: Callable[[int], jax.Array]) -> None:
        """One token: its output, and the state after it from the one before it."""
        refs, H = self.refs, self.sizes.heads
        x = {name: getattr(refs, f"{name}_buffer")[i_token].astype(F32) for name in self.sizes.fields}

        def beside_state(x: jax.Array, keys: bool) -> Callable[[int], jax.Array]:
            """One head's numbers of `x [heads, dim]` as they multiply a state; heads may be shared."""
            shared = H // x.shape[0]
            if keys == self.sizes.keys_last:
                return lambda head: x[head // shared : head // shared + 1]
            columns = x.T
            return lambda head: columns[:, head // shared : head // shared + 1]

        gates = [(x[name], name == "key_gate") for name in ("key_gate", "value_gate") if name in x]
        factors = [beside_state(jnp.exp(gate), keys) for gate, keys in gates]
        query, key = (beside_state(x[name], True) for name in ("query", "key"))
        value, beta = (beside_state(x[name], False) if name in x else None for name in ("value", "beta"))
        assert value is not None
        outputs = []
        for head in range(H):
            state, added = before(head), value(head)
            for factor in factors:
                state = _decayed(state, factor(head))
            if beta is not None:
                added = beta(head) * (added - self._sum_keys(key(head) * state))
            state = state + key(head) * added
            refs.state[i, head] = state
            outputs.append(self.sizes.scale * self._sum_keys(query(head) * state))
        output = jnp.concatenate(outputs, 1).T if self.sizes.keys_last else jnp.concatenate(outputs, 0)
        refs.row[i_token] = output.astype(refs.row.dtype)

    def _sum_keys(self, x: jax.Array) -> jax.Array:
        return x.sum(1 if self.sizes.keys_last else 0, keepdims=True)

    def _write(self, n: jax.Array, count: Any, length: Any) -> None:
        """Starts to write the state after `count` tokens of a sequence to the slots that get it."""
        i, refs = lax.rem(n, 2), self.refs
        writes = self._writes(n, count, length)
        if refs.written is not refs.state:
            some = writes[0][1]
            for _, wanted in writes[1:]:
                some |= wanted

            @pl.when(some)
            def _() -> None:
                for head in range(self.sizes.heads):
                    refs.written[i, head] = refs.state[i, head].astype(refs.written.dtype)

        for slot, wanted in writes:

            @pl.when(wanted)
            def _(slot: jax.Array = slot) -> None:
                self._write_copy(i, slot).start()
                refs.pending[i] += 1

    def _write_copy(self, i: Any, slot: Any) -> Any:
        return self._copy(self.refs.written.at[i], self._heads(self.refs.pool.at[slot]), WRITE, i)

    def _drain(self, i: Any) -> None:
        """Waits for the writes from a buffer."""
        lax.fori_loop(0, self.refs.pending[i], lambda *_: self._write_copy(i, 0).wait(), None)
        self.refs.pending[i] = 0


def _decayed(state: jax.Array, factor: jax.Array) -> jax.Array:
    # a state of 0 stays so, even if a factor overflows
    return jnp.where((state == 0) & (factor == jnp.inf), state, factor * state)


def kernel(sizes: PooledSizes, names: tuple[str, ...], *refs: Any) -> None:
    """`names` are those of `refs`, in order."""
    named = dict(zip(names, refs, strict=True))
    Walk(sizes, SimpleNamespace(**{"written": named["state"], **named})).run()
