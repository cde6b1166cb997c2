"""How many calls `vmap` makes of one, which what is fastest for a batch depends on too."""

import math
import threading
from typing import Any

import jax
from jax import lax

from ejkernel import _checks

# Numbers in a state: of larger ones gradients go by chunks anyhow, and looking takes a millisecond or two of tracing.
LARGEST_STATE = 64 * 64


class _Found(threading.local):
    """The sizes of axes that `vmap` was seen to map, by thread: a program of another may be mapped here later on."""

    def __init__(self) -> None:
        self.sizes: list[int] = []


_found = _Found()


def times(query: Any, value_dim: int) -> int:
    """How many rows `vmap` maps a query over in all, for small states.

    1 if it does not, or if the caller's own `jit` or loop hides it.
    """
    if _checks.is_concrete(query) or query.shape[-1] * value_dim > LARGEST_STATE:
        return 1
    _found.sizes.clear()
    _seen(lax.stop_gradient(query))
    return math.prod(_found.sizes)


@jax.custom_batching.custom_vmap
def _seen(x: jax.Array) -> jax.Array:
    return x


@_seen.def_vmap
def _(size: int, batched: list[bool], x: jax.Array) -> Any:
    # runs while `vmap` traces, once for each of its axes
    _found.sizes.append(size)
    return _seen(x), batched[0]
