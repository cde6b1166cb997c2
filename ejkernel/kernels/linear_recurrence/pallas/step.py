"""The launch of the kernel for one token a sequence."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _pallas, _varying
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32

VMEM = 8 * 2**20  # bytes of states that a program holds, twice coming and twice going


def serves(call: Call) -> bool:
    """Whether the call is one step, and a program's heads fit."""
    return call.tokens == 1 and not call.packed and 16 * _heads(call) * call.key_dim * call.value_dim <= VMEM


def _heads(call: Call) -> int:
    """Heads a program: whole registers of them, or all."""
    return 8 if call.heads % 8 == 0 else call.heads


def step(call: Call, query: Any, key: Any, value: Any, log_decay: Any, initial: Any) -> list[jax.Array]:
    """Output and final states."""
    # not at the top: `import ejkernel` must not import Pallas
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    device = importlib.import_module("ejkernel.kernels.linear_recurrence.pallas.device.step")
    B, H, K, V, heads = call.batch, call.heads, call.key_dim, call.value_dim, _heads(call)

    def each_head(x: jax.Array) -> jax.Array:
        return jnp.repeat(x[:, 0].astype(F32), H // x.shape[2], axis=1)

    # all of them small beside the states
    inputs = {"query": each_head(query) * call.scale, "key": each_head(key), "value": each_head(value)}
    if log_decay is not None and initial is not None:
        decay = log_decay if call.decay == "constant" else log_decay[:, 0]
        decay = decay.astype(F32)
        inputs["decay"] = decay if call.decay == "key" else jnp.broadcast_to(decay[..., None], (B, H, K))
    aliases = {}
    if initial is not None:
        aliases = {len(inputs): 1}
        inputs["initial"] = initial.astype(F32)

    def spec(*sizes: int) -> Any:
        return pl.BlockSpec((1, heads, *sizes), lambda b, h: (b, h, *(0 for _ in sizes)))

    shapes = {"query": (K,), "key": (K,), "value": (V,), "decay": (K,), "initial": (K, V)}
    outputs = {"output": (V,), "final": (K, V)}
    output, final = pl.pallas_call(
        functools.partial(device.step, (*inputs, *outputs)),
        grid=(B, H // heads),
        in_specs=[spec(*shapes[name]) for name in inputs],
        out_specs=[spec(*sizes) for sizes in outputs.values()],
        out_shape=[_varying.shape_like((B, H, *sizes), F32, query) for sizes in outputs.values()],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        interpret=_pallas.INTERPRET or False,
        name=f"recurrence_{call.decay}_step",
    )(*inputs.values())
    return [output[:, None].astype(call.dtype), final]
