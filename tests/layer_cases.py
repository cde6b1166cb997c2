"""Layers as other libraries publish them, by their names and shapes, in NumPy and float64: one sequence at a time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ejkernel import layers

WIDTH = 16


@dataclass(frozen=True)
class Published:
    """A layer, the function that takes its weights, their shapes, and what they compute of `x [T, width]`."""

    layer: type
    load: str
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    compute: Any
    # which of the parameters makes queries
    query: str

    def weights(self, seed=0):
        """Numbers for all of them, none where another would do as well."""
        random = np.random.default_rng(seed)
        return {
            name: (random.standard_normal(shape) * 0.4 + name.endswith(("norm.weight", "layernorm.weight"))).astype(
                np.float32
            )
            for name, shape in self.shapes.items()
        }

    def make(self, seed=0, **more):
        return getattr(self.layer, self.load)(self.weights(seed), WIDTH, **self.options, **more)

    def expected(self, weights, x):
        return self.compute({name: np.float64(each) for name, each in weights.items()}, np.float64(x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms(x, scale, epsilon):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def heads(x, count):
    return x.reshape(len(x), count, -1)


def shared(x, count):
    """Heads, each of which serves several that follow one another."""
    return np.repeat(x, count // x.shape[1], 1)


def convolved(x, weight, bias=0.0):
    size = weight.shape[-1]
    longer = np.concatenate([np.zeros((size - 1, x.shape[1])), x])
    return silu(np.stack([(longer[t : t + size] * weight[:, 0].T).sum(0) for t in range(len(x))]) + bias)


def rotated(x, dims, theta):
    """The first `dims` of `x [T, H, K]`, as complex numbers whose parts stand half of them apart, turned by place."""
    half = dims // 2
    turns = np.exp(1j * np.outer(np.arange(len(x)), theta ** (-2 * np.arange(half) / dims)))[:, None]
    turned = (x[..., :half] + 1j * x[..., half:dims]) * turns
    return np.concatenate([turned.real, turned.imag, x[..., dims:]], -1)


def remembered(query, key, value, log_decay, scale, beta=None):
    """`[T, H, V]`; decays are `[T, H, K]` or what broadcasts to it; with a `beta [T, H]` by the delta rule."""
    output = np.zeros(value.shape)
    log_decay = np.broadcast_to(log_decay, query.shape)
    for h in range(value.shape[1]):
        memory = np.zeros((query.shape[-1], value.shape[-1]))
        for t in range(len(query)):
            memory = np.exp(log_decay[t, h])[:, None] * memory
            written = value[t, h] if beta is None else beta[t, h] * (value[t, h] - memory.T @ key[t, h])
            memory = memory + np.outer(key[t, h], written)
            output[t, h] = scale * memory.T @ query[t, h]
    return output


def gated_linear_attention(w, x):
    query, key, value = (convolved(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]) for n in "qkv")
    logits = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
    gate = -softplus(-logits) / 4
    query, key, value, gate = heads(query, 4), heads(key, 2), heads(value, 2), heads(gate, 2)
    output = remembered(query, shared(key, 4), shared(value, 4), shared(gate, 4), 2**-0.5)
    output = rms(output, w["g_norm_swish_gate.weight"], 1e-5) * silu(heads(x @ w["g_proj.weight"].T, 4))
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


def multi_scale_retention(w, x):
    query, key, value = (heads(x @ w[f"{n}_proj.weight"].T, 2) for n in "qkv")
    query, key = rotated(query, 8, 10000.0), rotated(key, 8, 10000.0)
    decay = np.log(1 - 2.0 ** (-5 - np.arange(2)))[:, None]
    output = remembered(query, key, value, decay, 8**-0.5)
    output = rms(output, w["g_norm_swish_gate.weight"], 1e-5) * silu(heads(x @ w["g_proj.weight"].T, 2))
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


def minimax(w, x):
    query, key, value = np.split(heads(silu(x @ w["qkv_proj.weight"].T), 2), 3, -1)
    decay = -(2.0 ** (-8 * (np.arange(2) + 1) / 2)) * (1 - 1 / (3 - 1 + 1e-5) + 1e-5)
    output = remembered(query, key, value, decay[:, None], 1.0).reshape(len(x), -1)
    output = rms(output, w["norm.weight"], 1e-6) * sigmoid(x @ w["output_gate.weight"].T)
    return output @ w["out_proj.weight"].T


def mamba2(w, x):
    gate, mixed, step = np.split(x @ w["in_proj.weight"].T + w["in_proj.bias"], [24, 64], -1)
    value, key, query = np.split(convolved(mixed, w["conv1d.weight"], w["conv1d.bias"]), [24, 32], -1)
    value, query, key = heads(value, 4), shared(heads(query, 2), 4), shared(heads(key, 2), 4)
    step = np.clip(softplus(step + w["dt_bias"]), 0.3, 1.2)[..., None]
    output = remembered(query, key, value * step, -np.exp(w["A_log"])[:, None] * step, 1.0)
    output = (output + w["D"][:, None] * value).reshape(len(x), -1)
    output = rms(heads(output * silu(gate), 2), w["norm.weight"].reshape(2, -1), 1e-5).reshape(len(x), -1)
    return output @ w["out_proj.weight"].T + w["out_proj.bias"]


def qwen3_next(w, x):
    query, key, value, gate = np.split(heads(x @ w["in_proj_qkvz.weight"].T, 2), [4, 8, 20], -1)
    beta, decay = (each.reshape(len(x), 4) for each in np.split(heads(x @ w["in_proj_ba.weight"].T, 2), 2, -1))
    mixed = np.concatenate([each.reshape(len(x), -1) for each in (query, key, value)], -1)
    query, key, value = np.split(convolved(mixed, w["conv1d.weight"]), [8, 16], -1)
    decay = -np.exp(w["A_log"]) * softplus(decay + w["dt_bias"])
    query, key = (shared(unit(heads(each, 2)), 4) for each in (query, key))
    output = remembered(query, key, heads(value, 4), decay[..., None], 4**-0.5, sigmoid(beta))
    output = rms(output, w["norm.weight"], 1e-6) * silu(gate.reshape(len(x), 4, 6))
    return output.reshape(len(x), -1) @ w["out_proj.weight"].T


def kimi(w, x):
    query, key, value = (heads(convolved(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]), 2) for n in "qkv")
    decay = heads(softplus(x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]), 2)
    decay = -np.exp(w["A_log"])[:, None] * decay
    output = remembered(unit(query), unit(key), value, decay, 4**-0.5, sigmoid(x @ w["b_proj.weight"].T))
    gate = heads(x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"], 2)
    output = rms(output, w["o_norm.weight"], 1e-5) * sigmoid(gate)
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


def softmax(w, x):
    """All options at once: grouped heads, biases, gates, norms, part of a head rotated, a soft cap, a window, sinks."""
    query, key, value = (x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in "qkv")
    query, gate = np.split(heads(query, 4), 2, -1)
    query = rotated(rms(query, 1 + w["q_norm.weight"], 1e-6), 4, 10000.0)
    key = rotated(rms(heads(key, 2), 1 + w["k_norm.weight"], 1e-6), 4, 10000.0)
    scores = np.einsum("shd,lhd->hsl", query, shared(key, 4)) * 6**-0.5
    scores = 2 * np.tanh(scores / 2)
    apart = np.arange(len(x))[:, None] - np.arange(len(x))
    weights = np.where((apart >= 0) & (apart < 3), np.exp(scores), 0)
    weights = weights / (weights.sum(-1, keepdims=True) + np.exp(w["sinks"])[:, None, None])
    output = np.einsum("hsl,lhd->shd", weights, shared(heads(value, 2), 4)) * sigmoid(gate)
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


def kimi_bounded(w, x, most=2):
    """More value heads than keys, a bounded decay of full rank, beta to `most`, another value dim."""
    query, key, value = (convolved(x @ w[f"{n}_proj.weight"].T, w[f"{n}_conv1d.weight"]) for n in "qkv")
    query, key = (shared(unit(heads(each, 2)), 4) for each in (query, key))
    rate = np.exp(w["A_log"]).reshape(4, 1)
    decay = -5 * sigmoid(rate * heads(x @ w["f_proj.weight"].T + w["dt_bias"], 4))
    output = remembered(query, key, heads(value, 4), decay, 4**-0.5, most * sigmoid(x @ w["b_proj.weight"].T))
    output = rms(output, w["o_norm.weight"], 1e-5) * sigmoid(heads(x @ w["g_proj.weight"].T, 4))
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


def kimi_k3(w, x):
    """The same with a decay by two projections and beta to 1."""
    return kimi_bounded({**w, "f_proj.weight": w["f_b_proj.weight"] @ w["f_a_proj.weight"]}, x, 1)


def olmo_hybrid(w, x):
    mixed = np.concatenate([x @ w[f"{n}_proj.weight"].T for n in "qkv"], -1)
    query, key, value = np.split(convolved(mixed, w["conv1d.weight"]), [8, 16], -1)
    decay = -np.exp(w["A_log"]) * softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
    query, key = (shared(unit(heads(each, 2)), 4) for each in (query, key))
    beta = 2 * sigmoid(x @ w["b_proj.weight"].T)
    output = remembered(query, key, heads(value, 4), decay[..., None], 4**-0.5, beta)
    output = rms(output, w["o_norm.weight"], 1e-6) * silu(heads(x @ w["g_proj.weight"].T, 4))
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


MULTIPLIERS = (0.5, 1.5, 0.8, 1.2, 0.9)


def falcon_h1(w, x, normed=True):
    parts = np.split(x @ w["in_proj.weight"].T, [24, 48, 56, 64], -1)
    gate, *mixed, step = (factor * part for factor, part in zip(MULTIPLIERS, parts, strict=True))
    value, key, query = np.split(convolved(np.concatenate(mixed, -1), w["conv1d.weight"]), [24, 32], -1)
    value, query, key = heads(value, 4), shared(heads(query, 2), 4), shared(heads(key, 2), 4)
    step = softplus(step + w["dt_bias"])[..., None]
    output = remembered(query, key, value * step, -np.exp(w["A_log"])[:, None] * step, 1.0)
    output = (output + w["D"][:, None] * value).reshape(len(x), -1)
    if normed:
        output = rms(heads(output, 2), w["norm.weight"].reshape(2, -1), 1e-5).reshape(len(x), -1)
    return (output * silu(gate)) @ w["out_proj.weight"].T


def falcon_h1_without_norm(w, x):
    return falcon_h1(w, x, normed=False)


def attended(query, key, value, scale):
    scores = np.einsum("shd,lhd->hsl", query, key) * scale
    weights = np.where(np.tri(len(query), dtype=bool), np.exp(scores), 0)
    return np.einsum("hsl,lhd->shd", weights / weights.sum(-1, keepdims=True), value)


def gemma4(w, x):
    """Full attention: values are keys, normalised without a scale; half of the pairs turn, as if all did."""
    projected = heads(x @ w["k_proj.weight"].T, 1)
    query = rms(heads(x @ w["q_proj.weight"].T, 2), w["q_norm.weight"], 1e-6)
    key = rms(projected, w["k_norm.weight"], 1e-6)
    turns = np.exp(1j * np.outer(np.arange(len(x)), [1, 10000.0**-0.25, 0, 0]))[:, None]

    def turned(x):
        found = (x[..., :4] + 1j * x[..., 4:]) * turns
        return np.concatenate([found.real, found.imag], -1)

    output = attended(turned(query), shared(turned(key), 2), shared(rms(projected, 1, 1e-6), 2), 1.0)
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


def deepseek(w, x):
    """Pairs that turn together are neighbours; queries by two projections; biases, or as in Ling a gate a head."""
    down = rms(x @ w["q_a_proj.weight"].T + w.get("q_a_proj.bias", 0), w["q_a_layernorm.weight"], 1e-6)
    query = heads(down @ w["q_b_proj.weight"].T, 2)
    both = x @ w["kv_a_proj_with_mqa.weight"].T + w.get("kv_a_proj_with_mqa.bias", 0)
    latent, key = rms(both[:, :5], w["kv_a_layernorm.weight"], 1e-6), both[:, None, 5:]
    own, value = np.split(heads(latent @ w["kv_b_proj.weight"].T, 2), [3], -1)
    turns = np.exp(1j * np.outer(np.arange(len(x)), 10000.0 ** (-np.arange(2) / 2)))[:, None]

    def turned(x):
        return (x[..., ::2] + 1j * x[..., 1::2]) * turns

    def real(x):
        return np.concatenate([x.real, x.imag], -1)

    query = np.concatenate([query[..., :3], real(turned(query[..., 3:]))], -1)
    key = np.concatenate([own, shared(real(turned(key)), 2)], -1)
    output = attended(query, key, value, 7**-0.5)
    if "dense.weight" in w:
        output = output * sigmoid(x @ w["g_proj.weight"].T)[..., None]
        return output.reshape(len(x), -1) @ w["dense.weight"].T
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T + w["o_proj.bias"]


def kimi_latent(w, x):
    """Nothing turns; one projection of queries; the output gated by dim, or by head as in Ling."""
    query = heads(x @ w["q_proj.weight"].T, 2)
    both = x @ w["kv_a_proj_with_mqa.weight"].T
    latent, key = rms(both[:, :5], w["kv_a_layernorm.weight"], 1e-6), both[:, None, 5:]
    own, value = np.split(heads(latent @ w["kv_b_proj.weight"].T, 2), [3], -1)
    output = attended(query, np.concatenate([own, shared(key, 2)], -1), value, 7**-0.5)
    output = output * sigmoid(heads(x @ w["g_proj.weight"].T, 2))
    return output.reshape(len(x), -1) @ w["o_proj.weight"].T


_LATENT = {"heads": 2, "latent_dim": 5, "key_dim": 3, "rotary_dim": 4, "value_dim": 6}
_FALCON = {
    "in_proj.weight": (68, 16),
    "conv1d.weight": (40, 1, 4),
    "A_log": (4,),
    "D": (4,),
    "dt_bias": (4,),
    "out_proj.weight": (16, 24),
}
_FALCON_OPTIONS = {
    **{"heads": 4, "head_dim": 6, "state_dim": 4, "groups": 2, "convolution_bias": False},
    **{"norm_before_gate": True, "multipliers": MULTIPLIERS},
}
_KIMI_LATENT = {
    "q_proj.weight": (14, 16),
    "kv_a_proj_with_mqa.weight": (9, 16),
    "kv_a_layernorm.weight": (5,),
    "kv_b_proj.weight": (18, 5),
    "o_proj.weight": (16, 12),
}

_KDA = {
    **{f"{n}_proj.weight": (8, 16) for n in "qk"},
    **{f"{n}_conv1d.weight": (8, 1, 4) for n in "qk"},
    "v_proj.weight": (24, 16),
    "v_conv1d.weight": (24, 1, 4),
    "g_proj.weight": (24, 16),
    "b_proj.weight": (4, 16),
    "dt_bias": (16,),
    "o_norm.weight": (6,),
    "o_proj.weight": (16, 24),
}
_KDA_OPTIONS = {
    **{"heads": 2, "head_dim": 4, "value_heads": 4, "value_dim": 6, "lower_bound": -5.0},
    "low_rank_output_gate": False,
}

VARIANTS = {
    "kda, bounded": Published(
        layers.KimiDeltaAttention,
        "from_transformers",
        _KDA_OPTIONS | {"negative_eigenvalues": True, "low_rank_decay": False},
        _KDA | {"f_proj.weight": (16, 16), "A_log": (1, 1, 4, 1)},
        kimi_bounded,
        "query",
    ),
    "kda of Kimi-K3": Published(
        layers.KimiDeltaAttention,
        "from_transformers",
        _KDA_OPTIONS,
        _KDA | {"f_a_proj.weight": (6, 16), "f_b_proj.weight": (16, 6), "A_log": (4,)},
        kimi_k3,
        "query",
    ),
    "gdn of Olmo-Hybrid": Published(
        layers.GatedDeltaNet,
        "from_transformers",
        {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6, "negative_eigenvalues": True},
        {
            **{f"{n}_proj.weight": (8, 16) for n in "qk"},
            **{f"{n}_proj.weight": (24, 16) for n in "vg"},
            **{f"{n}_proj.weight": (4, 16) for n in "ab"},
            "conv1d.weight": (40, 1, 4),
            "A_log": (4,),
            "dt_bias": (4,),
            "o_norm.weight": (6,),
            "o_proj.weight": (16, 24),
        },
        olmo_hybrid,
        "query_key_value_gate",
    ),
    "mamba of Falcon-H1": Published(
        layers.Mamba2, "from_transformers", _FALCON_OPTIONS, _FALCON | {"norm.weight": (24,)}, falcon_h1, "into"
    ),
    "mamba of Falcon-H1 without a norm": Published(
        layers.Mamba2, "from_transformers", _FALCON_OPTIONS | {"norm": False}, _FALCON, falcon_h1_without_norm, "into"
    ),
    "softmax of Gemma 4": Published(
        layers.MultiHeadAttention,
        "from_transformers",
        {
            **{"heads": 2, "kv_heads": 1, "head_dim": 8, "norm": True, "value_norm": True, "values_are_keys": True},
            **{"softmax_scale": 1.0, "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        },
        {
            "q_proj.weight": (16, 16),
            "k_proj.weight": (8, 16),
            "o_proj.weight": (16, 16),
            "q_norm.weight": (8,),
            "k_norm.weight": (8,),
        },
        gemma4,
        "query",
    ),
    "latent of Kimi-K3": Published(
        layers.MultiHeadLatentAttention,
        "from_transformers",
        {**_LATENT, "rope_theta": None, "output_gate": "dim", "interleaved": False},
        _KIMI_LATENT | {"g_proj.weight": (12, 16)},
        kimi_latent,
        "query",
    ),
    "latent, gated by head": Published(
        layers.MultiHeadLatentAttention,
        "from_transformers",
        {**_LATENT, "rope_theta": None, "output_gate": "head", "interleaved": False},
        _KIMI_LATENT | {"g_proj.weight": (2, 16)},
        kimi_latent,
        "query",
    ),
    "latent of Ling-3.0-tiny": Published(
        layers.MultiHeadLatentAttention,
        "from_transformers",
        {**_LATENT, "query_rank": 7, "output_gate": "head"},
        {
            "q_a_proj.weight": (7, 16),
            "q_a_layernorm.weight": (7,),
            "q_b_proj.weight": (14, 7),
            "kv_a_proj_with_mqa.weight": (9, 16),
            "kv_a_layernorm.weight": (5,),
            "kv_b_proj.weight": (18, 5),
            "g_proj.weight": (2, 16),
            "dense.weight": (16, 12),
        },
        deepseek,
        "query",
    ),
}

PUBLISHED = {
    "gla": Published(
        layers.GatedLinearAttention,
        "from_fla",
        {"heads": 4, "kv_heads": 2, "gate_rank": 3, "convolution": 3, "gate_normalizer": 4.0},
        {
            "q_proj.weight": (8, 16),
            "k_proj.weight": (4, 16),
            "v_proj.weight": (8, 16),
            "g_proj.weight": (16, 16),
            "q_conv1d.weight": (8, 1, 3),
            "k_conv1d.weight": (4, 1, 3),
            "v_conv1d.weight": (8, 1, 3),
            "gk_proj.0.weight": (3, 16),
            "gk_proj.1.weight": (4, 3),
            "gk_proj.1.bias": (4,),
            "g_norm_swish_gate.weight": (4,),
            "o_proj.weight": (16, 16),
        },
        gated_linear_attention,
        "query",
    ),
    "retention": Published(
        layers.Retention,
        "from_fla",
        {"heads": 2},
        {
            "q_proj.weight": (16, 16),
            "k_proj.weight": (16, 16),
            "v_proj.weight": (32, 16),
            "g_proj.weight": (32, 16),
            "g_norm_swish_gate.weight": (16,),
            "o_proj.weight": (16, 32),
        },
        multi_scale_retention,
        "query",
    ),
    "lightning": Published(
        layers.LightningAttention,
        "from_transformers",
        {"heads": 2, "layer_idx": 1, "num_layers": 3, "head_dim": 6},
        {
            "qkv_proj.weight": (36, 16),
            "output_gate.weight": (12, 16),
            "norm.weight": (12,),
            "out_proj.weight": (16, 12),
        },
        minimax,
        "query_key_value",
    ),
    "mamba": Published(
        layers.Mamba2,
        "from_transformers",
        {"heads": 4, "head_dim": 6, "state_dim": 4, "groups": 2, "bias": True, "time_step_limit": (0.3, 1.2)},
        {
            "in_proj.weight": (68, 16),
            "in_proj.bias": (68,),
            "conv1d.weight": (40, 1, 4),
            "conv1d.bias": (40,),
            "A_log": (4,),
            "D": (4,),
            "dt_bias": (4,),
            "norm.weight": (24,),
            "out_proj.weight": (16, 24),
            "out_proj.bias": (16,),
        },
        mamba2,
        "into",
    ),
    "gdn": Published(
        layers.GatedDeltaNet,
        "from_transformers",
        {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6},
        {
            "in_proj_qkvz.weight": (64, 16),
            "in_proj_ba.weight": (8, 16),
            "conv1d.weight": (40, 1, 4),
            "A_log": (4,),
            "dt_bias": (4,),
            "norm.weight": (6,),
            "out_proj.weight": (16, 24),
        },
        qwen3_next,
        "query_key_value_gate",
    ),
    "kda": Published(
        layers.KimiDeltaAttention,
        "from_fla",
        {"heads": 2, "head_dim": 4},
        {
            **{f"{n}_proj.weight": (8, 16) for n in "qkv"},
            **{f"{n}_conv1d.weight": (8, 1, 4) for n in "qkv"},
            "f_proj.0.weight": (4, 16),
            "f_proj.1.weight": (8, 4),
            "g_proj.0.weight": (4, 16),
            "g_proj.1.weight": (8, 4),
            "g_proj.1.bias": (8,),
            "b_proj.weight": (2, 16),
            "A_log": (2,),
            "dt_bias": (8,),
            "o_norm.weight": (4,),
            "o_proj.weight": (16, 8),
        },
        kimi,
        "query",
    ),
    "softmax": Published(
        layers.MultiHeadAttention,
        "from_qwen3_next",
        {
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "bias": True,
            "window": 3,
            "soft_cap": 2.0,
            "sinks": True,
            "rotary_dim": 4,
        },
        {
            "q_proj.weight": (48, 16),
            "q_proj.bias": (48,),
            **{f"{n}_proj.weight": (12, 16) for n in "kv"},
            **{f"{n}_proj.bias": (12,) for n in "kv"},
            "o_proj.weight": (16, 24),
            "o_proj.bias": (16,),
            "q_norm.weight": (6,),
            "k_norm.weight": (6,),
            "sinks": (4,),
        },
        softmax,
        "query",
    ),
    "latent": Published(
        layers.MultiHeadLatentAttention,
        "from_transformers",
        {**_LATENT, "query_rank": 7, "bias": True},
        {
            "q_a_proj.weight": (7, 16),
            "q_a_proj.bias": (7,),
            "q_a_layernorm.weight": (7,),
            "q_b_proj.weight": (14, 7),
            "kv_a_proj_with_mqa.weight": (9, 16),
            "kv_a_proj_with_mqa.bias": (9,),
            "kv_a_layernorm.weight": (5,),
            "kv_b_proj.weight": (18, 5),
            "o_proj.weight": (16, 12),
            "o_proj.bias": (16,),
        },
        deepseek,
        "query",
    ),
}
