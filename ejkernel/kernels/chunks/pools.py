"""A recurrence that starts from slots of a pool of states and writes slots, for serving, in plain JAX.

What a sequence gets is the same to the bit whatever else is in the call, and wherever it was cut at multiples of 128
tokens. So sequences are visited one by one, and all products have fixed shapes. CPUs visit token by token, where a cut
changes nothing at all; other devices chunks of a fixed size that divides 128, counted from the sequence's start.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels import _varying
from ejkernel.kernels._differentiable import splitting
from ejkernel.kernels.chunks import token_walk
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.first_gates import decayed
from ejkernel.kernels.chunks.recurrence import Recurrence
from ejkernel.kernels.chunks.walk import einsum_of, map_gates

Results = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class PooledCall:
    """Static facts of a call with a pool.

    Its arrays are those of `call`, which is packed, but for the initial state; then `cu_seqlens`, the pool
    `[slots, H, K, V]`, the slots that are read `[N]` and written `[N, C]`, and after how many of a sequence's tokens
    `[N, C]`, or `None` for `C = 1` and all of them. The results are the output `[1, T, H, V]` and the pool.
    """

    call: Any
    checkpoints: int  # C
    longest: int  # the most tokens that a sequence may have: those of a batch's rows, of a packed stream all

    instead: ClassVar[str] = "Shard heads, or have devices with pools of their own by jax.shard_map"

    @property
    def batch(self) -> int:
        return self.call.batch

    @property
    def heads(self) -> int:
        return self.call.heads

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        dims = {name: each for name, each in self.call.dims().items() if name != "initial_state"}
        return {**dims, "states": "SHKV", "reads": "N", "writes": "NC", "at": "NC"}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> "PooledCall":
        """The call that a device has where so many share its heads."""
        return replace(self, call=self.call.part(rows, heads, shapes))

    def result_specs(self, tokens: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        """How the results are sharded where shardings are explicit."""
        output, _ = self.call.result_specs(tokens)
        return output, PartitionSpec(None, tokens[2], None, None)


class _Runs(NamedTuple):
    """Runs of tokens between the places where states are written, `[N · (1 + C)]` each, in order."""

    sequence: jax.Array
    first: jax.Array  # whether it is its sequence's first
    begin: jax.Array  # the sequence's first token
    low: jax.Array  # tokens of the run, counted from there
    high: jax.Array
    slot: jax.Array  # that gets the state after it; out of range for none


def run(recurrence: Recurrence, pooled: PooledCall, *arrays: jax.Array | None, walk: Any = None) -> Results:
    """Output and pool; see `PooledCall`. `walk` is one of the two below, `None` that of the device."""
    call: Call = pooled.call
    if call.tokens == 1:
        return _beside_padding(recurrence, pooled, *arrays, walk=walk)
    *aligned, cu_seqlens, states, reads, writes, at = _varying.align(arrays)
    inputs = recurrence.inputs(*aligned, None)
    output = jnp.zeros_like(inputs.query, call.dtype, shape=(1, call.tokens, call.heads, call.value_dim))
    if 0 in (states.size, call.sequences):
        return output, states
    slots = states.shape[0]
    known = ((reads >= 0) & (reads < slots))[:, None, None, None]
    starts = states.at[jnp.clip(reads, 0, slots - 1)].get(mode="promise_in_bounds").astype(call.state_dtype)
    starts = jnp.where(known, starts, 0)
    runs = _runs(call, slots, cu_seqlens, writes, at)
    if call.tokens == 0:
        every = starts[runs.sequence].astype(states.dtype)
        return output, states.at[runs.slot].set(every, mode="drop")
    tokens = recurrence.arrays(call, inputs, cu_seqlens)

    def by(kind: Any) -> Callable[[], Results]:
        return lambda: _walk(kind(call, recurrence, tokens), runs, starts, output, states)

    if walk is not None:
        return by(walk)()
    return lax.platform_dependent(cpu=by(TokenWalk), default=by(ChunkWalk))


def _beside_padding(recurrence: Recurrence, pooled: PooledCall, *arrays: jax.Array | None, walk: Any) -> Results:
    """A call with one token, as a call with that token and one of padding.

    XLA compiles arrays of one token into other code, whose sums are rounded otherwise than in calls with more tokens.
    """
    shapes = zip(arrays, pooled.dims().values(), strict=True)
    padded = [x if x is None or "T" not in letters else _pad(x, letters.index("T")) for x, letters in shapes]
    longer = replace(pooled, call=replace(pooled.call, tokens=2))
    output, states = run(recurrence, longer, *padded, walk=walk)
    return output[:, :1], states


def _pad(x: jax.Array, axis: int) -> jax.Array:
    """`x` with a zero behind it along `axis`, in a way that XLA does not see through."""
    return lax.optimization_barrier(jnp.pad(x, [(0, int(i == axis)) for i in range(x.ndim)]))


def checkpoints(slots: int, borders: jax.Array, writes: jax.Array, at: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """After how many of its sequence's tokens a state is written, and to which slot; `[N, C]`.

    `writes` is `[N]` without `at`. Where nothing is written, the slot is past the end.
    """
    length = (borders[1:] - borders[:-1])[:, None].astype(jnp.int32)
    writes = jnp.where(writes >= 0, writes, slots)
    if at is None:
        return length, writes.reshape(-1, 1)
    return jnp.clip(at, 0, length), jnp.where((at >= 0) & (at <= length), writes, slots)


def _runs(call: Call, slots: int, cu_seqlens: jax.Array, writes: jax.Array, at: jax.Array | None) -> _Runs:
    N = call.sequences
    borders = jnp.minimum(cu_seqlens, call.tokens).astype(jnp.int32)
    high, slot = checkpoints(slots, borders, writes, at)
    if at is not None:
        high, slot = lax.sort((high, slot), num_keys=1)
        # and the tokens after the last of them
        high = jnp.concatenate([high, (borders[1:] - borders[:-1])[:, None]], 1)
        slot = jnp.concatenate([slot, jnp.full_like(slot, slots, shape=(N, 1))], 1)
    low = jnp.pad(high[:, :-1], ((0, 0), (1, 0)))
    sequence = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], high.shape)
    first = jnp.broadcast_to(jnp.arange(high.shape[1])[None] == 0, high.shape)
    fields = sequence, first, jnp.broadcast_to(borders[:-1, None], high.shape), low, high, slot
    return _Runs(*(x.reshape(-1) for x in fields))


def _walk(walk: Any, runs: _Runs, starts: jax.Array, output: jax.Array, states: jax.Array) -> Results:
    """Visits one run of tokens after the other; the pool is written and never read, so it stays where it is."""

    def visit(carry: Any, each: _Runs) -> Any:
        carried, output, states = carry
        start = lax.dynamic_slice_in_dim(starts, each.sequence, 1)
        carried, state, output = walk.run(each, jnp.where(each.first, start, carried), output)
        return (carried, output, states.at[each.slot].set(state[0].astype(states.dtype), mode="drop")), None

    carry = jnp.zeros_like(starts[:1]), output, states
    (_, output, states), _ = lax.scan(visit, carry, runs)
    return output, states


class TokenWalk(NamedTuple):
    """Token by token; the state is carried from run to run."""

    call: Call
    recurrence: Recurrence
    tokens: Any

    def run(self, each: _Runs, carried: jax.Array, output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What the next run takes as `carried`, the state after this run, and the output with its tokens."""

        def visit(i: jax.Array, carry: Results) -> Results:
            state, output = carry
            at = each.begin + i
            token = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, at, 1, 1), self.tokens)
            token = map_gates(lambda x: self._dithered(x.astype(self.call.state_dtype), token), token)
            read, state = token_walk.step(self.call, self.recurrence.write, token, state)
            return state, lax.dynamic_update_slice_in_dim(output, read, at, 1)

        state, output = lax.fori_loop(each.low, each.high, visit, (carried, output))
        return state, state, output

    def _dithered(self, gate: jax.Array, token: Any) -> jax.Array:
        # by the token's key, not by its number, which is 0 at every token of decoding: so it is the same however cut;
        # and by each head's key alone, so that it is the same on devices that share the heads
        bits = lax.bitcast_convert_type(token.key.astype(jnp.float32), jnp.uint32)
        number = bits.sum(-1, dtype=jnp.uint32, keepdims=True)
        return token_walk._dithered(gate, jnp.repeat(number, self.call.heads // number.shape[2], axis=2))


class ChunkWalk(NamedTuple):
    """Chunk by chunk, counted from a sequence's start; runs carry the state at the start of the current chunk.

    A run that ends inside a chunk computes the chunk up to there, and the next run computes it again.
    """

    call: Call
    recurrence: Recurrence
    tokens: Any

    def run(self, each: _Runs, carried: jax.Array, output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """As `TokenWalk.run`."""
        C, call, einsum = self.call.largest_chunk, self.call, einsum_of(self.call)
        math = self.recurrence.math(call)

        def visit(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            carried, _, output = carry
            number = k * C + jnp.arange(C, dtype=jnp.int32)
            token, inside = each.begin + number, number < each.high
            chunk = jax.tree.map(lambda x: self._cut(x, token, inside), self.tokens)
            # first gates are the state's: inside the chunk, one that overflows would multiply a zero by infinity
            first = [chunk.log_decay, getattr(chunk, "value_log_decay", None)]
            gates = [] if first[0] is None else [first[0][:, :, 0, :, None]]
            gates += [] if first[1] is None else [first[1][:, :, 0, None, :]]
            start = decayed(carried, *gates)
            chunk = map_gates(lambda x: jnp.where((number == k * C)[:, None], 0, x), chunk)
            effect = math.effect(chunk, einsum)
            state, extra = math.advance(effect.transition, start, einsum)
            read = call.scale * math.output(effect, start, extra, einsum)
            read = jnp.moveaxis(read[0], 1, 0).astype(call.dtype)
            token = jnp.where(inside & (number >= each.low), token, call.tokens)
            output = output.at[0, token].set(read, mode="drop")
            return jnp.where(each.high >= (k + 1) * C, state, carried), state, output

        return lax.fori_loop(each.low // C, -(-each.high // C), visit, (carried, carried, output))

    def _cut(self, x: jax.Array, token: jax.Array, inside: jax.Array) -> jax.Array:
        """A chunk's tokens of `x [1, T, heads, ·]`, 0 where they are not `inside`: `[1, H, C, ·]`."""
        x = x.at[:, jnp.clip(token, 0, self.call.tokens - 1)].get(mode="promise_in_bounds")
        x = jnp.where(inside[:, None, None], x, 0).astype(self.call.state_dtype)
        return jnp.repeat(jnp.moveaxis(x, 1, 2), self.call.heads // x.shape[2], axis=1)


def implementations(recurrence: Recurrence, triton: str) -> tuple[Implementation, ...]:
    """The implementations of a recurrence's calls with pools; `triton` is the module of its Triton kernels."""
    pallas = "chunks.pallas.pools"

    def run_here(call: PooledCall, *arrays: jax.Array | None) -> Results:
        return run(recurrence, call, *arrays)

    def run_on_tpus(call: PooledCall, *arrays: jax.Array | None) -> Results:
        return Later(pallas, "run")(recurrence, call, *arrays)

    return (
        Implementation("pallas", ("tpu",), Later(pallas, "supports"), run_on_tpus, splits=False),
        Implementation("triton", ("cuda",), Later(triton, "supports_pooled"), splitting(Later(triton, "run_pooled"))),
        Implementation("xla", None, lambda call: None, splitting(run_here)),
    )
