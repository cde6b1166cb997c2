"""The gated linear recurrence's kernels as an op: XLA stands behind them for derivatives beyond the first."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.kernels.chunks import kernels
from ejkernel.kernels.chunks.kernels import recurrence
from ejkernel.kernels.linear_recurrence import xla
from ejkernel.kernels.linear_recurrence.call import Call

__all__ = ["Kernels", "recurrence"]


@functools.cache
def Kernels(forward: Callable[..., Any], backward: Callable[..., Any]) -> kernels.Kernels:
    """Kernels whose arrays are query, key, value, log decay, initial state and borders.

    The log decay is that of the value dims, or a `(key, value)` pair where both decay. `backward` is told only whether
    the gates' gradient is asked for, which costs about a quarter of it.
    """

    def wanting(wanted: tuple[bool, ...], call: Call, *arguments: Any) -> Any:
        return backward(call.value_decay or wanted[3], call, *arguments)

    return kernels.Kernels(forward, wanting, _by_xla)


def _by_xla(call: Call, query: Any, key: Any, value: Any, log_decay: Any, *rest: Any) -> tuple[jax.Array, jax.Array]:
    both = isinstance(log_decay, tuple)
    decays = log_decay if both else (None, log_decay) if call.value_decay else (log_decay, None)
    return xla.run(call, query, key, value, *decays, *rest)
