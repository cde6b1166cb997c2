"""The recurrences and the short convolution on one NVIDIA GPU: times, memory and errors of their Triton kernels."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from benchmarks.gpu import rows
from benchmarks.gpu.rows import DIRECTIONS, Part, Row

ERRORS = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}  # the largest that a row may have, by its dtype
# of what is one number of a sequence and a head: a sum over tokens, which cancels but for its terms' roundings
CANCELS = {"d_g_gamma": 0.1}
CHANNELS = 128  # of a convolution that are checked, each computed by itself
Pair = tuple[float | None, float | None]
Arrays = dict[str, jax.Array]

# log decays, of normal numbers
GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mild": lambda x: jax.nn.log_sigmoid(x) / 16,
    "ordinary": jax.nn.log_sigmoid,
    "strong": lambda x: jax.nn.log_sigmoid(x) * 30,
    "Kimi-K3's": lambda x: -5 * jax.nn.sigmoid(x),
}
KEY_GATES, HEAD_GATES = ("recurrent_gla", "kda"), ("simple_gla", "gated_delta_rule")
DELTA_RULES = ("delta_rule", "gated_delta_rule", "kda")


@dataclass(frozen=True)
class Work:
    """A call of an op, forward and with all gradients.

    Attributes:
        name: What the pages call it.
        H: Heads of values; of a convolution, `H * K` are the channels.
        query_heads: Heads of queries and keys, `H` if 0.
        packed: Sequences of uneven lengths in the stream, by `cu_seqlens`.
        segments: Sequences of uneven lengths in every row, by `segment_ids`.
        state: Whether there is an initial state. That of one token is donated, and so updated in place.
        bars: Milliseconds promised on one H200, by direction.
        fla: Those of flash-linear-attention 0.6.0 on one H200.
    """

    name: str
    op: str
    B: int = 8
    T: int = 4096
    H: int = 16
    query_heads: int = 0
    K: int = 128
    V: int = 128
    dtype: str = "bfloat16"
    gates: str = "mild"
    packed: int = 0
    segments: int = 0
    state: bool = False
    bars: Pair = (None, None)
    fla: Pair = (None, None)
    directions: tuple[str, ...] = DIRECTIONS

    @property
    def steps(self) -> bool:
        return self.T == 1 and self.state


GLA = Work("recurrent_gla, mild gates", "recurrent_gla", fla=(1.37, 5.85), bars=(0.45, 1.65))
SIMPLE = Work("simple_gla", "simple_gla", fla=(0.38, 1.84), bars=(0.18, 0.72))
PLAIN_GLA = replace(GLA, fla=(None, None), bars=(None, None))
STEP = replace(PLAIN_GLA, B=256, T=1, state=True, directions=DIRECTIONS[:1])
FORWARD = replace(PLAIN_GLA, directions=DIRECTIONS[:1])
LINEAR_RECURRENCE = [
    GLA,
    replace(GLA, name="recurrent_gla, ordinary gates", gates="ordinary"),
    replace(GLA, name="recurrent_gla, Kimi-K3's gates", gates="Kimi-K3's"),
    replace(GLA, name="recurrent_gla, strong gates everywhere", gates="strong", bars=(1.1, 3.5)),
    SIMPLE,
    replace(SIMPLE, name="retention", op="retention"),
    replace(SIMPLE, name="recurrent, learned g_gamma", op="recurrent"),
    Work("linear_attention", "linear_attention"),
    replace(STEP, name="recurrent_gla, one token, B256", fla=(0.24, None), bars=(0.155, None)),
    replace(PLAIN_GLA, name="recurrent_gla, B1 T65536", B=1, T=65536, bars=(0.98, None)),
    replace(PLAIN_GLA, name="recurrent_gla, B2 T8192 H4", B=2, T=8192, H=4, bars=(0.11, None)),
    replace(PLAIN_GLA, name="recurrent_gla, B1 T32768", B=1, T=32768),
    replace(PLAIN_GLA, name="recurrent_gla, B1 T32768, 32 uneven sequences packed", B=1, T=32768, packed=32),
    replace(PLAIN_GLA, name="recurrent_gla, B32 T2048 H8 K64 V64", B=32, T=2048, H=8, K=64, V=64),
    replace(PLAIN_GLA, name="recurrent_gla, K64", K=64),
    replace(PLAIN_GLA, name="recurrent_gla, H8 K256 V256", H=8, K=256, V=256),
    replace(FORWARD, name="recurrent_gla, float32", dtype="float32"),
    replace(FORWARD, name="simple_gla, float32", op="simple_gla", dtype="float32"),
    replace(FORWARD, name="recurrent_gla, float16", dtype="float16"),
    replace(PLAIN_GLA, name="simple_gla, float16", op="simple_gla", dtype="float16"),
]

GATED = Work("gated_delta_rule", "gated_delta_rule", bars=(0.50, 1.9), fla=(0.84, None))
PLAIN_GATED = replace(GATED, bars=(None, None), fla=(None, None))
KDA = replace(GATED, name="kda, mild gates", op="kda", bars=(0.85, 3.0), fla=(1.76, 9.45))
DELTA_RULE = [
    GATED,
    replace(GATED, name="delta_rule", op="delta_rule", fla=(1.01, 2.83)),
    KDA,
    replace(KDA, name="kda, Kimi-K3's gates", gates="Kimi-K3's", bars=(0.95, 3.0), fla=(None, None)),
    replace(KDA, name="kda, strong gates everywhere", gates="strong", bars=(None, None), fla=(None, None)),
    replace(PLAIN_GATED, name="gated_delta_rule, B1 T65536", B=1, T=65536),
    replace(PLAIN_GATED, name="kda, B1 T65536", op="kda", B=1, T=65536),
    replace(PLAIN_GATED, name="gated_delta_rule, B32 T1024", B=32, T=1024),
    replace(PLAIN_GATED, name="gated_delta_rule, B1 T32768, 32 uneven sequences packed", B=1, T=32768, packed=32),
    replace(PLAIN_GATED, name="gated_delta_rule, float32", dtype="float32", directions=DIRECTIONS[:1]),
    replace(
        STEP, name="gated_delta_rule, one token, B256", op="gated_delta_rule", fla=(0.191, None), bars=(0.155, None)
    ),
]

# of queries and keys, and of values, as other libraries publish their times
HEADS = [
    replace(PLAIN_GATED, name=f"gated_delta_rule, heads {few}/{many}, B{B} T{T}", B=B, T=T, H=many, query_heads=few)
    for few, many in ((16, 16), (16, 32), (8, 32), (4, 16))
    for B, T in ((8, 4096), (1, 32768), (8, 1024), (1, 8192))
]

SEGMENTS = [
    replace(work, name=name, segments=segments)
    for op, work in (("recurrent_gla", PLAIN_GLA), ("simple_gla", SIMPLE), ("gated_delta_rule", GATED), ("kda", KDA))
    for name, segments in ((op, 0), (f"{op}, eight sequences a row", 8))
    for work in (replace(work, bars=(None, None), fla=(None, None)),)
]

# as in layers of width 2048: queries, keys and values side by side
ROWS = Work("rows", "causal_conv1d", H=48, bars=(0.23, 0.75))
PACKED = replace(ROWS, name="packed", B=1, T=32768, packed=32, bars=(1.05 * 0.23, 1.05 * 0.75))
CONVOLUTION = [
    ROWS,
    PACKED,
    replace(ROWS, name="rows, with a state", state=True, bars=(None, None)),
    replace(PACKED, name="packed, with a state", state=True, bars=(None, None), directions=DIRECTIONS[1:]),
    replace(ROWS, name="rows, float32", dtype="float32", bars=(None, None)),
    replace(ROWS, name="one token, B64", B=64, T=1, state=True, bars=(None, None), directions=DIRECTIONS[:1]),
]


def borders(total: int, sequences: int) -> np.ndarray:
    """`cu_seqlens` of sequences of uneven lengths that fill so many tokens."""
    parts = np.random.default_rng(0).exponential(size=sequences) + 0.1
    ends = np.round(np.cumsum(parts) / parts.sum() * total)
    return np.concatenate([[0], ends]).astype(np.int32)


def inputs(work: Work, direction: str, seed: int) -> Arrays:
    """The call's arrays by name, keys of delta rules of length 1; with gradients, the output's cotangent `d_output`."""
    draws = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int, dtype: Any = work.dtype) -> jax.Array:
        return jax.random.normal(next(draws), shape).astype(dtype)

    tokens, sequences = (work.B, work.T), work.packed or work.B
    if work.op == "causal_conv1d":
        channels = work.H * work.K
        found = {"x": normal(*tokens, channels), "weight": normal(4, channels, dtype="float32") / 2}
        output, state = (*tokens, channels), normal(sequences, 3, channels)
    else:
        few = work.query_heads or work.H
        found = {"query": normal(*tokens, few, work.K), "key": normal(*tokens, few, work.K)}
        found["value"] = normal(*tokens, work.H, work.V)
        output, state = found["value"].shape, normal(sequences, work.H, work.K, work.V, dtype="float32")
    if work.op in KEY_GATES + HEAD_GATES:
        shape = (*tokens, work.H, work.K) if work.op in KEY_GATES else (*tokens, work.H)
        found["g"] = GATES[work.gates](normal(*shape, dtype="float32"))
    if work.op == "recurrent":
        found["g_gamma"] = jnp.broadcast_to(jnp.log(1 - 2.0 ** (-5.0 - jnp.arange(work.H))), (sequences, work.H))
    if work.op in DELTA_RULES:
        length = jnp.linalg.norm(found["key"].astype(jnp.float32), axis=-1, keepdims=True)
        found["key"] = (found["key"] / length).astype(work.dtype)
        found["beta"] = jax.nn.sigmoid(normal(*tokens, work.H, dtype="float32"))
    if work.segments:
        ids = np.repeat(np.arange(work.segments), np.diff(borders(work.T, work.segments)))
        found["segment_ids"] = jnp.broadcast_to(jnp.asarray(ids, jnp.int32), tokens)
    if work.state:
        found["initial_state"] = state
    return found if direction == "forward" else found | {"d_output": normal(*output)}


def program(work: Work, direction: str, platform: str) -> Callable[[Arrays], Arrays]:
    """The call: its results, or its output and the gradients of all floating arrays, by name."""
    options: dict[str, Any] = {
        "platform": platform,
        "cu_seqlens": borders(work.T, work.packed) if work.packed else None,
    }
    if work.op == "causal_conv1d":
        options["activation"] = "silu"
    op = getattr(ejkernel, work.op)

    def forward(arrays: Arrays) -> Arrays:
        return dict(zip(("output", "state"), op(**arrays, **options), strict=True))

    def both(arrays: Arrays) -> Arrays:
        fixed = {name: arrays[name] for name in ("segment_ids",) if name in arrays}
        moving = {name: x for name, x in arrays.items() if name not in ("segment_ids", "d_output")}
        output, pull = jax.vjp(lambda moving: forward(moving | fixed)["output"], moving)
        return {"output": output} | {f"d_{name}": x for name, x in pull(arrays["d_output"])[0].items()}

    return forward if direction == "forward" else both


def part_of(work: Work, name: str, x: jax.Array) -> jax.Array:
    """What of an array is checked, in float32: the first row, and the heads that share the first head of queries."""
    name = name.removeprefix("d_")
    if work.op == "causal_conv1d":
        return x[..., :CHANNELS].astype(jnp.float32)
    x = x if work.packed else x[:1]
    if name == "segment_ids":
        return x
    axis = 1 if name in ("initial_state", "state", "g_gamma") else 2
    few = work.query_heads or work.H
    return jax.lax.slice_in_dim(x, 0, x.shape[axis] // few, axis=axis).astype(jnp.float32)


def errors(work: Work, direction: str, arrays: Arrays, results: Arrays) -> dict[str, float]:
    """Relative errors of what is checked of the results against XLA's in float32, by name."""
    small = {name: part_of(work, name, x) for name, x in arrays.items()}
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(program(work, direction, "xla"))(small)
    return {name: rows.relative_error(part_of(work, name, results[name]), x) for name, x in expected.items()}


def times(work: Work, sets: Sequence[Arrays], function: Callable[[Arrays], Arrays]) -> tuple[float, float]:
    """Median milliseconds of a call and their spread; a step's state is donated."""
    if not work.steps:
        return rows.clock(function, [(each,) for each in sets])
    others = {name: x for name, x in sets[0].items() if name != "initial_state"}
    step = jax.jit(lambda state, others: function(others | {"initial_state": state}), donate_argnums=0)
    states = [sets[0]["initial_state"] + 0]

    def again(_: int) -> jax.Array:
        states[0] = step(states[0], others)["state"]
        return states[0]

    rows.in_batches(again, 200, 2)
    return rows.in_batches(again, 200)


def measure(work: Work, bandwidth: float, platform: str = "triton") -> list[Row]:
    found = []
    for direction, bar, fla in zip(DIRECTIONS, work.bars, work.fla, strict=True):
        if direction not in work.directions:
            continue
        sets = [inputs(work, direction, seed) for seed in range(2)]
        function = jax.jit(program(work, direction, platform))
        start = time.perf_counter()
        compiled = function.lower(sets[0]).compile()
        compile_s = time.perf_counter() - start
        results = function(sets[0])
        wrong = errors(work, direction, sets[0], results)
        if not all(each < CANCELS.get(name, ERRORS[work.dtype]) for name, each in wrong.items()):
            raise RuntimeError(f"{direction}: errors {wrong}")
        moved = sum(x.nbytes for x in jax.tree.leaves((sets[0], results)))
        row = rows.timed(work.name, times(work, sets, function), bar)
        found.append(
            {
                **{"name": row.pop("name"), "direction": direction},
                **row,
                "floor_ms": round(moved / bandwidth * 1e3, 4),
                "fla_ms": fla,
                "largest_error": float(f"{max(wrong.values()):.2e}"),
                "beside_inputs_and_outputs_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
                "compile_s": round(compile_s, 2),
            }
        )
    return found


PARTS = {
    "linear_recurrence": Part(LINEAR_RECURRENCE, measure),
    "delta_rule": Part(DELTA_RULE, measure),
    "heads": Part(HEADS, measure),
    "segments": Part(SEGMENTS, measure),
    "convolution": Part(CONVOLUTION, measure),
}
