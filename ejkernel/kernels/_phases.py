"""A call of a recurrence in two phases each way, of which the first needs no states from outside.

Where start states come late, as those from other devices do, they travel between the phases.
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
Inputs = tuple[Any, ...]  # the arrays of a call in their order, without the initial state
CuSeqlens = jax.Array | None


@dataclass(frozen=True)
class Phases:
    """The phases; `start` are initial states `[N, H, K, V]`.

    Attributes:
        begin: `begin(call, inputs, cu_seqlens)`: what `finish` can use again, and what the tokens do to states: the
            states that they add `[N, H, K, V]`, or for the delta rule matrices and these `[N, H, K, K + V]`.
        finish: `finish(call, inputs, cu_seqlens, carry, start)`: the output, and residuals for the way back. `carry` is
            the first result of `begin`.
        begin_back: `begin_back(call, inputs, cu_seqlens, start, residuals, d_output)`: what `finish_back` can use
            again, and the cotangent of `start` from the output alone.
        finish_back: `finish_back(call, inputs, cu_seqlens, start, residuals, carry, (d_output, d_final))`: cotangents
            of the inputs. `carry` is the first result of `begin_back`.
    """

    begin: Callable[..., tuple[Any, jax.Array]]
    finish: Callable[..., tuple[jax.Array, Any]]
    begin_back: Callable[..., tuple[Any, jax.Array]]
    finish_back: Callable[..., tuple[Any, ...]]


def phases_of(implementation: Implementation, call: Any) -> Phases:
    """Its own phases, or one run of it for each, as for all rows of several sequences."""
    own = None if call.segmented else implementation.phases
    return own or phases_from_run(implementation.run)


@functools.cache  # the same function gives the same phases, so that nothing is traced again
def phases_from_run(run: Run) -> Phases:
    """The phases of `run(call, *arrays)`, which does everything at once: each is one run of it."""

    def begin(call: Any, inputs: Inputs, cu_seqlens: CuSeqlens) -> tuple[None, jax.Array]:
        return None, run(call, *inputs, None, cu_seqlens)[1]

    def finish(
        call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, carry: None, start: jax.Array
    ) -> tuple[jax.Array, Any]:
        (output, _), pull = jax.vjp(lambda inputs, start: run(call, *inputs, start, cu_seqlens), inputs, start)
        return output, pull

    def begin_back(
        call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, start: jax.Array, pull: Any, d_output: jax.Array
    ) -> tuple[None, jax.Array]:
        return None, pull((d_output, jnp.zeros_like(start)))[1]

    def finish_back(
        call: Any, inputs: Inputs, cu_seqlens: CuSeqlens, start: jax.Array, pull: Any, carry: None, cotangents: Results
    ) -> tuple[Any, ...]:
        return pull(cotangents)[0]

    return Phases(begin, finish, begin_back, finish_back)
