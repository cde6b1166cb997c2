"""Families of published models, by `model_type`: their layers, and how their `config.json` describes each."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ejkernel.layers._config import Config

Options = dict[str, Any]
Read = Callable[[Config], Options]
# the kind of each layer, given its index, or one kind for all
DefaultKinds = str | Callable[[Config, int], str]

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
# other names in files, and the letters of Nemotron-H's pattern
_KINDS = {"mamba": LINEAR, "kda": LINEAR, "M": LINEAR, "attention": FULL, "*": FULL, "E": "moe", "-": "mlp"}


class Mixer(NamedTuple):
    """A layer of this package in a model.

    Attributes:
        layer: The name of its class.
        options: Its arguments other than `width`, from the config; also `interleaved`, an argument of `load`.
        load: The name of the class method that loads its weights.
        folders: The names that it has within a layer of the model, in different files.
    """

    layer: str
    options: Read
    load: str = "from_transformers"
    folders: tuple[str, ...] = ("self_attn",)


class Model(NamedTuple):
    """A family: its name, the mixers of each kind of layer, and the kinds for configs that do not list them."""

    name: str
    mixers: Mapping[str, tuple[Mixer, ...]]
    default_kinds: DefaultKinds

    def kinds(self, c: Config) -> list[str]:
        """The kind of each layer of the model."""
        listed, pattern = c.get("layer_types", "layers_block_type"), c.get("hybrid_override_pattern")
        if listed is None and isinstance(pattern, str):
            listed = list(pattern)
        if listed is None:
            numbers, default = range(c.size("num_hidden_layers")), self.default_kinds
            return [default if isinstance(default, str) else default(c, number) for number in numbers]
        if not isinstance(listed, list | tuple):
            c.mistakes.append(f"layer_types: got {listed!r}; expected a list of names")
            return []
        return [_KINDS.get(str(each), str(each)) for each in listed]


def _every(count: Callable[[Config], int] | int, most: str, last: str) -> Callable[[Config, int], str]:
    """Groups of `count` layers, of which the last is of another kind."""
    return lambda c, layer: most if (layer + 1) % (count if isinstance(count, int) else count(c)) else last


def _named(*names: str, first: int = 0) -> Callable[[Config, int], str]:
    """Full attention in the layers that one of these settings lists, which counts from `first`."""
    return lambda c, layer: FULL if layer + first in c.get(*names, default=()) else LINEAR


def _kimi_kind(c: Config, layer: int) -> str:
    if c.get("linear_attn_config.full_attn_layers") is None:
        return FULL if layer and layer % 4 == 0 else LINEAR
    return _named("linear_attn_config.full_attn_layers", first=1)(c, layer)


def _ling_kind(c: Config, layer: int) -> str:
    """Linear attention, except in the last layer of each group and in an incomplete group."""
    size = c.size("layer_group_size", default=6)
    return FULL if (layer + 1) % size == 0 or layer >= c.size("num_hidden_layers") // size * size else LINEAR


def _qwen_kind(c: Config, layer: int) -> str:
    windows = c.flag("use_sliding_window", default=False)
    return SLIDING if windows and layer >= c.size("max_window_layers", default=28) else FULL


def _gemma4_kind(c: Config, layer: int) -> str:
    return FULL if (layer + 1) % 6 == 0 or layer + 1 == c.size("num_hidden_layers") else SLIDING


def _gated_delta_net(c: Config) -> Options:
    c.only("hidden_act", "silu", None)
    return {
        "key_heads": c.size("linear_num_key_heads"),
        "value_heads": c.size("linear_num_value_heads"),
        "key_dim": c.size("linear_key_head_dim"),
        "value_dim": c.size("linear_value_head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", default=4),
        "epsilon": c.number("rms_norm_eps", default=1e-6),
    }


def _olmo_gated_delta_net(c: Config) -> Options:
    c.only("hidden_act", "silu", None)
    heads = c.size("num_attention_heads")
    key_heads = c.size("linear_num_key_heads", default=heads)
    key_dim = c.size("linear_key_head_dim", default=int(0.75 * c.size("hidden_size") / key_heads))
    return {
        "key_heads": key_heads,
        "value_heads": c.size("linear_num_value_heads", default=heads),
        "key_dim": key_dim,
        "value_dim": c.size("linear_value_head_dim", default=2 * key_dim),
        "convolution": c.size("linear_conv_kernel_dim", default=4),
        "negative_eigenvalues": c.flag("linear_allow_neg_eigval", default=True),
        "epsilon": 1e-5,  # the config's epsilon is for other norms
    }


def _fla_delta(c: Config, expand_v: float) -> Options:
    """What fla's Gated DeltaNet and KDA have in common."""
    c.only("use_short_conv", True, None)
    return {
        "value_heads": c.size("num_v_heads", "num_heads"),
        "value_dim": c.product("head_dim", "expand_v", expand_v),
        "convolution": c.size("conv_size", default=4),
        "negative_eigenvalues": c.flag("allow_neg_eigval", default=False),
        "epsilon": c.number("norm_eps", default=1e-6),
    }


def _fla_gated_delta_net(c: Config) -> Options:
    c.only("use_gate", True, None)
    c.only("output_gate_activation", "swish", "silu", None)
    return {"key_heads": c.size("num_heads"), "key_dim": c.size("head_dim"), **_fla_delta(c, 2.0)}


def _fla_kda(c: Config) -> Options:
    return {
        "heads": c.size("num_heads"),
        "head_dim": c.size("head_dim"),
        "gate_bias": True,
        "lower_bound": c.number("lower_bound", default=None),
        **_fla_delta(c, 1.0),
    }


def _kda(c: Config) -> Options:
    """Kimi Linear, Kimi-K3 and, except for the bound, GLM-5.3-Flash."""
    return {
        "heads": c.size("linear_num_heads", "linear_attn_config.num_heads"),
        "head_dim": c.size("linear_head_dim", "linear_attn_config.head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size", default=4),
        "lower_bound": c.number("linear_lower_bound", "linear_attn_config.gate_lower_bound", default=None),
        "negative_eigenvalues": c.flag("linear_allow_neg_eigval", default=False),
        "low_rank_output_gate": not c.flag("linear_attn_config.use_full_rank_gate", default=False),
        "epsilon": c.number("rms_norm_eps", default=1e-5),
    }


def _glm_kda(c: Config) -> Options:
    options = _kda(c)
    if options["lower_bound"] is None and c.flag("linear_attn_config.safe_gate", default=True):
        options["lower_bound"] = -5.0
    return options


def _ling_kda(c: Config) -> Options:
    c.only("no_kda_lora", True, None)
    return {
        "heads": c.size("linear_num_heads", "num_attention_heads"),
        "head_dim": c.size("linear_head_dim", "head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        "lower_bound": c.number("kda_lower_bound", default=-5.0) if c.flag("kda_safe_gate", default=True) else None,
        "low_rank_decay": False,
        "low_rank_output_gate": False,
        "epsilon": c.number("rms_norm_eps", default=1e-6),
    }


def _retention(c: Config, expand_k: float = 1.0, expand_v: float = 2.0) -> Options:
    """fla's RetNet, which ignores `use_short_conv`."""
    c.only("feature_map", None)
    c.only("use_output_gate", True, None)
    c.only("hidden_act", "swish", "silu", None)
    c.only("elementwise_affine", True, None)
    return {
        "heads": c.size("num_heads"),
        "kv_heads": c.size("num_kv_heads", default=None),
        "key_width": c.product("hidden_size", "expand_k", expand_k),
        "value_width": c.product("hidden_size", "expand_v", expand_v),
        "epsilon": c.number("norm_eps", default=1e-6),
    }


def _gla(c: Config) -> Options:
    c.only("clamp_min", None)
    short = c.flag("use_short_conv", default=False)
    return _retention(c, 0.5, 1.0) | {"convolution": c.size("conv_size", default=4) if short else None}


def _lightning(c: Config) -> Options:
    c.only("hidden_act", "silu", None)
    return {
        "heads": c.size("num_attention_heads"),
        "head_dim": c.size("head_dim", default=None),
        "layer_idx": c.layer,
        "num_layers": c.size("num_hidden_layers"),
    }


def _mamba(c: Config, heads: int, head_dim: int, state_dim: int, groups: int) -> Options:
    """What all families have in common; `groups` is the default."""
    return {
        "heads": heads,
        "head_dim": head_dim,
        "state_dim": state_dim,
        "groups": c.size("n_groups", "mamba_n_groups", "mamba_ngroups", default=groups),
        "convolution": c.size("conv_kernel", "mamba_d_conv", default=4),
        "convolution_bias": c.flag("use_conv_bias", "mamba_conv_bias", default=True),
        "bias": c.flag("use_bias", "mamba_proj_bias", "add_bias_linear", default=False),
        "time_step_limit": _time_step_limit(c),
        "epsilon": c.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
    }


def _time_step_limit(c: Config) -> Any:
    """JSON has no infinity: files have its name, an object with it, or null."""
    limits = c.get("time_step_limit", default=(0.0, math.inf))
    if isinstance(limits, list | tuple) and len(limits) == 2:
        infinite = (None, "inf", "Infinity", {"__float__": "Infinity"})
        return tuple(math.inf if each in infinite else each for each in limits)
    c.mistakes.append(f"time_step_limit: got {limits!r}; expected the shortest and the longest")
    return None


def _mamba2(c: Config) -> Options:
    c.only("hidden_act", "silu", None)
    return _mamba(c, c.size("num_heads"), c.size("head_dim"), c.size("state_size"), 8)


def _nemotron_mamba2(c: Config) -> Options:
    c.only("mamba_hidden_act", "silu", None)
    return _mamba(c, c.size("mamba_num_heads"), c.size("mamba_head_dim"), c.size("ssm_state_size"), 8)


def _bamba_mamba2(c: Config) -> Options:
    """Bamba, Granite 4, and the sizes of Falcon-H1."""
    c.only("hidden_act", "silu", None)
    heads = c.size("mamba_n_heads")
    width = c.size("mamba_d_ssm", default=None) or c.product("hidden_size", "mamba_expand", 2)
    automatic = c.get("mamba_d_head", default="auto") == "auto"
    return _mamba(c, heads, width // heads if automatic else c.size("mamba_d_head"), c.size("mamba_d_state"), 1)


def _zamba_mamba2(c: Config) -> Options:
    heads = c.size("n_mamba_heads")
    head_dim = c.size("mamba_headdim", default=c.product("hidden_size", "mamba_expand", 2) // heads)
    return _mamba(c, heads, head_dim, c.size("mamba_d_state"), 1) | {"epsilon": 1e-5}


def _falcon_mamba2(c: Config) -> Options:
    options = _bamba_mamba2(c)
    first = c.number("ssm_in_multiplier", default=1.0)
    if options["bias"] and first != 1:
        c.mistakes.append(
            f"ssm_in_multiplier: got {first} with mamba_proj_bias; expected 1, as a bias is not multiplied"
        )
    return options | {
        "out_bias": c.flag("projectors_bias", default=False),
        "norm": c.flag("mamba_rms_norm", default=False),
        "norm_before_gate": c.flag("mamba_norm_before_gate", default=True),
        # the factor of the input is a factor of all its projections
        "multipliers": tuple(first * each for each in c.numbers("ssm_multipliers", default=(1.0,) * 5)),
    }


def _attention(c: Config, theta: float | None = 10000.0, share: float = 1.0, **more: Any) -> Options:
    """Llama, and others with the same settings; `theta` and `share` are defaults of the rotation, `None` is without."""
    heads = c.size("num_attention_heads")
    head_dim = c.size("head_dim", default=c.size("hidden_size") // heads)
    return {
        "heads": heads,
        "kv_heads": c.size("num_key_value_heads", default=heads),
        "head_dim": head_dim,
        "bias": c.flag("attention_bias", default=False),
        "window": c.size("sliding_window") if c.kind == SLIDING else None,
        "epsilon": c.number("rms_norm_eps", default=1e-6),
        **({"rope_theta": None} if theta is None else c.rotation(head_dim, theta, share)),
        **more,
    }


def _gemma2_attention(c: Config, theta: float = 10000.0) -> Options:
    c.only("use_bidirectional_attention", False, None)
    return _attention(c, theta) | {
        "softmax_scale": c.number("query_pre_attn_scalar", default=256) ** -0.5,
        "soft_cap": c.number("attn_logit_softcapping", default=None),
    }


def _gemma3_attention(c: Config) -> Options:
    options = _gemma2_attention(c, 1e6) | {"norm": True}
    if c.kind == SLIDING and c.get("rope_parameters") is None:
        # in older files, `rope_theta` and `rope_scaling` are only for full attention
        options |= {"rope_theta": c.number("rope_local_base_freq", default=10000.0), "rope_scaling": None}
    return options


def _gemma4_attention(c: Config) -> Options:
    c.only("use_bidirectional_attention", None, "vision")
    shared = c.get("num_kv_shared_layers", default=0)
    if shared and c.layer >= c.size("num_hidden_layers") - shared:
        c.mistakes.append(
            f"num_kv_shared_layers: got {shared}, so layer {c.layer} has keys of another; expected one's own"
        )
    options = _attention(c, norm=True, value_norm=True, softmax_scale=1.0)
    if c.kind == FULL:
        same = options["values_are_keys"] = c.flag("attention_k_eq_v", default=False)
        # settings of the layer, or of all layers of full attention
        names = [f"per_layer_config.{number}" for number in (c.layer, f"{c.layer:02}")]
        options["head_dim"] = c.size(*(f"{name}.head_dim" for name in names), "global_head_dim", default=512)
        of_layer = [f"{name}.num_key_value_heads" for name in names]
        of_all = ["num_global_key_value_heads"] if same else []
        options["kv_heads"] = c.size(*of_layer, *of_all, default=options["kv_heads"])
    if c.get("rope_parameters") is None and c.kind == FULL:
        scaling = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        options |= {"rope_theta": 1e6, "rope_scaling": scaling}
    return options


def _gpt_oss_attention(c: Config) -> Options:
    return _attention(c, 150000.0, sinks=True, bias=c.flag("attention_bias", default=True))


def _falcon_attention(c: Config) -> Options:
    options = _attention(c)
    return options | {"softmax_scale": c.number("key_multiplier", default=1.0) * options["head_dim"] ** -0.5}


def _granite_attention(c: Config) -> Options:
    c.only("position_embedding_type", "rope", "nope", None)
    theta = 10000.0 if c.get("position_embedding_type") == "rope" else None
    return _attention(c, theta, softmax_scale=c.number("attention_multiplier", default=1.0))


def _latent_attention(c: Config, theta: float | None = 10000.0) -> Options:
    """DeepSeek V3 and Kimi-K2."""
    key_dim, rotary_dim = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    rotation = {"rope_theta": None} if theta is None else c.rotation(None, theta)
    scale, scaling = (key_dim + rotary_dim) ** -0.5, rotation.get("rope_scaling") or {}
    if all_dims := scaling.get("mscale_all_dim"):
        scale *= (0.1 * all_dims * math.log(max(scaling.get("factor", 1.0), 1.0)) + 1) ** 2
    return {
        "heads": c.size("num_attention_heads"),
        "latent_dim": c.size("kv_lora_rank"),
        "query_rank": c.size("q_lora_rank", default=None),
        "key_dim": key_dim,
        "rotary_dim": rotary_dim,
        "value_dim": c.size("v_head_dim"),
        "bias": c.flag("attention_bias", default=False),
        "softmax_scale": scale,
        **rotation,
        "interleaved": c.flag("rope_interleave", default=True),
    }


def _kimi_latent_attention(c: Config) -> Options:
    """Kimi Linear and Kimi-K3, which have no rotation."""
    c.only("mla_use_nope", True, None)
    gated = c.flag("mla_use_output_gate", default=False)
    return _latent_attention(c, None) | {
        "interleaved": False,
        "output_gate": "dim" if gated else None,
        # Kimi-K3 has one epsilon for all norms
        "epsilon": c.number("rms_norm_eps", default=1e-5) if gated else 1e-6,
    }


def _ling_latent_attention(c: Config) -> Options:
    c.only("use_mla_nope", False, None)
    gates = {"head_wise": "head", "element_wise": "dim"}
    c.only("gated_attention_proj_granularity_type", *gates, None)
    gate = c.get("gated_attention_proj_granularity_type", default="head_wise")
    return _latent_attention(c, 6e6) | {"output_gate": gates.get(gate)}


_QWEN = {
    LINEAR: (Mixer("GatedDeltaNet", _gated_delta_net, folders=("linear_attn",)),),
    FULL: (
        Mixer(
            "MultiHeadAttention", partial(_attention, share=0.25, norm=True, output_gate=True), load="from_qwen3_next"
        ),
    ),
}
_KIMI = {
    LINEAR: (Mixer("KimiDeltaAttention", _kda),),
    FULL: (Mixer("MultiHeadLatentAttention", _kimi_latent_attention),),
}
_ZAMBA = (Mixer("Mamba2", _zamba_mamba2, folders=("mamba", "mamba_decoder.mamba")),)
_INTERVAL = _every(lambda c: c.size("full_attention_interval", default=4), LINEAR, FULL)


def _fla(name: str, layer: str, options: Read) -> Model:
    mixer = Mixer(layer, options, load="from_fla", folders=("attn",))
    return Model(f"fla's {name}", {LINEAR: (mixer,)}, _named("attn.layers"))


def _softmax(name: str, options: Read, default_kinds: DefaultKinds = FULL, load: str = "from_transformers") -> Model:
    mixers = (Mixer("MultiHeadAttention", options, load),)
    return Model(name, {FULL: mixers, SLIDING: mixers}, default_kinds)


def _mamba_hybrid(
    name: str,
    mamba: Read,
    attention: Read,
    default_kinds: DefaultKinds = LINEAR,
    folders: tuple[str, str] = ("mamba", "self_attn"),
) -> Model:
    mixers = Mixer("Mamba2", mamba, folders=folders[:1]), Mixer("MultiHeadAttention", attention, folders=folders[1:])
    return Model(name, {LINEAR: mixers[:1], FULL: mixers[1:], "hybrid": mixers}, default_kinds)


_GEMMA3 = _softmax(
    "Gemma 3",
    _gemma3_attention,
    _every(lambda c: c.size("sliding_window_pattern", default=6), SLIDING, FULL),
    "from_gemma3",
)
_GEMMA4 = _softmax("Gemma 4", _gemma4_attention, _gemma4_kind)
_QWEN3 = _softmax("Qwen3", partial(_attention, norm=True), _qwen_kind)
_QWEN3_5 = Model("Qwen3.5", _QWEN, _INTERVAL)
_LING = Model(
    "Ling 3",
    {
        LINEAR: (Mixer("KimiDeltaAttention", _ling_kda, folders=("self_attn", "attention")),),
        FULL: (Mixer("MultiHeadLatentAttention", _ling_latent_attention, folders=("self_attn", "attention")),),
    },
    _ling_kind,
)
_GLM = Model(
    "GLM-5.3-Flash",
    {LINEAR: (Mixer("KimiDeltaAttention", _glm_kda),)},
    _every(4, LINEAR, "indexed_attention"),
)
_DEEPSEEK = {FULL: (Mixer("MultiHeadLatentAttention", _latent_attention),)}

MODELS: dict[str, Model] = {
    "gla": _fla("GLA", "GatedLinearAttention", _gla),
    "retnet": _fla("RetNet", "Retention", _retention),
    "gated_deltanet": _fla("Gated DeltaNet", "GatedDeltaNet", _fla_gated_delta_net),
    "kda": _fla("KDA", "KimiDeltaAttention", _fla_kda),
    "minimax": Model(
        "MiniMax",
        {
            LINEAR: (Mixer("LightningAttention", _lightning),),
            FULL: (Mixer("MultiHeadAttention", partial(_attention, theta=1e6)),),
        },
        _every(2, FULL, LINEAR),
    ),
    "mamba2": Model("Mamba-2", {LINEAR: (Mixer("Mamba2", _mamba2, folders=("mixer",)),)}, LINEAR),
    "bamba": _mamba_hybrid("Bamba", _bamba_mamba2, partial(_attention, share=0.5), _named("attn_layer_indices")),
    "granitemoehybrid": _mamba_hybrid("Granite 4", _bamba_mamba2, _granite_attention),
    "falcon_h1": _mamba_hybrid("Falcon-H1", _falcon_mamba2, _falcon_attention, "hybrid"),
    "nemotron_h": _mamba_hybrid(
        "Nemotron-H", _nemotron_mamba2, partial(_attention, theta=None, bias=False), folders=("mixer", "mixer")
    ),
    "zamba2": Model("Zamba2", {LINEAR: _ZAMBA, "hybrid": _ZAMBA}, LINEAR),
    "olmo_hybrid": Model(
        "Olmo-Hybrid",
        {LINEAR: (Mixer("GatedDeltaNet", _olmo_gated_delta_net, folders=("linear_attn",)),)},
        _every(4, LINEAR, FULL),
    ),
    "qwen3_next": Model("Qwen3-Next", _QWEN, _INTERVAL),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN3_5),
    "kimi_linear": Model("Kimi Linear", _KIMI, _kimi_kind),
    "kimi_k3": Model("Kimi-K3", _KIMI, _kimi_kind),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), _GLM),
    **dict.fromkeys(("bailing_hybrid", "bailing_moe_v3_vl"), _LING),
    "deepseek_v3": Model("DeepSeek V3", _DEEPSEEK, FULL),
    "kimi_k2": Model("Kimi-K2", _DEEPSEEK, FULL),
    "llama": _softmax("Llama", _attention),
    "qwen2": _softmax("Qwen2", partial(_attention, bias=True, out_bias=False), _qwen_kind),
    **dict.fromkeys(("qwen3", "qwen3_moe"), _QWEN3),
    "gemma2": _softmax("Gemma 2", _gemma2_attention, _every(2, SLIDING, FULL)),
    **dict.fromkeys(("gemma3", "gemma3_text"), _GEMMA3),
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4),
    "gpt_oss": _softmax("gpt-oss", _gpt_oss_attention, _every(2, SLIDING, FULL)),
}
