"""The forward pass as launches of Triton kernels.

Few queries are decoded with split keys, a path of its own: it is kept for the GPU page's rows of one query in Llama 3's
shape (32 query heads, 8 key heads of 128).
"""

from dataclasses import replace
from typing import Any

from jax import Array

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.launcher import Launcher, device, without_masked
from ejkernel.kernels.attention.triton.plan import Plan


def forward(call: Call, plan: Plan, inputs: Inputs) -> tuple[Array, Array, Array]:
    """The output `[B, S, H, Dv]`, and the log-sum-exp to base 2 as the sum of two numbers, `[B, H, S]`.

    With a bias the two are the maximum and the logarithm of the sum relative to it, else the log-sum-exp and 0. In a
    row with nothing to sum they are 0 and -inf.
    """
    if plan.decoding_parts:
        return _decode(Launcher.of(call, plan, inputs))
    launcher = Launcher.of(call, plan, inputs._replace(**without_masked(call, inputs, {"value": inputs.value})))
    tile = plan.config.forward
    output, lse, lse_rest = launcher.launch(
        device("forward").forward,
        launcher.arrays | launcher.ranges(tile.columns),
        _results(launcher),
        programs=launcher.blocks(tile.rows) * call.heads,
        tile=tile,
    )
    return output, lse, lse_rest


def _decode(launcher: Launcher) -> tuple[Array, Array, Array]:
    """`forward` with split keys: programs attend to parts of the keys, whose results a second kernel merges."""
    call, parts = launcher.call, launcher.plan.decoding_parts
    rows = (call.batch, call.queries, call.heads, parts)
    split = launcher.launch(
        device("decoding").attend_part,
        launcher.arrays,
        {"part_sum": shape(*rows, call.value_dim), "part_top": shape(*rows), "part_total": shape(*rows)},
        programs=call.batch * parts * call.kv_heads,
        tile=replace(launcher.plan.config.decoding, rows=padded(call.queries * call.groups)),
        parts=parts,
    )
    output, lse, lse_rest = launcher.launch(
        device("decoding").merge_parts,
        split._asdict() | {"sinks": launcher.inputs.sinks},
        _results(launcher),
        programs=call.batch * call.queries * call.heads,
        tile=Tile(rows=1, columns=1),
        parts=parts,
        part_block=padded(parts, 1),
    )
    return output, lse, lse_rest


def _results(launcher: Launcher) -> dict[str, Any]:
    call = launcher.call
    rows = shape(call.batch, call.heads, call.queries)
    output = shape(call.batch, call.queries, call.heads, call.value_dim, dtype=call.residual_dtype)
    return {"output": output, "lse": rows, "lse_rest": rows}
