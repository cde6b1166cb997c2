"""One token a sequence: each state is read once and written once, in place."""

from typing import Any

import jax.numpy as jnp

from ejkernel.kernels.linear_recurrence.pallas.device.walk import grown


def step(names: tuple[str, ...], *refs: Any) -> None:
    """Output `[heads, V]` and states `[heads, K, V]` of one row's heads; query, key and decays are `[heads, K]`."""
    arrays = dict(zip(names, refs, strict=True))
    # key dims down the sublanes, where the states have them
    down = {name: arrays[name][0].T for name in ("query", "key", "decay") if name in arrays}
    for h in range(arrays["value"].shape[1]):
        at = slice(h, h + 1)
        state = down["key"][:, at] * arrays["value"][0, at]
        if "initial" in arrays:
            before = arrays["initial"][0, h]
            state = (grown(before, down["decay"][:, at]) if "decay" in down else before) + state
        arrays["final"][0, h] = state
        arrays["output"][0, at] = jnp.sum(down["query"][:, at] * state, axis=0, keepdims=True)
