"""`attention` on XLA."""

from ejkernel.kernels._xla.attention._interface import attention

__all__ = ["attention"]
