"""Every op, always on XLA: the paths that code written against the contract imports from."""

from ejkernel.kernels._xla.attention import attention
from ejkernel.kernels._xla.flash_attention import flash_attention
from ejkernel.kernels._xla.gla import recurrent_gla
from ejkernel.kernels._xla.lightning_attn import lightning_attn
from ejkernel.kernels._xla.linear_attention import linear_attention
from ejkernel.kernels._xla.recurrent import recurrent
from ejkernel.kernels._xla.retention import retention
from ejkernel.kernels._xla.simple_gla import simple_gla

__all__ = [
    "attention",
    "flash_attention",
    "lightning_attn",
    "linear_attention",
    "recurrent",
    "recurrent_gla",
    "retention",
    "simple_gla",
]
