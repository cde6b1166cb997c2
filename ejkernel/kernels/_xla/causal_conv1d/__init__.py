"""`causal_conv1d`, always on XLA."""

from ejkernel.kernels._xla.causal_conv1d._interface import causal_conv1d

__all__ = ["causal_conv1d"]
