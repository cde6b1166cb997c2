"""The examples, shortened, do what they say. `multihost.py` has a test of its own."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "examples"


def output_of(script, *arguments):
    command = [sys.executable, "-W", "error", FOLDER / script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """What an example prints whose devices are those of the tests: run here, which saves the start of Python."""

    def run(script, *arguments):
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        importlib.import_module(script.removesuffix(".py")).main()
        return capsys.readouterr().out

    return run


def numbers(pattern, text):
    return [float(found) for found in re.findall(pattern, text)]


def safetensors(path, arrays):
    """Writes arrays by name: a header's length, the header, the numbers."""
    header, data = {}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
ATTENTION = {"q_proj": (16, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8), "q_norm": (4,), "k_norm": (4,)}
DELTA = {"in_proj_qkvz": (24, 8), "in_proj_ba": (4, 8), "conv1d": (16, 1, 4), "norm": (4,), "out_proj": (8, 8)}
DENSE = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}


def folders(**parts):
    return {f"{folder}.{name}": shape for folder, shapes in parts.items() for name, shape in shapes.items()}


def qwen3_next_shapes():
    norms = {f"{name}_layernorm": (8,) for name in ("input", "post_attention")}
    experts = {f"experts.{which}.{name}": shape for which in (0, 1, 2) for name, shape in DENSE.items()}
    mlp = {"gate": (3, 8), "shared_expert_gate": (1, 8)} | experts | folders(shared_expert=DENSE)
    first = norms | folders(linear_attn=DELTA, mlp=mlp)
    last = norms | folders(self_attn=ATTENTION, mlp=DENSE)
    found = {"model.embed_tokens": (12, 8), "model.norm": (8,), "lm_head": (12, 8)}
    found |= folders(**{"model.layers.0": first, "model.layers.1": last})
    weights = {f"{name}.weight": shape for name, shape in found.items()}
    return weights | {f"model.layers.0.linear_attn.{name}": (2,) for name in ("A_log", "dt_bias")}


NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hidden_size": 8,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "ssm_state_size": 3,
    "n_groups": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}


def nemotron_h_shapes():
    mlp = {"up_proj": (6, 8), "down_proj": (8, 6)}
    mamba = {"in_proj": (48, 8), "conv1d": (28, 1, 4), "norm": (16,), "out_proj": (8, 16)}
    attention = {"q_proj": (8, 8), "k_proj": (4, 8), "v_proj": (4, 8), "o_proj": (8, 8)}
    experts = {f"experts.{which}.{name}": shape for which in range(4) for name, shape in mlp.items()}
    experts |= folders(shared_experts=mlp) | {"gate": (4, 8)}
    found = {"backbone.embeddings": (12, 8), "backbone.norm_f": (8,), "lm_head": (12, 8)}
    for number, mixer in enumerate((mamba, mlp, attention, experts)):
        found |= folders(**{f"backbone.layers.{number}": {"norm": (8,)} | folders(mixer=mixer)})
    weights = {f"{name}.weight": shape for name, shape in found.items()}
    weights |= {f"backbone.layers.0.mixer.{name}": (4,) for name in ("A_log", "dt_bias", "D")}
    return weights | {
        "backbone.layers.0.mixer.conv1d.bias": (28,),
        "backbone.layers.3.mixer.gate.e_score_correction_bias": (4,),
    }


def qwen3_5_shapes():
    """In the folder of a model that sees too, its projections apart and its experts in one array."""
    found = {name.replace("model.", "model.language_model."): shape for name, shape in qwen3_next_shapes().items()}
    layer = "model.language_model.layers.0."
    for name in ("in_proj_qkvz", "in_proj_ba"):
        del found[f"{layer}linear_attn.{name}.weight"]
    apart = {"in_proj_qkv": (16, 8), "in_proj_z": (8, 8), "in_proj_b": (2, 8), "in_proj_a": (2, 8)}
    found |= {f"{layer}linear_attn.{name}.weight": shape for name, shape in apart.items()}
    found = {name: shape for name, shape in found.items() if ".experts." not in name}
    return found | {f"{layer}mlp.experts.gate_up_proj": (3, 12, 8), f"{layer}mlp.experts.down_proj": (3, 8, 6)}


HYBRIDS = {
    "Qwen3-Next": (QWEN3_NEXT, qwen3_next_shapes),
    "Qwen3.5": (
        {"model_type": "qwen3_5_moe", "text_config": QWEN3_NEXT | {"model_type": "qwen3_5_moe_text"}},
        qwen3_5_shapes,
    ),
    "Nemotron-H": (NEMOTRON_H, nemotron_h_shapes),
}


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_models_are_read_and_generate_from_their_states(name, tmp_path, printed_by):
    config, shapes = HYBRIDS[name]
    random = np.random.default_rng(0)
    arrays = {name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in shapes().items()}
    names = sorted(arrays)
    for number in range(2):
        safetensors(tmp_path / f"{number}.safetensors", {name: arrays[name] for name in names[number::2]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--tokens", 3, 5, 7, "--generate", 4, "--dtype", "float32"]
    written, compared = printed_by("hybrid_models.py", tmp_path, *arguments).splitlines()
    assert len(written.split()) == 4
    assert numbers(r"logits ([\d.e+-]+) from one pass", compared)[0] < 1e-5


def test_hybrid_models_that_are_broken_are_refused(tmp_path, printed_by):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in qwen3_next_shapes().items()}
    file, config = tmp_path / "0.safetensors", tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_NEXT))
    safetensors(file, arrays)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(SystemExit, match=r"0.safetensors: got a file cut off"):
        printed_by("hybrid_models.py", tmp_path)
    safetensors(file, {name: each for name, each in arrays.items() if "layers.0.linear_attn.conv1d" not in name})
    with pytest.raises(SystemExit, match=r"model.layers.0.linear_attn.conv1d.weight: missing"):
        printed_by("hybrid_models.py", tmp_path)
    safetensors(file, {name: each for name, each in arrays.items() if name != "model.norm.weight"})
    with pytest.raises(SystemExit, match=r"no model.norm.weight"):
        printed_by("hybrid_models.py", tmp_path)
    file.write_bytes(whole)
    config.write_text(json.dumps({"model_type": "qwen3_next", "num_hidden_layers": 2}))
    with pytest.raises(SystemExit, match=r"config: got 5 settings that do not fit; expected those of Qwen3-Next"):
        printed_by("hybrid_models.py", tmp_path)


def test_hybrid_trains_on_a_mesh_and_goes_on_on_another():
    output = output_of("train_hybrid.py", "--steps", 6, "--tokens", 64, "--width", 32, "--depth", 2)
    first, last, guessing = numbers(r"([\d.]+) (?:at first|at last|nats)", output)
    assert last < first - 0.3 and abs(first - guessing) < 0.5
    (difference,) = numbers(r"losses differ by ([\d.e+-]+)", output)
    assert difference < 0.05
    assert "(16, 32) of a kernel (32, 32) in float32" in output and "(8, 32) of a kernel (32, 32)" in output


def test_stack_trains_the_same_whatever_is_kept():
    found = {}
    for policy, steps in (("nothing", 6), ("op", 6), ("op", 60)):
        output = output_of("train_stacked.py", "--steps", steps, "--tokens", 48, "--policy", policy)
        assert "8 layers as one: (8, 32, 64) of a kernel (8, 64, 64) on each device" in output
        found[policy, steps] = numbers(r"([\d.]+) (?:at first|at last|nats)", output), numbers(r"([\d.]+) MiB", output)
    _, last, guessing = found["op", 60][0]
    assert last < guessing - 0.5
    assert found["op", 6][0] == pytest.approx(found["nothing", 6][0], abs=2e-3)
    assert found["op", 6][1] > found["nothing", 6][1]


def test_training_packed_learns_to_repeat_and_leaks_nothing(printed_by):
    output = printed_by("train_packed.py", "--steps", 40, "--width", 32)
    repeated, new = numbers(r"repeated ([\d.]+)", output), numbers(r"new ([\d.]+)", output)
    (guessing,) = numbers(r"costs ([\d.]+) nats", output)
    assert repeated[-1] < guessing - 0.5
    # what cannot be foreseen never costs less than guessing, but for the spread of one batch's mean
    assert min(new) > guessing - 0.15
    # and more where repetition is expected
    assert new[-1] > guessing
    assert "40 different packings, 1 compilation" in output


def test_training_rows_learns_to_repeat_and_leaks_nothing(printed_by):
    output = printed_by("train_rows.py", "--steps", 40, "--width", 32, "--rows", 4, "--tokens", 64)
    repeated, new = numbers(r"repeated ([\d.]+)", output), numbers(r"new ([\d.]+)", output)
    (guessing,) = numbers(r"costs ([\d.]+) nats", output)
    assert repeated[-1] < guessing - 0.3
    assert min(new) > guessing - 0.15 and new[-1] > guessing


def test_rows_of_a_data_pipeline_are_packed_whole(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    example = importlib.import_module("train_rows")
    batches = example.batches(np.random.default_rng(0), 3, 80)
    seen = []
    for batch in (next(batches), next(batches)):
        ids, position = batch["inputs_segmentation"], batch["inputs_position"]
        for row in range(3):
            assert (np.diff(ids[row][ids[row] > 0]) >= 0).all() and (ids[row] > 0).sum() > 40
            for number in range(1, ids[row].max() + 1):
                (here,) = np.nonzero(ids[row] == number)
                np.testing.assert_array_equal(position[row, here], np.arange(here.size))
                assert (here == np.arange(here[0], here[-1] + 1)).all()
                seen.append([*batch["inputs"][row, here], batch["targets"][row, here[-1]]])
        assert not batch["inputs"][ids == 0].any()
    source = example.documents(np.random.default_rng(0))
    drawn = [list(next(source)[0]) for _ in seen]
    assert sorted(seen) == sorted(drawn)


def test_neighbours_leak_only_without_resets(printed_by):
    ours, scan = printed_by("packing_leak.py", "--tokens", 40).splitlines()
    assert ours.startswith("segment_ids: ") and ours.endswith(": the same bits")
    assert len(set(numbers(r"([\d.]+) behind", ours))) == 1
    assert scan.startswith("a plain scan: ") and scan.endswith(": it leaks")
    assert len(set(numbers(r"([\d.]+) behind", scan))) == 3


def test_decoding_from_cached_states_agrees_with_one_pass(printed_by):
    output = printed_by("decode.py", "--tokens", 5, "--width", 16)
    errors = numbers(r"([\d.e+-]+) from one pass", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    # a state does not grow with its prompt
    assert len(set(re.findall(r"state of ([\d,]+) bytes", output))) == 1


def test_a_server_gives_each_request_what_it_gets_alone(printed_by):
    output = printed_by("serve.py", "--requests", 5, "--tokens", 12)
    assert output.endswith("every answer is what its request gets alone, one token at a time, to the bit\n")
    written, requests, steps = map(int, re.search(r"(\d+) tokens of (\d+) requests in (\d+) steps", output).groups())
    # together: in fewer steps than tokens, though prompts have to be read too
    assert requests == 5 and written >= 5 and steps < written
    right, drafts = map(int, re.search(r"(\d+) of (\d+) drafts", output).groups())
    assert 0 < right < drafts
    for name in ("GatedDeltaNet", "MultiHeadAttention", "MultiHeadLatentAttention"):
        assert f"{name} keeps (" in output


def test_sharded_time_agrees_with_one_device():
    output = output_of("shard_time.py", "--devices", 4, "--tokens", 128)
    errors = numbers(r"(?:output|gradients) ([\d.]+e[+-]\d+)", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    assert "4 devices, 32 of 128 tokens on each" in output
    assert output.count("output lies on 4 devices") == 2
