"""Constants that all Triton kernels of attention are compiled for, with or without pages."""

from dataclasses import dataclass
from typing import Any

from jax import Array

from ejkernel.kernels._launch import padded


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Sizes of heads and what becomes of scores; device code gets it as `CALL`."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_block: int  # the key dim, padded
    value_block: int
    rows: int  # of a tile of scores: queries, or with pages queries times heads of a group
    columns: int  # keys of a tile
    sinks: int
    sink_heads: int
    sink_block: int
    scale: float
    cap: float
    precision: str


def common(call: Any, sinks: Array | None, full_precision: bool) -> dict[str, Any]:
    """The fields of `Constants` but for the tile, by name."""
    return {
        "heads": call.heads,
        "kv_heads": call.kv_heads,
        "key_dim": call.key_dim,
        "value_dim": call.value_dim,
        "key_block": padded(call.key_dim),
        "value_block": padded(call.value_dim),
        "sinks": 0 if sinks is None else sinks.shape[1],
        "sink_heads": 1 if sinks is None else sinks.shape[0],
        "sink_block": 1 if sinks is None else padded(sinks.shape[1], 1),
        "scale": float(call.scale),
        "cap": float(call.soft_cap or 0.0),
        "precision": "tf32x3" if full_precision else "ieee",
    }
