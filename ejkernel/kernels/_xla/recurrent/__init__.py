"""`recurrent`, always on XLA."""

from ejkernel.kernels._xla.recurrent._interface import recurrent

__all__ = ["recurrent"]
