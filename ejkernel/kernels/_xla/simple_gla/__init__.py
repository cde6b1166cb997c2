"""`simple_gla`, always on XLA."""

from ejkernel.kernels._xla.simple_gla._interface import simple_gla

__all__ = ["simple_gla"]
