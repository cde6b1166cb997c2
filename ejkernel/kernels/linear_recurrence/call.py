"""What a call of the gated linear recurrence is: its static facts and its arrays."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax

from ejkernel.kernels.chunks.call import Call as RecurrenceCall

Decay = Literal["none", "constant", "head", "key"]


@dataclass(frozen=True)
class Call(RecurrenceCall):
    """Static facts of one call."""

    decay: Decay
    value_decay: bool

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        gates = {"none": "", "constant": "NH" if self.packed else "BH", "head": "BTH", "key": "BTHK"}
        return self._dims(log_decay=gates[self.decay], value_log_decay="BTHV")


class Inputs(NamedTuple):
    """The arrays of a call that have gradients, or their cotangents.

    Query, key and value each have a number of heads that divides `H`.
    """

    query: jax.Array  # [B, T, heads, K]
    key: jax.Array  # [B, T, heads, K]
    value: jax.Array  # [B, T, heads, V]
    log_decay: jax.Array | None  # by `Call.decay`: None; constant [N, H]; head [B, T, H]; key [B, T, H, K]
    value_log_decay: jax.Array | None  # [B, T, H, V] if `Call.value_decay`
    initial_state: jax.Array | None  # [N, H, K, V]; None for zeros

    @property
    def gates(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Log decays of key dims and of value dims."""
        return self.log_decay, self.value_log_decay
