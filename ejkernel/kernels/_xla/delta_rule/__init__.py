"""`delta_rule`, always on XLA."""

from ejkernel.kernels._xla.delta_rule._interface import delta_rule

__all__ = ["delta_rule"]
