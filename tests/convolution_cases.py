"""Calls of the short convolution, against which every implementation is checked."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import ejkernel
from ejkernel.convolution import unit_conv1d


@dataclass(frozen=True)
class Case:
    """One call; `lengths` packs, with so much `padding` behind, and `ids` says whose each token of a row is."""

    name: str
    batch: int = 2
    tokens: int = 11
    channels: int = 5
    taps: int = 4
    lengths: tuple[int, ...] | None = None
    padding: int = 0
    unbatched: bool = False
    ids: tuple[tuple[int, ...], ...] | None = None
    state: bool = True
    bias: bool = True
    activation: str | None = "silu"
    unit_dim: int = 0

    def __str__(self):
        return self.name

    def arrays(self, dtype, seed=0):
        """Arguments by name, cotangents among them; what is an integer stays one."""
        random = np.random.default_rng(seed)
        shape = (self.batch, self.tokens, self.channels)
        states, whole = self.batch, {}
        if self.lengths is not None:
            tokens, states = sum(self.lengths) + self.padding, len(self.lengths)
            shape = (tokens, self.channels) if self.unbatched else (1, tokens, self.channels)
            whole["cu_seqlens"] = np.cumsum([0, *self.lengths]).astype(np.int32)
        if self.ids is not None:
            shape = (len(self.ids), len(self.ids[0]), self.channels)
            states, whole["segment_ids"] = len(self.ids), np.array(self.ids, np.int32)
        state = (states, self.taps - 1, self.channels)
        drawn = {"x": shape, "weight": (self.taps, self.channels), "d_output": shape, "d_final_state": state}
        drawn |= {"bias": (self.channels,)} if self.bias else {}
        drawn |= {"initial_state": state} if self.state else {}
        # as exact as the dtype is, so that the oracle starts from the same numbers
        return {name: np.asarray(jnp.asarray(random.normal(size=each), dtype)) for name, each in drawn.items()} | whole


RAGGED = (5, 0, 1, 2, 3, 9, 0)
ROWS_OF_SEVERAL = (
    (0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2),
    (7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    (-1, -1, 3, 3, -1, 3, 3, 3, 3, -2, -1),
    (-1, -5, -1, -1, -1, -1, -1, -1, -1, -1, -1),
    (-1, -1, -1, -1, -1, -1, -1, -1, -1, 4, 4),
    (2, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1),
    (5, 4, 5, 4, 5, 4, 5, 4, 5, 5, 4),
)
CASES = (
    Case("plain"),
    Case("bare", state=False, bias=False, activation=None),
    Case("shorter than the history", tokens=2),
    Case("one token", tokens=1),
    Case("one tap", taps=1),
    Case("two taps, no bias", taps=2, bias=False),
    Case("many taps", taps=9, tokens=7),
    Case("packed", lengths=RAGGED, padding=3),
    Case("packed, no states", lengths=RAGGED, padding=3, state=False),
    Case("packed, unbatched", lengths=(4, 4), unbatched=True, bias=False),
    Case("packed, one tap", lengths=(3, 0, 2), taps=1, padding=1),
    Case("packed, few tokens", lengths=(1, 0), taps=6),
    Case("segments", ids=ROWS_OF_SEVERAL),
    Case("segments, no states", ids=ROWS_OF_SEVERAL, state=False, activation=None),
    Case("segments, many taps", ids=tuple(row[:5] for row in ROWS_OF_SEVERAL), taps=8),
    Case("segments, one tap", ids=ROWS_OF_SEVERAL[:3], taps=1),
)
# heads divided by their norms
UNITS = (
    Case("norms", channels=12, unit_dim=4),
    Case("norms, bare", channels=4, unit_dim=2, state=False, bias=False, activation=None),
    Case("norms, one tap", taps=1, channels=8, unit_dim=4),
    Case("norms, one head", tokens=2, channels=8, unit_dim=8),
    Case("norms, packed", lengths=RAGGED, padding=3, channels=8, unit_dim=4),
    Case("norms, packed, unbatched", lengths=(4, 4), unbatched=True, channels=6, unit_dim=2, state=False),
    Case("norms, segments", ids=ROWS_OF_SEVERAL, channels=8, unit_dim=4),
)
DIFFERENTIABLE = ("x", "weight", "bias", "initial_state")


def results_and_gradients(case, arrays, platform=None, front=ejkernel.causal_conv1d):
    """Output, final state and gradients by name, from the cotangents among the arrays."""
    moved = {name: arrays[name] for name in DIFFERENTIABLE if name in arrays}
    places = {name: arrays[name] for name in ("cu_seqlens", "segment_ids") if name in arrays}
    return _compiled(case, platform, front)(moved, places, (arrays["d_output"], arrays["d_final_state"]))


@functools.cache
def _compiled(case, platform, front):
    options = {} if platform is None else {"platform": platform}
    if case.unit_dim:
        front, options = unit_conv1d, options | {"unit_dim": case.unit_dim}

    @jax.jit
    def run(moved, places, cotangents):
        results, pull = jax.vjp(lambda moved: front(**moved, **places, activation=case.activation, **options), moved)
        return {"output": results[0], "final_state": results[1], **pull(cotangents)[0]}

    return run


def check(case, dtype=np.float32, tolerance=1e-5, **options):
    """Every result of a call beside the oracle's, relative to the largest."""
    arrays = case.arrays(dtype)
    found = results_and_gradients(case, arrays, **options)
    output, final, gradients = oracle.causal_conv1d(activation=case.activation, unit_dim=case.unit_dim, **arrays)
    expected = {"output": output, "final_state": final, **gradients}
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert found[name].dtype == arrays["d_output"].dtype, name
        assert found[name].shape == right.shape, name
        scale = max(np.abs(right).max(initial=0), 1)
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), right, rtol=0, atol=tolerance * scale, err_msg=name
        )
    if "final_state" in found and dtype == np.float32:
        np.testing.assert_array_equal(found["final_state"], final.astype(np.float32))


def check_sizes(case, dtype, tolerance, **options):
    """Heads of very different sizes, some without a norm, each beside the oracle's, relative to its own largest."""
    arrays = case.arrays(dtype)
    heads = case.channels // case.unit_dim
    sizes = np.repeat(np.resize([1, 1e-30, 1e25, 0, 1e-3, 1e12], heads), case.unit_dim)
    for name in ("x", "initial_state"):
        arrays[name] = np.asarray(jnp.asarray(np.asarray(arrays[name], np.float64) * sizes, dtype))
    found = results_and_gradients(case, arrays, **options)
    with np.errstate(over="ignore"):
        output, final, gradients = oracle.causal_conv1d(activation=case.activation, unit_dim=case.unit_dim, **arrays)
    for name, right in {"output": output, "final_state": final, **gradients}.items():
        found_heads, right_heads = (
            np.moveaxis(np.asarray(each, np.float64).reshape(*each.shape[:-1], heads, -1), -2, 0)
            for each in (found[name], right)
        )
        for head, (one, other) in enumerate(zip(found_heads, right_heads, strict=True)):
            scale = np.abs(other).max()
            # what is left of a gradient along its own vector is a difference that cancels
            np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale + 1e-44, err_msg=f"{name} {head}")


def spoilt(x, where, number):
    """A copy with this number there."""
    x = np.array(x)
    x[where] = number
    return x
