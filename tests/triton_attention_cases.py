"""Calls of softmax attention for its Triton kernels: long enough for several tiles, on the CPU and on a GPU."""

import jax
import numpy as np
import oracle
from attention_cases import Case

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
        "all at once", queries=3, keys=50, **GROUPED, bias_heads=4, options={**EVERYTHING, "query_offset": 40}, dead=(1,)
    ),
]


def expected(case):
    """The oracle as a function of the arrays by name."""
    return lambda **arrays: oracle.flash_attention(**arrays, **case.options)


def options_of(case):
    """The options, with borders as arrays."""
    borders = {name: np.array(each, np.int32) for name, each in case.options.items() if name.startswith("cu_")}
    return {**case.options, **borders}


def with_gradients(function, arrays, cotangent):
    """What `function` of the arrays by name returns, and its gradients."""
    fixed = {name: each for name, each in arrays.items() if each.dtype == bool}
    moving = {name: each for name, each in arrays.items() if name not in fixed}
    results, pull = jax.vjp(lambda moving: function(**moving, **fixed), moving)
    return results, pull(cotangent)[0]
