"""`ejkernel.attention`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.attention import attention as _attention

attention = pinned(_attention, "xla")
