"""Whole layers on one NVIDIA GPU, and 24 of them decoding a token: what they take beside their matrix products.

Times are of layers and of their projections alone. Counts are of the kernels that a program for an H200 starts, and of
the bytes that these read and write.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import described, hlo
from benchmarks.gpu import ops, rows, serving
from benchmarks.gpu.rows import Part, Row
from ejkernel import layers

WIDTH, KEYS, STEPS = 2048, 4096, 24
BF16 = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
LAYERS: dict[str, Callable[..., Any]] = {
    "GatedLinearAttention": partial(
        layers.GatedLinearAttention, WIDTH, heads=16, key_width=WIDTH, convolution=4, **BF16
    ),
    "GatedDeltaNet": partial(layers.GatedDeltaNet, WIDTH, key_heads=16, value_heads=16, **BF16),
    "KimiDeltaAttention": partial(layers.KimiDeltaAttention, WIDTH, heads=16, **BF16),
    "Mamba2": partial(layers.Mamba2, WIDTH, heads=64, **BF16),
    "MultiHeadAttention": partial(layers.MultiHeadAttention, WIDTH, heads=16, **BF16),
}


@dataclass(frozen=True)
class Work:
    """`B8 T4096` forward or with gradients, as many tokens packed, or one token of each row of a batch.

    `bar` are the milliseconds asked of one H200; of steps, those of `STEPS` layers.
    """

    layer: str
    kind: str
    batch: int = 8
    tokens: int = 4096
    bar: float | None = None

    @property
    def name(self) -> str:
        return f"{self.layer}, {self.kind}" + (f" B{self.batch}" if self.kind == "step" else "")

    @property
    def borders(self) -> Any:
        return ops.borders(self.tokens, 32)


def _works(layer: str, forward: float, gradients: float, alone: float, many: float) -> list[Work]:
    packed = {"batch": 1, "tokens": 32768}
    return [
        Work(layer, "forward", bar=forward),
        Work(layer, "gradients", bar=gradients),
        Work(layer, "packed forward", **packed, bar=forward),
        Work(layer, "packed gradients", **packed, bar=gradients),
        Work(layer, "step", 1, 1, bar=alone),
        Work(layer, "step", 64, 1, bar=many),
    ]


WORKS = [
    *_works("GatedLinearAttention", 2.7, 8.7, 0.55, 1.35),
    *_works("GatedDeltaNet", 2.9, 9.3, 0.55, 1.35),
    *_works("KimiDeltaAttention", 3.2, 9.8, 0.6, 1.4),
    *_works("Mamba2", 3.2, 10.3, 0.65, 2.3),
    Work("MultiHeadAttention", "step", 1, 1, bar=0.7),
]


def arguments(work: Work, count: int = 1) -> tuple[Any, ...]:
    """Parameters of `count` layers, what they carry, and the input; of training, the output's cotangent too."""
    graph, parameters = nnx.split([LAYERS[work.layer](rngs=nnx.Rngs(seed)) for seed in range(count)])
    x = serving.normal(work.batch, work.tokens, WIDTH)
    if work.kind != "step":
        return parameters, x, work.borders if "packed" in work.kind else None, x
    return parameters, [each.empty_cache(work.batch, KEYS) for each in nnx.merge(graph, parameters)], x


def program(work: Work, count: int = 1, *, projections: bool = False) -> Callable[..., Any]:
    """The work of `count` layers, or of their projections alone."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: [LAYERS[work.layer](rngs=nnx.Rngs(0)) for _ in range(count)]))

    def forward(parameters: Any, x: jax.Array, cu_seqlens: Any) -> Any:
        layer = nnx.merge(graph, parameters)[0]
        return _projected(layer, x) if projections else layer(x, cu_seqlens=cu_seqlens)[0]

    def gradients(parameters: Any, x: jax.Array, cu_seqlens: Any, cotangent: jax.Array) -> Any:
        output, pull = jax.vjp(lambda parameters, x: forward(parameters, x, cu_seqlens), parameters, x)
        return output, pull(jax.tree.map(lambda each: _as_wide(cotangent, each.shape), output))

    def step(parameters: Any, states: Any, x: jax.Array) -> Any:
        after = []
        for layer, state in zip(nnx.merge(graph, parameters), states, strict=True):
            output, state = (_projected(layer, x)[-1], state) if projections else layer(x, state)
            x = x + output
            after.append(state)
        return x, after

    if work.kind == "step":
        return step
    return gradients if "gradients" in work.kind else lambda *given: forward(*given[:3])


def _as_wide(cotangent: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The cotangent itself where it has this shape, as the layer's output's does."""
    return cotangent if cotangent.shape == shape else jnp.broadcast_to(cotangent[..., :1], shape)


def _projected(layer: Any, x: jax.Array) -> list[jax.Array]:
    """Each projection of as many tokens; those of other inputs than `x` get what has their width."""
    linears = [each for _, each in nnx.iter_graph(layer) if isinstance(each, nnx.Linear)]
    widest = max((each(x) for each in linears if each.in_features == WIDTH), key=lambda y: y.shape[-1])
    found = [each(x if each.in_features == WIDTH else widest[..., : each.in_features]) for each in linears]
    return [each for each in found if each.shape != x.shape] + [each for each in found if each.shape == x.shape]


def count(work: Work) -> dict[str, Any]:
    """What the program for an H200 starts; a step's is of one layer."""
    shapes = jax.eval_shape(partial(arguments, work))
    donated = 1 if work.kind == "step" else ()
    # XLA's own products of many tokens need a GPU to be tried out on
    options = {} if work.kind == "step" else {"xla_gpu_enable_triton_gemm": False}
    compiled = described.compiled(program(work), shapes, donated, **options)
    kernels, moved = collections.Counter[str](), collections.Counter[str]()
    for kind, _, size in hlo.launches(compiled.as_text()):
        whose = {"matmul": "products", "triton_kernel_call": "ours"}.get(kind, "others")
        kernels[whose] += 1
        moved[whose] += size
    if work.layer == "MultiHeadAttention":
        # of the cache a token is written where it is
        moved["ours"] -= 2 * _bytes(shapes[1][0][:2])
    found: dict[str, Any] = {"name": work.name, "parameters_mb": round(_bytes(shapes[0]) / 1e6, 1)}
    if work.kind == "step":
        found["carried_mb"] = round(_bytes(shapes[1]) / 1e6, 1)
    for whose in ("products", "ours", "others"):
        found |= {f"{whose}_kernels": kernels[whose], f"{whose}_mb": round(moved[whose] / 1e6, 1)}
    return found | {"temporaries_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)}


def _bytes(shapes: Any) -> int:
    return sum(each.size * each.dtype.itemsize for each in jax.tree.leaves(shapes))


def measure(work: Work, bandwidth: float) -> list[Row]:
    whole, projections = (_times(work, projections=each) for each in (False, True))
    row = rows.timed(work.name, whole, work.bar)
    return [row | {"projections_ms": round(projections[0], 4), "projections_spread_ms": round(projections[1], 4)}]


def _times(work: Work, *, projections: bool) -> tuple[float, float]:
    """Median milliseconds and their spread; steps donate what they carry."""
    layers = STEPS if work.kind == "step" else 1
    given = jax.jit(partial(arguments, work, layers))()
    function = jax.jit(program(work, layers, projections=projections), donate_argnums=1 if layers > 1 else ())
    states = given[1]

    def call(_: int) -> Any:
        nonlocal states
        if work.kind != "step":
            return function(*given)
        output, states = function(given[0], states, *given[2:])
        return output

    jax.block_until_ready(call(0))
    return rows.in_batches(call, 10)


PARTS = {
    "layers": Part([work for work in WORKS if work.kind != "step"], measure, count),
    "steps": Part([work for work in WORKS if work.kind == "step"], measure, count),
}
