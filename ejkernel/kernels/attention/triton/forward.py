"""The forward pass as launches of Triton kernels."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, live_tokens
from ejkernel.kernels.attention.triton.launcher import Launcher, device
from ejkernel.kernels.attention.triton.plan import Plan


def forward(call: Call, plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and the log of the denominator to base 2 as the sum of two, `[B, H, S]`.

    With a bias these are the maximum and the log of what is left; 0 and -inf stand for no denominator.
    """
    if plan.decoding_parts:
        return _decode(Launcher.of(call, plan, inputs))
    if inputs.mask is not None:
        # what the mask hides must not matter even if it is NaN, and 0 · NaN would let it
        _, seen = live_tokens(call, by_group(call, inputs.mask, 1))
        inputs = inputs._replace(value=jnp.where(seen, inputs.value, 0))
    launcher = Launcher.of(call, plan, inputs)
    tile = plan.config.forward
    programs = launcher.blocks(tile.rows) * call.heads
    kernel, results = device("forward").forward, _results(launcher)
    arrays = launcher.arrays | launcher.ranges(tile.columns)
    output, top, total = launcher.launch(kernel, arrays, results, programs=programs, tile=tile)
    return output, top, total


def _decode(launcher: Launcher) -> tuple[Array, Array, Array]:
    """Parts of the keys side by side, then merged."""
    call, parts = launcher.call, launcher.plan.decoding_parts
    rows = (call.batch, call.queries, call.heads, parts)
    summed = launcher.launch(
        device("decoding").attend_part,
        launcher.arrays,
        {"sum": shape(*rows, call.value_dim), "top": shape(*rows), "total": shape(*rows)},
        programs=call.batch * parts * call.kv_heads,
        tile=replace(launcher.plan.config.decoding, rows=padded(call.queries * call.groups)),
        parts=parts,
    )
    output, top, total = launcher.launch(
        device("decoding").merge_parts,
        {"sum": summed.sum, "part_top": summed.top, "part_total": summed.total, "sinks": launcher.inputs.sinks},
        _results(launcher),
        programs=call.batch * call.queries * call.heads,
        tile=Tile(rows=1, columns=1),
        parts=parts,
        part_block=padded(parts, 1),
    )
    return output, top, total


def _results(launcher: Launcher) -> dict[str, Any]:
    call = launcher.call
    rows = shape(call.batch, call.heads, call.queries)
    output = shape(call.batch, call.queries, call.heads, call.value_dim, dtype=call.residual_dtype)
    return {"output": output, "top": rows, "total": rows}
