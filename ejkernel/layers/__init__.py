"""Flax NNX layers that show how the ops are used; needs Flax, which the extra `layers` brings.

All are called alike: `output, state = layer(x, state, cu_seqlens)`. `x` is `[B, T, width]`, or `[T, width]` for a
packed stream; the state continues a sequence, one token at a time if need be. Kernels carry their partitioning: heads
lie along the mesh axis `"model"`, and `nnx.get_partition_spec(nnx.state(layer))` reads it back.
"""

from ejkernel.layers.linear import GatedLinearAttention, GatedState, LightningAttention, Retention
from ejkernel.layers.softmax import KeyValueCache, MultiHeadAttention

__all__ = [
    "GatedLinearAttention",
    "GatedState",
    "KeyValueCache",
    "LightningAttention",
    "MultiHeadAttention",
    "Retention",
]
