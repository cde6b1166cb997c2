"""Published models: what their `config.json` says of each layer, by `model_type`, and how their files name it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from flax import nnx

from ejkernel import _checks
from ejkernel.layers import _weights
from ejkernel.layers._config import Config

Options = dict[str, Any]


class Mixer(NamedTuple):
    """One of the layers here in a model: its class, the function that takes its weights, its options.

    `folders` are what it is called within a layer of the model, `options` take the number and the kind of that,
    `load_options` are what else `load` takes.
    """

    layer: str
    load: str
    folders: tuple[str, ...]
    options: Callable[[Config, int, str], Options]
    load_options: Callable[[Config], Options] = lambda c: {}


class Model(NamedTuple):
    """A family: its name, the kinds of its layers in order, and the mixers of each kind."""

    name: str
    kinds: Callable[[Config], Sequence[str]]
    mixers: Mapping[str, tuple[Mixer, ...]]


class Published(nnx.Module):
    """A layer that models are published with: `from_config` makes it as a model has it."""

    @classmethod
    def from_config(
        cls,
        config: Any,
        layer: int,
        weights: _weights.Weights | None = None,
        *,
        prefix: str | None = None,
        rngs: nnx.Rngs | None = None,
        **options: Any,
    ) -> Self:
        """This layer as a model has it, with its sizes and options from the model's `config.json`.

        Args:
            config: The model's `config.json` as a dict, its path or that of its folder, or an object with `to_dict`, as
                transformers' are.
            layer: Which of the model's layers, from 0; it has to be one of this kind.
            weights: The model's, whose are taken: arrays by name, or the path of a safetensors file, of its index or of
                their folder. `None` makes new ones.
            prefix: What this layer's names in `weights` begin with; `None` finds it, as the model is published.
            rngs: Random keys for the initial parameters, where there are no `weights`.
            **options: The layer's own, as `dtype` and `param_dtype`, in place of those of the config.

        Raises:
            ValueError: The model has no such layer, or is not known; or settings, or names and shapes of `weights`, do
                not fit, all of which are listed.
        """
        read = Config(config)
        if type(layer) is not int:
            raise TypeError(f"layer: got {type(layer).__name__}; expected an int")
        model, mixer, found = _options(cls.__name__, read, layer)
        of_loading = mixer.load_options(read)
        read.check(model.name)
        found |= options
        if weights is None:
            if rngs is None:
                raise TypeError("rngs: got None; expected nnx.Rngs, or weights to take")
            return cls(**found, rngs=rngs)  # type: ignore[call-arg]
        weights = _weights.as_mapping(weights)
        if prefix is None:
            prefix = _prefix(weights, layer, mixer.folders)
        return getattr(cls, mixer.load)(weights, **found, **of_loading, prefix=prefix)


def mixers(config: Any) -> list[tuple[type[Published], ...]]:
    """The layers here that each layer of a published model has: one, several side by side, or none.

    Args:
        config: As `from_config` takes it.

    Examples:
        >>> config = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*"}
        >>> [[kind.__name__ for kind in kinds] for kinds in mixers(config)]
        [['Mamba2'], [], ['MultiHeadAttention']]
    """
    read = Config(config)
    if read.model_type not in MODELS:
        _checks.fail("config", f"model_type {read.model_type!r}", f"one of {', '.join(sorted(MODELS))}")
    model = MODELS[read.model_type]
    kinds = model.kinds(read)
    read.check(model.name)
    by_name = {kind.__name__: kind for kind in _subclasses(Published)}
    return [tuple(by_name[each.layer] for each in model.mixers.get(kind, ())) for kind in kinds]


def _subclasses(kind: type[Published]) -> list[type[Published]]:
    direct = kind.__subclasses__()
    return direct + [each for found in direct for each in _subclasses(found)]


def _options(kind: str, config: Config, layer: int) -> tuple[Model, Mixer, Options]:
    """The model, and the mixer `kind` of its layer `layer`, with its options."""
    known = {name: each for name, each in MODELS.items() if kind in _kinds_of_mixers(each)}
    if config.model_type not in known:
        _checks.fail(
            "config", f"model_type {config.model_type!r}", f"one that has a {kind}: {', '.join(sorted(known))}"
        )
    model = known[config.model_type]
    kinds = model.kinds(config)
    config.check(model.name)
    if not 0 <= layer < len(kinds):
        _checks.fail("layer", layer, f"0 to {len(kinds) - 1}, as {model.name} has {len(kinds)} layers")
    for mixer in model.mixers.get(kinds[layer], ()):
        if mixer.layer == kind:
            return model, mixer, mixer.options(config, layer, kinds[layer])
    fitting = [name for name, mixers in model.mixers.items() if any(each.layer == kind for each in mixers)]
    numbers = [number for number, name in enumerate(kinds) if name in fitting]
    _checks.fail("layer", f"{layer}, {kinds[layer]}", f"a {kind}, as {model.name} has it in layers {numbers}")


def _kinds_of_mixers(model: Model) -> set[str]:
    return {mixer.layer for mixers in model.mixers.values() for mixer in mixers}


# what comes before `layers.` in published files, and in transformers' modules
_ROOTS = (
    "model.",
    "backbone.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "transformer.",
    "",
)


def _prefix(weights: Mapping[str, Any], layer: int, folders: Sequence[str]) -> str:
    """What the layer's names begin with, of the ways that models are published; the first if there is none."""
    candidates = [f"{root}layers.{layer}.{folder}." for root in _ROOTS for folder in folders]
    return next((each for each in candidates if any(str(name).startswith(each) for name in weights)), candidates[0])


def _all(kind: str, count: str = "num_hidden_layers") -> Callable[[Config], list[str]]:
    return lambda c: [kind] * (c.size(count) or 0)


_PLAIN = {"mamba": "linear_attention", "attention": "full_attention", "kda": "linear_attention"}


def _listed(usual: Callable[[Config, int], str]) -> Callable[[Config], list[str]]:
    """The kinds that the config lists, or the `usual` one of each layer."""

    def kinds(c: Config) -> list[str]:
        listed = c.get("layer_types", "layers_block_type")
        if listed is None:
            return [usual(c, layer) for layer in range(c.size("num_hidden_layers") or 0)]
        if not isinstance(listed, list | tuple):
            c.mistakes.append(f"layer_types: got {listed!r}; expected a list of names")
            return []
        return [_PLAIN.get(str(each), str(each)) for each in listed]

    return kinds


def _every(count: Callable[[Config], Any] | int, most: str, last: str) -> Callable[[Config], list[str]]:
    """Of `count` layers the last is of another kind."""

    def usual(c: Config, layer: int) -> str:
        every = count if isinstance(count, int) else count(c)
        return most if every is None or (layer + 1) % every else last

    return _listed(usual)


def _kimi_kinds(c: Config) -> list[str]:
    full = c.get("linear_attn_config.full_attn_layers")
    if c.get("layer_types") is not None or full is None:
        return _listed(lambda c, layer: "full_attention" if layer and layer % 4 == 0 else "linear_attention")(c)
    count = c.size("num_hidden_layers") or 0
    # counted from 1
    return ["full_attention" if layer + 1 in full else "linear_attention" for layer in range(count)]


def _nemotron_kinds(c: Config) -> list[str]:
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    pattern = c.get("hybrid_override_pattern")
    if c.get("layers_block_type", "layer_types") is None and isinstance(pattern, str):
        return [names.get(each, each) for each in pattern]
    return _listed(lambda c, layer: "linear_attention")(c)


def _bamba_kinds(c: Config) -> list[str]:
    full = c.get("attn_layer_indices", default=[])
    return _listed(lambda c, layer: "full_attention" if layer in full else "linear_attention")(c)


def _fla_kinds(c: Config) -> list[str]:
    """Layers that its hybrids name have softmax attention."""
    full = c.get("attn.layers", default=[])
    return ["softmax" if layer in full else "recurrent" for layer in range(c.size("num_hidden_layers") or 0)]


def _gated_delta_net(c: Config, layer: int, kind: str) -> Options:
    return {
        "width": c.size("hidden_size"),
        "key_heads": c.size("linear_num_key_heads"),
        "value_heads": c.size("linear_num_value_heads"),
        "key_dim": c.size("linear_key_head_dim"),
        "value_dim": c.size("linear_value_head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", default=4),
        "epsilon": c.number("rms_norm_eps", default=1e-6),
    }


def _olmo_gated_delta_net(c: Config, layer: int, kind: str) -> Options:
    heads = c.size("num_attention_heads")
    key_heads = c.size("linear_num_key_heads", default=heads)
    usual = int(0.75 * c.size("hidden_size") / key_heads) if key_heads and c.size("hidden_size") else None
    key_dim = c.size("linear_key_head_dim", default=usual)
    return {
        "width": c.size("hidden_size"),
        "key_heads": key_heads,
        "value_heads": c.size("linear_num_value_heads", default=heads),
        "key_dim": key_dim,
        "value_dim": c.size("linear_value_head_dim", default=2 * key_dim if key_dim else None),
        "convolution": c.size("linear_conv_kernel_dim", default=4),
        "negative_eigenvalues": c.flag("linear_allow_neg_eigval", default=True),
        "epsilon": 1e-5,  # whatever the config says of other norms
    }


def _fla_gated_delta_net(c: Config, layer: int, kind: str) -> Options:
    c.only("use_gate", True, None)
    c.only("use_short_conv", True, None)
    c.only("output_gate_activation", "swish", "silu", None)
    heads = c.size("num_heads")
    return {
        "width": c.size("hidden_size"),
        "key_heads": heads,
        "value_heads": c.size("num_v_heads", default=heads),
        "key_dim": c.size("head_dim"),
        "value_dim": c.product("head_dim", "expand_v", 2.0),
        "convolution": c.size("conv_size", default=4),
        "negative_eigenvalues": c.flag("allow_neg_eigval", default=False),
        "epsilon": c.number("norm_eps", default=1e-6),
    }


def _fla_kda(c: Config, layer: int, kind: str) -> Options:
    c.only("use_short_conv", True, None)
    heads = c.size("num_heads")
    return {
        "width": c.size("hidden_size"),
        "heads": heads,
        "head_dim": c.size("head_dim"),
        "value_heads": c.size("num_v_heads", default=heads),
        "value_dim": c.product("head_dim", "expand_v", 1.0),
        "convolution": c.size("conv_size", default=4),
        "lower_bound": c.number("lower_bound", default=None),
        "negative_eigenvalues": c.flag("allow_neg_eigval", default=False),
        "gate_bias": True,
        "epsilon": c.number("norm_eps", default=1e-6),
    }


def _kda(c: Config, layer: int, kind: str) -> Options:
    """Kimi Linear's, Kimi-K3's and GLM-5.3-Flash's."""
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("linear_num_heads", "linear_attn_config.num_heads"),
        "head_dim": c.size("linear_head_dim", "linear_attn_config.head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size", default=4),
        "lower_bound": c.number("linear_lower_bound", "linear_attn_config.gate_lower_bound", default=None),
        "negative_eigenvalues": c.flag("linear_allow_neg_eigval", default=False),
        "low_rank_output_gate": not c.flag("linear_attn_config.use_full_rank_gate", default=False),
        "epsilon": c.number("rms_norm_eps", default=1e-5),
    }


def _glm_kda(c: Config, layer: int, kind: str) -> Options:
    options = _kda(c, layer, kind)
    if options["lower_bound"] is None and c.flag("linear_attn_config.safe_gate", default=True):
        options["lower_bound"] = -5.0
    return options


def _ling_kda(c: Config, layer: int, kind: str) -> Options:
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("linear_num_heads", "num_attention_heads"),
        "head_dim": c.size("linear_head_dim", "head_dim"),
        "convolution": c.size("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
        "lower_bound": c.number("kda_lower_bound", default=-5.0) if c.flag("kda_safe_gate", default=True) else None,
        "low_rank_decay": False,
        "low_rank_output_gate": False,
        "epsilon": c.number("rms_norm_eps", default=1e-6),
    }


def _fla_output_gated(c: Config, expand_k: float, expand_v: float) -> Options:
    c.only("feature_map", None)
    c.only("use_output_gate", True, None)
    c.only("hidden_act", "swish", "silu", None)
    c.only("elementwise_affine", True, None)
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("num_heads"),
        "kv_heads": c.size("num_kv_heads", default=None),
        "key_width": c.product("hidden_size", "expand_k", expand_k),
        "value_width": c.product("hidden_size", "expand_v", expand_v),
        "epsilon": c.number("norm_eps", default=1e-6),
    }


def _gla(c: Config, layer: int, kind: str) -> Options:
    c.only("clamp_min", None)
    short = c.flag("use_short_conv", default=False)
    return _fla_output_gated(c, 0.5, 1.0) | {"convolution": c.size("conv_size", default=4) if short else None}


def _retention(c: Config, layer: int, kind: str) -> Options:
    # its model leaves `use_short_conv` alone
    return _fla_output_gated(c, 1.0, 2.0)


def _lightning(c: Config, layer: int, kind: str) -> Options:
    c.only("hidden_act", "silu", None)
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("num_attention_heads"),
        "head_dim": c.size("head_dim", default=None),
        "layer_idx": layer,
        "num_layers": c.size("num_hidden_layers"),
    }


def _mamba2(c: Config, layer: int, kind: str) -> Options:
    c.only("hidden_act", "silu", None)
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("num_heads"),
        "head_dim": c.size("head_dim"),
        "state_dim": c.size("state_size"),
        "groups": c.size("n_groups", default=8),
        "convolution": c.size("conv_kernel", default=4),
        "convolution_bias": c.flag("use_conv_bias", default=True),
        "bias": c.flag("use_bias", default=False),
        "time_step_limit": _time_step_limit(c),
        "epsilon": c.number("layer_norm_epsilon", default=1e-5),
    }


def _time_step_limit(c: Config) -> Any:
    """JSON has no infinity: files have a name, an object of one, or null for it."""
    given = c.get("time_step_limit", default=(0.0, math.inf))
    if isinstance(given, list | tuple) and len(given) == 2:
        infinite = (None, "inf", "Infinity", {"__float__": "Infinity"})
        return tuple(math.inf if each in infinite else each for each in given)
    c.mistakes.append(f"time_step_limit: got {given!r}; expected the shortest and the longest")
    return None


def _bamba(c: Config, layer: int, kind: str) -> Options:
    """Bamba's, Granite 4's and, of what Falcon-H1 adds, the sizes."""
    c.only("hidden_act", "silu", None)
    heads = c.size("mamba_n_heads")
    width = c.size("mamba_d_ssm", default=None) or c.product("hidden_size", "mamba_expand", 2)
    head_dim = c.get("mamba_d_head", default="auto")
    return {
        "width": c.size("hidden_size"),
        "heads": heads,
        "head_dim": width // heads if head_dim == "auto" and width and heads else c.size("mamba_d_head"),
        "state_dim": c.size("mamba_d_state"),
        "groups": c.size("mamba_n_groups", default=1),
        "convolution": c.size("mamba_d_conv", default=4),
        "convolution_bias": c.flag("mamba_conv_bias", default=True),
        "bias": c.flag("mamba_proj_bias", default=False),
        "time_step_limit": _time_step_limit(c),
        "epsilon": c.number("rms_norm_eps", default=1e-5),
    }


def _falcon_mamba2(c: Config, layer: int, kind: str) -> Options:
    options = _bamba(c, layer, kind)
    first = c.number("ssm_in_multiplier", default=1.0)
    if options["bias"] and first != 1:
        c.mistakes.append(
            f"ssm_in_multiplier: got {first} with mamba_proj_bias; expected 1, as a bias is not multiplied"
        )
    multipliers = c.numbers("ssm_multipliers", default=(1.0,) * 5)
    return options | {
        "out_bias": c.flag("projectors_bias", default=False),
        "norm": c.flag("mamba_rms_norm", default=False),
        "norm_before_gate": c.flag("mamba_norm_before_gate", default=True),
        # what the input is multiplied by, all that is made of it is
        "multipliers": None if first is None or multipliers is None else tuple(first * each for each in multipliers),
    }


def _nemotron_mamba2(c: Config, layer: int, kind: str) -> Options:
    c.only("mamba_hidden_act", "silu", None)
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("mamba_num_heads"),
        "head_dim": c.size("mamba_head_dim"),
        "state_dim": c.size("ssm_state_size"),
        "groups": c.size("n_groups", default=8),
        "convolution": c.size("conv_kernel", default=4),
        "convolution_bias": c.flag("use_conv_bias", default=True),
        "bias": c.flag("use_bias", default=False),
        "time_step_limit": _time_step_limit(c),
        "epsilon": c.number("layer_norm_epsilon", default=1e-5),
    }


def _zamba_mamba2(c: Config, layer: int, kind: str) -> Options:
    heads, width = c.size("n_mamba_heads"), c.product("hidden_size", "mamba_expand", 2)
    return {
        "width": c.size("hidden_size"),
        "heads": heads,
        "head_dim": c.size("mamba_headdim", default=width // heads if width and heads else None),
        "state_dim": c.size("mamba_d_state"),
        "groups": c.size("mamba_ngroups", default=1),
        "convolution": c.size("mamba_d_conv", default=4),
        "bias": c.flag("add_bias_linear", default=False),
        "epsilon": 1e-5,
    }


def _attention(**more: Any) -> Callable[[Config, int, str], Options]:
    """Llama's, whose settings others have too; `more` are options that a family has on all layers."""

    def options(c: Config, layer: int, kind: str) -> Options:
        heads, width = c.size("num_attention_heads"), c.size("hidden_size")
        head_dim = c.size("head_dim", default=width // heads if width and heads else None)
        found = {
            "width": width,
            "heads": heads,
            "kv_heads": c.size("num_key_value_heads", default=heads),
            "head_dim": head_dim,
            "bias": c.flag("attention_bias", default=False),
            "window": c.size("sliding_window") if kind == "sliding_attention" else None,
            "epsilon": c.number("rms_norm_eps", default=1e-6),
        }
        return found | c.rotation(kind, head_dim) | more

    return options


def _qwen_attention(share: float) -> Callable[[Config, int, str], Options]:
    def options(c: Config, layer: int, kind: str) -> Options:
        found = _attention(norm=True, output_gate=True)(c, layer, kind)
        return found | c.rotation(kind, found["head_dim"], share=share)

    return options


def _gemma2_attention(c: Config, layer: int, kind: str) -> Options:
    c.only("use_bidirectional_attention", False, None)
    scale = c.number("query_pre_attn_scalar", default=256)
    return _attention()(c, layer, kind) | {
        "softmax_scale": None if scale is None else scale**-0.5,
        "soft_cap": c.number("attn_logit_softcapping", default=None),
    }


def _gemma3_attention(c: Config, layer: int, kind: str) -> Options:
    found = _gemma2_attention(c, layer, kind) | {"norm": True}
    if c.get("rope_parameters") is not None:
        return found
    # older files: `rope_theta` and `rope_scaling` are those of full attention alone
    local = {"rope_theta": c.number("rope_local_base_freq", default=10000.0), "rope_scaling": None}
    return found | (local if kind == "sliding_attention" else c.rotation(kind, found["head_dim"], theta=1e6))


def _gemma4_attention(c: Config, layer: int, kind: str) -> Options:
    c.only("use_bidirectional_attention", None, "vision")
    shared, count = c.get("num_kv_shared_layers", default=0), c.size("num_hidden_layers")
    if shared and count and layer >= count - shared:
        c.mistakes.append(
            f"num_kv_shared_layers: got {shared}, so layer {layer} has keys of another; expected one's own"
        )
    found, full = _attention()(c, layer, kind), kind == "full_attention"
    same = bool(c.flag("attention_k_eq_v", default=False)) and full
    if full:
        # by the number of a layer, or for all of full attention
        by_layer: Any = c.get("per_layer_config", default={})
        of_layer: Options = next((by_layer[key] for key in (layer, str(layer), f"{layer:02}") if key in by_layer), {})
        found["head_dim"] = of_layer.get("head_dim") or c.size("global_head_dim", default=512)
        heads = of_layer.get("num_key_value_heads") or (
            c.size("num_global_key_value_heads", default=None) if same else None
        )
        found["kv_heads"] = heads or found["kv_heads"]
    usual = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    if c.get("rope_parameters") is None:
        found |= {"rope_theta": 1e6, "rope_scaling": usual} if full else {"rope_theta": 1e4, "rope_scaling": None}
    return found | {"norm": True, "value_norm": True, "values_are_keys": same, "softmax_scale": 1.0}


def _gpt_oss_attention(c: Config, layer: int, kind: str) -> Options:
    found = _attention(sinks=True)(c, layer, kind)
    return found | {"bias": c.flag("attention_bias", default=True)} | c.rotation(kind, None, theta=150000.0)


def _qwen2_attention(c: Config, layer: int, kind: str) -> Options:
    return _attention(bias=True, out_bias=False)(c, layer, kind)


def _nemotron_attention(c: Config, layer: int, kind: str) -> Options:
    found = _attention(bias=False)(c, layer, "full_attention")
    return found | {"rope_theta": None, "rope_scaling": None}


def _falcon_attention(c: Config, layer: int, kind: str) -> Options:
    found, factor = _attention()(c, layer, kind), c.number("key_multiplier", default=1.0)
    if found["head_dim"] and factor is not None:
        found["softmax_scale"] = factor * found["head_dim"] ** -0.5
    return found


def _granite_attention(c: Config, layer: int, kind: str) -> Options:
    found = _attention()(c, layer, kind) | {"softmax_scale": c.number("attention_multiplier", default=1.0)}
    c.only("position_embedding_type", "rope", "nope", None)
    without = c.get("position_embedding_type") != "rope"
    return found | ({"rope_theta": None, "rope_scaling": None} if without else {})


def _bamba_attention(c: Config, layer: int, kind: str) -> Options:
    found = _attention()(c, layer, kind)
    return found | c.rotation(kind, found["head_dim"], share=0.5)


def _minimax_attention(c: Config, layer: int, kind: str) -> Options:
    found = _attention()(c, layer, kind)
    return found | c.rotation(kind, found["head_dim"], theta=1e6)


def _latent_attention(c: Config, layer: int, kind: str) -> Options:
    """DeepSeek V3's and Kimi-K2's."""
    key_dim, rotary_dim = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim")
    rotation = c.rotation(kind, None)
    scaling = rotation["rope_scaling"] or {}
    scale = (key_dim + rotary_dim) ** -0.5 if key_dim and rotary_dim else None
    if scale and (all_dims := scaling.get("mscale_all_dim")):
        scale *= (0.1 * all_dims * math.log(max(scaling.get("factor", 1.0), 1.0)) + 1) ** 2
    return {
        "width": c.size("hidden_size"),
        "heads": c.size("num_attention_heads"),
        "latent_dim": c.size("kv_lora_rank"),
        "query_rank": c.size("q_lora_rank", default=None),
        "key_dim": key_dim,
        "rotary_dim": rotary_dim,
        "value_dim": c.size("v_head_dim"),
        "bias": c.flag("attention_bias", default=False),
        "softmax_scale": scale,
        **rotation,
    }


def _kimi_latent_attention(c: Config, layer: int, kind: str) -> Options:
    """Kimi Linear's and Kimi-K3's, without rotation."""
    c.only("mla_use_nope", True, None)
    gated = c.flag("mla_use_output_gate", default=False)
    return _latent_attention(c, layer, kind) | {
        "rope_theta": None,
        "rope_scaling": None,
        "output_gate": "dim" if gated else None,
        # in Kimi-K3 that of all norms
        "epsilon": c.number("rms_norm_eps", default=1e-5) if gated else 1e-6,
    }


def _ling_latent_attention(c: Config, layer: int, kind: str) -> Options:
    rotation = c.rotation(kind, None, theta=6e6)
    return _latent_attention(c, layer, kind) | rotation | {"query_rank": None, "output_gate": "head"}


def _delta(options: Any, load: str = "from_transformers", *folders: str) -> Mixer:
    return Mixer("GatedDeltaNet", load, folders or ("linear_attn",), options)


def _softmax(options: Any, load: str = "from_transformers", *folders: str) -> Mixer:
    return Mixer("MultiHeadAttention", load, folders or ("self_attn",), options)


def _state_space(options: Any, *folders: str) -> Mixer:
    return Mixer("Mamba2", "from_transformers", folders, options)


def _kimi_delta(options: Any, *folders: str) -> Mixer:
    return Mixer("KimiDeltaAttention", "from_transformers", folders or ("self_attn",), options)


def _latent(options: Any, load_options: Any, *folders: str) -> Mixer:
    return Mixer("MultiHeadLatentAttention", "from_transformers", folders or ("self_attn",), options, load_options)


def _fla(name: str, layer: str, options: Any) -> Model:
    return Model(f"fla's {name}", _fla_kinds, {"recurrent": (Mixer(layer, "from_fla", ("attn",), options),)})


def _softmax_only(name: str, options: Any, load: str = "from_transformers", kinds: Any = None) -> Model:
    mixers = (_softmax(options, load),)
    kinds = _listed(lambda c, layer: "full_attention") if kinds is None else kinds
    return Model(name, kinds, {"full_attention": mixers, "sliding_attention": mixers})


def _qwen_hybrid(name: str) -> Model:
    kinds = _every(lambda c: c.size("full_attention_interval", default=4), "linear_attention", "full_attention")
    attention = _softmax(_qwen_attention(0.25), "from_qwen3_next")
    return Model(name, kinds, {"linear_attention": (_delta(_gated_delta_net),), "full_attention": (attention,)})


def _hybrid(name: str, kinds: Any, recurrent: Mixer, attention: Mixer) -> Model:
    return Model(name, kinds, {"linear_attention": (recurrent,), "full_attention": (attention,)})


_WINDOWS = {"most": "sliding_attention", "last": "full_attention"}
_DEEPSEEK = (_latent(_latent_attention, lambda c: {"interleaved": c.flag("rope_interleave", default=True)}),)
_KIMI = {
    "linear_attention": (_kimi_delta(_kda),),
    "full_attention": (_latent(_kimi_latent_attention, lambda c: {"interleaved": False}),),
}
_ZAMBA = (_state_space(_zamba_mamba2, "mamba", "mamba_decoder.mamba"),)

MODELS: dict[str, Model] = {
    "gla": _fla("GLA", "GatedLinearAttention", _gla),
    "retnet": _fla("RetNet", "Retention", _retention),
    "gated_deltanet": _fla("Gated DeltaNet", "GatedDeltaNet", _fla_gated_delta_net),
    "kda": _fla("KDA", "KimiDeltaAttention", _fla_kda),
    "minimax": _hybrid(
        "MiniMax",
        _every(2, "linear_attention", "full_attention"),
        Mixer("LightningAttention", "from_transformers", ("self_attn",), _lightning),
        _softmax(_minimax_attention),
    ),
    "mamba2": Model("Mamba-2", _all("linear_attention"), {"linear_attention": (_state_space(_mamba2, "mixer"),)}),
    "bamba": _hybrid("Bamba", _bamba_kinds, _state_space(_bamba, "mamba"), _softmax(_bamba_attention)),
    "granitemoehybrid": _hybrid(
        "Granite 4",
        _listed(lambda c, layer: "linear_attention"),
        _state_space(_bamba, "mamba"),
        _softmax(_granite_attention),
    ),
    "falcon_h1": Model(
        "Falcon-H1",
        _all("hybrid"),
        {"hybrid": (_state_space(_falcon_mamba2, "mamba"), _softmax(_falcon_attention))},
    ),
    "nemotron_h": _hybrid(
        "Nemotron-H",
        _nemotron_kinds,
        _state_space(_nemotron_mamba2, "mixer"),
        _softmax(_nemotron_attention, "from_transformers", "mixer"),
    ),
    "zamba2": Model(
        "Zamba2",
        _listed(lambda c, layer: "linear_attention"),
        {"linear_attention": _ZAMBA, "hybrid": _ZAMBA},
    ),
    "olmo_hybrid": Model(
        "Olmo-Hybrid",
        _every(4, "linear_attention", "full_attention"),
        {"linear_attention": (_delta(_olmo_gated_delta_net),)},
    ),
    **{name: _qwen_hybrid("Qwen3-Next") for name in ("qwen3_next",)},
    **{name: _qwen_hybrid("Qwen3.5") for name in ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")},
    "kimi_linear": Model("Kimi Linear", _kimi_kinds, _KIMI),
    "kimi_k3": Model("Kimi-K3", _kimi_kinds, _KIMI),
    **{
        name: Model(
            "GLM-5.3-Flash",
            _every(4, "linear_attention", "indexed_attention"),
            {"linear_attention": (_kimi_delta(_glm_kda),)},
        )
        for name in ("glm5_next", "glm5_next_text")
    },
    "bailing_hybrid": Model(
        "Ling 3",
        _every(lambda c: c.size("layer_group_size", default=6), "linear_attention", "full_attention"),
        {
            "linear_attention": (_kimi_delta(_ling_kda, "self_attn", "attention"),),
            "full_attention": (_latent(_ling_latent_attention, lambda c: {}, "self_attn", "attention"),),
        },
    ),
    **{
        name: Model(shown, _all("full_attention"), {"full_attention": _DEEPSEEK})
        for name, shown in {"deepseek_v3": "DeepSeek V3", "kimi_k2": "Kimi-K2"}.items()
    },
    "llama": _softmax_only("Llama", _attention()),
    "qwen2": _softmax_only("Qwen2", _qwen2_attention),
    **{name: _softmax_only("Qwen3", _attention(norm=True)) for name in ("qwen3", "qwen3_moe")},
    "gemma2": _softmax_only("Gemma 2", _gemma2_attention, kinds=_every(2, **_WINDOWS)),
    **{
        name: _softmax_only(
            "Gemma 3",
            _gemma3_attention,
            "from_gemma3",
            _every(lambda c: c.size("sliding_window_pattern", default=6), **_WINDOWS),
        )
        for name in ("gemma3", "gemma3_text")
    },
    **{
        name: _softmax_only("Gemma 4", _gemma4_attention, kinds=_every(6, **_WINDOWS))
        for name in ("gemma4", "gemma4_text")
    },
    "gpt_oss": _softmax_only("gpt-oss", _gpt_oss_attention, kinds=_every(2, **_WINDOWS)),
}
