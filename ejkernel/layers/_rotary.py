"""Rotary position embedding, with the frequency scalings of published models."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel import _checks
from ejkernel.layers._parameters import matching, wide


class Rotary(NamedTuple):
    """The frequencies by which pairs of dims are rotated, and a factor of their cosines and sines."""

    frequencies: tuple[float, ...]
    factor: float

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """`x [..., T, H, K]` with dim `i` and dim `i + len(frequencies)` rotated together; later dims are unchanged."""
        half = len(self.frequencies)
        rotated, unrotated = wide(x[..., : 2 * half]), x[..., 2 * half :]
        positions = positions.reshape(*[1] * (x.ndim - 2 - positions.ndim), *positions.shape, 1, 1).astype(
            rotated.dtype
        )
        angles = positions * matching(jnp.asarray(self.frequencies), positions)
        cos, sin = jnp.cos(angles) * self.factor, jnp.sin(angles) * self.factor  # [..., T, 1, half]
        first, second = rotated[..., :half], rotated[..., half:]
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        return jnp.concatenate([rotated.astype(x.dtype), unrotated], -1)


def rotary(dims: int, theta: float, scaling: Mapping[str, Any] | None = None) -> Rotary:
    """The rotation of a head's first `dims`; `scaling` is a model's `rope_scaling`, whose type is in `SCALINGS`."""
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(f"rope_scaling: got {type(scaling).__name__}; expected a dict, as config.json has it")
    scaling = dict(scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        _checks.fail("rope_scaling", f"rope_type {kind!r}", f"one of {', '.join(SCALINGS)}")
    scaled, required, optional = SCALINGS[kind]
    if missing := [name for name in required if name not in scaling]:
        raise ValueError(f"rope_scaling: got no {missing[0]!r}; expected it, as {kind} needs it")
    names = (*required, *(name for name in optional if scaling.get(name) is not None))
    numbers = {name: _checks.positive(f"rope_scaling.{name}", scaling[name]) for name in names}
    frequencies, factor = scaled(theta ** (-np.arange(0, dims, 2) / dims), theta, scaling | numbers)
    return Rotary(tuple(map(float, frequencies)), float(factor))


def rotary_or_none(dims: int, theta: float | None, scaling: Mapping[str, Any] | None) -> Rotary | None:
    """The rotation of a head's first `dims`; `None` if `theta` is, which no `scaling` can go with."""
    if theta is not None:
        return rotary(dims, _checks.positive("rope_theta", theta), scaling)
    if scaling is not None:
        _checks.fail("rope_scaling", repr(scaling), "None, as rope_theta is None")
    return None


def _llama3(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """Low frequencies are divided by `factor`, high ones unchanged, and those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if high <= low:
        _checks.fail("rope_scaling.high_freq_factor", high, f"a number above low_freq_factor, {low}")
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    fast = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (fast + (1 - fast) / scaling["factor"]), 1.0


def _yarn(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """As `_llama3`, but interpolated by the index of the pair, not its frequency; and cosines and sines are scaled."""
    pairs, length, factor = len(frequencies), scaling["original_max_position_embeddings"], scaling["factor"]
    fast, slow = scaling.get("beta_fast") or 32.0, scaling.get("beta_slow") or 1.0
    if theta <= 1:
        _checks.fail("rope_theta", theta, "a number above 1, as yarn needs it")
    if fast <= slow:
        _checks.fail("rope_scaling.beta_fast", fast, f"a number above beta_slow, {slow}")

    def pair(turns: float) -> float:
        return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(fast), pair(slow)
    if _checks.flag("rope_scaling.truncate", scaling.get("truncate", True)):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed = np.clip((np.arange(pairs) - first) / max(last - first, 0.001), 0, 1)
    scale = scaling.get("attention_factor")
    if scale is None:

        def scale_of(mscale: float) -> float:
            return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

        scale = scale_of(1.0)
        # some models have 0, which means none
        if (mscale := scaling.get("mscale")) and (all_dim := scaling.get("mscale_all_dim")):
            mscale = _checks.positive("rope_scaling.mscale", mscale)
            scale = scale_of(mscale) / scale_of(_checks.positive("rope_scaling.mscale_all_dim", all_dim))
    return frequencies * (1 - slowed + slowed / factor), scale


def _proportional(frequencies: np.ndarray, theta: float, scaling: dict[str, Any]) -> tuple[np.ndarray, float]:
    """The share `partial_rotary_factor` of the pairs is rotated by the frequencies of all; the others are not."""
    turning = np.arange(len(frequencies)) < int(scaling.get("partial_rotary_factor", 1.0) * len(frequencies))
    return np.where(turning, frequencies / scaling.get("factor", 1.0), 0.0), 1.0


_STRETCHED = ("factor", "original_max_position_embeddings")
# by `rope_type`: a function that scales frequencies, and the required and optional numbers in `rope_scaling`
SCALINGS: dict[str, tuple[Callable[..., tuple[np.ndarray, float]], tuple[str, ...], tuple[str, ...]]] = {
    "default": (lambda frequencies, theta, scaling: (frequencies, 1.0), (), ()),
    "linear": (lambda frequencies, theta, scaling: (frequencies / scaling["factor"], 1.0), ("factor",), ()),
    "llama3": (_llama3, (*_STRETCHED, "low_freq_factor", "high_freq_factor"), ()),
    "proportional": (_proportional, (), ("partial_rotary_factor", "factor")),
    "yarn": (_yarn, _STRETCHED, ("beta_fast", "beta_slow", "attention_factor")),
}
