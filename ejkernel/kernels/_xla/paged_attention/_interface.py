"""`ejkernel.paged_attention`, always on XLA."""

from ejkernel._dispatch import pinned
from ejkernel.paged_attention import paged_attention as _paged_attention

paged_attention = pinned(_paged_attention, "xla")
