"""`ejkernel.flash_attention`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.attention import flash_attention as _flash_attention

flash_attention = pinned(_flash_attention, "xla")
