"""`retention`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import retention as _front

retention = pinned(_front, "xla")
