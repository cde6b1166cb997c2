"""A recurrence in two phases each way, the first of which needs no initial states.

With the tokens sharded over devices, initial states come from other devices; they travel between the two phases.
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
    """The four functions of an implementation; `start` are the initial states `[N, H, K, V]`.

    Attributes:
        begin: `begin(call, inputs, cu_seqlens)` returns what `finish` can use again, and the effect of the tokens on a
            state: the final states from zeros `[N, H, K, V]`; for the delta rule `[N, H, K, K + V]`, the matrices that
            multiply an initial state beside these final states.
        finish: `finish(call, inputs, cu_seqlens, carry, start)` returns the output, and residuals for the backward
            pass. `carry` is the first result of `begin`.
        begin_back: `begin_back(call, inputs, cu_seqlens, start, residuals, d_output)` returns what `finish_back` can
            use again, and the part of the cotangent of `start` that comes from `d_output`.
        finish_back: `finish_back(call, inputs, cu_seqlens, start, residuals, carry, (d_output, d_final))` returns the
            cotangents of the inputs. `carry` is the first result of `begin_back`.
    """

    begin: Callable[..., tuple[Any, jax.Array]]
    finish: Callable[..., tuple[jax.Array, Any]]
    begin_back: Callable[..., tuple[Any, jax.Array]]
    finish_back: Callable[..., tuple[Any, ...]]


def phases_of(implementation: Implementation, call: Any) -> Phases:
    """The implementation's phases. One without, and any call with `segment_ids`, runs once for each phase."""
    phases = None if call.segmented else implementation.phases
    return phases or phases_from_run(implementation.run)


@functools.cache  # the same function gives the same phases, so that nothing is traced again
def phases_from_run(run: Run) -> Phases:
    """The phases of an implementation that has only `run(call, *arrays)`: each phase runs it once."""

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
