"""`recurrent_gla`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import recurrent_gla as _front

recurrent_gla = pinned(_front, "xla")
