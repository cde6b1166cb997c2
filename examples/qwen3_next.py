"""Builds Qwen3-Next from its `config.json` and safetensors shards, and generates from token ids.

Three of four layers are Gated DeltaNet, whose state does not grow; the others are softmax attention with a cache.
Shards are memory-mapped, so that a layer's arrays are read when they are put on the device. All of them are looked at
before: a file that is cut off or holds something else is an error, and nothing is built.

    python examples/qwen3_next.py FOLDER --tokens 1 2 3 --generate 20
"""

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ejkernel.layers import GatedDeltaNet, MultiHeadAttention

DTYPES = {"BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32}


class CheckpointError(Exception):
    """What is wrong with which file."""


class Shards(Mapping):
    """The arrays of all `*.safetensors` in a folder by name, memory-mapped: each is read when it is used."""

    def __init__(self, folder):
        self.arrays = {}
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder}: no *.safetensors")
        for path in paths:
            self.arrays |= mapped(path)
        index = folder / "model.safetensors.index.json"
        if index.exists():
            missing = set(read_json(index).get("weight_map", {})) - set(self.arrays)
            if missing:
                raise CheckpointError(
                    f"{folder}: {len(missing)} arrays of its index are in no shard, as {min(missing)}"
                )

    def __getitem__(self, name):
        return self.arrays[name]

    def __iter__(self):
        return iter(self.arrays)

    def __len__(self):
        return len(self.arrays)


def mapped(path):
    """Arrays by name of one file: the length of a header, the header in JSON, numbers."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            raise CheckpointError(f"{path}: no safetensors file, or cut off in its header")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            known = {
                name: (entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
                for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{path}: no safetensors file, its header is none") from None
    arrays, numbers = (
        {},
        np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.empty(0, np.uint8),
    )
    for name, (kind, shape, start, stop) in known.items():
        if kind not in DTYPES:
            raise CheckpointError(f"{path}: {name} is {kind}, not {', '.join(DTYPES)}")
        if stop > len(numbers):
            raise CheckpointError(f"{path}: cut off, {name} ends at byte {stop} of {len(numbers)}")
        if stop - start != np.prod(shape, dtype=int) * np.dtype(DTYPES[kind]).itemsize:
            raise CheckpointError(f"{path}: {name} of shape {shape} has {stop - start} bytes")
        arrays[name] = numbers[start:stop].view(DTYPES[kind]).reshape(shape)
    return arrays


def read_json(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: no JSON object")
    return found


class Norm(nnx.Module):
    """A root mean square norm whose scale is stored less 1."""

    def __init__(self, weight, epsilon):
        self.weight, self.epsilon = nnx.Param(weight), epsilon

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * (1 + self.weight[...].astype(jnp.float32))).astype(x.dtype)


class Dense(nnx.Module):
    def __init__(self, take, prefix):
        self.gate, self.up, self.down = (nnx.Param(take(f"{prefix}.{n}_proj.weight")) for n in ("gate", "up", "down"))

    def __call__(self, x):
        return (jax.nn.silu(x @ self.gate[...].T) * (x @ self.up[...].T)) @ self.down[...].T


class Experts(nnx.Module):
    """Each token goes to a few of many experts, and to one that all share."""

    def __init__(self, take, prefix, config):
        self.count, self.chosen = config["num_experts"], config["num_experts_per_tok"]
        self.normalised = config.get("norm_topk_prob", True)
        self.router = nnx.Param(take(f"{prefix}.gate.weight"))
        self.gate, self.up, self.down = (
            nnx.Param(jnp.stack([take(f"{prefix}.experts.{e}.{n}_proj.weight").T for e in range(self.count)]))
            for n in ("gate", "up", "down")
        )
        self.shared = Dense(take, f"{prefix}.shared_expert")
        self.shared_gate = nnx.Param(take(f"{prefix}.shared_expert_gate.weight"))

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        shares = jax.nn.softmax((tokens @ self.router[...].T).astype(jnp.float32))
        shares, experts = jax.lax.top_k(shares, self.chosen)  # [tokens, chosen]
        if self.normalised:
            shares /= shares.sum(-1, keepdims=True)
        # tokens in the order of their experts, so that each expert's are one run
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=self.count)
        runs = tokens[order // self.chosen]
        inner = jax.nn.silu(jax.lax.ragged_dot(runs, self.gate[...], sizes))
        inner *= jax.lax.ragged_dot(runs, self.up[...], sizes)
        outer = jax.lax.ragged_dot(inner, self.down[...], sizes) * shares.reshape(-1)[order, None].astype(x.dtype)
        found = jnp.zeros_like(tokens).at[order // self.chosen].add(outer)
        found += jax.nn.sigmoid(tokens @ self.shared_gate[...].T) * self.shared(tokens)
        return found.reshape(x.shape)


class Block(nnx.Module):
    def __init__(self, take, weights, config, number, dtypes):
        prefix, width, epsilon = f"model.layers.{number}", config["hidden_size"], config["rms_norm_eps"]
        if layer_types(config)[number] == "linear_attention":
            self.mixer = GatedDeltaNet.from_transformers(
                weights,
                width,
                key_heads=config["linear_num_key_heads"],
                value_heads=config["linear_num_value_heads"],
                key_dim=config["linear_key_head_dim"],
                value_dim=config["linear_value_head_dim"],
                convolution=config["linear_conv_kernel_dim"],
                epsilon=epsilon,
                prefix=f"{prefix}.linear_attn.",
                **dtypes,
            )
        else:
            rope = config.get("rope_parameters") or config
            rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 0.25))
            self.mixer = MultiHeadAttention.from_qwen3_next(
                weights,
                width,
                config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                bias=config.get("attention_bias", False),
                rope_theta=rope.get("rope_theta", 10000.0),
                rotary_dim=int(config["head_dim"] * rotated),
                rope_scaling=config.get("rope_parameters") or config.get("rope_scaling"),
                epsilon=epsilon,
                prefix=f"{prefix}.self_attn.",
                **dtypes,
            )
        self.before, self.between = (
            Norm(take(f"{prefix}.{name}_layernorm.weight"), epsilon) for name in ("input", "post_attention")
        )
        sparse = config.get("num_experts", 0) and (number + 1) % config.get("decoder_sparse_step", 1) == 0
        if sparse and number not in config.get("mlp_only_layers", []):
            self.mlp = Experts(take, f"{prefix}.mlp", config)
        else:
            self.mlp = Dense(take, f"{prefix}.mlp")

    def __call__(self, x, state):
        mixed, state = self.mixer(self.before(x), state)
        x = x + mixed
        return x + self.mlp(self.between(x)), state


def layer_types(config):
    every = config.get("full_attention_interval", 4)
    count = config["num_hidden_layers"]
    usual = ["linear_attention" if (number + 1) % every else "full_attention" for number in range(count)]
    return config.get("layer_types") or usual


class Model(nnx.Module):
    """Logits of the next token, and the states to go on from; those of another call are given back to it."""

    def __init__(self, folder, dtype=jnp.float32):
        config, weights = read_json(folder / "config.json"), Shards(folder)

        def take(name):
            if name not in weights:
                raise CheckpointError(f"{folder}: no {name}")
            return jnp.asarray(weights[name], dtype)

        try:
            self.embed = nnx.Param(take("model.embed_tokens.weight"))
            blocks, count = [], config["num_hidden_layers"]
            for number in range(count):
                blocks.append(Block(take, weights, config, number, {"dtype": dtype, "param_dtype": dtype}))
                progress(number + 1, count)
            self.blocks = nnx.List(blocks)
            self.norm = Norm(take("model.norm.weight"), config["rms_norm_eps"])
            self.head = None if config.get("tie_word_embeddings") else nnx.data(nnx.Param(take("lm_head.weight")))
        except KeyError as missing:
            raise CheckpointError(f"{folder / 'config.json'}: no {missing}") from None
        except ValueError as error:
            raise CheckpointError(f"{folder}: {error}") from None

    def empty_states(self, batch, capacity):
        """Those of no tokens, with room in the caches for `capacity`."""
        return [
            block.mixer.empty_cache(batch, capacity) if isinstance(block.mixer, MultiHeadAttention) else None
            for block in self.blocks
        ]

    def __call__(self, tokens, states):
        x, after = self.embed[...][tokens], []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state)
            after.append(state)
        head = self.embed if self.head is None else self.head
        return self.norm(x) @ head[...].T, after


def progress(done, count):
    bar = "#" * (40 * done // count)
    print(f"\r[{bar:40}] layer {done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)


def generate(model, tokens, count):
    """The `count` likeliest tokens, one after the other, and the logits that each was chosen by."""
    graph, parameters = nnx.split(model)

    @partial(jax.jit, donate_argnums=2)
    def step(parameters, tokens, states):
        logits, states = nnx.merge(graph, parameters)(tokens, states)
        return logits[:, -1].astype(jnp.float32), states

    logits, states = step(parameters, tokens, model.empty_states(len(tokens), tokens.shape[1] + count))
    written, scores = [], []
    for _ in range(count):
        written.append(logits.argmax(-1)[:, None])
        scores.append(logits)
        logits, states = step(parameters, written[-1], states)
    return jnp.concatenate(written, 1), jnp.stack(scores, 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3], help="ids of the prompt")
    parser.add_argument("--generate", type=int, default=20, help="how many to write")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    try:
        model = Model(arguments.folder, jnp.dtype(arguments.dtype))
    except CheckpointError as error:
        sys.exit(str(error))
    prompt = jnp.array([arguments.tokens])
    written, scores = generate(model, prompt, arguments.generate)
    print(*written[0].tolist())
    whole, _ = nnx.jit(lambda model, tokens: model(tokens, [None] * len(model.blocks)))(
        model, jnp.concatenate([prompt, written], 1)
    )
    error = jnp.abs(whole[:, prompt.shape[1] - 1 : -1].astype(jnp.float32) - scores).max() / jnp.abs(scores).max()
    print(f"logits {error:.1e} from one pass over everything")


if __name__ == "__main__":
    main()
