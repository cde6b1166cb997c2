"""What loaders and `from_config` take: arrays of any library, safetensors files, and the configs of released models."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

nnx = pytest.importorskip("flax.nnx")

from layer_cases import PUBLISHED, VARIANTS, WIDTH  # noqa: E402

from ejkernel import layers  # noqa: E402
from ejkernel.layers._models import MODELS  # noqa: E402

KDA = PUBLISHED["kda"]


class Tensor:
    """As PyTorch's: NumPy cannot hold its bfloat16, and those that need a gradient are to be detached."""

    def __init__(self, array, attached=True, device="cuda"):
        self.array, self.attached, self.device, self.is_meta = array, attached, device, device == "meta"

    @property
    def dtype(self):
        return f"torch.{self.array.dtype}"

    @property
    def shape(self):
        return self.array.shape

    def detach(self):
        return Tensor(self.array, False, self.device)

    def cpu(self):
        return Tensor(self.array, self.attached, "cpu")

    def float(self):
        return Tensor(self.array.astype(np.float32), self.attached, self.device)

    def numpy(self):
        assert not self.attached and self.device == "cpu" and self.array.dtype != jnp.bfloat16
        return self.array


def write(path, arrays):
    """A safetensors file: a header's length, the header, the numbers."""
    names = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float8_e4m3fn": "F8_E4M3", "int32": "I32"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[str(array.dtype)], "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def same(one, other):
    found, expected = (nnx.state(each, nnx.Param) for each in (one, other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["numpy", "jax", "torch"])
def test_arrays_of_any_library_and_dtype(kind, dtype):
    weights = {name: each.astype(jnp.dtype(dtype)) for name, each in KDA.weights().items()}
    make = {"numpy": lambda x: x, "jax": lambda x: jnp.asarray(x, x.dtype), "torch": Tensor}[kind]
    if kind == "jax" and dtype == "float64":
        pytest.skip("JAX has it only if told so")
    given = {f"model.3.{name}": make(each) for name, each in weights.items()} | {
        "model.4.more": make(np.zeros(3, np.float32))
    }
    layer = KDA.layer.from_fla(given, WIDTH, **KDA.options, prefix="model.3.")
    same(layer, KDA.layer.from_fla({n: w.astype(np.float32) for n, w in weights.items()}, WIDTH, **KDA.options))


@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_a_bfloat16_checkpoint_loses_nothing_in_bfloat16(name):
    """Not even where 1 is added to a scale, or gates are in float32 as in Ling's files."""
    published = (PUBLISHED | VARIANTS)[name]
    weights = {
        name: each if name.endswith(("A_log", "dt_bias")) else each.astype(jnp.bfloat16)
        for name, each in published.weights().items()
    }

    def made(dtype):
        layer = getattr(published.layer, published.load)(weights, WIDTH, **published.options, param_dtype=dtype)
        return nnx.state(layer, nnx.Param)

    half, whole = made(jnp.bfloat16), made(jnp.float32)
    assert any(each.dtype == jnp.bfloat16 for each in jax.tree.leaves(half))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.float32(a), b), half, whole)


def test_tensors_that_do_not_fit_are_all_listed():
    weights = {name: Tensor(each) for name, each in KDA.weights().items()}
    first, second, third, fourth, *_ = weights
    weights[first] = Tensor(weights[first].array.astype(np.int32))
    weights[second] = Tensor(weights[second].array, device="meta")
    weights[third] = Tensor(weights[third].array.astype(jnp.float8_e4m3fn))
    weights[fourth] = "nothing"
    with pytest.raises(ValueError) as caught:
        KDA.layer.from_fla(weights, WIDTH, **KDA.options)
    first_line, *mistakes = str(caught.value).splitlines()
    assert [first_line, *sorted(mistakes)] == [
        "weights: got 4 names that do not fit; expected those of fla's KimiDeltaAttention of these sizes",
        *sorted(
            [
                f"  {first}: got dtype int32; expected bfloat16, float16, float32, float64",
                f"  {second}: got a tensor on the device meta; expected one with numbers",
                f"  {third}: got dtype float8_e4m3fn; expected bfloat16, float16, float32, float64",
                f"  {fourth}: got str; expected an array",
            ]
        ),
    ]
    with pytest.raises(TypeError, match="weights: got list; expected a dict of arrays by name, or the path of"):
        KDA.layer.from_fla([], WIDTH, **KDA.options)


def test_safetensors_by_file_index_and_folder(tmp_path):
    weights = {f"a.{name}": each.astype(jnp.bfloat16) for name, each in KDA.weights().items()}
    expected = KDA.layer.from_fla(weights, WIDTH, **KDA.options, prefix="a.")

    def check(path):
        same(KDA.layer.from_fla(path, WIDTH, **KDA.options, prefix="a."), expected)

    whole = tmp_path / "model.safetensors"
    write(whole, weights | {"b.more": np.zeros(2, np.int32), "b.scalar": np.array(1, jnp.float8_e4m3fn)})
    check(whole)
    check(str(tmp_path))
    names = sorted(weights)
    parts = {f"part-{number}.safetensors": names[number::2] for number in range(2)}
    shards = tmp_path / "shards"
    shards.mkdir()
    for file, held in parts.items():
        write(shards / file, {name: weights[name] for name in held})
    check(shards)
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, held in parts.items() for name in held}}))
    check(index)
    check(layers.Checkpoint(shards))
    index.write_text(json.dumps({"weight_map": {"what": "part-0.safetensors", "where": "part-0.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"index.json: got 2 names that no file holds, as 'what'; expected all of them"
    ):
        layers.Checkpoint(shards)
    index.write_text(json.dumps({"weight_map": {"what": "x.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"index.json: got no x.safetensors beside it"):
        layers.Checkpoint(shards)
    for content in ("[]", "{}", "?"):
        index.write_text(content)
        with pytest.raises(ValueError, match=r"index.json: got"):
            layers.Checkpoint(shards)


def test_files_that_are_broken_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"first": np.ones(2, np.float32), "second": np.ones((2, 3), np.float32)})
    whole = path.read_bytes()
    for content, message in (
        (whole[:-4], "got a file cut off: second ends at byte 32 of 28"),
        (whole[:50], "got no safetensors file, or one cut off in its header"),
        (b"PK" + whole[2:], "got no safetensors file, or one cut off"),
        (b"", "got no safetensors file"),
        (whole[:8] + b"?" + whole[9:], "got a header that is none"),
        (whole.replace(b"[2, 3]", b"[2, 9]"), r"got 24 bytes of second, whose shape \(2, 9\) has another size"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            layers.Checkpoint(path)
    with pytest.raises(FileNotFoundError, match="got no such file"):
        layers.Checkpoint(tmp_path / "other.safetensors")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"got a folder without \*.safetensors"):
        layers.Checkpoint(tmp_path)


def test_names_of_each_family_make_the_same_gated_delta_net():
    """The numbers of fla's names, put together as Qwen3.5, Olmo-Hybrid and Qwen3-Next have them."""
    published, options = (
        VARIANTS["gdn of Olmo-Hybrid"],
        {"key_heads": 2, "value_heads": 4, "key_dim": 4, "value_dim": 6},
    )
    olmo = published.weights()
    expected = published.layer.from_transformers(olmo, WIDTH, **options)
    convolutions = dict(zip(("q", "k", "v"), np.split(olmo["conv1d.weight"], [8, 16]), strict=True))
    fla = {name: each for name, each in olmo.items() if name != "conv1d.weight"}
    fla |= {f"{name}_conv1d.weight": each for name, each in convolutions.items()}
    q, k, v, g, b, a = (olmo[f"{name}_proj.weight"] for name in "qkvgba")
    shared = {name: olmo[name] for name in ("A_log", "dt_bias", "conv1d.weight")}
    shared |= {"norm.weight": olmo["o_norm.weight"], "out_proj.weight": olmo["o_proj.weight"]}
    qwen35 = {"in_proj_qkv.weight": np.concatenate([q, k, v]), "in_proj_z.weight": g}
    qwen35 |= {"in_proj_b.weight": b, "in_proj_a.weight": a} | shared
    rows = [
        part[size * head : size * (head + 1)] for head in (0, 1) for part, size in ((q, 4), (k, 4), (v, 12), (g, 12))
    ]
    pairs = [part[2 * head : 2 * head + 2] for head in (0, 1) for part in (b, a)]
    qwen3 = {"in_proj_qkvz.weight": np.concatenate(rows), "in_proj_ba.weight": np.concatenate(pairs)} | shared
    same(published.layer.from_fla(fla, WIDTH, **options, epsilon=1e-6), expected)
    for weights in (fla, qwen35, qwen3):
        same(published.layer.from_transformers(weights, WIDTH, **options), expected)
    # what is missing is told by the names of the family that most are of
    del qwen35["in_proj_a.weight"]
    with pytest.raises(ValueError, match=r"Qwen3_5GatedDeltaNet of these sizes\n  in_proj_a.weight: missing"):
        published.layer.from_transformers(qwen35, WIDTH, **options)


def test_decays_of_kimi_k3_are_padded():
    variant = VARIANTS["kda of Kimi-K3"]
    weights = variant.weights()
    padded = np.pad(weights["A_log"], (0, 124), constant_values=np.nan)
    layer = variant.layer.from_transformers(weights | {"A_log": padded}, WIDTH, **variant.options)
    np.testing.assert_array_equal(layer.A_log[...], weights["A_log"])


SOFTMAX = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6},
    "rms_norm_eps": 1e-6,
}
FLA = {"hidden_size": 32, "num_heads": 2, "head_dim": 8, "num_hidden_layers": 2, "norm_eps": 1e-5}
MAMBA = {
    **{"hidden_size": 32, "mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_d_state": 12},
    **{"mamba_n_groups": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
LATENT = {
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "rms_norm_eps": 1e-5},
    **SOFTMAX,
}
KIMI = {"head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2]}
# as files have it: model_type, the config, and of each layer what it is with some of its attributes
CONFIGS = {
    "gla": (FLA, [("GatedLinearAttention", {"key_dim": 8, "value_dim": 16})]),
    "retnet": (FLA, [("Retention", {"key_dim": 16, "value_dim": 32})]),
    "gated_deltanet": (
        FLA | {"expand_v": 1.5, "num_v_heads": 4},
        [("GatedDeltaNet", {"value_heads": 4, "value_dim": 12})],
    ),
    "kda": (FLA | {"lower_bound": -5}, [("KimiDeltaAttention", {"lower_bound": -5.0, "value_dim": 8})]),
    "minimax": (SOFTMAX | {"head_dim": 8}, [("MultiHeadAttention", {}), ("LightningAttention", {"head_dim": 8})]),
    "mamba2": (
        {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "num_hidden_layers": 1}
        | {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
        [("Mamba2", {"norm_groups": 2, "time_step_limit": (0.0, np.inf)})],
    ),
    "bamba": (
        MAMBA | {"num_hidden_layers": 2, "attn_layer_indices": [1]},
        [("Mamba2", {"head_dim": 8}), ("MultiHeadAttention", {"head_dim": 8})],
    ),
    "granitemoehybrid": (
        MAMBA | {"layer_types": ["mamba", "attention"], "attention_multiplier": 0.25},
        [("Mamba2", {"groups": 2}), ("MultiHeadAttention", {"rotate": None, "softmax_scale": 0.25})],
    ),
    "falcon_h1": (
        MAMBA
        | {"num_hidden_layers": 1, "mamba_d_ssm": 48, "ssm_in_multiplier": 2.0, "key_multiplier": 0.5}
        | {"ssm_multipliers": [1, 2, 3, 4, 5]},
        [("Mamba2", {"head_dim": 6, "norm": None, "multipliers": (2.0, 4.0, 6.0, 8.0, 10.0)})],
    ),
    "nemotron_h": (
        {"hidden_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 12, "n_groups": 2}
        | {"hybrid_override_pattern": "M*-E", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        [("Mamba2", {"head_dim": 8}), ("MultiHeadAttention", {"head_dim": 16, "rotate": None})],
    ),
    "zamba2": (
        {"hidden_size": 32, "n_mamba_heads": 8, "mamba_d_state": 12, "layers_block_type": ["mamba", "hybrid"]},
        [("Mamba2", {"head_dim": 8}), ("Mamba2", {"head_dim": 8})],
    ),
    "olmo_hybrid": (
        SOFTMAX | {"num_hidden_layers": 4},
        [("GatedDeltaNet", {"key_dim": 6, "value_dim": 12, "negative_eigenvalues": True})],
    ),
    "qwen3_next": (
        SOFTMAX | LINEAR | {"num_hidden_layers": 4, "head_dim": 16, "rope_theta": 1e7},
        [("GatedDeltaNet", {"value_dim": 6})] * 3 + [("MultiHeadAttention", {"output_gate": True})],
    ),
    "qwen3_5": (
        {"text_config": SOFTMAX | LINEAR | {"num_hidden_layers": 4, "head_dim": 16, "model_type": "qwen3_5_text"}},
        [("GatedDeltaNet", {"value_dim": 6})],
    ),
    "kimi_linear": (
        LATENT | {"linear_attn_config": KIMI},
        [("KimiDeltaAttention", {"lower_bound": None}), ("MultiHeadLatentAttention", {"rotate": None})],
    ),
    "kimi_k3": (
        {
            "text_config": LATENT
            | {"linear_attn_config": KIMI | {"use_full_rank_gate": True, "gate_lower_bound": -5.0}}
            | {"mla_use_output_gate": True, "mla_use_nope": True, "q_lora_rank": 10}
        },
        [
            ("KimiDeltaAttention", {"lower_bound": -5.0, "output_gate_down": None}),
            ("MultiHeadLatentAttention", {"output_gate_of": "dim", "rotate": None}),
        ],
    ),
    "glm5_next": (
        {
            "text_config": {"hidden_size": 32, "layer_types": ["linear_attention", "indexed_attention"]}
            | {"linear_attn_config": {"head_dim": 8, "num_heads": 4}}
        },
        [("KimiDeltaAttention", {"lower_bound": -5.0})],
    ),
    "bailing_hybrid": (
        LATENT | {"head_dim": 8, "layer_group_size": 2, "no_kda_lora": True, "partial_rotary_factor": 0.5},
        [
            ("KimiDeltaAttention", {"lower_bound": -5.0, "decay_down": None}),
            ("MultiHeadLatentAttention", {"output_gate_of": "head", "query_down": None}),
        ],
    ),
    "deepseek_v3": (
        LATENT
        | {
            "q_lora_rank": 10,
            "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
            | {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
        },
        [("MultiHeadLatentAttention", {"softmax_scale": 12**-0.5 * (0.1 * np.log(40) + 1) ** 2})],
    ),
    "kimi_k2": (LATENT | {"q_lora_rank": 10}, [("MultiHeadLatentAttention", {"softmax_scale": 12**-0.5})]),
    "llama": (SOFTMAX | {"rope_theta": 5e5, "rope_scaling": None}, [("MultiHeadAttention", {"head_dim": 8})]),
    "qwen2": (SOFTMAX, [("MultiHeadAttention", {})]),
    "qwen3": (SOFTMAX | {"head_dim": 16}, [("MultiHeadAttention", {"head_dim": 16})]),
    "gemma2": (
        SOFTMAX | {"sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0},
        [("MultiHeadAttention", {"window": 4, "soft_cap": 50.0, "softmax_scale": 0.25})],
    ),
    "gemma3": (
        {
            "text_config": SOFTMAX
            | {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
            | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
        },
        [("MultiHeadAttention", {"window": 4}), ("MultiHeadAttention", {"window": None})],
    ),
    "gemma4": (
        {
            "text_config": SOFTMAX
            | {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
            | {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        },
        [
            ("MultiHeadAttention", {"head_dim": 8, "kv_heads": 2}),
            ("MultiHeadAttention", {"head_dim": 16, "kv_heads": 1, "value": None, "softmax_scale": 1.0}),
        ],
    ),
    "gpt_oss": (
        SOFTMAX | {"head_dim": 16, "sliding_window": 4},
        [("MultiHeadAttention", {"window": 4}), ("MultiHeadAttention", {"window": None})],
    ),
}
# other names of those above
ALIASES = {
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "glm5_next_text",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
    "bailing_moe_v3_vl",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_come_from_the_config(name):
    config, expected = CONFIGS[name]
    config = {"model_type": name, **config}
    for number, (kind, attributes) in enumerate(expected):
        layer = nnx.eval_shape(lambda k=kind, n=number: getattr(layers, k).from_config(config, n, rngs=nnx.Rngs(0)))
        assert layer.width == 32
        for attribute, value in attributes.items():
            found = getattr(layer, attribute)
            assert found == value or found == pytest.approx(value), attribute


LING = {"model_type": "bailing_hybrid", **CONFIGS["bailing_hybrid"][0]}
GEMMA4 = {"model_type": "gemma4_text", **CONFIGS["gemma4"][0]["text_config"], "layer_types": None}
QWEN2 = {"model_type": "qwen2", **SOFTMAX, "num_hidden_layers": 4, "sliding_window": 6, "max_window_layers": 3}


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"model_type": "kimi_linear", "num_hidden_layers": 6}, [4]),
        ({"model_type": "minimax", "num_hidden_layers": 4}, [0, 2]),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2}, [1, 3]),
        # layers past the last whole group are not linear
        (LING | {"num_hidden_layers": 8, "layer_group_size": 3}, [2, 5, 6, 7]),
    ],
    ids=lambda each: each["model_type"] if isinstance(each, dict) else "",
)
def test_kinds_of_layers_where_the_config_lists_none(config, full):
    recurrent = {"KimiDeltaAttention", "LightningAttention", "GatedDeltaNet"}
    found = [number for number, (kind,) in enumerate(layers.mixers(config)) if kind.__name__ not in recurrent]
    assert found == full


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (QWEN2, [None] * 4),
        (QWEN2 | {"use_sliding_window": True}, [None] * 3 + [6]),
        # the last layer sees everything in any case
        (GEMMA4 | {"num_hidden_layers": 8}, [4] * 5 + [None, 4, None]),
    ],
    ids=["qwen2", "qwen2, windows", "gemma4"],
)
def test_windows_where_the_config_lists_none(config, windows):
    def made(number):
        return nnx.eval_shape(lambda: layers.MultiHeadAttention.from_config(config, number, rngs=nnx.Rngs(0)))

    assert [made(number).window for number in range(len(windows))] == windows


def test_ling_projects_queries_once_or_twice_and_gates_heads_or_dims():
    """Ling-3.0-tiny has `q_lora_rank`; published files name the last projection `dense`."""
    twice = VARIANTS["latent of Ling-3.0-tiny"]
    weights = {f"model.layers.1.attention.{name}": each for name, each in twice.weights().items()}
    config = LING | {
        **{"hidden_size": WIDTH, "num_attention_heads": 2, "kv_lora_rank": 5, "q_lora_rank": 7, "rope_theta": 1e4},
        **{"qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 6},
    }
    same(layers.MultiHeadLatentAttention.from_config(config, 1, weights), twice.make())
    config["gated_attention_proj_granularity_type"] = "element_wise"
    found = nnx.eval_shape(lambda: layers.MultiHeadLatentAttention.from_config(config, 1, rngs=nnx.Rngs(0)))
    assert found.output_gate_of == "dim"
    config |= {"gated_attention_proj_granularity_type": "token_wise", "use_mla_nope": True}
    raises(
        "config: got 2 settings that do not fit; expected those of Ling 3\n"
        "  use_mla_nope: got True; expected False or nothing, as the layer has nothing else\n"
        "  gated_attention_proj_granularity_type: got 'token_wise'; expected 'head_wise' or 'element_wise' or nothing, "
        "as the layer has nothing else",
        "MultiHeadLatentAttention",
        config,
        1,
    )


def test_every_family_has_a_config_here_and_stands_on_the_page():
    assert MODELS.keys() == CONFIGS.keys() | ALIASES
    page = (Path(__file__).parents[2] / "docs/layers/published.md").read_text()
    _, *rows = [line.split("|")[1:-1] for line in page.splitlines() if re.match(r"\| [^|`]+\| `[a-z]\w*`", line)]
    said = {
        name: set(re.findall(r"`(\w+)`", held)) for _, names, held, _ in rows for name in re.findall(r"`(\w+)`", names)
    }
    assert said == {
        name: {mixer.layer for mixers in model.mixers.values() for mixer in mixers} for name, model in MODELS.items()
    }


def test_frequencies_come_from_the_config():
    gemma = {"model_type": "gemma3", **CONFIGS["gemma3"][0]}
    local, full = (
        nnx.eval_shape(lambda n=n: layers.MultiHeadAttention.from_config(gemma, n, rngs=nnx.Rngs(0))) for n in (0, 1)
    )
    np.testing.assert_allclose(local.rotate.frequencies, 10000.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(full.rotate.frequencies, 1e6 ** (-np.arange(4) / 4) / 8)
    qwen = {"model_type": "qwen3_next", **CONFIGS["qwen3_next"][0]}
    layer = nnx.eval_shape(lambda: layers.MultiHeadAttention.from_config(qwen, 3, rngs=nnx.Rngs(0)))
    np.testing.assert_allclose(layer.rotate.frequencies, 1e7 ** (-np.arange(2) / 2))


@pytest.mark.parametrize("root", ["model.", "backbone.", "model.language_model.", "language_model.model."])
def test_a_layer_of_a_whole_model_by_its_folder(tmp_path, root):
    """Names of layer 1 are not those of layer 10; the config's path, or an object that has it, do as well."""
    config = {"model_type": "llama", **SOFTMAX, "num_hidden_layers": 11}
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    weights = {
        f"{root}layers.{layer}.self_attn.{name}.weight": np.full(shape, layer, np.float32)
        for layer in (1, 10)
        for name, shape in shapes.items()
    } | {f"{root}embed_tokens.weight": np.zeros(3, np.float32)}
    write(tmp_path / "model.safetensors", weights)
    (tmp_path / "config.json").write_text(json.dumps(config))

    class Settings:
        def to_dict(self):
            return config

    for given in (config, tmp_path, str(tmp_path / "config.json"), Settings()):
        layer = layers.MultiHeadAttention.from_config(given, 10, tmp_path, param_dtype=jnp.bfloat16)
        assert layer.query.kernel[...].dtype == jnp.bfloat16 and (layer.query.kernel[...] == 10).all()
    with pytest.raises(
        ValueError, match=r"got 4 names that do not fit.*\n  model.layers.2.self_attn.k_proj.weight: missing"
    ):
        layers.MultiHeadAttention.from_config(config, 2, weights)


def raises(message, kind, config, layer=0, error=ValueError):
    with pytest.raises(error) as caught:
        getattr(layers, kind).from_config(config, layer, rngs=nnx.Rngs(0))
    assert str(caught.value) == message


def test_settings_that_do_not_fit_are_all_listed():
    raises(
        "config: got 5 settings that do not fit; expected those of Qwen3-Next\n"
        "  hidden_size: got 0; expected a positive integer\n"
        "  linear_num_value_heads: got '4'; expected a positive integer\n"
        "  linear_key_head_dim: missing; expected a positive integer\n"
        "  linear_value_head_dim: got 6.0; expected a positive integer\n"
        "  rms_norm_eps: got 'small'; expected a number",
        "GatedDeltaNet",
        {"model_type": "qwen3_next", "hidden_size": 0, "linear_num_key_heads": 2, "linear_num_value_heads": "4"}
        | {"linear_value_head_dim": 6.0, "rms_norm_eps": "small", "num_hidden_layers": 2},
    )
    raises(
        "config: got 3 settings that do not fit; expected those of fla's Gated DeltaNet\n"
        "  use_gate: got False; expected True or nothing, as the layer has nothing else\n"
        "  output_gate_activation: got 'sigmoid'; expected 'swish' or 'silu' or nothing, "
        "as the layer has nothing else\n"
        "  expand_v: got 1.3; expected a number that makes head_dim, 8, a whole one",
        "GatedDeltaNet",
        {
            "model_type": "gated_deltanet",
            **FLA,
            "use_gate": False,
            "output_gate_activation": "sigmoid",
            "expand_v": 1.3,
        },
    )
    raises(
        "config: got 2 settings that do not fit; expected those of Llama\n"
        "  num_attention_heads: missing; expected a positive integer\n"
        "  rope_parameters.rope_type: got 'longrope'; expected one of default, linear, llama3, proportional, yarn",
        "MultiHeadAttention",
        {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "rope_scaling": {"type": "longrope"}},
    )
    shared = CONFIGS["gemma4"][0]["text_config"] | {"num_kv_shared_layers": 1, "model_type": "gemma4_text"}
    raises(
        "config: got 1 setting that does not fit; expected those of Gemma 4\n"
        "  num_kv_shared_layers: got 1, so layer 1 has keys of another; expected one's own",
        "MultiHeadAttention",
        shared,
        1,
    )


def test_layers_that_a_model_does_not_have():
    qwen = {"model_type": "qwen3_next", **CONFIGS["qwen3_next"][0]}
    raises(
        "layer: got 3, full_attention; expected a GatedDeltaNet, as Qwen3-Next has it in layers [0, 1, 2]",
        "GatedDeltaNet",
        qwen,
        3,
    )
    raises("layer: got 4; expected 0 to 3, as Qwen3-Next has 4 layers", "GatedDeltaNet", qwen, 4)
    raises("layer: got str; expected an int", "GatedDeltaNet", qwen, "0", TypeError)
    raises(
        "config: got model_type 'llama'; expected one that has a Retention: retnet",
        "Retention",
        {"model_type": "llama"},
    )
    raises(
        "config: got list; expected what config.json has, its path or an object with to_dict",
        "Retention",
        [],
        error=TypeError,
    )
    with pytest.raises(TypeError, match=r"rngs: got None; expected nnx.Rngs, or weights to take"):
        layers.GatedDeltaNet.from_config(qwen, 0)
