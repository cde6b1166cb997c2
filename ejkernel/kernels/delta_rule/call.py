"""What a call of the delta rule is: its static facts and its arrays."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax

from ejkernel.kernels.chunks.call import Call as RecurrenceCall

Decay = Literal["none", "head", "key"]


@dataclass(frozen=True)
class Call(RecurrenceCall):
    """Static facts of one call."""

    decay: Decay

    # chunks of 64 take more products and, where tokens reflect (beta 2), have twice the error
    largest_chunk: ClassVar[int] = 32

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        return self._dims(beta="BTH", log_decay={"none": "", "head": "BTH", "key": "BTHK"}[self.decay])


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents.

    Query, key and value each have a number of heads that divides `H`.
    """

    query: jax.Array  # [B, T, heads, K]
    key: jax.Array  # [B, T, heads, K]
    value: jax.Array  # [B, T, heads, V]
    beta: jax.Array  # [B, T, H]
    log_decay: jax.Array | None  # by `Call.decay`: None; head [B, T, H]; key [B, T, H, K]
    initial_state: jax.Array | None  # [N, H, K, V]; None for zeros

    @property
    def gates(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Log decays of key dims and of value dims, which have none."""
        return self.log_decay, None
