"""The base class of recurrent layers: their state, how they are called, and how they serve."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ejkernel import _checks
from ejkernel.kernels.step.call import Results
from ejkernel.layers import _one_token
from ejkernel.layers._models import Published
from ejkernel.layers._parameters import ParamInit, wide_dtype
from ejkernel.layers._serving import RaggedBatch, ServingLimits
from ejkernel.layers._tokens import Sequences, layer_input, without_padding


class RecurrentState(NamedTuple):
    """The state that a recurrent layer carries from token to token; its size does not depend on how many there were.

    The first axis below is `[B, …]`. It is `[N, …]` for packed sequences and `[slots, …]` for a pool, for serving.

    Attributes:
        memory: `[B, H, K, V]`, the state of the recurrence.
        recent: `[B, size - 1, channels]`, the last tokens that a short convolution still needs; `None` without one.
        position: `[B]` int32, how many tokens there were; `None` in layers that do not need it, and in a pool.
    """

    memory: jax.Array
    recent: jax.Array | None = None
    position: jax.Array | None = None


Mixed = tuple[jax.Array, RecurrentState]
# the initial state of a sequence: ops and the convolution take `None` for zeros
START = RecurrentState(None)  # type: ignore[arg-type]


class RecurrentLayer(Published):
    """A recurrent layer. Subclasses create the parameters, `out` among them, and compute with them in `_mix`."""

    convolution: Any = None  # a `ShortConvolution` in layers that have one
    out: nnx.Linear
    counts_tokens = False  # whether the state has a position
    has_step = True  # whether `_step` computes single tokens, instead of `_mix`

    def __init__(self, width: int, memory_shape: tuple[int, int, int], init: ParamInit) -> None:
        self.width, self.memory_shape, self.dtype = _checks.positive_int("width", width), memory_shape, init.dtype

    def empty_cache(
        self, batch: int | ServingLimits, capacity: int | None = None, dtype: DTypeLike | None = None
    ) -> RecurrentState:
        """The initial state of `batch` sequences, or a pool of states, for serving.

        Args:
            batch: How many sequences, or `ServingLimits`, whose `slots` are the number of states in the pool.
            capacity: Ignored, as a state does not grow with the tokens; attention layers need it.
            dtype: The dtype of the last tokens that a convolution needs; `None` is the layer's `dtype` or else
                float32. The recurrence's state is in float32, or in float64 if `dtype` is float64.
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
        """Computes the tokens of `x` and returns the output, of the shape of `x`, and the state after them.

        Args:
            x: `[B, T, width]`, or packed `[T, width]` or `[1, T, width]`.
            state: The state that an earlier call returned, to continue its sequences; `None` starts from zeros. The
                returned state has its dtypes.
            cu_seqlens: Borders of the packed sequences, `[N + 1]`. Tokens past the last border are padding: output 0,
                no gradient, no effect. Or a `RaggedBatch`, for serving: `state` is then a pool of states, whose slots
                the batch's sequences read and write.
            segment_ids: Integers `[B, T]`, instead of `cu_seqlens`: which sequence of its row each token belongs to. A
                token whose id differs from the one before it starts a sequence from zeros; the first sequence of a row
                starts from `state`. The returned state is that after the row's last token. A negative id is padding:
                output 0, no gradient, no effect on the state. In a padded batch, give padding the id -1.
        """
        dims = _checks.Dims(width=self.width, **dict(zip("HKV", self.memory_shape, strict=True)))
        if self.convolution is not None:
            dims.sizes |= {"recent": self.convolution.size - 1, "channels": self.convolution.channels}
        x, sequences, batch = layer_input(dims, x, cu_seqlens, segment_ids, self.dtype)
        start = self._checked_state(dims, state) if batch is None else self._checked_pools(dims, state, batch)
        if self.has_step and start.memory is not None and _one_token.applies(x, sequences):
            output, state = _one_token.in_two_rows(self._decode, x, start)
        else:
            mixed, state = self._mix(x, start, sequences)
            output = without_padding(self.out(mixed.astype(x.dtype)), sequences)
        if batch is not None:
            return output, state._replace(position=None)
        if state.recent is not None and start.recent is not None:
            # as it came, so that a state can be carried through a loop
            state = state._replace(recent=state.recent.astype(start.recent.dtype))
        return output, state

    def _decode(self, x: jax.Array, state: RecurrentState) -> Mixed:
        results = self._step(x, state)
        return self.out(results.output.astype(x.dtype)), RecurrentState(results.memory, results.recent)

    def _mix(self, x: jax.Array, state: RecurrentState, sequences: Sequences) -> Mixed:
        """The input of the projection `out`, `[…, T, heads · dim]`, and the next state."""
        raise NotImplementedError

    def _step(self, x: jax.Array, state: RecurrentState) -> Results:
        """The same for a single token `[rows, 1, width]`; rows past those of the state are copies of the others."""
        raise NotImplementedError

    def _checked_state(self, dims: _checks.Dims, state: Any) -> RecurrentState:
        if state is None:
            return START
        if not isinstance(state, RecurrentState):
            raise TypeError(f"state: got {type(state).__name__}; expected the RecurrentState of an earlier call")
        memory, recent, position = state
        memory = _checks.carried(dims, "state.memory", memory, "H K V")
        if self.convolution is not None:
            recent = _checks.carried(dims, "state.recent", recent, "recent channels")
        if self.counts_tokens:
            position = _checks.position(dims, "state.position", position)
        return RecurrentState(memory, recent, position)

    def _checked_pools(self, dims: _checks.Dims, state: Any, batch: RaggedBatch) -> RecurrentState:
        """Pools, which ops take for initial states, and the positions of the batch's sequences."""
        if not isinstance(state, RecurrentState):
            raise TypeError(f"state: got {type(state).__name__}; expected what empty_cache or an earlier call returned")
        memory, recent = _checks.floating("state.memory", state.memory), None
        dims.match("state.memory", memory, "slots H K V")
        if self.convolution is not None:
            recent = _checks.floating("state.recent", state.recent)
            dims.match("state.recent", recent, "slots recent channels")
        position = _checks.position(dims, "batch.lengths", batch.lengths)
        pools: Any = [None if each is None else batch.pool(each) for each in (memory, recent)]
        return RecurrentState(pools[0], pools[1], position)
