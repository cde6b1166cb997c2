"""Builds Qwen3-Next, Qwen3.5 or Nemotron-H from the folder they are published as, and generates from token ids.

Most layers have a state that does not grow, Gated DeltaNet or Mamba-2; the others are softmax attention with a cache.
Each is made by `from_config` from the model's `config.json` and safetensors shards. Those are memory-mapped, so that a
layer's arrays are read when they are put on the device.

    python examples/hybrid_models.py FOLDER --tokens 1 2 3 --generate 20
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel import layers

# how files name what is around the layers; `norms` are those before the mixer and, where there is one, before the MLP
QWEN = {"embed": "embed_tokens", "norm": "norm", "norms": ("input_layernorm", "post_attention_layernorm")}
NEMOTRON = {"embed": "embeddings", "norm": "norm_f", "norms": ("norm",)}
ROOTS = ("model.", "backbone.", "model.language_model.", "language_model.model.", "language_model.")


class Norm(nnx.Module):
    """A root mean square norm, whose scale Qwen stores less 1."""

    def __init__(self, weight, offset, epsilon):
        self.scale, self.epsilon = nnx.Param(weight[...] + offset), epsilon

    def __call__(self, x):
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * self.scale[...]).astype(x.dtype)


class Dense(nnx.Module):
    """Two projections up and one down with SiLU, or one up with the square of ReLU."""

    def __init__(self, take, prefix):
        self.gate = nnx.data(take.optional(f"{prefix}gate_proj.weight"))
        self.up, self.down = (take(f"{prefix}{name}_proj.weight") for name in ("up", "down"))

    def __call__(self, x):
        gate = None if self.gate is None else x @ self.gate[...].T
        return activated(gate, x @ self.up[...].T) @ self.down[...].T


def activated(gate, up):
    return jnp.square(jax.nn.relu(up)) if gate is None else jax.nn.silu(gate) * up


class Experts(nnx.Module):
    """Each token goes to a few of many experts, and to one that all share."""

    def __init__(self, take, prefix, config):
        self.chosen, self.normalised = config["num_experts_per_tok"], config.get("norm_topk_prob", True)
        self.router = take(f"{prefix}gate.weight")
        self.count = self.router[...].shape[0]
        self.gate, self.up, self.down = (nnx.data(each) for each in self.experts(take, prefix))
        shared = next(name for name in ("shared_expert.", "shared_experts.") if f"{prefix}{name}up_proj.weight" in take)
        self.shared = Dense(take, prefix + shared)
        self.shared_gate = nnx.data(take.optional(f"{prefix}shared_expert_gate.weight"))
        # Nemotron-H's: sigmoids, a bias of the choice alone, groups of experts, and a factor
        self.bias = nnx.data(take.optional(f"{prefix}gate.e_score_correction_bias"))
        self.groups, self.chosen_groups = config.get("n_group", 1), config.get("topk_group", 1)
        self.factor = config.get("routed_scaling_factor", 1.0)

    def experts(self, take, prefix):
        """`[experts, rows, columns]` of each projection, from one array an expert or from one of all."""
        joined = take.optional(f"{prefix}experts.gate_up_proj")
        if joined is not None:
            gate, up = jnp.split(jnp.swapaxes(joined[...], 1, 2), 2, -1)
            return (
                nnx.Param(gate),
                nnx.Param(up),
                nnx.Param(jnp.swapaxes(take(f"{prefix}experts.down_proj")[...], 1, 2)),
            )

        def stacked(name):
            if f"{prefix}experts.0.{name}.weight" not in take:
                return None
            each = [take(f"{prefix}experts.{number}.{name}.weight")[...].T for number in range(self.count)]
            return nnx.Param(jnp.stack(each))

        return [stacked(f"{name}_proj") for name in ("gate", "up", "down")]

    def choose(self, tokens):
        """The shares of the experts that each token goes to, and their numbers, `[tokens, chosen]`."""
        logits = tokens.astype(jnp.float32) @ self.router[...].T.astype(jnp.float32)
        if self.bias is None:
            shares, experts = jax.lax.top_k(jax.nn.softmax(logits), self.chosen)
            return shares / shares.sum(-1, keepdims=True) if self.normalised else shares, experts
        scores = jax.nn.sigmoid(logits)
        choice = (scores + self.bias[...]).reshape(len(tokens), self.groups, -1)
        best, _ = jax.lax.top_k(choice, 2)
        _, groups = jax.lax.top_k(best.sum(-1), self.chosen_groups)
        allowed = (jnp.arange(self.groups) == groups[..., None]).any(1)
        choice = jnp.where(allowed[..., None], choice, -jnp.inf).reshape(scores.shape)
        _, experts = jax.lax.top_k(choice, self.chosen)
        shares = jnp.take_along_axis(scores, experts, -1)
        if self.normalised:
            shares /= shares.sum(-1, keepdims=True) + 1e-20
        return shares * self.factor, experts

    def __call__(self, x):
        tokens = x.reshape(-1, x.shape[-1])
        shares, experts = self.choose(tokens)
        # tokens in the order of their experts, so that each expert's are one run
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=self.count)
        runs = tokens[order // self.chosen]
        gate = None if self.gate is None else jax.lax.ragged_dot(runs, self.gate[...], sizes)
        inner = activated(gate, jax.lax.ragged_dot(runs, self.up[...], sizes))
        outer = jax.lax.ragged_dot(inner, self.down[...], sizes) * shares.reshape(-1)[order, None].astype(x.dtype)
        found = jnp.zeros_like(tokens).at[order // self.chosen].add(outer)
        shared = self.shared(tokens)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(tokens @ self.shared_gate[...].T)
        return (found + shared).reshape(x.shape)


class Weights:
    """Parameters by their names in the files: matrices in the dtype to compute in, norms and the like in float32."""

    def __init__(self, checkpoint, dtype):
        self.checkpoint, self.dtype = checkpoint, dtype

    def __contains__(self, name):
        return name in self.checkpoint

    def __call__(self, name):
        if name not in self:
            raise ValueError(f"{self.checkpoint.path}: no {name}")
        array = self.checkpoint[name]
        return nnx.Param(jnp.asarray(array, jnp.float32 if array.ndim == 1 else self.dtype))

    def optional(self, name):
        return self(name) if name in self else None


class Block(nnx.Module):
    """A mixer, an MLP, or the one after the other, each with a norm before it."""

    def __init__(self, take, prefix, mixer, names, config, offset):
        epsilon = config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-6))
        self.norms = nnx.List([Norm(take(f"{prefix}{name}.weight"), offset, epsilon) for name in names["norms"]])
        self.mixer = nnx.data(mixer)
        folder = f"{prefix}{'mlp' if len(self.norms) > 1 else 'mixer'}."
        if f"{folder}gate.weight" in take:
            self.mlp = nnx.data(Experts(take, folder, config))
        else:
            self.mlp = nnx.data(Dense(take, folder) if f"{folder}up_proj.weight" in take else None)

    def __call__(self, x, state):
        if self.mixer is not None:
            mixed, state = self.mixer(self.norms[0](x), state)
            x = x + mixed
        return x if self.mlp is None else x + self.mlp(self.norms[-1](x)), state


class Model(nnx.Module):
    """Logits of the next token, and the states to go on from; those of another call are given back to it."""

    def __init__(self, folder, dtype=jnp.float32):
        config, checkpoint = json.loads((folder / "config.json").read_text()), layers.Checkpoint(folder)
        take, kinds = Weights(checkpoint, dtype), layers.mixers(config)
        config = config.get("text_config", config)
        nemotron = config["model_type"] == "nemotron_h"
        names, offset = (NEMOTRON, 0.0) if nemotron else (QWEN, 1.0)
        if config.get("moe_latent_size") is not None:
            raise ValueError(f"{folder}: experts of a latent, which this script does not have")
        root = next((root for root in ROOTS if f"{root}{names['embed']}.weight" in take), ROOTS[0])
        self.embed = take(f"{root}{names['embed']}.weight")
        blocks = []
        for number, found in enumerate(kinds):
            mixer = None
            if found:
                mixer = found[0].from_config(config, number, checkpoint, dtype=dtype, param_dtype=dtype)
            blocks.append(Block(take, f"{root}layers.{number}.", mixer, names, config, offset))
            progress(number + 1, len(kinds))
        self.blocks = nnx.List(blocks)
        epsilon = config.get("rms_norm_eps", config.get("layer_norm_epsilon", 1e-6))
        self.norm = Norm(take(f"{root}{names['norm']}.weight"), offset, epsilon)
        self.head = nnx.data(None if config.get("tie_word_embeddings") else take("lm_head.weight"))

    def empty_states(self, batch, capacity):
        """Those of no tokens, with room in the caches for `capacity`."""
        return [
            block.mixer.empty_cache(batch, capacity) if hasattr(block.mixer, "empty_cache") else None
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
    except (OSError, ValueError) as error:
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
