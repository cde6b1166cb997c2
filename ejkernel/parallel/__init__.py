"""Sequence parallelism: one sequence's time over several devices, on JAX's own meshes and collectives."""

from ejkernel.parallel.linear_attention import recurrent

__all__ = ["recurrent"]
