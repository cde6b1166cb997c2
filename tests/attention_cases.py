"""One table of softmax attention calls, for `attention` and `flash_attention` alike."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conftest import assert_close


@dataclass(frozen=True)
class Case:
    """A call: sizes, options passed on as they are, and how many heads each optional array has (0: not there)."""

    name: str
    batch: int = 2
    queries: int = 5
    keys: int = 5
    heads: int = 2
    kv_heads: int = 2
    key_dim: int = 4
    value_dim: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    mask_heads: int = 0
    bias_heads: int = 0
    sink_shape: tuple[int, ...] | None = None
    broadcast: bool = False  # one mask or bias for the whole batch
    dead: tuple[int, ...] = ()  # queries that may attend nowhere

    def __str__(self):
        return self.name.replace(" ", "-")

    def arrays(self, dtype=np.float64, seed=0):
        """The array arguments by name; floating ones in `dtype`."""
        random = np.random.default_rng(seed)

        def normal(*shape):
            return random.normal(size=shape).astype(dtype)

        found = {
            "query": normal(self.batch, self.queries, self.heads, self.key_dim),
            "key": normal(self.batch, self.keys, self.kv_heads, self.key_dim),
            "value": normal(self.batch, self.keys, self.kv_heads, self.value_dim),
        }
        rows = 1 if self.broadcast else self.batch
        if self.mask_heads:
            found["attention_mask"] = random.random((rows, self.mask_heads, self.queries, self.keys)) < 0.6
            found["attention_mask"][:, :, self.dead] = False
        if self.bias_heads:
            found["bias"] = normal(rows, self.bias_heads, self.queries, self.keys)
            found["bias"][random.random(found["bias"].shape) < 0.2] = -np.inf
            found["bias"][:, :, self.dead] = -np.inf
        if self.sink_shape:
            found["softmax_aux"] = normal(*self.sink_shape)
        return found


GROUPED = {"heads": 4, "kv_heads": 2}

CASES = [
    Case("plain"),
    Case("one token", queries=1, keys=1),
    Case("one query, mask", queries=1, keys=19, key_dim=5, value_dim=3, mask_heads=2, sink_shape=(1,)),
    Case("more keys", queries=3, keys=7, value_dim=6),
    Case("causal", options={"causal": True}),
    Case("causal, more keys", queries=3, keys=7, options={"causal": True}),
    Case("causal, more queries", queries=7, keys=3, options={"causal": True}),
    Case("window", queries=7, keys=7, options={"sliding_window": 1}),
    Case("window to the left", queries=7, keys=7, options={"sliding_window": (2, 0)}),
    Case("window to the right", queries=7, keys=7, options={"sliding_window": (0, 2)}),
    Case("window past the keys", queries=8, keys=3, options={"sliding_window": (1, 1)}),
    Case("causal window", queries=7, keys=7, options={"sliding_window": (2, 3), "causal": True}),
    Case("grouped", **GROUPED, value_dim=3),
    Case("one key head", heads=3, kv_heads=1, options={"causal": True}),
    Case("mask", mask_heads=1, dead=(2,)),
    Case("mask by group", **GROUPED, mask_heads=2, dead=(0,), options={"causal": True}),
    Case("mask by head", **GROUPED, mask_heads=4),
    Case("mask for all", mask_heads=1, broadcast=True, options={"sliding_window": 2}),
    Case("bias", bias_heads=1, options={"causal": True}),
    Case("bias by group", **GROUPED, bias_heads=2, dead=(1, 3)),
    Case("bias by head", **GROUPED, bias_heads=4, broadcast=True),
    # `attention` ignores the mask, `flash_attention` does not
    Case("bias and mask", bias_heads=2, mask_heads=1, dead=(3,)),
    Case("scale", options={"softmax_scale": 0.3}),
    Case("soft cap", options={"logits_soft_cap": 0.8}, **GROUPED),
    Case("sinks", sink_shape=(3,), **GROUPED),
    Case("no sinks", sink_shape=(2, 0)),
    Case("sinks by group", sink_shape=(2, 1), **GROUPED, options={"causal": True}),
    Case("sinks by head", sink_shape=(4, 2), **GROUPED, mask_heads=1, dead=(4,)),
    Case(
        "everything",
        queries=6,
        keys=8,
        **GROUPED,
        value_dim=3,
        options={"causal": True, "sliding_window": (3, 1), "logits_soft_cap": 2.0, "softmax_scale": 0.7},
        bias_heads=4,
        sink_shape=(2, 2),
        dead=(3,),
    ),
]

PACKED = [
    Case("packed", batch=1, queries=9, keys=9, options={"cu_seqlens": [0, 3, 5, 9]}),
    Case("packed, padding", batch=1, queries=9, keys=9, options={"cu_seqlens": [0, 0, 4, 4, 7], "causal": True}),
    Case("packed, nothing", batch=1, queries=4, keys=4, options={"cu_seqlens": [0]}),
    Case(
        "packed, two streams",
        **GROUPED,
        batch=1,
        queries=8,
        keys=11,
        value_dim=3,
        options={"cu_seqlens": [0, 2, 5, 5, 7], "cu_seqlens_kv": [0, 4, 4, 7, 10], "sliding_window": (1, 2)},
    ),
    Case(
        "packed, everything",
        **GROUPED,
        batch=1,
        queries=10,
        keys=12,
        options={
            "cu_seqlens": [0, 4, 4, 9],
            "cu_seqlens_kv": [0, 5, 6, 12],
            "query_offset": np.array([1, 0, 2]),
            "causal": True,
            "sliding_window": (3, 0),
            "logits_soft_cap": 2.0,
        },
        bias_heads=2,
        mask_heads=1,
        sink_shape=(4, 2),
    ),
    Case("packed, mask", batch=1, queries=9, keys=9, mask_heads=1, dead=(1,), options={"cu_seqlens": [0, 4, 8]}),
]

SEGMENTED = [
    # an id that comes back, padding between sequences and at the ends, a row of padding alone
    Case(
        "segments",
        batch=3,
        queries=9,
        keys=9,
        **GROUPED,
        options={
            "segment_ids": np.array([[1, 1, 1, 0, 0, 7, 7, 1, 1], [-1, 2, 2, -3, 3, 3, 3, -1, -1], [-1] * 9]),
            "causal": True,
        },
    ),
    Case(
        "segments, two streams",
        queries=7,
        keys=10,
        value_dim=3,
        options={
            "segment_ids": np.array([[0, 0, 4, 4, 4, 9, 2], [5, 5, -1, 3, 3, 3, 3]], np.int32),
            "segment_ids_kv": np.array([[0, 4, 4, 4, 2, 2, 0, 0, 1, 1], [3] * 4 + [-1, -1] + [6] * 4], np.int32),
        },
        sink_shape=(2, 2),
    ),
    Case(
        "segments, everything",
        queries=8,
        keys=10,
        **GROUPED,
        value_dim=3,
        options={
            "segment_ids": np.array([[2, 2, 2, 5, 5, 5, -1, 2], [1] * 5 + [0] * 3]),
            "segment_ids_kv": np.array([[2, 2, 2, 2, 5, 5, 5, 2, 2, -1], [1] * 6 + [0] * 4]),
            "query_offset": np.array([1, 2]),
            "causal": True,
            "sliding_window": (4, 1),
            "logits_soft_cap": 2.0,
        },
        bias_heads=2,
        mask_heads=1,
        sink_shape=(4, 2),
        dead=(2,),
    ),
]

OFFSET = [
    Case("decoding", queries=1, keys=8, options={"causal": True, "query_offset": 5}),
    Case("prefill", queries=4, keys=8, **GROUPED, options={"sliding_window": (2, 1), "query_offset": 3}),
    Case("offset by row", queries=4, keys=8, options={"causal": True, "query_offset": np.array([4, -2])}),
    Case("offset beyond int32", queries=4, keys=8, options={"causal": True, "query_offset": 2**31 - 1}),
    Case(
        "window with offsets beyond int32",
        batch=4,
        queries=4,
        keys=8,
        options={"sliding_window": (2, 2**30), "query_offset": np.array([2**31 - 1, 2**40, -(2**40), 1])},
    ),
]

# few queries for each key, which a CPU multiplies without matrix products
FEW = [
    Case(
        "one query, everything",
        queries=1,
        keys=9,
        **GROUPED,
        key_dim=5,
        value_dim=3,
        options={
            "causal": True,
            "sliding_window": (5, 0),
            "query_offset": np.array([7, 2]),
            "logits_soft_cap": 2.0,
            "softmax_scale": 0.7,
        },
        mask_heads=4,
        bias_heads=1,
        sink_shape=(4, 2),
    ),
    Case("one query a key", queries=1, keys=37, key_dim=5, mask_heads=1, sink_shape=(2,)),
    Case("few queries, mask", queries=2, keys=19, **GROUPED, key_dim=1, mask_heads=2, dead=(1,)),
    Case(
        "few queries, packed",
        batch=1,
        queries=4,
        keys=11,
        options={"cu_seqlens": [0, 1, 3], "cu_seqlens_kv": [0, 4, 9], "query_offset": np.array([3, 2]), "causal": True},
    ),
    Case(
        "few queries, segments",
        queries=2,
        keys=11,
        **GROUPED,
        options={
            "segment_ids": np.array([[3, 4], [-1, 0]]),
            "segment_ids_kv": np.array([[3, 3, 3, 4, 4, 4, 4, 3, -1, -1, -1], [0] * 11]),
            "query_offset": 7,
            "causal": True,
        },
        sink_shape=(1,),
    ),
]

# what blocks could get wrong; the rest of `CASES` only differs in what is done to a single score
BLOCKWISE = [
    each
    for each in CASES
    if each.name
    in {
        "more keys",
        "causal, more keys",
        "causal, more queries",
        "window",
        "window to the right",
        "window past the keys",
        "causal window",
        "one key head",
        "mask by group",
        "mask for all",
        "bias",
        "bias by group",
        "bias and mask",
        "soft cap",
        "no sinks",
        "sinks by head",
        "everything",
    }
]

EMPTY = [Case("no queries", queries=0), Case("no keys", keys=0, sink_shape=(2,)), Case("no rows", batch=0)]


# most of a test's time goes into compiling, and what is compiled runs once
QUICK = {"xla_backend_optimization_level": 0}


def differentiable(arrays):
    """The names of the arrays that have a gradient."""
    return [name for name, each in arrays.items() if jnp.issubdtype(each.dtype, jnp.floating)]


def results_and_gradients(function, arrays, cotangents):
    """What `function` of the arrays by name returns, and the gradients of its product with `cotangents` by name."""
    moving = {name: arrays[name] for name in differentiable(arrays)}
    fixed = {name: each for name, each in arrays.items() if name not in moving}
    return _with_gradients(function)(moving, fixed, cotangents)


# so that properties, which call the same function with many values, compile it once
@functools.lru_cache(maxsize=32)
def _with_gradients(function):
    def run(moving, fixed, cotangents):
        results, pull = jax.vjp(lambda moving: function(**moving, **fixed), moving)
        return results, pull(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, results))[0]

    return jax.jit(run, compiler_options=QUICK)


def check(function, expected, arrays, tolerance, slope_tolerance=1e-7, directions=3):
    """Compares results of `function` with those of `expected`, and its gradients with differences of `expected`.

    Both take the arrays by name and return a tuple of arrays; the gradients are compared along random directions.
    """
    random = np.random.default_rng(1)
    right = expected(**arrays)
    finite = tuple(np.isfinite(each) for each in right)
    cotangents = tuple(np.where(each, random.normal(size=each.shape), 0) for each in finite)
    results, gradients = results_and_gradients(function, arrays, cotangents)
    for i, (actual, each, real) in enumerate(zip(results, right, finite, strict=True)):
        assert (np.isfinite(actual) == real).all()
        assert_close(np.where(real, actual, 0), np.where(real, each, 0), tolerance, f"result {i}")

    def product(results):
        return sum((np.where(f, x, 0) * c).sum() for x, f, c in zip(results, finite, cotangents, strict=True))

    for name in gradients:
        for _ in range(directions):
            direction = random.normal(size=arrays[name].shape)
            above, below = (
                product(expected(**{**arrays, name: arrays[name] + step * direction})) for step in (1e-5, -1e-5)
            )
            difference, slope = (above - below) / 2e-5, (np.asarray(gradients[name]) * direction).sum()
            assert abs(slope - difference) <= slope_tolerance * max(1.0, abs(difference)), (
                f"gradient of {name}: {slope}, expected {difference}"
            )


def check_second_gradients(function, arrays, names, tolerance=1e-6):
    """Compares the gradient of a product with the gradient of `function` with differences of that product."""
    random = np.random.default_rng(2)
    directions = {name: random.normal(size=arrays[name].shape) for name in names}
    fixed = {name: each for name, each in arrays.items() if name not in names}
    moving = {name: arrays[name] for name in names}

    def product(moving):
        gradients = jax.grad(lambda moving: (function(**moving, **fixed) ** 2).sum())(moving)
        return sum((gradients[name] * directions[name]).sum() for name in names)

    run = jax.jit(jax.value_and_grad(product), compiler_options=QUICK)
    second = run(moving)[1]
    for name in names:
        step = 1e-5 * random.normal(size=arrays[name].shape)
        above, below = (run({**moving, name: arrays[name] + each})[0] for each in (step, -step))
        slope, difference = (np.asarray(second[name]) * step).sum() * 2, above - below
        scale = max(np.abs(second[name]).max(), 1.0) * np.abs(step).sum()
        assert abs(slope - difference) <= tolerance * scale, f"second gradient of {name}: {slope}, not {difference}"
