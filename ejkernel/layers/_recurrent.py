"""The base of layers with a memory: what they carry from call to call, and how they are called."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.layers import _one_token
from ejkernel.layers._models import Published
from ejkernel.layers._parameters import ParamInit, wide_dtype
from ejkernel.layers._serving import RaggedBatch, ServingLimits
from ejkernel.layers._tokens import Sequences, layer_input, without_padding


class RecurrentState(NamedTuple):
    """What a layer with a memory carries from token to token; its size does not depend on how many there were.

    Attributes:
        memory: `[B, H, K, V]`; packed, here and below, `[N, …]`, and `[slots, …]` where it is a pool, for serving.
        recent: `[B, size - 1, channels]`, the last tokens that a short convolution still needs; `None` without one.
        position: `[B]` int32, how many tokens there were; `None` where the layer does not need it, and in a pool.
    """

    memory: jax.Array
    recent: jax.Array | None = None
    position: jax.Array | None = None


Mixed = tuple[jax.Array, RecurrentState]
# what a sequence starts from; ops and the convolution take `None` for zeros
START = RecurrentState(None)  # type: ignore[arg-type]


class RecurrentLayer(Published):
    """A layer with a memory: subclasses make the parameters, `out` among them, and compute with them in `_mix`."""

    convolution: Any = None  # or a `ShortConvolution`
    out: nnx.Linear
    counts_tokens = False  # whether the state has a position
    has_step = True  # whether `_step` computes a single token

    def __init__(self, width: int, memory_shape: tuple[int, int, int], init: ParamInit) -> None:
        self.width, self.memory_shape, self.dtype = _checks.positive_int("width", width), memory_shape, init.dtype

    def empty_cache(
        self, batch: int | ServingLimits, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> RecurrentState:
        """The state that `batch` sequences start from, or a pool of states, for serving.

        Args:
            batch: How many sequences, or `ServingLimits`, whose `slots` the pool has.
            capacity: Not needed, as a state does not grow with the tokens; other layers take it.
            dtype: Of the last tokens that a convolution needs; `None` is the layer's `dtype` or else float32. The
                memory is in float32, or in float64 if this is.
        """
        serving = isinstance(batch, ServingLimits)
        rows = batch.slots if isinstance(batch, ServingLimits) else _checks.positive_int("batch", batch)
        if rows is None:
            _checks.fail("limits", "no slots", "slots=, as this layer keeps states in them")
        if dtype is None:
            dtype = jnp.float32 if self.dtype is None else self.dtype
        dtype = _checks.floating_dtype("dtype", dtype)
        recent = None
        if self.convolution is not None:
            recent = jnp.zeros((rows, self.convolution.size - 1, self.convolution.channels), dtype)
        position = jnp.zeros(rows, jnp.int32) if self.counts_tokens and not serving else None
        memory_dtype = jnp.float32 if serving else wide_dtype(dtype)
        return RecurrentState(jnp.zeros((rows, *self.memory_shape), memory_dtype), recent, position)

    def __call__(
        self,
        x: jax.Array,
        state: RecurrentState | None = None,
        cu_seqlens: _checks.Borders | RaggedBatch | None = None,
        *,
        segment_ids: _checks.AnyArray | None = None,
    ) -> tuple[jax.Array, RecurrentState]:
        """Runs over the tokens of `x` and returns the output, shaped like it, and the state after them.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            state: From an earlier call that this one continues; `None` starts from nothing.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`. Tokens past the last one are padding: output 0, no
                gradient, no effect. Or a `RaggedBatch`, for serving: `state` is a pool of states then, whose slots the
                batch's sequences read and write.
            segment_ids: To which sequence of its row each token belongs, integers `[B, T]`, instead of `cu_seqlens`. A
                token whose id differs from the one before it starts from nothing, and the first sequence of a row from
                `state`; the state that comes back is that after the row's last token. A negative id is padding: output
                0, no gradient, no effect on the state. So a padded batch has its states right: give padding -1.
        """
        dims = _checks.Dims(width=self.width, **dict(zip("HKV", self.memory_shape, strict=True)))
        x, sequences, batch = layer_input(dims, x, cu_seqlens, segment_ids, self.dtype)
        start = self._checked_state(dims, state) if batch is None else self._checked_pools(dims, state, batch)
        if self.has_step and start.memory is not None and _one_token.applies(x, sequences):
            return _one_token.in_two_rows(self._decode, x, start)
        mixed, state = self._mix(x, start, sequences)
        if batch is not None:
            state = state._replace(position=None)
        return without_padding(self.out(mixed.astype(x.dtype)), sequences), state

    def _decode(self, x: jax.Array, state: RecurrentState) -> Mixed:
        mixed, state = self._step(x, state)
        return self.out(mixed.astype(x.dtype)), state

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        """What `out` projects, `[…, T, heads · dim]`, and the next state; `state` is `START` or an earlier one."""
        raise NotImplementedError

    def _step(self, x: jax.Array, state: RecurrentState) -> Mixed:
        """The same for a single token `[B, 1, width]` that continues a state, of which there may be fewer rows.

        Rows of `x` past those of the state are copies of the others.
        """
        raise NotImplementedError

    def _checked_state(self, dims: _checks.Dims, state: Any) -> RecurrentState:
        if state is None:
            return START
        if not isinstance(state, RecurrentState):
            raise TypeError(f"state: got {type(state).__name__}; expected the RecurrentState of an earlier call")
        memory, recent, position = state
        memory = _checks.carried(dims, "state.memory", memory, "H K V")
        if self.convolution is not None:
            dims.sizes |= {"recent": self.convolution.size - 1, "channels": self.convolution.channels}
            recent = _checks.carried(dims, "state.recent", recent, "recent channels")
        if self.counts_tokens:
            position = _checks.position(dims, "state.position", position)
        return RecurrentState(memory, recent, position)

    def _checked_pools(self, dims: _checks.Dims, state: Any, batch: RaggedBatch) -> RecurrentState:
        """Pools in place of states, as ops take them for initial states, and where sequences stand."""
        if not isinstance(state, RecurrentState):
            raise TypeError(f"state: got {type(state).__name__}; expected what empty_cache or an earlier call returned")
        memory, recent = _checks.floating("state.memory", state.memory), None
        dims.match("state.memory", memory, "slots H K V")
        if self.convolution is not None:
            dims.sizes |= {"recent": self.convolution.size - 1, "channels": self.convolution.channels}
            recent = _checks.floating("state.recent", state.recent)
            dims.match("state.recent", recent, "slots recent channels")
        position = _checks.position(dims, "batch.lengths", batch.lengths)
        # ops take a pool where they take a state
        pools: Any = [None if each is None else batch.pool(each) for each in (memory, recent)]
        return RecurrentState(pools[0], pools[1], position)
