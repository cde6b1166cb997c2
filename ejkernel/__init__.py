"""Attention kernels for JAX: gated linear recurrences and softmax attention, packed, exact and fast."""

__version__ = "0.1.0"
