"""`lightning_attn`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import lightning_attn as _front

lightning_attn = pinned(_front, "xla")
