"""Every op, always on XLA: the paths that code written against the contract imports from."""

from ejkernel.kernels._xla.attention import attention
from ejkernel.kernels._xla.causal_conv1d import causal_conv1d
from ejkernel.kernels._xla.delta_rule import delta_rule
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule
from ejkernel.kernels._xla.gla import recurrent_gla
from ejkernel.kernels._xla.kda import kda
from ejkernel.kernels._xla.lightning_attn import lightning_attn
from ejkernel.kernels._xla.linear_attention import linear_attention
from ejkernel.kernels._xla.paged_attention import paged_attention
from ejkernel.kernels._xla.recurrent import recurrent
from ejkernel.kernels._xla.retention import retention
from ejkernel.kernels._xla.simple_gla import simple_gla

__all__ = [
    "attention",
    "causal_conv1d",
    "delta_rule",
    "flash_attention",
    "gated_delta_rule",
    "kda",
    "lightning_attn",
    "linear_attention",
    "paged_attention",
    "recurrent",
    "recurrent_gla",
    "retention",
    "simple_gla",
]
