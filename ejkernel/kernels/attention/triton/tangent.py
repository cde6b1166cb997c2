"""The tangent pass as a launch of a Triton kernel."""

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._launch import shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, live_tokens
from ejkernel.kernels.attention.triton.launcher import Launcher, aligned, device
from ejkernel.kernels.attention.triton.plan import Plan


def tangent(
    call: Call, plan: Plan, inputs: Inputs, results: tuple[Array, Array, Array], tangents: Inputs
) -> tuple[Array, Array]:
    """The tangents of the output and, `[B, H, S]`, of the log-sum-exp, from what `forward` gave and `tangents`.

    Fields of `tangents` are `None` where an array has none.
    """
    if inputs.mask is not None:
        # what the mask hides must not matter even if it is NaN, and 0 · NaN would let it
        alive, seen = live_tokens(call, by_group(call, inputs.mask, 1))
        inputs, tangents = (_selected(each, alive, seen) for each in (inputs, tangents))
    launcher = Launcher.of(call, plan, inputs)
    output, top, total = results
    moving = {f"d_{name}": getattr(tangents, name) for name in ("query", "key", "value", "sinks")}
    tile = plan.config.tangent_tile
    d_output, d_lse = launcher.launch(
        device("tangent").tangent,
        launcher.arrays
        | launcher.ranges(tile.columns)
        | {"output": output, "top": top, "total": total, "d_bias": aligned(tangents.bias), **moving},
        {"d_output": shape(*output.shape, dtype=output.dtype), "d_lse": shape(*top.shape)},
        programs=launcher.blocks(tile.rows) * call.heads,
        tile=tile,
    )
    return d_output, d_lse


def _selected(arrays: Inputs, alive: Array, seen: Array) -> Inputs:
    """`arrays`, of which each may be `None`, with 0 for queries and keys that the mask leaves nobody."""
    masks = {"query": alive, "key": seen, "value": seen}
    there = {name: getattr(arrays, name) for name in masks if getattr(arrays, name) is not None}
    return arrays._replace(**{name: jnp.where(masks[name], each, 0) for name, each in there.items()})
