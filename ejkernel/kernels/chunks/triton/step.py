"""The token-by-token kernel of both recurrences, for calls of a few tokens a sequence, and for pools."""

import importlib
from typing import Any

import jax

from ejkernel.kernels._launch import padded
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
) -> Any:
    """Output and final states, or the pool that has them; a program takes at most `block` value dims."""
    call, state, block = launcher.call, x.initial_state, min(block, padded(launcher.call.value_dim))
    return launcher.launch(
        importlib.import_module(DEVICE).step,
        {
            **{"query": x.query, "key": x.key, "value": x.value, "beta": beta, "start": state},
            **{"gate": x.log_decay, "value_gate": value_gate, "ids": launcher.packing.ids},
            **({} if slots is None else slots.inputs()),
        },
        {
            "output": launcher.rows(call.value_dim, call.dtype),
            **({"final": launcher.states()} if slots is None else slots.outputs()),
        },
        # packed streams have one more sequence: the padding behind the last
        programs=(call.sequences + call.packed) * call.heads * cdiv(call.value_dim, block),
        tile=launcher.config.step,
        in_place=slots.in_place() if slots else {"final": state} if state is not None and state.dtype == F32 else None,
        query_heads=x.query.shape[2],
        key_heads=x.key.shape[2],
        value_heads=x.value.shape[2],
        key_block=padded(call.key_dim),
        value_block=block,
        start=state is not None,
        pooled=slots is not None,
    )
