"""Softmax attention on one NVIDIA GPU: the Triton kernels beside cuDNN, XLA and PyTorch's compiled `flex_attention`.

Times are milliseconds of a call, forward, with backward, or with tangents, on rotating inputs. Errors are those of the
first row and key head of each result, against float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.gpu.rows import DIRECTIONS, Part, Row, clock, relative_error
from ejkernel._dispatch import PlatformError, explain
from ejkernel.attention import flash_attention

PLATFORMS = ("triton", "cudnn", "xla")
TANGENTS = ("tangents",)


@dataclass(frozen=True)
class Work:
    """One line of the table; `bars` are the times asked for on one H200, forward and with backward."""

    name: str
    B: int = 4
    S: int = 4096
    L: int = 0
    H: int = 16
    Hkv: int = 0
    D: int = 128
    Dv: int = 0
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()  # lengths of the sequences in every row
    sinks: int = 0
    bias: str = ""  # of "pairs", or of "keys", the same for all queries
    bias_dtype: str = "bfloat16"
    bias_gradient: bool = True
    mask: str = ""  # likewise
    offset: bool = False  # the queries are the last of the keys' positions
    options: dict[str, Any] = field(default_factory=lambda: {"causal": True})
    bars: tuple[float | None, ...] = (None, None)
    forced: bool = True  # the bars are for Triton, whichever serves the call
    directions: tuple[str, ...] = DIRECTIONS

    @property
    def decodes(self) -> bool:
        return self.S == 1

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, value and output."""
        keys, kv_heads, value_dim = self.L or self.S, self.Hkv or self.H, self.Dv or self.D
        return (
            (self.B, self.S, self.H, self.D),
            (self.B, keys, kv_heads, self.D),
            (self.B, keys, kv_heads, value_dim),
            (self.B, self.S, self.H, value_dim),
        )


def ragged(count: int, total: int) -> tuple[int, ...]:
    """Lengths drawn evenly from nothing to twice their mean, that add up to `total`."""
    parts = np.random.default_rng(0).uniform(size=count) + 0.002
    return tuple(np.diff(np.round(np.cumsum([0, *parts]) / parts.sum() * total).astype(int)).tolist())


CAUSAL = Work("causal", bars=(0.70, 2.6))
STREAM = Work("packed", B=1, S=16384, lengths=(512,) * 32, bars=(0.17, 0.60))
DECODE = Work("one query, 32768 keys, 8 rows", B=8, S=1, L=32768, H=32, Hkv=8, bars=(0.33,), directions=DIRECTIONS[:1])
MASK = replace(CAUSAL, name="mask", mask="pairs", options={}, bars=(None, None))
BIAS = replace(CAUSAL, name="bias", B=2, bias="pairs", bars=(None, None))
FLOAT32 = replace(CAUSAL, name="float32", B=1, dtype="float32", bars=(None, None))
WINDOW = {"causal": True, "sliding_window": 1024}
WORKS = [
    CAUSAL,
    replace(CAUSAL, name="soft cap", options={"causal": True, "logits_soft_cap": 50.0}, bars=(0.90, 3.2)),
    replace(CAUSAL, name="sinks", sinks=1, bars=(0.72, 2.7)),
    STREAM,
    replace(STREAM, name="packed, ragged", lengths=ragged(32, 16384), bars=(0.21, 0.78)),
    # the same sequences as rows with ids and as one stream: the first is to take at most 1.1 times the second
    Work("segments", B=8, segments=ragged(8, 4096)),
    Work("segments, packed", B=1, S=8 * 4096, lengths=8 * ragged(8, 4096)),
    Work("D192 Dv128", B=2, D=192, Dv=128, bars=(0.55, 2.8)),
    replace(CAUSAL, name="window", options=WINDOW, bars=(0.36, 1.3), forced=False),
    DECODE,
    replace(DECODE, name="one query, 4096 keys", B=4, L=4096, H=16, Hkv=16, bars=(0.045,)),
    replace(DECODE, name="one query, 32768 keys", B=1, bars=(0.06,)),
    replace(CAUSAL, name="full", options={}, bars=(None, None)),
    replace(CAUSAL, name="grouped", H=32, Hkv=8, bars=(None, None)),
    replace(CAUSAL, name="D64", D=64, bars=(None, None)),
    replace(CAUSAL, name="D256", B=2, D=256, bars=(None, None)),
    replace(CAUSAL, name="D512", B=1, D=512, bars=(None, None)),
    MASK,
    replace(MASK, name="mask, causal", options={"causal": True}),
    replace(MASK, name="mask, odd length", S=4095),
    replace(MASK, name="mask of keys", mask="keys"),
    replace(MASK, name="mask, D64", D=64),
    replace(MASK, name="mask, D256", B=2, D=256),
    BIAS,
    replace(BIAS, name="bias without its gradient", bias_gradient=False),
    replace(BIAS, name="bias, odd length", S=4095),
    replace(BIAS, name="bias of keys", bias="keys"),
    replace(BIAS, name="bias, float32", bias_dtype="float32"),
    replace(BIAS, name="bias, D64", D=64),
    replace(BIAS, name="bias, D256", D=256),
    replace(CAUSAL, name="odd length", S=4095, bars=(None, None)),
    replace(CAUSAL, name="offset", S=2048, L=4096, offset=True, bars=(None, None)),
    replace(CAUSAL, name="log-sum-exp", options={"causal": True, "return_lse": True}, bars=(None, None)),
    replace(
        CAUSAL,
        name="dropout",
        options={"causal": True, "deterministic": False, "dropout_prob": 0.1},
        bars=(None, None),
    ),
    FLOAT32,
    replace(FLOAT32, name="float32, D256", D=256),
]
# outputs and their tangents, by `jax.jvp`
FORWARD_MODE = [replace(CAUSAL, name="causal, tangents", bars=(None,), directions=TANGENTS)]


def inputs(work: Work, seed: int) -> dict[str, Any]:
    """The array arguments, and the output's cotangent."""
    keys = jax.random.split(jax.random.key(seed), 7)
    normal = [
        jax.random.normal(key, shape, jnp.float32).astype(work.dtype)
        for key, shape in zip(keys[:4], work.shapes, strict=True)
    ]
    found: dict[str, Any] = dict(zip(("query", "key", "value", "d_output"), normal, strict=True))
    tokens = work.L or work.S
    if work.lengths:
        found["cu_seqlens"] = jnp.asarray(np.cumsum([0, *work.lengths]), jnp.int32)
    if work.segments:
        ids = np.repeat(np.arange(len(work.segments)), work.segments)
        found["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), (work.B, work.S))
    if work.decodes or work.offset:
        found["query_offset"] = jnp.full((work.B,), tokens - work.S, jnp.int32)
    if work.sinks:
        found["softmax_aux"] = jax.random.normal(keys[4], (work.H, work.sinks)).astype(work.dtype)
    if work.bias:
        shape = (1, work.H, work.S if work.bias == "pairs" else 1, tokens)
        found["bias"] = jax.random.normal(keys[5], shape).astype(work.bias_dtype)
    if work.mask:
        shape = (work.B, 1, work.S if work.mask == "pairs" else 1, tokens)
        found["attention_mask"] = jax.random.bernoulli(keys[6], 0.8, shape)
    if not work.options.get("deterministic", True):
        found["dropout_rng"] = keys[6]
    return found


def program(work: Work, direction: str, platform: str) -> Callable[[dict[str, Any]], dict[str, Array]]:
    """The call's results, or its output and gradients, or its output and tangent; by name."""

    def forward(arrays: dict[str, Any]) -> Any:
        arrays = {name: each for name, each in arrays.items() if name != "d_output"}
        return flash_attention(**arrays, **work.options, dtype=None, platform=platform)

    def run(arrays: dict[str, Any]) -> dict[str, Array]:
        names = ["query", "key", "value", "softmax_aux", *(["bias"] if work.bias_gradient else [])]
        moving = {name: arrays[name] for name in names if name in arrays}

        def moved(moving: dict[str, Any]) -> Any:
            return forward({**arrays, **moving})

        if direction == "tangents":
            # queries, keys and values stand for tangents of their own
            return dict(zip(("output", "tangent"), jax.jvp(moved, (moving,), (moving,)), strict=True))
        results, pull = (moved(moving), None) if direction == "forward" else jax.vjp(moved, moving)
        output, *lse = results if isinstance(results, tuple) else (results,)
        if pull is None:
            return dict(zip(("output", "lse"), (output, *lse), strict=False))
        return {"output": output} | pull((arrays["d_output"], *lse) if lse else arrays["d_output"])[0]

    return run


def error(work: Work, direction: str) -> float:
    """The largest of the first row's and key head's results, relative to float32 on XLA."""
    groups, arrays = work.H // (work.Hkv or work.H), inputs(work, 0)
    heads = dict.fromkeys(("query", "d_output", "output", "tangent"), groups) | {"key": 1, "value": 1}

    def cut(name: str, x: Any) -> Any:
        if name in ("cu_seqlens", "dropout_rng"):
            return x
        x = x[:groups] if name == "softmax_aux" else x[:1]
        x = x[:, :, : heads[name]] if name in heads else x[:, :groups] if name == "bias" else x
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    mine = jax.jit(program(work, direction, "triton"))(arrays)
    # which weights dropout leaves depends on the number of heads
    whole = not work.options.get("deterministic", True)
    with jax.default_matmul_precision("highest"):
        small = arrays if whole else {name: cut(name, each) for name, each in arrays.items()}
        expected = jax.jit(program(work, direction, "xla"))(small)
    # a bias for all rows, or a sink, has gradients from rows that were left out
    found = {name: relative_error(cut(name, mine[name]), cut(name, x)) for name, x in expected.items() if name in heads}
    if not max(found.values()) < (1e-5 if work.dtype == "float32" else 1e-2):
        raise RuntimeError(f"{direction}: errors {found}")
    return float(f"{max(found.values()):.2e}")


def chosen(work: Work) -> str:
    """Which implementation serves the call on an NVIDIA GPU."""
    shapes = jax.eval_shape(lambda: inputs(work, 0))
    del shapes["d_output"]
    found = explain(flash_attention, **shapes, **work.options, dtype=None).chosen
    return found.get("cuda", found["default"])


def measure(work: Work, bandwidth: float) -> list[Row]:
    """A row for each direction: times by platform, and whether that of the one that serves it is what was asked for."""
    sets = [inputs(work, seed) for seed in range(8 if work.decodes else 2)]
    rows = []
    for direction, bar in zip(work.directions, work.bars, strict=True):
        row: Row = {"name": work.name, "direction": direction, "bar_ms": bar, "chosen": chosen(work)}
        for platform in PLATFORMS:
            try:
                row[f"{platform}_ms"] = round(milliseconds(program(work, direction, platform), sets, work.decodes), 4)
            except PlatformError:
                continue
        held = "triton" if work.forced else row["chosen"]
        row["met"] = None if bar is None else row[f"{held}_ms"] <= bar
        rows.append(row | {"largest_error": error(work, direction)})
    return rows


def milliseconds(function: Callable[..., Any], sets: list[dict[str, Any]], at_once: bool) -> float:
    """The median of a call; short ones are started in one program, so that starting them does not count."""
    if not at_once:
        return clock(jax.jit(function), [(each,) for each in sets])[0]
    together = jax.jit(lambda sets: [function(each) for each in sets])
    return clock(together, [(sets,)])[0] / len(sets)


def flex(work: Work, bandwidth: float) -> list[Row]:
    """PyTorch's compiled `flex_attention` on the same shapes, where it can serve them."""
    dropped = not work.options.get("deterministic", True)
    if (
        work.directions != DIRECTIONS
        or work.sinks
        or dropped
        or work.dtype != "bfloat16"
        or (work.bias and work.bias_gradient)
    ):
        return []
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    cap, window = (work.options.get(name) for name in ("logits_soft_cap", "sliding_window"))
    with_lse = work.options.get("return_lse", False)
    keys, device = work.L or work.S, {"device": "cuda"}
    owner = kept = added = None
    if work.lengths or work.segments:
        lengths = work.lengths or work.segments
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).cuda()
    if work.mask:
        kept = torch.rand(work.B, work.S if work.mask == "pairs" else 1, keys, **device) < 0.8
    if work.bias:
        dtype = getattr(torch, work.bias_dtype)
        added = torch.randn(work.H, work.S if work.bias == "pairs" else 1, keys, dtype=dtype, **device)

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        given = None if kept is None else kept[b, i if work.mask == "pairs" else 0, j]
        if not work.options.get("causal"):
            return given
        seen = i + (keys - work.S) >= j
        seen = seen if given is None else seen & given
        if window is not None:
            seen = seen & (i - j <= window)
        return seen if owner is None else seen & (owner[i] == owner[j])

    def scored(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if added is None:
            return cap * torch.tanh(score / cap)
        return score + added[h, i if work.bias == "pairs" else 0, j]

    mask = None
    if work.options.get("causal") or work.mask:
        mask = create_block_mask(allowed, work.B if work.mask else None, None, work.S, keys, device="cuda")
    shapes = [(shape[0], shape[2], shape[1], shape[3]) for shape in work.shapes]
    made = [torch.randn(*shape, dtype=torch.bfloat16, **device) for shape in shapes]
    *moving, d_output = [each.requires_grad_() for each in made[:3]] + [made[3]]
    changed = scored if cap or work.bias else None

    def forward() -> Any:
        grouped = work.Hkv not in (0, work.H)
        return compiled(*moving, score_mod=changed, block_mask=mask, enable_gqa=grouped, return_lse=with_lse)

    def both() -> Any:
        output = forward()
        given = (d_output, torch.ones_like(output[1])) if with_lse else d_output
        return torch.autograd.grad(output, moving, given)

    from triton.testing import do_bench

    return [
        {"name": work.name, "direction": direction, "flex_ms": round(do_bench(function, return_mode="median"), 4)}
        for direction, function in zip(DIRECTIONS, (forward, both), strict=True)
    ]


PARTS = {"flash_attention": Part([*WORKS, *FORWARD_MODE], measure), "flex": Part(WORKS, flex)}
