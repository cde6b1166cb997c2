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
ATTENTION = {
    "q_proj": (16, 8),
    "k_proj": (4, 8),
    "v_proj": (4, 8),
    "o_proj": (8, 8),
    "q_norm": (4,),
    "k_norm": (4,),
}
DELTA = {"in_proj_qkvz": (24, 8), "in_proj_ba": (4, 8), "conv1d": (16, 1, 4), "norm": (4,), "out_proj": (8, 8)}
DENSE = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}


def qwen3_next_shapes():
    norms = {f"{name}_layernorm": (8,) for name in ("input", "post_attention")}
    experts = {f"{which}.{name}": shape for which in (0, 1, 2) for name, shape in DENSE.items()}
    mlp = {"gate": (3, 8), "shared_expert_gate": (1, 8)}
    mlp |= {f"experts.{name}": shape for name, shape in experts.items()}
    mlp |= {f"shared_expert.{name}": shape for name, shape in DENSE.items()}
    first = {**norms, **{f"linear_attn.{n}": s for n, s in DELTA.items()}, **{f"mlp.{n}": s for n, s in mlp.items()}}
    last = {**norms, **{f"self_attn.{n}": s for n, s in ATTENTION.items()}, **{f"mlp.{n}": s for n, s in DENSE.items()}}
    found = {"model.embed_tokens": (12, 8), "model.norm": (8,), "lm_head": (12, 8)}
    found |= {f"model.layers.0.{name}": shape for name, shape in first.items()}
    found |= {f"model.layers.1.{name}": shape for name, shape in last.items()}
    weights = {f"{name}.weight": shape for name, shape in found.items()}
    return weights | {f"model.layers.0.linear_attn.{name}": (2,) for name in ("A_log", "dt_bias")}


def test_qwen3_next_is_read_and_generates_from_its_states(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    import qwen3_next as example

    random = np.random.default_rng(0)
    arrays = {
        name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in qwen3_next_shapes().items()
    }
    names = sorted(arrays)
    shards = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        safetensors(shard, {name: arrays[name] for name in part})
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    arguments = ["--tokens", "3", "5", "7", "--generate", "4", "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", ["qwen3_next.py", str(tmp_path), *arguments])
    example.main()
    written, compared = capsys.readouterr().out.splitlines()
    assert len(written.split()) == 4
    assert numbers(r"logits ([\d.e+-]+) from one pass", compared)[0] < 1e-5

    whole = shards[1].read_bytes()
    for content, message in (
        (whole[:-4], "1.safetensors: cut off, .* ends at byte"),
        (whole[:50], "1.safetensors: no safetensors file, or cut off in its header"),
        (b"PK" + whole[2:], "1.safetensors: no safetensors file, or cut off"),
        (whole[:8] + b"?" + whole[9:], "1.safetensors: no safetensors file, its header is none"),
        (whole.replace(b"F32", b"I64", 1), "1.safetensors: .* is I64, not BF16, F16, F32"),
        (whole.replace(b"[2]", b"[3]", 1), r"1.safetensors: .* of shape \(3,\) has 8 bytes"),
    ):
        shards[1].write_bytes(content)
        with pytest.raises(example.CheckpointError, match=message):
            example.Model(tmp_path)
    safetensors(shards[1], {name: arrays[name] for name in names[3::2]})
    with pytest.raises(example.CheckpointError, match=f"no {names[1]}|{names[1]}: missing"):
        example.Model(tmp_path)
    shards[1].write_bytes(whole)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(example.CheckpointError, match=r"config.json: no 'num_hidden_layers'"):
        example.Model(tmp_path)


def test_hybrid_trains_on_a_mesh_and_goes_on_on_another():
    output = output_of("train_hybrid.py", "--steps", 6, "--tokens", 64, "--width", 32, "--depth", 2)
    first, last, guessing = numbers(r"([\d.]+) (?:at first|at last|nats)", output)
    assert last < first - 0.3 and abs(first - guessing) < 0.5
    (difference,) = numbers(r"losses differ by ([\d.e+-]+)", output)
    assert difference < 0.05
    assert "(16, 32) of a kernel (32, 32) in float32" in output and "(8, 32) of a kernel (32, 32)" in output


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


def test_decoding_from_cached_states_agrees_with_one_pass(printed_by):
    output = printed_by("decode.py", "--tokens", 5, "--width", 16)
    errors = numbers(r"([\d.e+-]+) from one pass", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    # a state does not grow with its prompt
    assert len(set(re.findall(r"state of ([\d,]+) bytes", output))) == 1


def test_sharded_time_agrees_with_one_device():
    output = output_of("shard_time.py", "--devices", 4, "--tokens", 128)
    errors = numbers(r"(?:output|gradients) ([\d.]+e[+-]\d+)", output)
    assert len(errors) == 4 and max(errors) < 1e-5
    assert "4 devices, 32 of 128 tokens on each" in output
    assert output.count("output lies on 4 devices") == 2
