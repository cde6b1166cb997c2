"""Flax NNX layers of published models; they need Flax, which the extra `layers` installs.

All are called in the same way: `output, state = layer(x, state, cu_seqlens)`. `x` is `[B, T, width]`, or `[T, width]`
for a packed stream; the state continues the sequences of an earlier call, for decoding token by token. Kernels have
partitioning metadata: heads are sharded along the mesh axis `"model"`, and
`nnx.get_partition_spec(nnx.state(layer))` returns it.

A server calls `output, cache = layer(x, cache, batch)` with tokens of many requests, `x [T, width]`: `ragged_batch`
creates the batch from a scheduler's lists, and `layer.empty_cache(limits)` the pools of states or the pages.

Each layer has a class method `from_config(config, layer, weights)`, which creates a layer of a published model with
sizes and options from the model's `config.json`, and class methods `from_…(weights, *arguments, prefix="", **options)`,
which create a layer with the weights of another implementation:

- `weights`: NumPy, JAX or PyTorch arrays by their names in a state dict. Or the path of a safetensors file, of its
  index or of their folder, or a `Checkpoint` of these.
- `prefix`: the prefix of the layer's names; other names are ignored.
- `*arguments`, `**options`: the arguments of the layer, without `rngs`.

A `ValueError` lists every name that is missing or unknown, every shape that does not fit and every setting that the
layer does not support.
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
