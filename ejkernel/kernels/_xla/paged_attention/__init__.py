"""`paged_attention` on XLA."""

from ejkernel.kernels._xla.paged_attention._interface import paged_attention

__all__ = ["paged_attention"]
