"""`recurrent`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.linear_attention import recurrent as _front

recurrent = pinned(_front, "xla")
