"""Everything public that takes borders of packed sequences, as a function of them, by name."""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import ejkernel
from ejkernel import parallel, xla_utils
from ejkernel.xla_utils import cumsum

TOKENS, CHUNK = 300, 16  # more tokens than an 8-bit number counts
MESH = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
X, KEYS, VALUES = np.random.default_rng(0).normal(size=(3, TOKENS, 2, 4)).astype(np.float32)
GATES = -np.abs(KEYS)


@dataclass(frozen=True)
class Taker:
    """`call(borders)`, and whether it knows how many tokens there are to be bounded by."""

    call: Callable[[Any], Any]
    counts: bool = True


def sliced(op: Callable[..., Any], *arrays: Any) -> Callable[[Any], Any]:
    """`op` of `parallel` inside one's own `shard_map`."""

    def call(cu: Any) -> Any:
        run = functools.partial(op, axis_name="time", cu_seqlens=cu)
        specs = jax.P("time")
        out = specs if op is parallel.flash_attention else (specs, jax.P())
        return jax.shard_map(run, mesh=MESH, in_specs=(specs,) * len(arrays), out_specs=out)(*arrays)

    return call


def ops() -> dict[str, Taker]:
    """The ops, plain and over a mesh."""
    layer = {"layer_idx": 1, "num_layers": 3}
    arrays = {
        "recurrent": (X, KEYS, VALUES, GATES),
        "recurrent_gla": (X, KEYS, VALUES, GATES),
        "simple_gla": (X, KEYS, VALUES, GATES[..., 0]),
        "retention": (X, KEYS, VALUES),
        "lightning_attn": (X, KEYS, VALUES),
        "linear_attention": (X, KEYS, VALUES),
        "flash_attention": (X, KEYS, VALUES),
        "delta_rule": (X, KEYS, VALUES, GATES[..., 1]),
        "gated_delta_rule": (X, KEYS, VALUES, GATES[..., 0], GATES[..., 1]),
        "kda": (X, KEYS, VALUES, GATES, GATES[..., 1]),
    }
    found = {}
    for name, given in arrays.items():
        options = layer if name == "lightning_attn" else {"causal": True} if name == "flash_attention" else {}
        one, many = (functools.partial(getattr(each, name), **options) for each in (ejkernel, parallel))
        found[name] = Taker(lambda cu, one=one, given=given: one(*given, cu_seqlens=cu))
        found[f"parallel.{name}"] = Taker(
            lambda cu, many=many, given=given: many(*given, cu_seqlens=cu, axis_name="time", mesh=MESH)
        )
    pages = ejkernel.PagedCache(*np.zeros((2, 8, 4, *KEYS.shape[-2:-1], 1), np.float32))  # of one dim
    tokens = [x.reshape(-1, *x.shape[-2:])[..., :1] for x in (X, KEYS, VALUES)]

    def paged(cu: Any) -> Any:
        sequences = len(cu) - 1
        table, lengths = np.full((sequences, 8), -1), np.zeros(sequences, int)
        return ejkernel.paged_attention(*tokens, pages, table, lengths, cu)

    found["paged_attention"] = Taker(paged)
    weight = KEYS[:3].reshape(3, 8)
    found["causal_conv1d"] = Taker(lambda cu: ejkernel.causal_conv1d(X.reshape(TOKENS, 8), weight, cu_seqlens=cu))
    for name in ("recurrent", "delta_rule", "flash_attention"):
        found[f"parallel.{name}, sliced"] = Taker(sliced(getattr(parallel, name), *arrays[name]))
    return found


def layers() -> dict[str, Taker]:
    """The layers, made once; they need Flax. Weights are all 1, as drawing them would compile programs."""
    from flax import nnx

    from ejkernel import layers

    x = X.reshape(TOKENS, 8)
    options: dict[str, dict[str, int]] = {
        "GatedLinearAttention": {},
        "Retention": {},
        "LightningAttention": {"layer_idx": 1, "num_layers": 3},
        "MultiHeadAttention": {},
    }

    def made(name: str) -> Any:
        shapes = nnx.eval_shape(lambda: getattr(layers, name)(8, 2, **options[name], rngs=nnx.Rngs(0)))
        graph, parameters = nnx.split(shapes)
        return nnx.merge(graph, jax.tree.map(lambda each: np.ones(each.shape, each.dtype), parameters))

    every = {name: made(name) for name in options}
    return {f"layers.{name}": Taker(lambda cu, layer=layer: layer(x, None, cu)) for name, layer in every.items()}


TAKERS = {
    **ops(),
    "flash_attention, cu_seqlens_kv": Taker(
        lambda cu: ejkernel.flash_attention(
            X, KEYS, VALUES, cu_seqlens=np.linspace(0, TOKENS, len(cu), dtype=np.int32), cu_seqlens_kv=cu
        )
    ),
    "chunk_local_cumsum": Taker(lambda cu: xla_utils.chunk_local_cumsum(X[None], CHUNK, cu_seqlens=cu)),
    "chunk_global_cumsum": Taker(lambda cu: xla_utils.chunk_global_cumsum(X[None], cu_seqlens=cu)),
    "chunk_global_cumsum_scalar": Taker(lambda cu: cumsum.chunk_global_cumsum_scalar(X[None, ..., 0], cu_seqlens=cu)),
    "chunk_global_cumsum_vector": Taker(lambda cu: cumsum.chunk_global_cumsum_vector(X[None], cu_seqlens=cu)),
    "prepare_lens": Taker(xla_utils.prepare_lens, counts=False),
    "prepare_sequence_ids": Taker(xla_utils.prepare_sequence_ids, counts=False),
    "prepare_position_ids": Taker(xla_utils.prepare_position_ids, counts=False),
    "prepare_token_indices": Taker(xla_utils.prepare_token_indices, counts=False),
    "prepare_chunk_offsets": Taker(lambda cu: xla_utils.prepare_chunk_offsets(cu, CHUNK), counts=False),
    "prepare_chunk_indices": Taker(lambda cu: xla_utils.prepare_chunk_indices(cu, CHUNK), counts=False),
    **(layers() if importlib.util.find_spec("flax") else {}),
}
