"""`lightning_attn`, always on XLA."""

from ejkernel.kernels._xla.lightning_attn._interface import lightning_attn

__all__ = ["lightning_attn"]
