"""`flash_attention` on XLA."""

from ejkernel.kernels._xla.flash_attention._interface import flash_attention

__all__ = ["flash_attention"]
