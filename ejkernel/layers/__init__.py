"""Flax NNX layers that published models are made of; needs Flax, which the extra `layers` brings.

All are called alike: `output, state = layer(x, state, cu_seqlens)`. `x` is `[B, T, width]`, or `[T, width]` for a
packed stream; the state continues a sequence, one token at a time if need be. Kernels carry their partitioning: heads
lie along the mesh axis `"model"`, and `nnx.get_partition_spec(nnx.state(layer))` reads it back.

A server calls `output, cache = layer(x, cache, batch)` with tokens of many requests, `x [T, width]`: `ragged_batch`
makes the batch from what a scheduler has, and `layer.empty_cache(limits)` the pools of states or the pages.

Each has a function `from_config(config, layer, weights)` that makes it as a published model has it, with sizes and
options from the model's `config.json`, and functions `from_…(weights, *arguments, prefix="", **options)` that make it
with the weights of the implementation in use elsewhere:

- `weights`: arrays by the names of its state dict: of NumPy, JAX or PyTorch. Or the path of a safetensors file, of its
  index or of their folder; a `Checkpoint` has those arrays open.
- `prefix`: what the names begin with; all others are left alone.
- `*arguments`, `**options`: the layer's own, without `rngs`.

A `ValueError` lists every name that is missing or unknown, every shape that does not fit and every setting that the
layer does not have.
"""

try:
    import flax  # noqa: F401
except ModuleNotFoundError as error:
    message = f"the layers need Flax, the extra layers: pip install '.[layers]' in a checkout ({error})"
    raise ModuleNotFoundError(message, name=error.name) from error

from ejkernel.layers._checkpoint import Checkpoint
from ejkernel.layers._models import mixers
from ejkernel.layers._recurrent import RecurrentState
from ejkernel.layers._serving import RaggedBatch, ServingLimits, ragged_batch
from ejkernel.layers._stacked import stacked
from ejkernel.layers.gated_delta_net import GatedDeltaNet
from ejkernel.layers.gated_linear_attention import GatedLinearAttention
from ejkernel.layers.kimi_delta_attention import KimiDeltaAttention
from ejkernel.layers.latent_attention import LatentCache, MultiHeadLatentAttention
from ejkernel.layers.lightning_attention import LightningAttention
from ejkernel.layers.mamba2 import Mamba2
from ejkernel.layers.retention import Retention
from ejkernel.layers.softmax import KeyValueCache, MultiHeadAttention

__all__ = [
    "Checkpoint",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "KeyValueCache",
    "KimiDeltaAttention",
    "LatentCache",
    "LightningAttention",
    "Mamba2",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "RaggedBatch",
    "RecurrentState",
    "Retention",
    "ServingLimits",
    "mixers",
    "ragged_batch",
    "stacked",
]
