"""The token-by-token kernel of both recurrences, for calls of a few tokens a sequence, and for pools."""

import importlib
from typing import Any

import jax

from ejkernel.kernels._launch import padded, shape
from ejkernel.kernels.chunks.triton.launching import F32, Launcher
from ejkernel.kernels.chunks.triton.pools import Slots
from ejkernel.xla_utils.utils import cdiv

DEVICE = "ejkernel.kernels.chunks.triton.device.step"


def step(
    launcher: Launcher,
    x: Any,
    slots: Slots | None = None,
    *,
    block: int,
    beta: jax.Array | None = None,
    value_gate: jax.Array | None = None,
    output: jax.Array | None = None,
    inside: bool = False,
) -> tuple[Any, Any]:
    """Output and final states, or the pool that has them; a program takes at most `block` value dims.

    An `output` is overwritten, but for tokens that go by chunks. With `inside` there is none, see `device.step`.
    """
    call, state, block = launcher.call, x.initial_state, min(block, padded(launcher.call.value_dim))
    inputs = {
        **{"query": x.query, "key": x.key, "value": x.value, "beta": beta, "start": state},
        **{"gate": x.log_decay, "value_gate": value_gate, "ids": launcher.packing.ids},
    }
    # packed streams have one more sequence: the padding behind the last
    runs = call.sequences + call.packed
    if slots is None:
        states = {"final": launcher.states()}
        in_place = {"final": state} if state is not None and state.dtype == F32 else {}
    else:
        inputs |= slots.inputs() | {"copies": slots.copies}
        states, in_place = {"pool": shape(*slots.pool.shape, dtype=slots.pool.dtype)}, {"pool": slots.pool}
        runs = launcher.prompts * slots.at.shape[1] if inside else runs
    if output is not None:
        in_place["output"] = output
    results = launcher.launch(
        importlib.import_module(DEVICE).step,
        inputs,
        {"output": None if inside else launcher.rows(call.value_dim, call.dtype), **states},
        programs=runs * call.heads * cdiv(call.value_dim, block),
        tile=launcher.config.step,
        in_place=in_place or None,
        query_heads=x.query.shape[2],
        key_heads=x.key.shape[2],
        value_heads=x.value.shape[2],
        key_block=padded(call.key_dim),
        value_block=block,
        start=state is not None,
        inside=inside,
    )
    return results.output, results.final if slots is None else results.pool
