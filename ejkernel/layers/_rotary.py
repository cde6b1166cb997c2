"""Rotary embedding: pairs of a head's dims are turned by angles that grow with the token's position."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks
from ejkernel.layers._dtypes import matching, wide


class Rotary(NamedTuple):
    """The angle of each pair of dims for one position, and what cosines and sines are multiplied by."""

    frequencies: tuple[float, ...]
    factor: float

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """`x [..., T, H, K]`: the two halves of its first dims turned, the dims past twice the frequencies kept."""
        half = len(self.frequencies)
        turned, kept = wide(x[..., : 2 * half]), x[..., 2 * half :]
        positions = positions.reshape(*[1] * (x.ndim - 2 - positions.ndim), *positions.shape, 1, 1).astype(turned.dtype)
        angles = positions * matching(jnp.asarray(self.frequencies), positions)
        cos, sin = jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor  # [..., T, 1, half]
        first, second = turned[..., :half], turned[..., half:]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return jnp.concatenate([turned.astype(x.dtype), kept], -1)


def rotary(dims: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Rotary:
    """Of the first `dims` of a head; `scaling` as a model's `config.json` has it under `rope_scaling`.

    Of its `rope_type`s there are `default`, `linear`, `llama3` and `yarn`.
    """
    scaling = {} if scaling is None else dict(scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SCALINGS:
        _checks.fail("rope_scaling", f"rope_type {kind!r}", f"one of {', '.join(SCALINGS)}")
    try:
        frequencies, factor = SCALINGS[kind](theta ** (-np.arange(0, dims, 2) / dims), theta, scaling)
    except KeyError as missing:
        raise ValueError(f"rope_scaling: got no {missing}; expected it, as {kind} needs it") from None
    return Rotary(tuple(map(float, frequencies)), float(factor))


def _default(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    return frequencies, 1.0


def _linear(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    return frequencies / scaling["factor"], 1.0


def _llama3(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Slow pairs are slowed down by `factor`, fast ones are not, those between partly."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (fast + (1 - fast) / scaling["factor"]), 1.0


def _yarn(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """As `_llama3`, but that what lies between is counted in pairs rather than in turns; and all are scaled."""
    pairs, length, factor = len(frequencies), scaling["original_max_position_embeddings"], scaling["factor"]

    def pair(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slow = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    scale = scaling.get("attention_factor")
    if scale is None:

        def of(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

        both = scaling.get("mscale") and scaling.get("mscale_all_dim")
        scale = of(scaling["mscale"]) / of(scaling["mscale_all_dim"]) if both else of(1.0)
    return frequencies * (1 - slow + slow / factor), scale


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
