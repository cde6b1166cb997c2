"""`linear_attention`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import linear_attention as _front

linear_attention = pinned(_front, "xla")
