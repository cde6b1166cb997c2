"""Sequence parallelism: one sequence's time over several devices, on JAX's own meshes and collectives."""

from ejkernel.parallel.delta_rule import delta_rule, gated_delta_rule, kda
from ejkernel.parallel.linear_attention import (
    lightning_attn,
    linear_attention,
    recurrent,
    recurrent_gla,
    retention,
    simple_gla,
)
from ejkernel.parallel.ring_attention import flash_attention, from_balanced, to_balanced

__all__ = [
    "delta_rule",
    "flash_attention",
    "from_balanced",
    "gated_delta_rule",
    "kda",
    "lightning_attn",
    "linear_attention",
    "recurrent",
    "recurrent_gla",
    "retention",
    "simple_gla",
    "to_balanced",
]
