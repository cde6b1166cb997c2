"""`gated_delta_rule`, always on XLA."""

from ejkernel.kernels._xla.gated_delta_rule._interface import gated_delta_rule

__all__ = ["gated_delta_rule"]
