"""Small layers of other libraries, with random weights, and how each is called and handed over."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers import interpreter  # noqa: F401
from ejkernel import layers

# transformers would run fla's kernels where it finds them; it shall run its own code
sys.modules["fla"] = None
import transformers  # noqa: E402
from transformers import DynamicCache, logging  # noqa: E402
from transformers.models.minimax.modeling_minimax import MiniMaxCache  # noqa: E402

logging.set_verbosity_error()  # it would warn that its own code is slow


def theirs(model: str, name: str) -> Any:
    """A class of one of transformers' models, by the name of its folder."""
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


# imported while fla is hidden
for _model in (
    *("mamba2", "bamba", "nemotron_h", "falcon_h1", "granitemoehybrid", "zamba2", "minimax"),
    *(
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_moe",
        "olmo_hybrid",
        "kimi_linear",
        "glm5_next",
        "bailing_hybrid",
        "deepseek_v3",
    ),
    *("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma4", "gpt_oss"),
):
    importlib.import_module(f"transformers.models.{_model}.modeling_{_model}")
del sys.modules["fla"]

import fla.layers  # noqa: E402
import fla.models  # noqa: E402
from fla.models.utils import Cache as FlaCache  # noqa: E402
from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate  # noqa: E402
from fla.ops.kda.naive import naive_recurrent_kda  # noqa: E402


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _chunk_kda(q, k, v, g, beta, A_log, dt_bias, lower_bound=None, allow_neg_eigval=False, **options):
    """`chunk_kda`, which the interpreter cannot run, as fla's own reference in PyTorch has it."""
    if lower_bound is None:
        g = naive_kda_gate(g, A_log, dt_bias)
    else:
        g = naive_kda_lowerbound_gate(g, A_log, dt_bias, lower_bound)
    return naive_recurrent_kda(_unit(q), _unit(k), v, g, beta.sigmoid() * (2 if allow_neg_eigval else 1))


fla.layers.kda.chunk_kda = _chunk_kda

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 4, 2, 8, 6
EPSILON = 1e-3  # none that a config has by itself, so that it has to be read
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": EPSILON,
}
# what is around the layers, of all families
AROUND = {
    **{"vocab_size": 64, "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 16},
}
SHORT = {"max_position_embeddings": 128, "num_hidden_layers": 2}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
HYBRID = ["linear_attention", "full_attention"]
HYBRID_GLM = ["linear_attention", "indexed_attention"]
MAMBA = {
    "hidden_size": WIDTH,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": EPSILON,
}
LATENT = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rms_norm_eps": EPSILON,
    **SHORT,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Reference:
    """A layer elsewhere: how it is called with its own cache, and the function that takes its weights."""

    layer: str
    theirs: str
    config: Any
    module: torch.nn.Module
    # further options are the layer's own
    load: Callable[..., Any]
    # its output for `x [B, T, width]`, whose first token stands at a position
    call: Callable[[torch.Tensor, Any, int], torch.Tensor]
    empty_cache: Callable[[], Any]
    # parameters whose gradients come with the same 1 added that the weights do
    shifted: tuple[str, ...] = ()
    # whether all of it can be computed in float64, which Triton's kernels cannot
    float64: bool = True


def draw(module: torch.nn.Module, seed: int) -> None:
    """Every parameter drawn from the numbers of bfloat16, also those that would start as 0, as 1 or not at all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 1, generator=generator)
            elif name.endswith("dt_bias"):
                parameter.uniform_(-3, 0, generator=generator)
            elif parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)
            parameter.copy_(parameter.to(torch.bfloat16))


def _loader(ours: str, config: Any, index: int) -> Callable[..., Any]:
    """By the config, as users do; the names of one module have no prefix."""
    return lambda weights, **more: getattr(layers, ours).from_config(config, index, weights, prefix="", **more)


def _fla(ours: str, name: str, cls: str, config: str, **sizes: Any) -> Reference:
    sizes = {"hidden_size": WIDTH, "num_heads": HEADS, "norm_eps": EPSILON, **sizes}
    module = getattr(fla.layers, cls)(layer_idx=0, **sizes)
    made = getattr(fla.models, config)(num_hidden_layers=1, vocab_size=64, **sizes)
    return Reference(
        ours,
        name,
        made,
        module,
        _loader(ours, made, 0),
        lambda x, cache, position: module(x, past_key_values=cache, use_cache=cache is not None)[0],
        FlaCache,
        float64=False,
    )


def small_config(model: str, name: str, sizes: dict[str, Any]) -> Any:
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        config = getattr(importlib.import_module(f"transformers.models.{model}.configuration_{model}"), f"{name}Config")
    config = config(**AROUND | sizes)
    config._attn_implementation = "eager"
    return config


def _recurrent(
    ours: str, name: str, model: str, config: str, cls: str, prepare: Any = lambda module, config: None, **sizes: Any
) -> Reference:
    """One of transformers' that takes a cache and nothing else."""
    made = small_config(model, config, sizes)
    module = theirs(model, cls)(made, layer_idx=0)
    prepare(module, made)
    return Reference(
        ours,
        f"transformers {name}",
        made,
        module,
        _loader(ours, made, 0),
        lambda x, cache, position: module(x, cache_params=cache),
        lambda: DynamicCache(config=made),
    )


def _softmax(
    name: str,
    model: str,
    config: str,
    cls: str,
    rotary: str | None,
    index: int = 0,
    ours: str = "MultiHeadAttention",
    shifted: bool = False,
    **sizes: Any,
) -> Reference:
    """Attention: `rotary` is the class that makes its cosines and sines, by kinds of layers where it says so."""
    made = small_config(model, config, sizes)
    module = theirs(model, cls)(made, layer_idx=index)
    kind = (getattr(made, "layer_types", None) or ["full_attention"] * (index + 1))[index]
    window = made.sliding_window if kind == "sliding_attention" else None
    by_kind = model in ("gemma3", "gemma4")
    more = {"shared_kv_states": {}} if model == "gemma4" else {}

    def call(x: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        places = position + torch.arange(x.shape[1])
        mask = None
        if x.shape[1] > 1:
            seen = places[:, None] >= places
            if window is not None:
                seen &= places[:, None] - places < window
            mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        embedding = {}
        if rotary is not None:
            # its frequencies are made in the dtype of the day
            angles = theirs(model, rotary)(config=made)
            at = places[None].expand(x.shape[0], -1)
            embedding["position_embeddings"] = angles(x, at, kind) if by_kind else angles(x, at)
        return module(x, attention_mask=mask, past_key_values=cache, **embedding, **more)[0]

    return Reference(
        ours,
        f"transformers {name}",
        made,
        module,
        _loader(ours, made, index),
        call,
        lambda: DynamicCache(config=made),
        ("q_norm.weight", "k_norm.weight") if shifted else (),
    )


def _lightning() -> Reference:
    config = small_config(
        "minimax",
        "MiniMax",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "block_size": 16,
            "layer_types": ["linear_attention"] * 3,
            "num_local_experts": 2,
        },
    )
    module = theirs("minimax", "MiniMaxLightningAttention")(config, layer_idx=1)
    return Reference(
        "LightningAttention",
        "transformers MiniMax",
        config,
        module,
        _loader("LightningAttention", config, 1),
        lambda x, cache, position: module(x, None, None, past_key_values=cache)[0],
        MiniMaxCache,
    )


def _multiplied(module: torch.nn.Module, config: Any) -> None:
    """What Falcon-H1's model does after its layers are made."""
    module.mup_vector = theirs("falcon_h1", "compute_mup_vector")(config)


def qwen_config(name: str, model: str, **more: Any) -> Any:
    """A small hybrid: Qwen3-Next, or Qwen3.5, dense or with experts."""
    return small_config(
        model,
        name,
        {
            **SIZES,
            **LINEAR,
            "num_hidden_layers": 4,
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                # of the two pairs that turn, one by the time of a token and one by its height
                **({"mrope_section": [1, 1, 0]} if model.startswith("qwen3_5") else {}),
            },
            **more,
        },
    )


QWEN = {
    **SIZES,
    **LINEAR,
    **SHORT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "layer_types": HYBRID,
}


def references() -> list[Reference]:
    """All of them, their weights not yet drawn."""
    multipliers = {
        "ssm_in_multiplier": 0.7,
        "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.9],
        "key_multiplier": 0.6,
    }
    nemotron = {
        **{"hidden_size": WIDTH, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2},
        **{"chunk_size": 16, "layers_block_type": HYBRID, "num_attention_heads": HEADS, "head_dim": HEAD_DIM},
        **{"num_key_value_heads": KV_HEADS, "time_step_min": 1e-30, "layer_norm_epsilon": EPSILON},
    }
    falcon = {**MAMBA, "mamba_d_ssm": 64, **multipliers}
    kimi = {"linear_num_heads": HEADS, "linear_head_dim": HEAD_DIM, "layer_types": HYBRID}
    ling = {**LATENT, "head_dim": HEAD_DIM, "layer_types": HYBRID}
    mrope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
    return [
        _fla("GatedLinearAttention", "fla", "GatedLinearAttention", "GLAConfig"),
        _fla(
            "GatedLinearAttention",
            "fla, short convolution, grouped",
            "GatedLinearAttention",
            "GLAConfig",
            num_kv_heads=KV_HEADS,
            use_short_conv=True,
        ),
        _fla("Retention", "fla", "MultiScaleRetention", "RetNetConfig"),
        _lightning(),
        _recurrent(
            *("Mamba2", "Mamba-2", "mamba2", "Mamba2", "Mamba2Mixer"),
            **{"hidden_size": WIDTH, "num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 12, "n_groups": 2},
            **{"chunk_size": 16, "num_hidden_layers": 1, "layer_norm_epsilon": EPSILON},
        ),
        _recurrent("Mamba2", "Bamba", "bamba", "Bamba", "BambaMixer", **MAMBA, attn_layer_indices=[1]),
        _recurrent("Mamba2", "Nemotron-H", "nemotron_h", "NemotronH", "NemotronHMamba2Mixer", **nemotron),
        _recurrent(
            *("Mamba2", "Falcon-H1, norm after the gate", "falcon_h1", "FalconH1", "FalconH1Mixer", _multiplied),
            **{**falcon, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        ),
        _recurrent(
            *("Mamba2", "Falcon-H1, norm before the gate", "falcon_h1", "FalconH1", "FalconH1Mixer", _multiplied),
            **{**falcon, "mamba_rms_norm": True, "mamba_norm_before_gate": True},
        ),
        _recurrent(
            *("Mamba2", "Falcon-H1, no norm", "falcon_h1", "FalconH1", "FalconH1Mixer", _multiplied),
            **{**falcon, "mamba_rms_norm": False},
        ),
        _recurrent(
            *("Mamba2", "Granite 4", "granitemoehybrid", "GraniteMoeHybrid", "GraniteMoeHybridMambaLayer"),
            **MAMBA,
            layer_types=HYBRID,
        ),
        _recurrent(
            *("Mamba2", "Zamba2", "zamba2", "Zamba2", "Zamba2MambaMixer"),
            **{"hidden_size": WIDTH, "n_mamba_heads": 8, "mamba_d_state": 12, "mamba_ngroups": 2, "mamba_expand": 2},
            **{"chunk_size": 16, "num_hidden_layers": 2, "layers_block_type": ["linear_attention", "hybrid"]},
            **{"time_step_min": 1e-30, "rms_norm_eps": EPSILON, "num_attention_heads": HEADS, "num_mem_blocks": 1},
        ),
        _recurrent(*("GatedDeltaNet", "Qwen3-Next", "qwen3_next", "Qwen3Next", "Qwen3NextGatedDeltaNet"), **QWEN),
        _recurrent("GatedDeltaNet", "Qwen3.5", "qwen3_5", "Qwen3_5Text", "Qwen3_5GatedDeltaNet", **QWEN),
        _recurrent(
            *("GatedDeltaNet", "Olmo-Hybrid", "olmo_hybrid", "OlmoHybrid", "OlmoHybridGatedDeltaNet"),
            **{**SIZES, **SHORT, "layer_types": HYBRID},
        ),
        _fla("GatedDeltaNet", "fla", "GatedDeltaNet", "GatedDeltaNetConfig", head_dim=HEAD_DIM),
        _fla(
            *("GatedDeltaNet", "fla, more value heads, beta to 2", "GatedDeltaNet", "GatedDeltaNetConfig"),
            **{"head_dim": HEAD_DIM, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5, "allow_neg_eigval": True},
        ),
        _fla("KimiDeltaAttention", "fla", "KimiDeltaAttention", "KDAConfig", head_dim=HEAD_DIM),
        _fla(
            *("KimiDeltaAttention", "fla, bounded, more value heads, beta to 2", "KimiDeltaAttention", "KDAConfig"),
            **{"head_dim": HEAD_DIM, "num_heads": 2, "num_v_heads": 4, "expand_v": 1.5, "allow_neg_eigval": True},
            **{"safe_gate": True, "lower_bound": -5.0},
        ),
        _recurrent(
            *("KimiDeltaAttention", "Kimi Linear", "kimi_linear", "KimiLinear", "KimiLinearDeltaAttention"),
            **{**LATENT, **kimi},
        ),
        _recurrent(
            *("KimiDeltaAttention", "GLM-5.3-Flash", "glm5_next", "Glm5NextText", "Glm5NextTextLinearAttention"),
            **{**LATENT, **kimi, "linear_lower_bound": -5.0, "qk_rope_head_dim": 0, "layer_types": HYBRID_GLM},
        ),
        _recurrent(
            *("KimiDeltaAttention", "Ling 3", "bailing_hybrid", "BailingHybrid", "BailingHybridDeltaAttention"),
            **ling,
        ),
        _softmax(
            *("DeepSeek V3", "deepseek_v3", "DeepseekV3", "DeepseekV3Attention", "DeepseekV3RotaryEmbedding"),
            ours="MultiHeadLatentAttention",
            **{**LATENT, "q_lora_rank": 10, "attention_bias": True},
            rope_parameters={**YARN, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        ),
        _softmax(
            *("DeepSeek V3, one projection", "deepseek_v3", "DeepseekV3", "DeepseekV3Attention"),
            "DeepseekV3RotaryEmbedding",
            ours="MultiHeadLatentAttention",
            **{**LATENT, "q_lora_rank": None, "rope_interleave": False},
        ),
        _softmax(
            *("Kimi Linear", "kimi_linear", "KimiLinear", "KimiLinearAttention", None, 1),
            ours="MultiHeadLatentAttention",
            **{**LATENT, **kimi},
        ),
        _softmax(
            *("Ling 3", "bailing_hybrid", "BailingHybrid", "BailingHybridAttention", "BailingHybridRotaryEmbedding", 1),
            ours="MultiHeadLatentAttention",
            **ling,
        ),
        _softmax("Llama", "llama", "Llama", "LlamaAttention", "LlamaRotaryEmbedding", **SIZES, **SHORT),
        _softmax(
            *("Llama, rope llama3", "llama", "Llama", "LlamaAttention", "LlamaRotaryEmbedding"),
            **SIZES,
            **SHORT,
            rope_parameters={**LLAMA3, "rope_theta": 500.0},
        ),
        _softmax("Qwen2", "qwen2", "Qwen2", "Qwen2Attention", "Qwen2RotaryEmbedding", **SIZES, **SHORT),
        _softmax("Qwen3", "qwen3", "Qwen3", "Qwen3Attention", "Qwen3RotaryEmbedding", **SIZES, **SHORT),
        _softmax(
            *("Qwen3, experts", "qwen3_moe", "Qwen3Moe", "Qwen3MoeAttention", "Qwen3MoeRotaryEmbedding"),
            **{**SIZES, **SHORT},
        ),
        _softmax(
            *("Gemma 2, window", "gemma2", "Gemma2", "Gemma2Attention", "Gemma2RotaryEmbedding"),
            **{**SIZES, **SHORT, **WINDOWS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
        ),
        *(
            _softmax(
                *(f"Gemma 3, {shown}", "gemma3", "Gemma3Text", "Gemma3Attention", "Gemma3RotaryEmbedding", index),
                shifted=True,
                **{**SIZES, **SHORT, **WINDOWS, "query_pre_attn_scalar": 16},
            )
            for index, shown in enumerate(("window", "full"))
        ),
        *(
            _softmax(
                *(
                    f"Gemma 4, {shown}",
                    "gemma4",
                    "Gemma4Text",
                    "Gemma4TextAttention",
                    "Gemma4TextRotaryEmbedding",
                    index,
                ),
                **{**SIZES, **SHORT, **WINDOWS, "global_head_dim": 512, "attention_k_eq_v": True},
                num_global_key_value_heads=1,
            )
            for index, shown in enumerate(("window", "full, 512 dims, values are keys"))
        ),
        _softmax(
            *("gpt-oss, window", "gpt_oss", "GptOss", "GptOssAttention", "GptOssRotaryEmbedding"),
            **{**SIZES, **SHORT, **WINDOWS, "rope_parameters": {**YARN, "rope_theta": 150000.0}},
        ),
        _softmax(
            *("Qwen3-Next", "qwen3_next", "Qwen3Next", "Qwen3NextAttention", "Qwen3NextRotaryEmbedding", 1),
            shifted=True,
            **QWEN,
        ),
        _softmax(
            *("Qwen3.5", "qwen3_5", "Qwen3_5Text", "Qwen3_5Attention", "Qwen3_5TextRotaryEmbedding", 1),
            shifted=True,
            **{**QWEN, "rope_parameters": mrope},
        ),
        _softmax(
            *("MiniMax", "minimax", "MiniMax", "MiniMaxAttention", "MiniMaxRotaryEmbedding", 1),
            **{**SIZES, **SHORT, "layer_types": HYBRID, "num_local_experts": 2},
        ),
        _softmax("Nemotron-H", "nemotron_h", "NemotronH", "NemotronHAttention", None, 1, **nemotron),
        _softmax("Falcon-H1", "falcon_h1", "FalconH1", "FalconH1Attention", "FalconH1RotaryEmbedding", **falcon),
        _softmax(
            *("Granite 4", "granitemoehybrid", "GraniteMoeHybrid", "GraniteMoeHybridAttention"),
            *("GraniteMoeHybridRotaryEmbedding", 1),
            **{**MAMBA, "layer_types": HYBRID, "attention_multiplier": 0.3, "position_embedding_type": "rope"},
        ),
        _softmax(
            *("Bamba", "bamba", "Bamba", "BambaAttention", "BambaRotaryEmbedding", 1),
            **{**MAMBA, "attn_layer_indices": [1]},
        ),
    ]
