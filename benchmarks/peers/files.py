"""The files that transformers and fla write of small random models, of which `from_config` reads every layer."""

import contextlib
import io
import tempfile
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx
from transformers import AutoModelForCausalLM

from benchmarks.peers.references import draw, theirs
from ejkernel import layers


def read(config: Any) -> dict[str, int]:
    """How many layers of a model were read from how many shards, in bfloat16; raises where a bit is not the module's.

    Files often name and join arrays in other ways than the modules do.
    """
    if config.model_type == "olmo_hybrid":  # whose joined convolution transformers would write in three equal parts
        config.linear_value_head_dim = config.linear_key_head_dim
    if config.model_type == "glm5_next_text":  # which no model for text alone has
        model = theirs("glm5_next", "Glm5NextTextModel")(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    draw(model, 0)
    model = model.to(torch.bfloat16)
    count = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, max_shard_size="20KB")
        checkpoint = layers.Checkpoint(folder)
        for number, kinds in enumerate(layers.mixers(folder)):
            for kind in kinds:
                found = kind.from_config(folder, number, checkpoint)
                expected = kind.from_config(config, number, model.state_dict())
                states = (nnx.state(each, nnx.Param) for each in (found, expected))
                jax.tree.map(np.testing.assert_array_equal, *states)
                count += 1
        shards = len(list(checkpoint.path.glob("*.safetensors")))
    return {"layers": count, "shards": shards}
