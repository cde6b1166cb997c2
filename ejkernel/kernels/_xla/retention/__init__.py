"""`retention`, always on XLA."""

from ejkernel.kernels._xla.retention._interface import retention

__all__ = ["retention"]
