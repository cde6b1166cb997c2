"""`kda`, always on XLA."""

from ejkernel.kernels._xla.kda._interface import kda

__all__ = ["kda"]
