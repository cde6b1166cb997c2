"""A call of a recurrence in two phases each way, of which the first needs no states from outside.

Where these come late, as those from other devices do, they travel between the phases.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._dispatch import Implementation

Results = tuple[jax.Array, jax.Array]
Run = Callable[..., Results]


@dataclass(frozen=True)
class Phases:
    """Inputs are the arrays that a `Call` lists, up to the initial state; what is `kept` is for the way back.

    Attributes:
        begin: `begin(call, inputs, cu_seqlens)`: a memory for `finish`, and what the tokens do to states: those that
            they add `[N, H, K, V]`, or for the delta rule matrices and these `[N, H, K, K + V]`.
        finish: `finish(call, inputs, cu_seqlens, memory, start)`: the output, and what is kept.
        begin_back: `begin_back(call, inputs, cu_seqlens, start, kept, d_output)`: a memory for `finish_back`, and what
            the output alone gives of the cotangent of `start`.
        finish_back: `finish_back(call, inputs, cu_seqlens, start, kept, memory, (d_output, d_end))`: the inputs'
            cotangents.
    """

    begin: Callable[..., tuple[Any, jax.Array]]
    finish: Callable[..., tuple[jax.Array, Any]]
    begin_back: Callable[..., tuple[Any, jax.Array]]
    finish_back: Callable[..., tuple[Any, ...]]


def of(implementation: Implementation) -> Phases:
    """Its own, or one run of it for each."""
    return implementation.phases or of_whole(implementation.run)


@functools.cache  # equal ones are the same, so that nothing is traced again
def of_whole(run: Run) -> Phases:
    """The phases of `run(call, *arrays)`, which does everything at once: each is one run of it."""

    def begin(call: Any, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None) -> tuple[None, jax.Array]:
        return None, run(call, *inputs, None, cu_seqlens)[1]

    def finish(
        call: Any, inputs: tuple[Any, ...], cu_seqlens: jax.Array | None, memory: None, start: jax.Array
    ) -> tuple[jax.Array, Any]:
        (output, _), pull = jax.vjp(lambda inputs, start: run(call, *inputs, start, cu_seqlens), inputs, start)
        return output, pull

    def begin_back(
        call: Any,
        inputs: tuple[Any, ...],
        cu_seqlens: jax.Array | None,
        start: jax.Array,
        pull: Any,
        d_output: jax.Array,
    ) -> tuple[None, jax.Array]:
        return None, pull((d_output, jnp.zeros_like(start)))[1]

    def finish_back(
        call: Any,
        inputs: tuple[Any, ...],
        cu_seqlens: jax.Array | None,
        start: jax.Array,
        pull: Any,
        memory: None,
        cotangents: Results,
    ) -> tuple[Any, ...]:
        return pull(cotangents)[0]

    return Phases(begin, finish, begin_back, finish_back)
