"""Small random models: what `examples/hybrid_models.py` makes of their checkpoints, beside transformers."""

import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from benchmarks.peers.compare import difference
from benchmarks.peers.references import HEAD_DIM, HEADS, KV_HEADS, WIDTH, qwen_config, small_config, theirs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import hybrid_models as example

PROMPT, COUNT = 12, 10


def _nemotron() -> Any:
    return small_config(
        "nemotron_h",
        "NemotronH",
        {
            **{"hidden_size": WIDTH, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2},
            **{"chunk_size": 16, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM},
            **{"time_step_min": 1e-30, "routed_scaling_factor": 1.5},
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        },
    )


# by name: the class of the model, and its config
MODELS = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextForCausalLM", lambda: qwen_config("Qwen3Next", "qwen3_next")),
    "Qwen3.5": ("qwen3_5", "Qwen3_5ForCausalLM", lambda: qwen_config("Qwen3_5Text", "qwen3_5")),
    "Qwen3.5, experts": (
        "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM",
        lambda: qwen_config("Qwen3_5MoeText", "qwen3_5_moe"),
    ),
    "Nemotron-H": ("nemotron_h", "NemotronHForCausalLM", _nemotron),
}


@torch.no_grad()
def numbers(name: str, seed: int) -> dict[str, float]:
    """Logits of one pass; tokens generated from the example's states, by the logits transformers gives them."""
    folder_of_model, cls, config = MODELS[name]
    torch.manual_seed(seed)
    reference = theirs(folder_of_model, cls)(config()).eval()
    for parameter_name, parameter in [*reference.named_parameters(), *reference.named_buffers()]:
        if "norm" in parameter_name or "correction_bias" in parameter_name:  # all the same at first
            parameter += 0.2 * torch.randn(parameter.shape)
        elif parameter_name.endswith("dt_bias"):  # steps of all lengths
            parameter.uniform_(-3, 0)
    prompt = np.random.default_rng(seed).integers(64, size=(2, PROMPT))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        reference.save_pretrained(folder, max_shard_size="40KB")
        ours = example.Model(Path(folder))
    logits, _ = nnx.jit(lambda model, tokens: model(tokens, [None] * len(model.blocks)))(ours, jnp.asarray(prompt))
    written, scores = example.generate(ours, jnp.asarray(prompt), COUNT)
    tokens, cache, expected = torch.tensor(prompt), None, []
    for _ in range(COUNT):
        found = reference(tokens, past_key_values=cache, use_cache=True)
        expected.append(found.logits[:, -1])
        tokens, cache = expected[-1].argmax(-1)[:, None], found.past_key_values
    assert np.array_equal(written, torch.stack(expected, 1).argmax(-1))
    return {
        "output": difference(logits, reference(torch.tensor(prompt)).logits),
        "decoding": difference(scores, torch.stack(expected, 1)),
    }
