"""`linear_attention`, always on XLA."""

from ejkernel.kernels._xla.linear_attention._interface import linear_attention

__all__ = ["linear_attention"]
