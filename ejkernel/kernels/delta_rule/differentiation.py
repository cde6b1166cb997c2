"""The delta rule's kernels as an op: XLA stands behind them for derivatives beyond the first."""

import functools
from collections.abc import Callable
from typing import Any

from ejkernel.kernels.chunks import kernels
from ejkernel.kernels.chunks.kernels import recurrence
from ejkernel.kernels.delta_rule import xla

__all__ = ["Kernels", "recurrence"]


@functools.cache
def Kernels(forward: Callable[..., Any], backward: Callable[..., Any]) -> kernels.Kernels:
    """Kernels whose arrays are query, key, value, beta, log decay, initial state and borders."""
    return kernels.Kernels(forward, lambda wanted, *arguments: backward(*arguments), xla.run)
