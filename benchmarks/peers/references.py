"""Small layers of other libraries, with random weights, and how each is called and handed over."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers import interpreter  # noqa: F401
from ejkernel import layers

# transformers would run fla's kernels where it finds them; it shall run its own code
sys.modules["fla"] = None
from transformers import (  # noqa: E402
    BambaConfig,
    DynamicCache,
    Gemma2Config,
    GptOssConfig,
    KimiLinearConfig,
    LlamaConfig,
    Mamba2Config,
    MiniMaxConfig,
    Qwen3NextConfig,
    logging,
)
from transformers.models.bamba.modeling_bamba import BambaMixer  # noqa: E402
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding  # noqa: E402
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer  # noqa: E402
from transformers.models.minimax.modeling_minimax import MiniMaxCache, MiniMaxLightningAttention  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import (  # noqa: E402
    Qwen3NextAttention,
    Qwen3NextGatedDeltaNet,
    Qwen3NextRotaryEmbedding,
)

del sys.modules["fla"]
logging.set_verbosity_error()  # it would warn that its own code is slow

from fla.layers import GatedLinearAttention, KimiDeltaAttention, MultiScaleRetention, kda  # noqa: E402
from fla.models.utils import Cache as FlaCache  # noqa: E402
from fla.ops.kda.gate import naive_kda_gate  # noqa: E402
from fla.ops.kda.naive import naive_recurrent_kda  # noqa: E402


def _chunk_kda(q, k, v, g, beta, A_log, dt_bias, **options):
    """`chunk_kda`, which the interpreter cannot run, as fla's own reference in PyTorch has it."""
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    return naive_recurrent_kda(q, k, v, naive_kda_gate(g, A_log, dt_bias), beta.sigmoid())


kda.chunk_kda = _chunk_kda

WIDTH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 32, 4, 2, 8, 6
SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}


@dataclass(frozen=True)
class Reference:
    """A layer elsewhere: how it is called with its own cache, and the function that takes its weights."""

    layer: str
    theirs: str
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
    """Every parameter drawn, also those that would start as 0, as 1 or not at all."""
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
                parameter.normal_(0, 0.3, generator=generator)


def _fla(name: str, cls: type, ours: type, theirs: dict[str, Any], **options: Any) -> Reference:
    module = cls(hidden_size=WIDTH, num_heads=HEADS, layer_idx=0, **theirs)
    return Reference(
        ours.__name__,
        name,
        module,
        lambda weights, **more: ours.from_fla(weights, WIDTH, HEADS, **options, **more),
        lambda x, cache, position: module(x, past_key_values=cache, use_cache=cache is not None)[0],
        FlaCache,
        float64=False,
    )


def _state_space(name: str, module: torch.nn.Module, config: Any, ours: type, **options: Any) -> Reference:
    return Reference(
        ours.__name__,
        name,
        module,
        lambda weights, **more: ours.from_transformers(weights, WIDTH, **options, **more),
        lambda x, cache, position: module(x, cache_params=cache),
        lambda: DynamicCache(config=config),
    )


def _softmax(
    name: str, cls: type, rotary: type, config: Any, load: str = "from_transformers", index: int = 0, **options: Any
) -> Reference:
    config._attn_implementation = "eager"
    module = cls(config, layer_idx=index)
    window = options.get("window")

    def call(x: torch.Tensor, cache: Any, position: int) -> torch.Tensor:
        places = position + torch.arange(x.shape[1])
        mask = None
        if x.shape[1] > 1:
            seen = places[:, None] >= places
            if window is not None:
                seen &= places[:, None] - places < window
            mask = torch.where(seen, 0.0, -torch.inf)[None, None]
        # its frequencies are made in the dtype of the day
        embedding = rotary(config=config)(x, places[None].expand(x.shape[0], -1))
        return module(x, position_embeddings=embedding, attention_mask=mask, past_key_values=cache)[0]

    return Reference(
        "MultiHeadAttention",
        name,
        module,
        lambda weights, **more: getattr(layers.MultiHeadAttention, load)(
            weights, WIDTH, HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, **options, **more
        ),
        call,
        lambda: DynamicCache(config=config),
        ("q_norm.weight", "k_norm.weight") if load == "from_qwen3_next" else (),
    )


def _lightning() -> Reference:
    config = MiniMaxConfig(
        **SIZES, num_hidden_layers=3, block_size=16, layer_types=["linear_attention"] * 3, num_local_experts=2
    )
    module = MiniMaxLightningAttention(config, layer_idx=1)
    return Reference(
        "LightningAttention",
        "transformers MiniMax",
        module,
        lambda weights, **more: layers.LightningAttention.from_transformers(
            weights, WIDTH, HEADS, layer_idx=1, num_layers=3, head_dim=HEAD_DIM, **more
        ),
        lambda x, cache, position: module(x, None, None, past_key_values=cache)[0],
        MiniMaxCache,
    )


def _gated_delta_net() -> Reference:
    sizes = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12}
    config = qwen3_next_config(**{f"linear_{_theirs(name)}": size for name, size in sizes.items()})
    module = Qwen3NextGatedDeltaNet(config, layer_idx=0)
    return _state_space("transformers Qwen3-Next", module, config, layers.GatedDeltaNet, **sizes)


def _theirs(name: str) -> str:
    which, what = name.split("_")
    return f"num_{which}_heads" if what == "heads" else f"{which}_head_dim"


def qwen3_next_config(**more: Any) -> Qwen3NextConfig:
    return Qwen3NextConfig(
        **{
            **SIZES,
            "num_hidden_layers": 4,
            "vocab_size": 64,
            "intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            **more,
        }
    )


def _kimi() -> Reference:
    config = KimiLinearConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=HEADS,
        linear_head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
    )
    module = KimiLinearDeltaAttention(config, layer_idx=0)
    options = {"heads": HEADS, "head_dim": HEAD_DIM}
    return _state_space("transformers Kimi Linear", module, config, layers.KimiDeltaAttention, **options)


def _mamba(name: str, cls: type, config: Any, **options: Any) -> Reference:
    sizes = {"heads": 8, "head_dim": 8, "state_dim": 12, "groups": 2, **options}
    return _state_space(name, cls(config, layer_idx=0), config, layers.Mamba2, **sizes)


def references() -> list[Reference]:
    """All of them, their weights not yet drawn."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False}
    llama3 = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    types = ["sliding_attention", "full_attention"]
    short = {"max_position_embeddings": 128, "num_hidden_layers": 2}
    return [
        _fla("fla", GatedLinearAttention, layers.GatedLinearAttention, {}),
        _fla(
            "fla, short convolution, grouped",
            GatedLinearAttention,
            layers.GatedLinearAttention,
            {"num_kv_heads": KV_HEADS, "use_short_conv": True},
            kv_heads=KV_HEADS,
            convolution=4,
        ),
        _fla("fla", MultiScaleRetention, layers.Retention, {}),
        _lightning(),
        _mamba(
            "transformers Mamba-2",
            Mamba2Mixer,
            Mamba2Config(
                hidden_size=WIDTH,
                num_heads=8,
                head_dim=8,
                expand=2,
                state_size=12,
                n_groups=2,
                chunk_size=16,
                num_hidden_layers=1,
            ),
        ),
        _mamba(
            "transformers Bamba",
            BambaMixer,
            BambaConfig(
                hidden_size=WIDTH,
                mamba_n_heads=8,
                mamba_d_head=8,
                mamba_expand=2,
                mamba_d_state=12,
                mamba_n_groups=2,
                mamba_chunk_size=16,
                num_hidden_layers=1,
                attn_layer_indices=[],
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                rms_norm_eps=1e-5,
            ),
        ),
        _gated_delta_net(),
        _fla("fla", KimiDeltaAttention, layers.KimiDeltaAttention, {"head_dim": HEAD_DIM}, head_dim=HEAD_DIM),
        _kimi(),
        _softmax("transformers Llama", LlamaAttention, LlamaRotaryEmbedding, LlamaConfig(**SIZES, **short)),
        _softmax(
            "transformers Llama, rope llama3",
            LlamaAttention,
            LlamaRotaryEmbedding,
            LlamaConfig(**SIZES, **short, rope_parameters={**llama3, "rope_theta": 500.0}),
            rope_theta=500.0,
            rope_scaling=llama3,
        ),
        _softmax(
            "transformers Gemma-2, window",
            Gemma2Attention,
            Gemma2RotaryEmbedding,
            Gemma2Config(
                **SIZES,
                **short,
                query_pre_attn_scalar=16,
                attn_logit_softcapping=2.0,
                sliding_window=WINDOW,
                layer_types=types,
            ),
            softmax_scale=16**-0.5,
            soft_cap=2.0,
            window=WINDOW,
        ),
        _softmax(
            "transformers gpt-oss, window",
            GptOssAttention,
            GptOssRotaryEmbedding,
            GptOssConfig(
                **SIZES,
                **short,
                sliding_window=WINDOW,
                layer_types=types,
                attention_bias=True,
                rope_parameters={**yarn, "rope_theta": 150000.0},
            ),
            bias=True,
            sinks=True,
            window=WINDOW,
            rope_theta=150000.0,
            rope_scaling=yarn,
        ),
        _softmax(
            "transformers Qwen3-Next",
            Qwen3NextAttention,
            Qwen3NextRotaryEmbedding,
            qwen3_next_config(),
            "from_qwen3_next",
            index=3,
            rotary_dim=HEAD_DIM // 2,
        ),
    ]
