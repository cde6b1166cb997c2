"""`simple_gla`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import simple_gla as _front

simple_gla = pinned(_front, "xla")
