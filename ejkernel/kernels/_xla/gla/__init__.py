"""`recurrent_gla`, always on XLA."""

from ejkernel.kernels._xla.gla._interface import recurrent_gla

__all__ = ["recurrent_gla"]
