"""A small random Qwen3-Next: what `examples/qwen3_next.py` makes of its checkpoint, beside transformers."""

import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from transformers import Qwen3NextForCausalLM

from benchmarks.peers.compare import difference
from benchmarks.peers.references import qwen3_next_config

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import qwen3_next as example

PROMPT, COUNT = 12, 8


@torch.no_grad()
def numbers(seed: int) -> dict[str, float]:
    """Logits of one pass; tokens generated from the example's states, by the logits transformers gives them."""
    torch.manual_seed(seed)
    theirs = Qwen3NextForCausalLM(qwen3_next_config()).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name:  # all the same at first
            parameter += 0.2 * torch.randn(parameter.shape)
    prompt = np.random.default_rng(seed).integers(64, size=(2, PROMPT))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder, max_shard_size="40KB")
        ours = example.Model(Path(folder))
    logits, _ = nnx.jit(lambda model, tokens: model(tokens, [None] * len(model.blocks)))(ours, jnp.asarray(prompt))
    written, scores = example.generate(ours, jnp.asarray(prompt), COUNT)
    tokens, cache, expected = torch.tensor(prompt), None, []
    for _ in range(COUNT):
        found = theirs(tokens, past_key_values=cache, use_cache=True)
        expected.append(found.logits[:, -1])
        tokens, cache = expected[-1].argmax(-1)[:, None], found.past_key_values
    assert np.array_equal(written, torch.stack(expected, 1).argmax(-1))
    return {
        "output": difference(logits, theirs(torch.tensor(prompt)).logits),
        "decoding": difference(scores, torch.stack(expected, 1)),
    }
