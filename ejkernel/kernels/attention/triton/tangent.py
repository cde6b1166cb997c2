"""The tangent pass as a launch of a Triton kernel.

Kept as a promise of the contract: forward mode, in the time and memory of a kernel.
"""

from jax import Array

from ejkernel.kernels._launch import shape
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.launcher import Launcher, aligned, device, without_masked
from ejkernel.kernels.attention.triton.plan import Plan


def tangent(
    call: Call, plan: Plan, inputs: Inputs, results: tuple[Array, Array, Array], tangents: Inputs
) -> tuple[Array, Array]:
    """The tangents of the output and of the log-sum-exp, `[B, H, S]`, from the results of `forward` and `tangents`.

    Fields of `tangents` are `None` for arrays that have no tangent.
    """
    names = ("query", "key", "value")
    masked, moving = (without_masked(call, inputs, {n: getattr(x, n) for n in names}) for x in (inputs, tangents))
    launcher = Launcher.of(call, plan, inputs._replace(**masked))
    output, lse, lse_rest = results
    moving = {f"d_{name}": x for name, x in ({"bias": aligned(tangents.bias)} | moving).items()}
    tile = plan.config.tangent_tile
    d_output, d_lse = launcher.launch(
        device("tangent").tangent,
        launcher.arrays
        | launcher.ranges(tile.columns)
        | {"output": output, "lse": lse, "lse_rest": lse_rest, **moving, "d_sinks": tangents.sinks},
        {"d_output": shape(*output.shape, dtype=output.dtype), "d_lse": shape(*lse.shape)},
        programs=launcher.blocks(tile.rows) * call.heads,
        tile=tile,
    )
    return d_output, d_lse
