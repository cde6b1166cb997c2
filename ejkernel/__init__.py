"""Attention kernels for JAX: gated linear recurrences and softmax attention, packed, exact and fast."""

from ejkernel import parallel, xla_utils
from ejkernel._dispatch import PlatformError, SlowerImplementationWarning, explain
from ejkernel.attention import attention, flash_attention
from ejkernel.delta_rule import delta_rule, gated_delta_rule, kda
from ejkernel.linear_attention import (
    lightning_attn,
    linear_attention,
    recurrent,
    recurrent_gla,
    retention,
    simple_gla,
)

__version__ = "0.1.0"

__all__ = [
    "PlatformError",
    "SlowerImplementationWarning",
    "attention",
    "delta_rule",
    "explain",
    "flash_attention",
    "gated_delta_rule",
    "kda",
    "lightning_attn",
    "linear_attention",
    "parallel",
    "recurrent",
    "recurrent_gla",
    "retention",
    "simple_gla",
    "xla_utils",
]
