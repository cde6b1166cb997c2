"""The forward pass as launches of Triton kernels."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, live_tokens
from ejkernel.kernels.attention.triton.launcher import Launcher, device
from ejkernel.kernels.attention.triton.plan import Plan, Tile, power


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
    return launcher.launch(
        device("forward").forward,
        *launcher.tokens[:5],
        inputs.sinks,
        inputs.dropout_key,
        *launcher.places,
        *launcher.sizes,
        outputs=_results(launcher),
        programs=launcher.blocks(tile.queries) * call.heads,
        tile=tile,
    )


def _decode(launcher: Launcher) -> tuple[Array, Array, Array]:
    """Parts of the keys side by side, then merged."""
    call, parts = launcher.call, launcher.plan.decoding_parts
    config = launcher.plan.config.decoding
    tile = Tile(power(call.queries * call.groups), config.keys, config.warps, config.stages)
    rows = (call.batch, call.queries, call.heads, parts)
    summed = launcher.launch(
        device("decoding").attend_part,
        *launcher.tokens,
        launcher.inputs.query_offset,
        call.queries,
        call.keys,
        *launcher.bounds,
        outputs=[launcher.like(*rows, call.value_dim), launcher.like(*rows), launcher.like(*rows)],
        programs=call.batch * parts * call.kv_heads,
        tile=tile,
        PARTS=parts,
    )
    return launcher.launch(
        device("decoding").merge_parts,
        *summed,
        launcher.inputs.sinks,
        call.queries,
        outputs=_results(launcher),
        programs=call.batch * call.queries * call.heads,
        tile=Tile(1, 1, 4, 1),
        PARTS=parts,
        BPARTS=power(parts, 1),
    )


def _results(launcher: Launcher) -> list[Any]:
    call = launcher.call
    rows = launcher.like(call.batch, call.heads, call.queries)
    output = launcher.like(call.batch, call.queries, call.heads, call.value_dim, dtype=call.residual_dtype)
    return [output, rows, rows]
