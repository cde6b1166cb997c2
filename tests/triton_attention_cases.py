"""Calls of softmax attention for its Triton kernels: long enough for several tiles, on the CPU and on a GPU."""

from dataclasses import replace

import jax
import numpy as np
import oracle
from attention_cases import Case

from ejkernel.attention import flash_attention

GROUPED = {"heads": 4, "kv_heads": 2}
PACKED = {"batch": 1, "queries": 70, "keys": 70}
EVERYTHING = {"causal": True, "logits_soft_cap": 2.0, "softmax_scale": 0.7}

LONG = [
    Case("causal", queries=40, keys=40, options={"causal": True}),
    Case("full", queries=33, keys=49, **GROUPED, key_dim=20, value_dim=40),
    Case("window", queries=50, keys=37, options={"sliding_window": (9, 5)}),
    Case("causal window", queries=64, keys=64, options={"sliding_window": 20, "causal": True}, sink_shape=(2, 1)),
    Case("window beside the keys", queries=50, keys=20, options={"sliding_window": (3, 0)}, sink_shape=(1,)),
    Case("negative scale", queries=20, keys=33, options={"softmax_scale": -0.4}),
    Case("soft cap", queries=35, keys=35, options={"logits_soft_cap": 1.5, "causal": True}),
    Case("offset", queries=20, keys=50, options={"causal": True, "query_offset": 28}),
    Case("offset by row", queries=20, keys=50, options={"causal": True, "query_offset": np.array([40, -7])}),
    Case("mask", queries=40, keys=50, mask_heads=2, **GROUPED, dead=(3, 17), options={"causal": True}),
    Case("bias", queries=40, keys=50, bias_heads=4, **GROUPED, broadcast=True, dead=(3, 17)),
    Case("bias by row", queries=20, keys=33, bias_heads=1, options={"sliding_window": 9}, sink_shape=(3,)),
    Case("packed", **PACKED, **GROUPED, options={"cu_seqlens": [0, 3, 3, 40, 64], "causal": True}, sink_shape=(4, 2)),
    Case("packed, windowed", **PACKED, options={"cu_seqlens": [0, 33, 70], "sliding_window": (5, 7)}),
    # more than are looked at together
    Case(
        "packed, many",
        batch=1,
        heads=1,
        kv_heads=1,
        queries=90,
        keys=90,
        options={"cu_seqlens": [*range(70), 90], "causal": True},
    ),
    Case(
        "packed, two streams",
        batch=1,
        queries=50,
        keys=90,
        **GROUPED,
        value_dim=3,
        options={
            "cu_seqlens": [0, 20, 20, 45],
            "cu_seqlens_kv": [0, 30, 37, 85],
            "query_offset": np.array([10, 0, 23]),
            "sliding_window": (12, 2),
        },
    ),
    # an id that comes back, sequences of several whole blocks, padding at both ends
    Case(
        "segments",
        queries=100,
        keys=100,
        **GROUPED,
        options={
            "segment_ids": np.stack(
                [np.repeat([5, 2, 5, 7], [3, 60, 20, 17]), np.repeat([-1, 0, 1, 2, 3, -1], [18, 50, 1, 1, 20, 10])]
            ),
            "causal": True,
        },
        sink_shape=(4, 2),
    ),
    Case(
        "segments, two streams",
        queries=50,
        keys=90,
        value_dim=3,
        options={
            "segment_ids": np.stack([np.repeat([4, 3, 9], [20, 25, 5]), np.repeat([1, 1, -1], [20, 25, 5])]),
            "segment_ids_kv": np.stack([np.repeat([3, 4, 3], [40, 30, 20]), np.repeat([0, 1, 2], [10, 70, 10])]),
            "query_offset": np.array([30, 10]),
            "sliding_window": (40, 30),
        },
    ),
    Case(
        "segments, everything",
        queries=70,
        keys=70,
        **GROUPED,
        value_dim=6,
        options={
            **EVERYTHING,
            "segment_ids": np.stack([np.repeat([0, 1, -1], [30, 34, 6]), np.repeat([8, 6, 7], [40, 2, 28])]),
            "sliding_window": (20, 3),
        },
        bias_heads=2,
        mask_heads=1,
        sink_shape=(2, 2),
        dead=(5,),
    ),
    Case(
        "everything",
        **PACKED,
        **GROUPED,
        value_dim=6,
        options={**EVERYTHING, "cu_seqlens": [0, 30, 64], "sliding_window": (20, 3)},
        bias_heads=2,
        sink_shape=(2, 2),
        dead=(5,),
    ),
]
FEW = [
    Case("one query", queries=1, keys=70, **GROUPED, options={"causal": True, "query_offset": np.array([60, 3])}),
    Case("one of one head", queries=1, keys=40, key_dim=20, value_dim=7),
    Case("some", queries=5, keys=70, **GROUPED, options={"causal": True, "query_offset": np.array([60, -2])}),
    Case("windowed", queries=2, keys=70, options={"sliding_window": (20, 0), "query_offset": 50}, sink_shape=(2, 1)),
    Case("masked", queries=3, keys=70, **GROUPED, mask_heads=1, dead=(1,), sink_shape=(4, 1)),
    Case(
        "segments",
        queries=3,
        keys=70,
        **GROUPED,
        options={
            "segment_ids": np.array([[3, 8, 3], [-1, 0, 1]]),
            "segment_ids_kv": np.stack([np.repeat([3, 8, 3], [20, 30, 20]), np.repeat([1, -1, 2], [30, 20, 20])]),
        },
        sink_shape=(4, 1),
    ),
    Case(
        "all at once",
        queries=3,
        keys=50,
        **GROUPED,
        bias_heads=4,
        options={**EVERYTHING, "query_offset": 40},
        dead=(1,),
    ),
]


def expected(case):
    """The oracle as a function of the arrays by name."""
    return lambda **arrays: oracle.flash_attention(**arrays, **case.options)


def options_of(case):
    """The options, with borders as arrays."""
    borders = {name: np.array(each, np.int32) for name, each in case.options.items() if name.startswith("cu_")}
    return {**case.options, **borders}


def flash(case, **more):
    return lambda **arrays: flash_attention(**arrays, **options_of(case), **{"dtype": None, **more})


def directions(arrays, seed=3):
    """Of each array that moves, a direction, by name."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=x.shape).astype(x.dtype) for name, x in arrays.items() if x.dtype != bool}


def tangents(case, arrays, moved, **more):
    """Output and log-sum-exp, and their tangents along `moved`, a direction of some of the arrays."""
    fixed = {name: each for name, each in arrays.items() if name not in moved}
    run = lambda moving: flash(case, return_lse=True, **more)(**moving, **fixed)  # noqa: E731
    return jax.jvp(run, ({name: arrays[name] for name in moved},), (moved,))


def differences(case, arrays, moved):
    """The tangents of output and log-sum-exp along `moved`, from the oracle in float64."""
    wide = {name: np.asarray(x, bool if x.dtype == bool else np.float64) for name, x in arrays.items()}
    step = {name: 1e-6 * np.asarray(x, np.float64) for name, x in moved.items()}
    above, below = (
        expected(case)(**{name: x + sign * step[name] if name in step else x for name, x in wide.items()})
        for sign in (1, -1)
    )
    with np.errstate(invalid="ignore"):  # of rows that see nothing
        return [np.nan_to_num((a - b) / 2e-6) for a, b in zip(above, below, strict=True)]


def with_gradients(function, arrays, cotangent):
    """What `function` of the arrays by name returns, and its gradients."""
    fixed = {name: each for name, each in arrays.items() if each.dtype == bool}
    moving = {name: each for name, each in arrays.items() if name not in fixed}
    results, pull = jax.vjp(lambda moving: function(**moving, **fixed), moving)
    return results, pull(cotangent)[0]


def exact(case, arrays, d_output, d_lse):
    """Output, log-sum-exp and gradients by name, in float64, with all weights at once."""
    f64 = {name: np.asarray(each, bool if each.dtype == bool else np.float64) for name, each in arrays.items()}
    query, key, value = (f64[name] for name in ("query", "key", "value"))
    (batch, queries, heads, dim), (keys, kv_heads) = query.shape, key.shape[1:3]
    options = case.options
    key, value = (np.repeat(each, heads // kv_heads, 2) for each in (key, value))
    scale, cap = options.get("softmax_scale") or dim**-0.5, options.get("logits_soft_cap")
    scores, slope = np.einsum("bihd,bjhd->bhij", query, key) * scale, 1.0
    if cap:
        slope = 1 - np.tanh(scores / cap) ** 2
        scores = cap * np.tanh(scores / cap)

    def by_head(x, axis):
        return np.repeat(x, heads // x.shape[axis], axis)

    allowed = _in_sight(case, batch, queries, keys)[:, None]
    if "attention_mask" in f64:
        allowed = allowed & by_head(f64["attention_mask"], 1)
    if "bias" in f64:
        scores = scores + by_head(f64["bias"], 1)
    scores = np.where(allowed, scores, -np.inf)
    sinks = by_head(np.atleast_2d(f64.get("softmax_aux", np.zeros((1, 0)))), 0)
    logits = np.broadcast_to(sinks[None, :, None], (batch, heads, queries, sinks.shape[1]))
    logits = np.concatenate([scores, logits], -1)
    top = np.maximum(logits.max(-1, initial=-1e300, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    padding = np.broadcast_to(_padding(case, queries)[:, None], lse.shape)
    lse = np.where(padding, -np.inf, lse)
    weights = np.exp(scores - np.where(lse == -np.inf, 0, lse)[..., None])
    output = np.einsum("bhij,bjhd->bihd", weights, value)
    d_output = np.asarray(d_output, np.float64)
    mean = np.einsum("bihd,bihd->bhi", d_output, output) - np.swapaxes(np.asarray(d_lse, np.float64), 1, 2)
    mean = np.where(padding, 0, mean)
    d_scores = weights * (np.einsum("bihd,bjhd->bhij", d_output, value) - mean[..., None])
    found = {"query": np.einsum("bhij,bjhd->bihd", d_scores * slope, key) * scale}
    found["key"] = np.einsum("bhij,bihd->bjhd", d_scores * slope, query) * scale
    found["value"] = np.einsum("bhij,bihd->bjhd", weights, d_output)
    if "bias" in f64:
        found["bias"] = _summed(d_scores, 1, f64["bias"].shape)
    if "softmax_aux" in f64:
        share = -np.exp(sinks[None, :, None] - np.where(lse == -np.inf, np.inf, lse)[..., None]) * mean[..., None]
        found["softmax_aux"] = _summed(share.sum((0, 2)), 0, (f64["softmax_aux"].shape[:-1] or (1,)) + sinks.shape[1:])
    found = {
        name: _summed(each, 2, f64[name].shape) if name in ("key", "value") else each for name, each in found.items()
    }
    return output, lse.swapaxes(1, 2), {name: each.reshape(f64[name].shape) for name, each in found.items()}


def _padding(case, queries):
    """Which queries belong to no sequence, `[1 or B, S]`."""
    if "segment_ids" in case.options:
        return case.options["segment_ids"] < 0
    return np.arange(queries)[None] >= case.options.get("cu_seqlens", [queries])[-1]


def _in_sight(case, batch, queries, keys):
    """Which pairs position allows, `[B, S, L]`."""
    options = case.options
    cu, cu_kv = options.get("cu_seqlens"), options.get("cu_seqlens_kv") or options.get("cu_seqlens")
    window = options.get("sliding_window")
    left, right = (keys + queries,) * 2 if window is None else window if isinstance(window, tuple) else (window,) * 2
    spans = [(row, 0, queries, 0, keys) for row in range(batch)]
    if cu is not None:
        spans = [(0, *cu[n : n + 2], *cu_kv[n : n + 2]) for n in range(len(cu) - 1)]
    allowed = np.zeros((batch, queries, keys), bool)
    offsets = np.broadcast_to(options.get("query_offset", 0), len(spans))
    for (row, i, i_end, j, j_end), offset in zip(spans, offsets, strict=True):
        distance = np.arange(j_end - j) - np.arange(i_end - i)[:, None] - offset
        seen = (distance >= -left) & (distance <= (0 if options.get("causal") else right))
        allowed[row, i:i_end, j:j_end] = seen if window is not None or options.get("causal") else True
    if "segment_ids" in options:
        ids = options["segment_ids"]
        allowed &= (ids[:, :, None] == options.get("segment_ids_kv", ids)[:, None]) & (ids >= 0)[:, :, None]
    return allowed


def _summed(x, heads_axis, shape):
    """`x` summed over what `shape` has fewer of: heads by group, and axes of 1."""
    x = x.reshape(*x.shape[:heads_axis], shape[heads_axis], -1, *x.shape[heads_axis + 1 :]).sum(heads_axis + 1)
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return x.sum(axes, keepdims=True)


def scaled(case, times, **dims):
    """`case` with so many times the tokens."""

    def longer(each):
        if isinstance(each, bool | float):
            return each
        return (
            [x * times for x in each]
            if isinstance(each, list)
            else tuple(x * times for x in each)
            if isinstance(each, tuple)
            else each * times
        )

    options = {name: longer(each) for name, each in case.options.items() if not name.startswith("segment")}
    for name in case.options.keys() - options.keys():
        repeated = 1 if case in FEW and name == "segment_ids" else times
        options[name] = np.repeat(case.options[name], repeated, axis=1)
    queries = case.queries if case in FEW else case.queries * times
    return replace(case, queries=queries, keys=case.keys * times, options=options, **dims)
