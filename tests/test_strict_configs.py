"""JAX's strict settings, which many codebases run their tests under, break no op: values and gradients."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import token_by_token

import ejkernel
from ejkernel import parallel, xla_utils


@contextlib.contextmanager
def no_promotion():
    """Whatever would be made alike by JAX, ranks or dtypes, is an error."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@dataclass(frozen=True)
class Row:
    """A call: `op` takes arrays of these shapes by name, and returns one or several."""

    name: str
    op: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    dtype: Any = np.float32

    def __str__(self):
        return self.name

    def arrays(self):
        random = np.random.default_rng(0)
        found = {name: random.normal(size=shape) for name, shape in self.shapes.items()}
        # gates that grow would overflow
        found |= {name: -np.abs(x) for name, x in found.items() if name.startswith("g")}
        found |= {name: np.tanh(np.abs(x)) for name, x in found.items() if name == "beta"}
        return {name: jnp.asarray(x, self.dtype) for name, x in found.items()}


def heads(tokens=(2, 20), heads=4, kv_heads=2):
    """Shapes of query, key and value."""
    shapes = {"query": (*tokens, heads, 8), "key": (*tokens, kv_heads, 8)}
    return shapes | {"value": shapes["key"]}


MESH = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
MASK = np.random.default_rng(1).random((2, 1, 20, 20)) < 0.6
EVERYTHING = {"causal": True, "sliding_window": (9, 3), "logits_soft_cap": 3.0, "softmax_scale": 0.4}
DROPOUT = {"deterministic": False, "dropout_prob": 0.2, "dropout_rng": jax.random.PRNGKey(0)}
SINKS, BIAS = {"softmax_aux": (2, 1)}, {"bias": (2, 4, 20, 20)}
PADDED = {"cu_seqlens": np.array([0, 3, 3, 11, 15], np.int32)}
SEGMENTS = np.arange(40).reshape(2, 20) // 7 - 1
TIME = {"axis_name": "time", "mesh": MESH}
RING = TIME | {"causal": True}
FIRST = {"head_first": True, "reverse": True}

ROWS = [
    row
    for dtype in (np.float32, jnp.bfloat16)
    for row in (
        Row("attention", partial(ejkernel.attention, dtype=None), heads(), dtype),
        Row("attention, mask", partial(ejkernel.attention, attention_mask=MASK, **DROPOUT), heads(), dtype),
        Row("attention, everything", partial(ejkernel.attention, **EVERYTHING), heads() | SINKS | BIAS, dtype),
        Row("flash_attention", ejkernel.flash_attention, heads(), dtype),
        Row("flash_attention, mask", partial(ejkernel.flash_attention, attention_mask=MASK, **DROPOUT), heads(), dtype),
        Row(
            "flash_attention, everything",
            partial(ejkernel.flash_attention, **EVERYTHING, query_offset=np.array([2, 0]), block_sizes=(7, 4)),
            heads() | SINKS | BIAS,
            dtype,
        ),
        Row("flash_attention, packed", partial(ejkernel.flash_attention, causal=True, **PADDED), heads((20,)), dtype),
        Row(
            "flash_attention, packed with sinks",
            partial(ejkernel.flash_attention, **PADDED, query_offset=1, sliding_window=2),
            heads((20,)) | SINKS,
            dtype,
        ),
        Row(
            "flash_attention, segments",
            partial(ejkernel.flash_attention, **EVERYTHING, segment_ids=SEGMENTS, block_sizes=(7, 4)),
            heads() | SINKS | BIAS,
            dtype,
        ),
        Row("flash_attention, scale", ejkernel.flash_attention, heads() | {"softmax_scale": ()}, dtype),
        Row("parallel.flash_attention", partial(parallel.flash_attention, **RING), heads() | SINKS, dtype),
        Row("parallel, segments", partial(parallel.flash_attention, **RING, segment_ids=SEGMENTS), heads(), dtype),
        Row("parallel, packed", partial(parallel.flash_attention, **RING, **PADDED), heads((20,)) | SINKS, dtype),
        Row(
            "parallel.recurrent",
            partial(parallel.recurrent, **TIME),
            heads() | {"gk": (2, 20, 4, 8), "g_gamma": (4,), "initial_state": (4, 8, 8)},
            dtype,
        ),
        Row(
            "parallel.simple_gla",
            partial(parallel.simple_gla, **TIME, reverse=True),
            heads() | {"g": (2, 20, 4)},
            dtype,
        ),
        Row("parallel.retention, segments", partial(parallel.retention, **TIME, segment_ids=SEGMENTS), heads(), dtype),
        Row(
            "parallel.delta_rule, segments",
            partial(parallel.delta_rule, **TIME, segment_ids=SEGMENTS),
            heads() | {"beta": (2, 20, 4)},
            dtype,
        ),
        Row("parallel.retention, packed", partial(parallel.retention, **TIME, **PADDED), heads((20,)), dtype),
        Row(
            "local sum, packed",
            partial(xla_utils.chunk_local_cumsum, chunk_size=4, **PADDED),
            {"g": (1, 20, 3, 2)},
            dtype,
        ),
        Row("sum", partial(xla_utils.chunk_global_cumsum, **FIRST), {"s": (2, 3, 20), "softmax_scale": ()}, dtype),
        Row(
            "sum, packed",
            partial(xla_utils.chunk_global_cumsum, **FIRST, **PADDED, output_dtype=np.float16),
            {"s": (1, 3, 20, 2)},
            dtype,
        ),
    )
]


LINEAR = {"query": (2, 70, 4, 8), "key": (2, 70, 2, 8), "value": (2, 70, 2, 6)}
STREAM = {name: shape[1:] for name, shape in LINEAR.items()}
STATES, GAMMA = {"initial_state": (2, 4, 8, 6)}, {"g_gamma": (1, 4)}
GATES = {"g": (2, 70, 4, 8), "gk": (2, 70, 4, 1), "gv": (2, 70, 4, 6)} | GAMMA
BORDERS = {"cu_seqlens": np.array([0, 3, 3, 40, 66], np.int32)}
ROWS_OF_SEVERAL = {"segment_ids": np.arange(140).reshape(2, 70) // 9 - 1}
SEVERAL = {"g": (70, 4, 8), "g_gamma": (4, 4), "initial_state": (4, 4, 8, 6)}
SIGNAL = {"x": (2, 70, 5), "weight": (4, 5), "bias": (5,)}
NORMAL = {name: partial(getattr(ejkernel, name), normalize=True) for name in ("delta_rule", "gated_delta_rule", "kda")}


def of_any_length(op, tokens):
    """`op` of the first tokens."""

    def run(**arrays):
        whole = ("g_gamma", "initial_state")
        return op(**{name: x if name in whole else x[:, :tokens] for name, x in arrays.items()})

    return run


ROWS += [
    row
    for dtype in (np.float32, jnp.bfloat16)
    for row in (
        Row("linear_attention", ejkernel.linear_attention, LINEAR, dtype),
        Row("linear_attention, scale", ejkernel.linear_attention, LINEAR | STATES | {"softmax_scale": ()}, dtype),
        Row("retention", partial(ejkernel.retention, reverse=True), LINEAR | STATES, dtype),
        Row("retention, packed", partial(ejkernel.retention, **BORDERS), STREAM, dtype),
        Row("lightning_attn", partial(ejkernel.lightning_attn, layer_idx=1, num_layers=4), LINEAR, dtype),
        Row(
            "lightning_attn, a layer's array",
            partial(ejkernel.lightning_attn, layer_idx=jnp.int32(1), num_layers=4, **BORDERS),
            STREAM,
            dtype,
        ),
        Row("simple_gla", ejkernel.simple_gla, LINEAR | {"g": (2, 70, 4)}, dtype),
        Row("simple_gla, packed", partial(ejkernel.simple_gla, **BORDERS), STREAM | {"g": (70, 4)}, dtype),
        Row("recurrent_gla", ejkernel.recurrent_gla, LINEAR | STATES | {"g": (2, 70, 4, 8)}, dtype),
        Row("recurrent_gla, packed", partial(ejkernel.recurrent_gla, **BORDERS), STREAM | SEVERAL, dtype),
        Row("recurrent, all gates", ejkernel.recurrent, LINEAR | GATES | STATES, dtype),
        Row("recurrent, gv packed", partial(ejkernel.recurrent, **BORDERS), STREAM | {"gv": (70, 4, 6)}, dtype),
        Row("recurrent, segments", partial(ejkernel.recurrent, **ROWS_OF_SEVERAL), LINEAR | GATES | STATES, dtype),
        Row("recurrent, one token", of_any_length(ejkernel.recurrent, 1), LINEAR | GATES | STATES, dtype),
        Row("recurrent, few tokens", of_any_length(ejkernel.recurrent, 5), LINEAR | GATES | STATES, dtype),
        Row("causal_conv1d", partial(ejkernel.causal_conv1d, activation="silu"), SIGNAL, dtype),
        Row("causal_conv1d, states", ejkernel.causal_conv1d, SIGNAL | {"initial_state": (2, 3, 5)}, dtype),
        Row(
            "causal_conv1d, packed",
            partial(ejkernel.causal_conv1d, **BORDERS),
            SIGNAL | {"x": (70, 5), "initial_state": (4, 3, 5)},
            dtype,
        ),
        Row(
            "causal_conv1d, segments",
            partial(ejkernel.causal_conv1d, **ROWS_OF_SEVERAL),
            SIGNAL | {"initial_state": (2, 3, 5)},
            dtype,
        ),
        Row("delta_rule, scale", NORMAL["delta_rule"], LINEAR | {"beta": (2, 70, 4), "softmax_scale": ()}, dtype),
        Row(
            "gated_delta_rule, few tokens",
            of_any_length(NORMAL["gated_delta_rule"], 5),
            LINEAR | STATES | {"g": (2, 70, 4), "beta": (2, 70, 4)},
            dtype,
        ),
        Row(
            "kda, one token",
            of_any_length(NORMAL["kda"], 1),
            LINEAR | STATES | {"g": (2, 70, 4, 8), "beta": (2, 70, 4)},
            dtype,
        ),
        Row(
            "kda, segments",
            partial(NORMAL["kda"], **ROWS_OF_SEVERAL),
            LINEAR | {"g": (2, 70, 4, 8), "beta": (2, 70, 4)},
            dtype,
        ),
        Row(
            "kda, packed",
            partial(NORMAL["kda"], **BORDERS),
            STREAM | {"g": (70, 4, 8), "beta": (70, 4), "initial_state": (4, 4, 8, 6)},
            dtype,
        ),
        Row(
            "kda, segments",
            partial(NORMAL["kda"], **ROWS_OF_SEVERAL, reverse=True),
            LINEAR | {"g": (2, 70, 4, 8), "beta": (2, 70, 4)},
            dtype,
        ),
        Row(
            "parallel.gated_delta_rule",
            partial(parallel.gated_delta_rule, **TIME, normalize=True, reverse=True),
            heads() | {"g": (2, 20, 4), "beta": (2, 20, 4), "initial_state": (4, 8, 8)},
            dtype,
        ),
        Row("chunk_local_cumsum", partial(xla_utils.chunk_local_cumsum, chunk_size=8), {"g": (2, 20, 3)}, dtype),
        Row(
            "chunk_global_cumsum, packed",
            partial(xla_utils.chunk_global_cumsum, reverse=True, softmax_scale=0.5, **PADDED),
            {"s": (1, 20, 3, 2)},
            dtype,
        ),
    )
]


def values_and_gradients(row, arrays):
    results, pull = jax.vjp(lambda arrays: row.op(**arrays), arrays)
    return results, pull(jax.tree.map(jnp.ones_like, results))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row}-{np.dtype(row.dtype)}".replace(" ", "-"))
def test_promotion(row):
    """Nothing leaves it to JAX to make ranks or dtypes alike, which tracing, where that is forbidden, would refuse."""
    with no_promotion():
        jax.eval_shape(partial(values_and_gradients, row), row.arrays())


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in ROWS
        if str(row) in ("recurrent, all gates", "recurrent_gla, segments", "kda, segments", "kda, packed")
    ],
    ids=lambda row: f"{row}-{np.dtype(row.dtype)}".replace(" ", "-"),
)
def test_promotion_token_by_token(row):
    """As CPUs compute small states when there is no gradient."""
    with token_by_token(states=64 * 64), no_promotion():
        jax.eval_shape(lambda arrays: row.op(**arrays), row.arrays())


@pytest.mark.parametrize("dtype", (np.float32, jnp.bfloat16), ids=lambda dtype: str(np.dtype(dtype)))
def test_promotion_in_serving(dtype):
    """Pools of states, and pages; calls with them have no gradients."""
    slots = {"cu_seqlens": np.array([0, 3, 9]), "reads": np.array([-1, 1]), "writes": np.array([[0, 2], [1, 3]])}
    slots |= {"at": np.array([[3, 1], [6, 2]]), "states": jnp.zeros((5, 4, 8, 6), dtype)}
    query, key, value = (jnp.ones((9, heads, dim), dtype) for heads, dim in ((4, 8), (2, 8), (2, 6)))
    g, beta = -jnp.ones((9, 4, 8), dtype), jnp.ones((9, 4), dtype)
    pages = ejkernel.PagedCache(jnp.zeros((6, 4, 2, 8), dtype), jnp.zeros((6, 4, 2, 6), dtype))
    where = np.array([[1, 2], [3, 5]]), np.array([1, 0]), np.array([0, 3, 9])
    short = slots | {"states": jnp.zeros((5, 3, 32), dtype)}
    with no_promotion():
        jax.eval_shape(lambda: ejkernel.recurrent_gla(query, key, value, g, **slots))
        jax.eval_shape(lambda: ejkernel.kda(query, key, value, g, beta, normalize=True, **slots))
        jax.eval_shape(lambda: ejkernel.causal_conv1d(query.reshape(9, 32), jnp.ones((4, 32), dtype), **short))
        jax.eval_shape(lambda: ejkernel.paged_attention(query, key, value, pages, *where))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.dtype == np.float32], ids=lambda row: str(row).replace(" ", "-")
)
def test_nothing_kept_is_inf_or_nan(row):
    """Outside `jit`, where JAX looks at whatever goes from the forward to the backward pass."""
    if str(row).startswith("parallel"):  # outside `jit` a `shard_map` makes a program of every operation
        row = replace(row, op=jax.jit(row.op))
    with jax.debug_infs(True), jax.debug_nans(True):
        found = values_and_gradients(row, row.arrays())
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lens", {}),
        ("sequence_ids", {"total_tokens": 20}),
        ("position_ids", {}),
        ("token_indices", {}),
        ("chunk_offsets", {"chunk_size": 4}),
        ("chunk_indices", {"chunk_size": 4}),
        ("lens_from_mask", {}),
        ("cu_seqlens_from_mask", {}),
        ("cu_seqlens_from_segment_ids", {"sequences": 200}),
    ],
)
def test_promotion_in_packing(name, options):
    masks = {"mask": MASK[0, 0]} if name.endswith("mask") else {}
    argument = {"ids": MASK[0, 0].astype(np.int32)} if name.endswith("segment_ids") else masks or PADDED
    usual = getattr(xla_utils, f"prepare_{name}")(**argument, **options)
    with no_promotion():
        np.testing.assert_array_equal(getattr(xla_utils, f"prepare_{name}")(**argument, **options), usual)
