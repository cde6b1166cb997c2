"""One table of wrong calls: what is changed of a good call, the error, and how its message begins."""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel import parallel, xla_utils
from ejkernel.kernels import _xla
from ejkernel.xla_utils import cumsum

Row = tuple[dict[str, Any], type[Exception], str]


@dataclass(frozen=True)
class Traced:
    """A value that is known only when the compiled function runs."""

    value: Any


@dataclass(frozen=True)
class Op:
    """A function, a good call of it, and rows that spoil it; a message is a pattern that begins with the argument."""

    call: Callable[..., Any]
    good: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    arguments: tuple[str, ...] | None = None  # by default those of `call`

    def names(self) -> tuple[str, ...]:
        return self.arguments or tuple(inspect.signature(self.call).parameters)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


X, ROW = ones(2, 6, 4, 8), ones(6, 4, 8)
QKV = {"query": X, "key": X, "value": X}
NAN, INF = float("nan"), float("inf")
CU = np.array([0, 3, 6], np.int32)
TINY, EXPECTED = np.dtype(jnp.float8_e4m3fn), "expected bfloat16, float16, float32 or float64"


def packed(cu: Any, **changes: Any) -> dict[str, Any]:
    return {"query": ROW, "key": ROW, "value": ROW, "cu_seqlens": cu, **changes}


# rows for whatever takes an argument of the name
SCALE = [
    ({"softmax_scale": "1"}, TypeError, "softmax_scale: got str; expected a number"),
    ({"softmax_scale": True}, TypeError, "softmax_scale: got bool; expected a number"),
    ({"softmax_scale": 1j}, TypeError, "softmax_scale: got complex; expected a number"),
    ({"softmax_scale": NAN}, ValueError, "softmax_scale: got nan; expected a finite number"),
    ({"softmax_scale": ones(8)}, ValueError, r"softmax_scale: got shape \(8,\); expected one number"),
    ({"softmax_scale": np.array(1)}, TypeError, "softmax_scale: got dtype int"),
]
PLATFORM = [
    ({"platform": "vulkan"}, ValueError, "platform: got 'vulkan'; expected one of .*'xla'"),
    ({"platform": "vulkan"}, NotImplementedError, "platform: got 'vulkan'; expected one of .*'xla'"),
    ({"platform": 3}, ValueError, "platform: got 3; expected one of"),
]
# rows for every front of the recurrence
LINEAR = [
    ({"query": ones(4, 8)}, ValueError, r"query: got shape \(4, 8\)"),
    ({"query": None}, TypeError, "query: got NoneType; expected an array"),
    ({"query": X.astype(np.int32)}, TypeError, "query: got dtype int32; expected a floating-point"),
    ({"query": X.astype(TINY)}, TypeError, f"query: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"value": X.astype(TINY)}, TypeError, f"value: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"key": X[:, :5]}, ValueError, r"key: got shape \(2, 5, 4, 8\); expected .* T=6"),
    ({"key": X[:, :, :3], "value": X[:, :, :3]}, ValueError, "key: got 3 heads; expected a divisor of .* 4"),
    ({"value": X[:1]}, ValueError, r"value: got shape .* B=2"),
    ({"initial_state": ones(3, 4, 8, 8)}, ValueError, "initial_state: got shape .* B=2"),
    ({"initial_state": ones(2, 4, 8, 8, dtype=int)}, TypeError, "initial_state: got dtype int"),
    ({"reverse": 1}, TypeError, "reverse: got int; expected True or False"),
    ({"cu_seqlens": CU}, ValueError, "cu_seqlens: got a batch of 2"),
    ({"softmax_scale": [1.0]}, TypeError, "softmax_scale: got list; expected a number"),
]
POOL = {"states": ones(3, 4, 8, 8), "reads": np.array([0, -1]), "writes": np.array([1, 2])}
WRITES = np.array([[0, 1], [1, 2]])
POOLS = [
    ({"states": POOL["states"]}, ValueError, "reads: got None; expected a slot of states, or -1"),
    (POOL | {"writes": None}, ValueError, "writes: got None; expected a slot of states, or -1"),
    ({"reads": POOL["reads"]}, ValueError, "reads: got slots without a pool; expected states= beside it"),
    ({"at": WRITES}, ValueError, "at: got tokens without a pool; expected states= beside it"),
    (POOL | {"initial_state": ones(2, 4, 8, 8)}, ValueError, "initial_state: got an array beside states"),
    (POOL | {"reverse": True}, ValueError, "reverse: got True; expected False, as states= is given"),
    (POOL | {"reverse": np.bool_(True)}, ValueError, "reverse: got True; expected False, as states= is given"),
    (POOL | {"segment_ids": np.zeros((2, 6), np.int32)}, ValueError, "segment_ids: got ids beside states"),
    (POOL | {"states": ones(3, 4, 8, 7)}, ValueError, r"states: got shape .*; expected \[slots, H, K, V\] with .*V=8"),
    (
        POOL | {"states": ones(3, 4, 8, 8, dtype=int)},
        TypeError,
        "states: got dtype int.*; expected float32 or bfloat16",
    ),
    (POOL | {"states": ones(3, 4, 8, 8, dtype=np.float16)}, TypeError, "states: got dtype float16; expected float32"),
    (POOL | {"reads": np.array([0])}, ValueError, r"reads: got shape \(1,\); expected \[B\] with B=2"),
    (POOL | {"reads": ones(2)}, TypeError, "reads: got dtype float32; expected an integer dtype"),
    (POOL | {"reads": np.array([0, 3])}, ValueError, "reads: got slot 3; expected slots from 0 to 2, or -1"),
    (POOL | {"reads": [0, 1]}, TypeError, "reads: got list; expected an array"),
    (POOL | {"writes": np.array([0, -2])}, ValueError, "writes: got slot -2; expected slots from 0 to 2, or -1"),
    (POOL | {"writes": np.array([1, 1])}, ValueError, "writes: got slot 1 twice; expected each slot at most once"),
    (POOL | {"at": WRITES}, ValueError, r"writes: got shape \(2,\); expected \[B, C\] with B=2, C=2"),
    (POOL | {"writes": WRITES}, ValueError, r"writes: got shape \(2, 2\); expected \[B\] with B=2"),
    (POOL | {"writes": WRITES, "at": WRITES}, ValueError, "writes: got slot 1 twice"),
    (POOL | {"writes": WRITES, "at": ones(2, 2)}, TypeError, "at: got dtype float32"),
    (
        POOL | {"platform": "pallas"},
        ValueError,
        "platform: 'pallas' cannot serve this call: head dims K=8, V=8; it takes",
    ),
]
IDS = np.zeros((2, 6), np.int32)
SEGMENTS = [
    ({"segment_ids": IDS * 1.0}, TypeError, "segment_ids: got dtype float32; expected an integer dtype"),
    ({"segment_ids": IDS > 0}, TypeError, "segment_ids: got dtype bool; expected an integer dtype"),
    ({"segment_ids": [[0] * 6] * 2}, TypeError, "segment_ids: got list; expected an array"),
    ({"segment_ids": IDS[0]}, ValueError, r"segment_ids: got shape \(6,\); expected \[B, T\] with B=2, T=6"),
    ({"segment_ids": IDS[:, :5]}, ValueError, r"segment_ids: got shape \(2, 5\); expected \[B, T\] with B=2, T=6"),
    ({"segment_ids": IDS, "cu_seqlens": CU}, ValueError, "segment_ids: got ids beside cu_seqlens; expected one of"),
]
if not jax.config.jax_enable_x64:
    large = np.full((2, 6), 2**40)
    SEGMENTS.append(({"segment_ids": large}, ValueError, "segment_ids: got id 1099511627776; expected ids that int32"))
RECURRENT = [
    *LINEAR,
    *POOLS,
    *SEGMENTS,
    *SCALE,
    *PLATFORM,
    ({"platform": "triton"}, ValueError, "platform: 'triton' cannot serve this call: "),
    ({"query": ones(2, 6, 8)}, ValueError, r"query: got shape \(2, 6, 8\); expected \[B, T, H, K\]"),
    ({"query": ones(1, 2, 6, 4, 8)}, ValueError, r"query: got shape \(1, 2, 6, 4, 8\); expected \[B, T, H, K\]"),
    ({"query": [[1.0]]}, TypeError, "query: got list; expected an array"),
    ({"query": np.array(["a"])}, TypeError, "query: got dtype <U1; expected an array of numbers"),
    ({"key": X[..., :7]}, ValueError, r"key: got shape .* K=8"),
    ({"key": None}, TypeError, "key: got NoneType; expected an array"),
    ({"key": X[:, :, :0], "value": X[:, :, :0]}, ValueError, "key: got 0 heads; expected a divisor"),
    ({"value": X[:, :, :0]}, ValueError, "value: got 0 heads; expected a divisor of query's 4 heads"),
    ({"query": X[:, :, :3]}, ValueError, "query: got 3 heads; expected a divisor of key's 4 heads"),
    ({"query": X[:, :, :1], "g_gamma": ones(1)}, ValueError, r"g_gamma: got .* with H=4 \(H as in key\)"),
    ({"value": X.astype(np.complex64)}, TypeError, "value: got dtype complex64"),
    ({"g": ones(2, 6, 4)}, ValueError, r"g: got shape \(2, 6, 4\); expected \[B, T, H, 1\|K\]"),
    ({"g": ones(2, 6, 4, 5)}, ValueError, "g: got shape .* K=8"),
    ({"g": X > 0}, TypeError, "g: got dtype bool"),
    ({"g": -1.0}, TypeError, "g: got float; expected an array"),
    ({"gk": X[:, :, :2]}, ValueError, "gk: got shape .* H=4"),
    ({"gv": ones(2, 6, 4, 9)}, ValueError, "gv: got shape .* V=8"),
    ({"g_gamma": ones(3)}, ValueError, r"g_gamma: got shape \(3,\); expected \[H\] with H=4"),
    ({"g_gamma": ones(3, 4)}, ValueError, r"g_gamma: got shape \(3, 4\); expected \[1\|B, H\] with B=2"),
    ({"g_gamma": [0.0] * 4}, TypeError, "g_gamma: got list; expected an array"),
    ({"initial_state": ones(8, 8)}, ValueError, r"initial_state: got shape .* \[H, K, V\] or \[B, H, K, V\]"),
    ({"reverse": None}, TypeError, "reverse: got NoneType; expected True or False"),
    ({"reverse": Traced(True)}, TypeError, "reverse: got a traced value; expected True or False"),
    (packed([1, 6]), ValueError, "cu_seqlens: got first value 1; expected 0"),
    (packed([0, 4, 3]), ValueError, "cu_seqlens: got a decrease at index 2"),
    (packed([0, 7]), ValueError, "cu_seqlens: got last value 7; expected at most the 6"),
    (packed(np.array([0, 4, 3], np.uint32)), ValueError, "cu_seqlens: got a decrease at index 2"),
    (packed(np.array([0, 2**32 + 5])), ValueError, "cu_seqlens: got last value 4294967301; expected at most the 6"),
    (packed(CU[None]), ValueError, r"cu_seqlens: got shape \(1, 3\)"),
    (packed(CU[:0]), ValueError, r"cu_seqlens: got shape \(0,\); expected \[N\+1\]"),
    (packed(CU * 1.0), TypeError, "cu_seqlens: got dtype float"),
    (packed(CU > 0), TypeError, "cu_seqlens: got dtype bool"),
    (packed([0, None]), TypeError, "cu_seqlens: got dtype object"),
    (packed("0 6"), TypeError, "cu_seqlens: got str; expected an array"),
    (packed(CU, initial_state=ones(3, 4, 8, 8)), ValueError, "initial_state: got shape .* N=2"),
    (packed(CU, g_gamma=ones(3, 4)), ValueError, "g_gamma: got shape .* N=2"),
    (packed(CU, key=X), ValueError, r"key: got shape \(2, 6, 4, 8\); expected \[T, Hk, K\]"),
]
DELTA = [
    *LINEAR,
    *SEGMENTS,
    *SCALE,
    *PLATFORM,
    ({"beta": None}, TypeError, "beta: got NoneType; expected an array"),
    ({"beta": X}, ValueError, r"beta: got shape \(2, 6, 4, 8\); expected \[B, T, H\]"),
    ({"beta": ones(2, 6, 4, dtype=int)}, TypeError, "beta: got dtype int"),
    ({"beta": ones(2, 6, 3)}, ValueError, "query: got 4 heads; expected a divisor of beta's 3 heads"),
    ({"value": X[:, :, :0]}, ValueError, "value: got 0 heads; expected a divisor of beta's 4 heads"),
    ({"key": X[..., :7]}, ValueError, r"key: got shape .* K=8"),
    ({"normalize": 1}, TypeError, "normalize: got int; expected True or False"),
    ({"initial_state": ones(8, 8)}, ValueError, r"initial_state: got shape .* \[H, K, V\] or \[B, H, K, V\]"),
]
LAYER_NUMBER = [
    ({"layer_idx": "0"}, TypeError, "layer_idx: got str; expected a number"),
    ({"layer_idx": None}, TypeError, "layer_idx: got NoneType; expected a number"),
    ({"layer_idx": True}, TypeError, "layer_idx: got bool; expected a number"),
    ({"layer_idx": np.arange(3)}, ValueError, r"layer_idx: got shape \(3,\); expected one number"),
    *(
        ({"layer_idx": number}, ValueError, f"layer_idx: got {number}; expected at least 0 and below num_layers, 3")
        for number in (9, 3, -1, NAN, np.int32(3))
    ),
    ({"num_layers": 0}, ValueError, "num_layers: got 0; expected an int of at least 1"),
    ({"num_layers": 1.5}, ValueError, "num_layers: got 1.5"),
    ({"num_layers": True}, ValueError, "num_layers: got True"),
    ({"num_layers": Traced(3)}, ValueError, "num_layers: got a traced value"),
]
HEAD_GATE = [
    ({"g": ones(2, 6, 4, 1)}, ValueError, r"g: got shape .* \(2, 6, 4\)"),
    ({"g": None}, TypeError, "g: got NoneType; expected an array"),
    ({"g": ones(2, 6, 4, dtype=int)}, TypeError, "g: got dtype int"),
]

KV = ones(2, 7, 2, 8)
DROP = {"deterministic": False, "dropout_prob": 0.5}
WINDOW = [
    ({"sliding_window": -1}, ValueError, "sliding_window: got -1; expected bounds of at least 0"),
    ({"sliding_window": (3, -2)}, ValueError, "sliding_window: got -2"),
    ({"sliding_window": (1, 2, 3)}, ValueError, r"sliding_window: got 3 bounds; expected one bound or \(left, right\)"),
    ({"sliding_window": 1.5}, TypeError, "sliding_window: got float; expected an int"),
    ({"sliding_window": True}, TypeError, "sliding_window: got bool; expected an int"),
    ({"sliding_window": Traced(3)}, TypeError, "sliding_window: got a traced value"),
    ({"causal": "yes"}, TypeError, "causal: got str; expected True or False"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: got 0.0; expected a number above 0"),
    ({"logits_soft_cap": INF}, ValueError, "logits_soft_cap: got inf; expected a finite number"),
    ({"logits_soft_cap": Traced(1.0)}, TypeError, "logits_soft_cap: got a traced value"),
    ({"dtype": np.int8}, TypeError, "dtype: got int8; expected a floating-point dtype"),
    ({"dtype": TINY}, TypeError, f"dtype: got float8_e4m3fn; {EXPECTED}"),
    ({"softmax_dtype": "float8_e5m2"}, TypeError, f"softmax_dtype: got float8_e5m2; {EXPECTED}"),
    ({"query": X.astype(TINY)}, TypeError, f"query: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"softmax_aux": ones(2, dtype=TINY)}, TypeError, f"softmax_aux: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"softmax_dtype": "what"}, TypeError, "softmax_dtype: got 'what'; expected a floating-point dtype"),
]
ATTENTION = [
    *SCALE,
    *WINDOW,
    ({"query": X[0]}, ValueError, r"query: got shape \(6, 4, 8\); expected \[B, S, H, D\]"),
    ({"query": X.astype(np.int32)}, TypeError, "query: got dtype int32; expected a floating-point dtype"),
    ({"value": KV.astype(np.complex64)}, TypeError, "value: got dtype complex64; expected a floating-point dtype"),
    ({"key": [1.0]}, TypeError, "key: got list; expected an array"),
    ({"key": KV[:1]}, ValueError, r"key: got shape \(1, 7, 2, 8\); expected .* with B=2, D=8 \(B, D as in query\)"),
    ({"key": KV[..., :4]}, ValueError, r"key: got shape \(2, 7, 2, 4\); expected .*D=8"),
    ({"value": KV[:, :6]}, ValueError, r"value: got shape \(2, 6, 2, 8\); expected .*L=7"),
    ({"value": KV[:, :, :1]}, ValueError, r"value: got shape \(2, 7, 1, 8\); expected .*Hkv=2"),
    ({"query": X[:, :, :3]}, ValueError, "key: got 2 heads; expected a divisor of query's 3 heads"),
    ({"attention_mask": ones(2, 1, 6, 7)}, TypeError, "attention_mask: got dtype float32; expected bool"),
    ({"attention_mask": [[True]]}, TypeError, "attention_mask: got list; expected an array"),
    ({"attention_mask": ones(6, 7, dtype=bool)}, ValueError, r"attention_mask: got shape \(6, 7\)"),
    (
        {"attention_mask": ones(2, 3, 6, 7, dtype=bool)},
        ValueError,
        r"attention_mask: got shape .*1\|H\|Hkv.*H=4, Hkv=2",
    ),
    ({"attention_mask": ones(2, 1, 7, 6, dtype=bool)}, ValueError, r"attention_mask: got shape .*S=6.*L=7"),
    ({"bias": ones(2, 3, 6, 7)}, NotImplementedError, "bias: got 3 heads; expected 1, Hkv=2 or H=4"),
    ({"bias": ones(2, 1, 6, 8)}, ValueError, r"bias: got shape \(2, 1, 6, 8\)"),
    ({"bias": ones(2, 1, 6, 7, dtype=bool)}, TypeError, "bias: got dtype bool"),
    ({"init_bias": 3}, TypeError, "init_bias: got int; expected a function"),
    ({"init_bias": lambda: ones(2, 3, 6, 7)}, NotImplementedError, r"init_bias\(\): got 3 heads"),
    ({"init_bias": lambda: None}, TypeError, r"init_bias\(\): got NoneType"),
    ({"softmax_aux": ones(3, 2)}, ValueError, r"softmax_aux: got shape \(3, 2\); expected .*H=4, Hkv=2"),
    ({"softmax_aux": ones(1, 4, 2)}, ValueError, r"softmax_aux: got shape \(1, 4, 2\); expected \[sinks\] or"),
    ({"softmax_aux": ones(2, dtype=int)}, TypeError, "softmax_aux: got dtype int"),
    ({"dropout_prob": 1.0}, ValueError, r"dropout_prob: got 1.0; expected a probability in \[0, 1\)"),
    ({"dropout_prob": -0.1}, ValueError, "dropout_prob: got -0.1"),
    ({"dropout_prob": NAN}, ValueError, "dropout_prob: got nan"),
    ({"dropout_prob": "0.1"}, TypeError, "dropout_prob: got str; expected a number"),
    (DROP, ValueError, "dropout_rng: got None; expected a key"),
    ({**DROP, "dropout_rng": 3}, TypeError, "dropout_rng: got int; expected an array"),
    ({**DROP, "dropout_rng": ones(2)}, TypeError, "dropout_rng: got dtype float"),
    ({**DROP, "dropout_rng": np.zeros((3, 2), np.uint32)}, ValueError, r"dropout_rng: got shape \(3, 2\)"),
    ({"deterministic": 1}, TypeError, "deterministic: got int; expected True or False"),
]
Q1, KV1, CU_KV = X[:1], KV[:1], np.array([0, 2, 6])
IDS, IDS_KV = np.ones((1, 6), np.int32), np.ones((1, 7), np.int32)
FLASH = [
    *PLATFORM,
    *WINDOW,
    ({"query": Q1[0]}, ValueError, r"query: got shape \(6, 4, 8\); expected \[B, S, H, D\]"),
    ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens: got first value 1; expected 0"),
    ({"cu_seqlens": [0, 9]}, ValueError, "cu_seqlens: got last value 9; expected at most the 6 tokens"),
    ({"cu_seqlens": CU * 1.0}, TypeError, "cu_seqlens: got dtype float"),
    ({"cu_seqlens": CU, "cu_seqlens_kv": CU_KV[::-1] - 6}, ValueError, "cu_seqlens_kv: got a decrease at index 1"),
    ({"cu_seqlens": CU, "cu_seqlens_kv": CU_KV[:2]}, ValueError, "cu_seqlens_kv: got 1 sequences; expected the 2"),
    ({"cu_seqlens": CU, "cu_seqlens_kv": CU * 1.0}, TypeError, "cu_seqlens_kv: got dtype float"),
    ({"cu_seqlens_kv": CU}, ValueError, "cu_seqlens_kv: got borders of keys alone; expected cu_seqlens beside it"),
    ({"cu_seqlens": CU, "query": X}, ValueError, r"query: got shape \(2, 6, 4, 8\); expected \[1, S"),
    ({"cu_seqlens": CU, "query": [1.0]}, TypeError, "query: got list; expected an array"),
    ({"cu_seqlens": CU, "query": ROW}, ValueError, r"key: got shape \(1, 7, 2, 8\); expected rank 3"),
    (packed(CU, value=X), ValueError, r"value: got shape \(2, 6, 4, 8\); expected \[tokens, heads, dim\]"),
    ({"segment_ids": IDS * 1.0, "segment_ids_kv": IDS_KV}, TypeError, "segment_ids: got dtype float"),
    ({"segment_ids": IDS > 0, "segment_ids_kv": IDS_KV}, TypeError, "segment_ids: got dtype bool; expected an integer"),
    ({"segment_ids": [[1] * 6], "segment_ids_kv": IDS_KV}, TypeError, "segment_ids: got list; expected an array"),
    (
        {"segment_ids": IDS[0], "segment_ids_kv": IDS_KV},
        ValueError,
        r"segment_ids: got shape \(6,\); expected \[B, S\]",
    ),
    ({"segment_ids": IDS_KV}, ValueError, r"segment_ids: got shape \(1, 7\); expected \[B, S\] with B=1, S=6"),
    ({"segment_ids": IDS}, ValueError, r"segment_ids_kv: got None with 6 queries and 7 keys; expected ids \[B, L\]"),
    ({"segment_ids": IDS, "segment_ids_kv": IDS}, ValueError, r"segment_ids_kv: got shape \(1, 6\); expected .* L=7"),
    ({"segment_ids": IDS, "segment_ids_kv": IDS_KV > 0}, TypeError, "segment_ids_kv: got dtype bool"),
    ({"segment_ids": IDS, "segment_ids_kv": IDS_KV.astype(np.uint32)}, TypeError, "segment_ids_kv: got dtype uint32"),
    ({"segment_ids_kv": IDS_KV}, ValueError, "segment_ids_kv: got ids of keys alone; expected segment_ids beside it"),
    ({"segment_ids": IDS, "cu_seqlens": CU}, ValueError, "segment_ids: got ids beside cu_seqlens; expected one of"),
    (packed(CU, segment_ids=IDS), ValueError, "segment_ids: got ids beside cu_seqlens; expected one of"),
    (packed(None, segment_ids=IDS), ValueError, r"query: got shape \(6, 4, 8\); expected \[B, S, H, D\]"),
    ({"query_offset": 1.5}, TypeError, "query_offset: got float; expected an array"),
    ({"query_offset": True}, TypeError, "query_offset: got bool; expected an array"),
    ({"query_offset": ones(1)}, TypeError, "query_offset: got dtype float32; expected an integer dtype"),
    ({"query_offset": np.zeros(3, int)}, ValueError, r"query_offset: got shape \(3,\); expected one int, or \[1\]"),
    ({"return_lse": 1}, TypeError, "return_lse: got int; expected True or False"),
    ({"block_sizes": (0, 4)}, ValueError, "block_sizes: got 0; expected an int of at least 1"),
    ({"block_sizes": (True, 4)}, ValueError, "block_sizes: got True; expected an int of at least 1"),
    ({"block_sizes": 4}, ValueError, r"block_sizes: got 4; expected \(queries, keys\)"),
]

SHAPES = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (X, X, X[:1])]
G = ones(2, 6, 3)
SUM = [
    *SCALE,
    ({"reverse": 1}, TypeError, "reverse: got int; expected True or False"),
    ({"reverse": Traced(True)}, TypeError, "reverse: got a traced value; expected True or False"),
    ({"head_first": "no"}, TypeError, "head_first: got str; expected True or False"),
    ({"output_dtype": int}, TypeError, "output_dtype: got int64; expected a floating"),
    ({"output_dtype": TINY}, TypeError, f"output_dtype: got float8_e4m3fn; {EXPECTED}"),
    ({"output_dtype": "what"}, TypeError, "output_dtype: got 'what'; expected a floating"),
]
CHUNK = [
    *[
        ({"chunk_size": size}, ValueError, f"chunk_size: got {size}; expected a power of two")
        for size in (0, -4, 3, 12, 4.0, True, None)
    ],
    ({"chunk_size": Traced(4)}, ValueError, "chunk_size: got a traced value; expected a power of two"),
]
LOCAL = [
    *SUM,
    *CHUNK,
    ({"g": G[0]}, ValueError, r"g: got shape \(6, 3\); expected \[B, T, H\] or \[B, T, H, S\]"),
    ({"g": G.astype(TINY)}, TypeError, f"g: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"g": G.astype(int)}, TypeError, "g: got dtype int.*; expected a floating-point dtype"),
    ({"cu_seqlens": CU}, ValueError, "cu_seqlens: got a batch of 2; expected batch 1"),
    ({"cu_seqlens": Traced(CU)}, ValueError, "cu_seqlens: got a batch of 2; expected batch 1"),
    ({"g": G[:1], "cu_seqlens": -CU}, ValueError, "cu_seqlens: got a decrease at index 1"),
    ({"g": G[:1], "cu_seqlens": CU[None]}, ValueError, r"cu_seqlens: got shape \(1, 3\)"),
    ({"g": G[:1], "cu_seqlens": 6}, TypeError, "cu_seqlens: got int; expected an array"),
    ({"g": G[:1], "cu_seqlens": CU * 1.0}, TypeError, "cu_seqlens: got dtype float"),
]
GLOBAL = [
    *SUM,
    ({"s": G[0, 0]}, ValueError, r"s: got shape \(3,\); expected \[B, T, H\] or \[B, T, H, S\]"),
    (
        {"s": G[None, None], "head_first": True},
        ValueError,
        r"s: got shape \(1, 1, 2, 6, 3\); expected \[B, H, T\] or \[B, H, T, S\]",
    ),
    ({"s": G.astype(TINY)}, TypeError, f"s: got dtype float8_e4m3fn; {EXPECTED}"),
    ({"s": G > 0}, TypeError, "s: got dtype bool; expected a floating-point dtype"),
    ({"s": G + 1j}, TypeError, "s: got dtype complex64; expected a floating-point dtype"),
    ({"s": [[[1.0]]]}, TypeError, "s: got list; expected an array"),
    ({"cu_seqlens": CU}, ValueError, "cu_seqlens: got a batch of 2; expected batch 1"),
    ({"s": G[:1], "cu_seqlens": CU + 1}, ValueError, "cu_seqlens: got first value 1; expected 0"),
    ({"s": G[:1], "cu_seqlens": CU * 2}, ValueError, "cu_seqlens: got last value 12; .* the 6 tokens"),
]
MASK = ones(2, 3, dtype=bool)
TOTAL = [
    ({"cu_seqlens": CU + 1}, ValueError, "cu_seqlens: got first value 1; expected 0"),
    ({"cu_seqlens": CU[::-1] - 6}, ValueError, "cu_seqlens: got first value|cu_seqlens: got a decrease"),
    ({"total_tokens": 4}, ValueError, "total_tokens: got 4; expected at least the 6"),
    ({"total_tokens": -1}, ValueError, "total_tokens: got -1; expected an int of"),
    ({"total_tokens": 6.0}, ValueError, "total_tokens: got 6.0; expected an int of"),
    ({"total_tokens": True}, ValueError, "total_tokens: got True; expected an int of"),
    (
        {"cu_seqlens": Traced(CU)},
        ValueError,
        "total_tokens: got None with a traced cu_seqlens; expected total_tokens=, the number of tokens known",
    ),
]
CHUNK_SIZE = [
    ({"chunk_size": 0}, ValueError, "chunk_size: got 0; expected an int of at least 1"),
    ({"chunk_size": -2}, ValueError, "chunk_size: got -2; expected an int of at least 1"),
    ({"chunk_size": 2.0}, ValueError, "chunk_size: got 2.0; expected an int of at least 1"),
    ({"chunk_size": Traced(2)}, ValueError, "chunk_size: got a traced value; expected an int of at least 1"),
]

MESH = {"axis_name": "time", "mesh": jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))}
ALONG = [
    ({"mesh": 3}, TypeError, "mesh: got int; expected a jax.sharding.Mesh"),
    ({"axis_name": "space"}, ValueError, "axis_name: got 'space'; expected one of the mesh's axes"),
    ({"axis_name": None}, TypeError, "axis_name: got NoneType; expected the name of a mesh axis"),
    ({"mesh": None}, ValueError, "axis_name: got 'time'; expected an axis of the shard_map around this call"),
    ({"mesh": None, "axis_name": 3}, TypeError, "axis_name: got int; expected the name of a mesh axis"),
]


PAGES = ejkernel.PagedCache(ones(5, 4, 2, 8), ones(5, 4, 2, 8))
LATENT = {"pages": ejkernel.PagedCache(PAGES.key, None), "value": None, "value_dim": 8}
PAGED_CALL = {
    "query": ROW,
    "key": ROW[:, :2],
    "value": ROW[:, :2],
    "pages": PAGES,
    "table": np.array([[0, 1], [4, -1]]),
    "lengths": np.array([4, 0]),
    "cu_seqlens": CU,
}
PAGED = [
    *SCALE,
    *PLATFORM,
    ({"query": X}, ValueError, r"query: got shape \(2, 6, 4, 8\); expected \[T, H, D\]"),
    ({"query": ROW.astype(int)}, TypeError, "query: got dtype int"),
    ({"query": ROW[:, :3]}, ValueError, "key: got 2 heads; expected a divisor of query's 3 heads"),
    ({"key": ROW}, ValueError, r"key: got shape .* Hkv=2"),
    ({"key": ROW[:5, :2]}, ValueError, r"key: got shape .* T=6"),
    ({"key": None}, ValueError, "key: got None; expected an array beside value, or None for both"),
    ({"value": None}, ValueError, "value: got None; expected an array beside key, or None for both"),
    ({"value": ROW[:, :2, :7]}, ValueError, "value: got shape .* Dv=8"),
    ({"pages": tuple(PAGES)}, TypeError, "pages: got tuple; expected an ejkernel.PagedCache"),
    ({"pages": PAGES._replace(key=ones(5, 4, 2, 7))}, ValueError, r"pages.key: got shape .* D=8"),
    ({"pages": PAGES._replace(value=ones(5, 3, 2, 8))}, ValueError, r"pages.value: got shape .* page=4"),
    ({"pages": ejkernel.PagedCache(*ones(2, 5, 0, 2, 8))}, ValueError, "pages.key: got pages of 0 tokens"),
    ({"pages": PAGES._replace(key=ones(5, 4, 2, 8, dtype=int))}, TypeError, "pages.key: got dtype int"),
    ({"pages": PAGES._replace(value=None)}, ValueError, "value_dim: got None; expected how many"),
    (LATENT | {"value": ROW[:, :2]}, ValueError, "value: got an array; expected None"),
    (LATENT | {"value_dim": 9}, ValueError, "value_dim: got 9; expected at most the 8"),
    (LATENT | {"value_dim": 0}, ValueError, "value_dim: got 0; expected an int of at least 1"),
    ({"value_dim": 8}, ValueError, "value_dim: got 8; expected None"),
    ({"table": np.array([[0, 1]])}, ValueError, r"table: got shape \(1, 2\); expected \[N, M\] with N=2"),
    ({"table": np.array([[0, 1], [5, -1]])}, ValueError, "table: got page 5; expected pages from 0 to 4, or -1"),
    ({"table": np.array([[0, 1], [-2, -1]])}, ValueError, "table: got page -2"),
    ({"table": np.array([[0, 2**40], [1, -1]])}, ValueError, "table: got page 1099511627776"),
    ({"table": np.array([[0, 1], [1, -1]])}, ValueError, "table: got page 1 for new tokens in two places"),
    ({"table": ones(2, 2)}, TypeError, "table: got dtype float32; expected an integer dtype"),
    ({"table": [[0, 1], [4, -1]]}, TypeError, "table: got list; expected an array"),
    ({"lengths": np.array([4])}, ValueError, r"lengths: got shape \(1,\); expected \[N\] with N=2"),
    ({"lengths": np.array([4, -1])}, ValueError, "lengths: got -1; expected 0 to 8"),
    ({"lengths": np.array([9, 0])}, ValueError, "lengths: got 9; expected 0 to 8, the tokens of 2 pages of 4"),
    ({"lengths": ones(2)}, TypeError, "lengths: got dtype float32"),
    ({"cu_seqlens": [0, 4, 3]}, ValueError, "cu_seqlens: got a decrease at index 2"),
    ({"cu_seqlens": None}, TypeError, "cu_seqlens: got NoneType; expected an array"),
    ({"sliding_window": -1}, ValueError, "sliding_window: got -1"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap: got 0.0; expected a number above 0"),
    ({"softmax_aux": ones(3, 1)}, ValueError, r"softmax_aux: got shape \(3, 1\)"),
]

# the other fronts there hand their options on
SLICED = tuple(inspect.signature(parallel.recurrent).parameters)
CORRECTED = (*inspect.signature(parallel.delta_rule).parameters, "g")
BETA, GATE = {"beta": ones(2, 6, 4)}, {"g": ones(2, 6, 4)}


def without(rows: list[Row], *names: str) -> list[Row]:
    return [row for row in rows if not set(row[0]) & set(names)]


SIGNAL, TAPS, IDS = ones(2, 6, 5), ones(4, 5), np.zeros((2, 6), np.int32)
CONVOLUTION = [
    ({"x": ones(6, 5)}, ValueError, r"x: got shape \(6, 5\); expected \[B, T, D\]"),
    ({"x": SIGNAL.astype(np.int32)}, TypeError, "x: got dtype int32; expected a floating-point"),
    ({"x": SIGNAL + 0j}, TypeError, "x: got dtype complex64; expected a floating-point"),
    ({"weight": None}, TypeError, "weight: got NoneType; expected an array"),
    ({"weight": TAPS[:, :4]}, ValueError, r"weight: got shape \(4, 4\); expected \[W, D\] with D=5 \(D as in x\)"),
    ({"weight": TAPS[:0]}, ValueError, r"weight: got shape \(0, 5\); expected \[W, D\] with W of at least 1"),
    ({"bias": ones(4)}, ValueError, r"bias: got shape \(4,\); expected \[D\]"),
    ({"bias": np.ones(5, np.int32)}, TypeError, "bias: got dtype int32"),
    ({"activation": "relu"}, ValueError, "activation: got 'relu'; expected None or 'silu'"),
    ({"activation": jax.nn.silu}, ValueError, "activation: got .*; expected None or 'silu'"),
    ({"initial_state": ones(2, 4, 5)}, ValueError, r"initial_state: got shape .*; expected \[B, history, D\]"),
    ({"initial_state": ones(3, 3, 5)}, ValueError, r"initial_state: got shape .* B=2, history=3, D=5"),
    ({"cu_seqlens": CU}, ValueError, "cu_seqlens: got a batch of 2"),
    ({"x": SIGNAL[0], "cu_seqlens": CU + 1}, ValueError, "cu_seqlens: got first value 1; expected 0"),
    ({"x": SIGNAL[0], "cu_seqlens": [0, 7]}, ValueError, "cu_seqlens: got last value 7; expected at most the 6"),
    (
        {"x": SIGNAL[0], "cu_seqlens": CU, "initial_state": ones(3, 3, 5)},
        ValueError,
        r"initial_state: got shape .*; expected \[N, history, D\] with N=2",
    ),
    ({"segment_ids": IDS * 1.0}, TypeError, "segment_ids: got dtype float"),
    ({"segment_ids": IDS > 0}, TypeError, "segment_ids: got dtype bool"),
    ({"segment_ids": IDS[:1]}, ValueError, r"segment_ids: got shape \(1, 6\); expected \[B, T\]"),
    ({"x": SIGNAL[:1], "segment_ids": IDS[:1], "cu_seqlens": CU}, ValueError, "segment_ids: got ids beside cu_seqlens"),
    *PLATFORM,
]
OPS = {
    "causal_conv1d": Op(ejkernel.causal_conv1d, {"x": SIGNAL, "weight": TAPS}, CONVOLUTION),
    "recurrent": Op(ejkernel.recurrent, QKV, RECURRENT),
    "recurrent_gla": Op(ejkernel.recurrent_gla, QKV | {"g": X}, LINEAR),
    "delta_rule": Op(ejkernel.delta_rule, QKV | BETA, DELTA),
    "gated_delta_rule": Op(
        ejkernel.gated_delta_rule,
        QKV | BETA | GATE,
        [*DELTA, *POOLS, ({"g": X}, ValueError, r"g: got shape \(2, 6, 4, 8\); expected \[B, T, H\]")],
    ),
    "kda": Op(
        ejkernel.kda,
        QKV | BETA | {"g": X},
        [*DELTA, ({"g": ones(2, 6, 4, 1)}, ValueError, r"g: got shape \(2, 6, 4, 1\); expected \[B, T, H, K\]")],
    ),
    "simple_gla": Op(ejkernel.simple_gla, QKV | {"g": ones(2, 6, 4)}, [*without(LINEAR, "query"), *HEAD_GATE]),
    "retention": Op(ejkernel.retention, QKV, LINEAR),
    "lightning_attn": Op(ejkernel.lightning_attn, QKV | {"layer_idx": 1, "num_layers": 3}, [*LINEAR, *LAYER_NUMBER]),
    "linear_attention": Op(ejkernel.linear_attention, QKV, [*LINEAR, *PLATFORM]),
    "attention": Op(
        ejkernel.attention,
        {"query": X, "key": KV, "value": KV},
        [*ATTENTION, *PLATFORM, ({"platform": "triton"}, ValueError, "platform: got 'triton'; expected one of 'xla'")],
    ),
    "flash_attention": Op(ejkernel.flash_attention, {"query": Q1, "key": KV1, "value": KV1}, FLASH),
    "paged_attention": Op(ejkernel.paged_attention, PAGED_CALL, PAGED),
    "pinned recurrent": Op(
        _xla.recurrent,
        QKV,
        [
            *LINEAR[:3],
            ({"platform": "xla"}, TypeError, r"recurrent\(\) here always runs 'xla'; use ejkernel.recurrent to choose"),
        ],
        arguments=("query", "recurrent() here always runs 'xla'; use ejkernel.recurrent to choose"),
    ),
    "pinned recurrent_gla": Op(_xla.recurrent_gla, QKV, LINEAR[3:6]),
    "pinned attention": Op(
        _xla.attention,
        {"query": X, "key": KV, "value": KV},
        [({"platform": "xla"}, TypeError, r"attention\(\) here always runs 'xla'; use ejkernel.attention to choose")],
        arguments=("attention() here always runs 'xla'; use ejkernel.attention to choose",),
    ),
    "explain": Op(
        lambda op, query, key, value: str(ejkernel.explain(op, query, key, value)),
        {"op": ejkernel.recurrent, "query": SHAPES[0], "key": SHAPES[1], "value": X},
        [
            ({"op": 3}, TypeError, "op: got int; expected one of this library's ops"),
            ({"op": lambda *_: 0}, ValueError, "op: got .* which calls no op of this library"),
            ({"value": SHAPES[2]}, ValueError, r"value: got shape \(1, 6, 4, 8\)"),
            ({"query": None}, TypeError, "query: got NoneType; expected an array"),
        ],
    ),
    "chunk_local_cumsum": Op(xla_utils.chunk_local_cumsum, {"g": G, "chunk_size": 4}, LOCAL),
    "chunk_global_cumsum": Op(xla_utils.chunk_global_cumsum, {"s": G}, GLOBAL),
    "chunk_local_cumsum_scalar": Op(
        cumsum.chunk_local_cumsum_scalar,
        {"g": G, "chunk_size": 4},
        [*CHUNK[:2], ({"g": G[None]}, ValueError, r"g: got shape .*; expected \[B, T, H\]$")],
    ),
    "chunk_local_cumsum_vector": Op(
        cumsum.chunk_local_cumsum_vector,
        {"g": G[..., None], "chunk_size": 4},
        [*CHUNK[:2], ({"g": G}, ValueError, r"g: got shape \(2, 6, 3\); expected \[B, T, H, S\]$")],
    ),
    "chunk_global_cumsum_scalar": Op(
        cumsum.chunk_global_cumsum_scalar,
        {"s": G},
        [
            ({"s": G[None]}, ValueError, r"s: got shape .*; expected \[B, T, H\]$"),
            ({"cu_seqlens": CU}, ValueError, "cu_seqlens: got a batch of 2; expected batch 1"),
        ],
    ),
    "chunk_global_cumsum_vector": Op(
        cumsum.chunk_global_cumsum_vector,
        {"s": G[..., None]},
        [({"s": G}, ValueError, r"s: got shape \(2, 6, 3\); expected \[B, T, H, S\]$")],
    ),
    "prepare_lens": Op(
        xla_utils.prepare_lens,
        {"cu_seqlens": CU},
        [
            ({"cu_seqlens": 3}, TypeError, "cu_seqlens: got int; expected an array"),
            ({"cu_seqlens": [0, "a"]}, TypeError, "cu_seqlens: got dtype .* expected an array of numbers"),
            ({"cu_seqlens": CU * 1.0}, TypeError, "cu_seqlens: got dtype float.*; expected int32 or int64"),
            ({"cu_seqlens": CU[None]}, ValueError, r"cu_seqlens: got shape \(1, 3\); expected \[N\+1\]"),
            ({"cu_seqlens": CU[:0]}, ValueError, r"cu_seqlens: got shape \(0,\); expected \[N\+1\]"),
        ],
    ),
    "prepare_sequence_ids": Op(xla_utils.prepare_sequence_ids, {"cu_seqlens": CU}, TOTAL),
    "prepare_position_ids": Op(xla_utils.prepare_position_ids, {"cu_seqlens": CU}, TOTAL),
    "prepare_token_indices": Op(xla_utils.prepare_token_indices, {"cu_seqlens": CU}, TOTAL),
    "prepare_chunk_offsets": Op(xla_utils.prepare_chunk_offsets, {"cu_seqlens": CU, "chunk_size": 2}, CHUNK_SIZE),
    "prepare_chunk_indices": Op(
        xla_utils.prepare_chunk_indices,
        {"cu_seqlens": CU, "chunk_size": 2},
        [
            *CHUNK_SIZE,
            ({"total_chunks": 2}, ValueError, "total_chunks: got 2; expected at least the 4"),
            ({"total_chunks": "4"}, ValueError, "total_chunks: got '4'; expected an int of"),
            (
                {"cu_seqlens": Traced(CU)},
                ValueError,
                "total_chunks: got None with a traced cu_seqlens; expected total_chunks=, the number of chunks known",
            ),
        ],
    ),
    "prepare_lens_from_mask": Op(
        xla_utils.prepare_lens_from_mask,
        {"mask": MASK},
        [
            ({"mask": MASK[0]}, ValueError, r"mask: got shape \(3,\); expected \[B, T\]"),
            ({"mask": MASK * 1.0}, TypeError, "mask: got dtype float.*; expected bool"),
            ({"mask": [[True]]}, TypeError, "mask: got list; expected an array"),
        ],
    ),
    "prepare_cu_seqlens_from_segment_ids": Op(
        xla_utils.prepare_cu_seqlens_from_segment_ids,
        {"ids": np.array([[1, 1, 2], [3, 3, 3]]), "sequences": 4},
        [
            ({"ids": [[1, 1]]}, TypeError, "ids: got list; expected an array"),
            ({"ids": ones(2, 3)}, TypeError, "ids: got dtype float32; expected an integer dtype"),
            ({"ids": MASK}, TypeError, "ids: got dtype bool; expected an integer dtype"),
            ({"ids": np.arange(3)}, ValueError, r"ids: got shape \(3,\); expected \[B, T\]"),
            ({"sequences": 2}, ValueError, "sequences: got 2; expected at least the 3 that ids has"),
            ({"sequences": -1}, ValueError, "sequences: got -1; expected an int of at least 0"),
            ({"sequences": 4.0}, ValueError, "sequences: got 4.0; expected an int of at least 0"),
            ({"sequences": None}, ValueError, "sequences: got None; expected an int of at least 0"),
            ({"sequences": Traced(4)}, ValueError, "sequences: got a traced value; expected an int of at least 0"),
        ],
    ),
    "prepare_cu_seqlens_from_mask": Op(
        xla_utils.prepare_cu_seqlens_from_mask,
        {"mask": MASK},
        [
            ({"mask": None}, TypeError, "mask: got NoneType; expected an array"),
            ({"out_dtype": jnp.float32}, TypeError, "out_dtype: got float32; expected an integer dtype"),
            ({"out_dtype": "what"}, TypeError, "out_dtype: got 'what'; expected an integer dtype"),
            ({"out_dtype": None}, TypeError, "out_dtype: got None; expected an integer dtype"),
        ],
    ),
    "identity_dtype_convert": Op(
        lambda dtype: xla_utils.identity_dtype_convert(dtype)(X),
        {"dtype": np.float16},
        [
            ({"dtype": jnp.int32}, TypeError, "dtype: got int32; expected a floating-point dtype"),
            ({"dtype": TINY}, TypeError, f"dtype: got float8_e4m3fn; {EXPECTED}"),
            ({"dtype": "what"}, TypeError, "dtype: got 'what'; expected a floating-point dtype"),
            ({"dtype": None}, TypeError, "dtype: got None; expected a floating-point dtype"),
        ],
    ),
    "parallel.recurrent": Op(
        parallel.recurrent,
        QKV | MESH,
        [
            *LINEAR,
            *ALONG,
            *SCALE,
            ({"platform": "vulkan"}, ValueError, "platform: got 'vulkan'; expected one of"),
            ({"initial_state": ones(8, 8)}, ValueError, r"initial_state: got shape \(8, 8\)"),
            ({"g": ones(6)}, ValueError, r"g: got shape \(6,\); expected"),
            (packed([0, 5, 3]), ValueError, "cu_seqlens: got a decrease at index 2"),
            (packed(np.array([0, 9])), ValueError, "cu_seqlens: got last value 9; expected at most the 6"),
            (packed(CU * 1.0), TypeError, "cu_seqlens: got dtype float"),
            (packed(CU, query=None), TypeError, "query: got NoneType; expected an array"),
        ],
    ),
    "parallel.recurrent_gla": Op(parallel.recurrent_gla, QKV | MESH, [*LINEAR[:6], *ALONG], SLICED),
    "parallel.simple_gla": Op(parallel.simple_gla, QKV | MESH | {"g": ones(2, 6, 4)}, [*HEAD_GATE, *ALONG], SLICED),
    "parallel.retention": Op(parallel.retention, QKV | MESH, LINEAR[:6], SLICED),
    "parallel.linear_attention": Op(parallel.linear_attention, QKV | MESH, LINEAR[:6], SLICED),
    "parallel.lightning_attn": Op(
        parallel.lightning_attn, QKV | MESH | {"layer_idx": 1, "num_layers": 3}, LAYER_NUMBER
    ),
    "parallel.delta_rule": Op(parallel.delta_rule, QKV | MESH | BETA, [*DELTA, *ALONG]),
    "parallel.gated_delta_rule": Op(
        parallel.gated_delta_rule, QKV | MESH | BETA | GATE, [*DELTA[:6], *ALONG], CORRECTED
    ),
    "parallel.kda": Op(parallel.kda, QKV | MESH | BETA | {"g": X}, [*DELTA[:6], *ALONG], CORRECTED),
    "parallel.flash_attention": Op(
        parallel.flash_attention,
        QKV | MESH,
        [
            *ALONG,
            *SCALE,
            *WINDOW,
            *PLATFORM,
            ({"layout": "striped"}, ValueError, "layout: got 'striped'; expected 'contiguous' or 'balanced'"),
            ({"layout": 3}, ValueError, "layout: got 3; expected 'contiguous' or 'balanced'"),
            ({"query": [1.0]}, TypeError, "query: got list; expected an array"),
            ({"key": X[:1]}, ValueError, r"key: got shape \(1, 6, 4, 8\); expected .* B=2"),
            ({"softmax_aux": ones(3, 2)}, ValueError, r"softmax_aux: got shape \(3, 2\)"),
            ({"cu_seqlens_kv": CU}, ValueError, "cu_seqlens_kv: got borders of keys alone"),
            (packed([0, 9]), ValueError, "cu_seqlens: got last value 9; expected at most the 6"),
        ],
    ),
    "parallel.to_balanced": Op(
        parallel.to_balanced,
        {"x": X, "devices": 3},
        [
            ({"x": [1.0]}, TypeError, "x: got list; expected an array"),
            ({"x": X[:, :5]}, ValueError, "x: got 5 tokens; expected a multiple of 6, twice the 3 devices"),
            ({"devices": 0}, ValueError, "devices: got 0; expected an int of at least 1"),
            ({"devices": 1.0}, ValueError, "devices: got 1.0; expected an int of at least 1"),
            ({"axis": 4}, ValueError, "axis: got 4; expected an axis of an array of rank 4"),
            ({"axis": True}, ValueError, "axis: got True; expected an axis"),
        ],
    ),
    "parallel.from_balanced": Op(
        parallel.from_balanced,
        {"x": X, "devices": 3},
        [({"axis": -5}, ValueError, "axis: got -5; expected an axis of an array of rank 4")],
    ),
}


def layer_ops() -> dict[str, Op]:
    """The layers, made and called, which the extra `layers` brings."""
    from flax import nnx

    from ejkernel import layers

    def gated(x, state=None, cu_seqlens=None, segment_ids=None, width=8, heads=2, **options):
        layer = layers.GatedLinearAttention(width, heads, **options, rngs=nnx.Rngs(0))
        return layer(x, state, cu_seqlens, segment_ids=segment_ids)

    def retention(x, state=None, cu_seqlens=None, width=8, heads=2, **options):
        return layers.Retention(width, heads, **options, rngs=nnx.Rngs(0))(x, state, cu_seqlens)

    def lightning(x, layer_idx=1, num_layers=3):
        return layers.LightningAttention(8, 2, layer_idx=layer_idx, num_layers=num_layers, rngs=nnx.Rngs(0))(x)

    def softmax(x, cache=None, cu_seqlens=None, width=8, heads=2, **options):
        return layers.MultiHeadAttention(width, heads, **options, rngs=nnx.Rngs(0))(x, cache, cu_seqlens)

    def empty_cache(batch, capacity, heads=2, **options):
        # weights that are shapes alone: a few of these are made whenever tests are collected
        layer = nnx.eval_shape(lambda: layers.MultiHeadAttention(8, heads, rngs=nnx.Rngs(0)))
        return layer.empty_cache(batch, capacity, **options)

    x = ones(2, 3, 8)
    inputs = [
        ({"x": [1.0]}, TypeError, "x: got list; expected an array"),
        ({"x": x.astype(int)}, TypeError, "x: got dtype int"),
        ({"x": x.astype(TINY)}, TypeError, f"x: got dtype float8_e4m3fn; {EXPECTED}"),
        ({"x": ones(2, 3, 7)}, ValueError, r"x: got shape \(2, 3, 7\); expected \[B, T, width\] with width=8"),
        ({"x": x[0]}, ValueError, r"x: got shape \(3, 8\); expected \[B, T, width\]"),
        ({"cu_seqlens": np.array([0, 3])}, ValueError, r"x: got shape \(2, 3, 8\); expected \[1, T, width\]"),
        (
            {"x": x[0], "cu_seqlens": np.array([0, 4])},
            ValueError,
            "cu_seqlens: got last value 4; expected at most the 3",
        ),
    ]
    sizes = [
        ({"heads": 0}, ValueError, "heads: got 0; expected an int of at least 1"),
        ({"heads": 2.0}, ValueError, "heads: got 2.0; expected an int of at least 1"),
        ({"heads": True}, ValueError, "heads: got True; expected an int of at least 1"),
        ({"width": -8}, ValueError, "width: got -8; expected an int of at least 1"),
    ]
    dtypes = [
        ({"dtype": np.int8}, TypeError, "dtype: got int8; expected a floating-point dtype"),
        ({"param_dtype": TINY}, TypeError, f"param_dtype: got float8_e4m3fn; {EXPECTED}"),
    ]
    cache, roomy = empty_cache(2, 2), empty_cache(2, 9)
    state = layers.RecurrentState(ones(2, 2, 2, 4), ones(2, 3, 16))
    linear = {"rope_type": "linear", "factor": 8.0}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    llama3 = dict(yarn, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
    rows = {
        "GatedLinearAttention": [
            ({"segment_ids": np.zeros((2, 4), int)}, ValueError, r"segment_ids: got shape .*; expected \[B, T\]"),
            ({"segment_ids": ones(2, 3)}, TypeError, "segment_ids: got dtype float32; expected an integer dtype"),
            (
                {"segment_ids": np.zeros((2, 3), int), "cu_seqlens": np.array([0, 3])},
                ValueError,
                "segment_ids: got ids beside cu_seqlens; expected one of the two",
            ),
            ({"key_width": 9}, ValueError, "key_width: got 9; expected a multiple of the 2 heads"),
            ({"value_width": 0}, ValueError, "value_width: got 0; expected an int of at least 1"),
            ({"convolution": 0}, ValueError, "convolution: got 0; expected an int of at least 1"),
            ({"kv_heads": 3}, ValueError, "kv_heads: got 3; expected a divisor of the 2 heads"),
            ({"epsilon": 0}, ValueError, "epsilon: got 0.0; expected a number above 0"),
            ({"gate_normalizer": 0}, ValueError, "gate_normalizer: got 0.0; expected a number above 0"),
            ({"gate_rank": 0}, ValueError, "gate_rank: got 0; expected an int of at least 1"),
            ({"memory": (0, 8)}, ValueError, "memory: got 0.0; expected a number above 0"),
            ({"memory": 8}, ValueError, r"memory: got 8; expected \(shortest, longest\), in tokens"),
            ({"memory": (8, 2)}, ValueError, r"memory: got \(8, 2\); expected \(shortest, longest\), in tokens"),
            ({"memory": (2, INF)}, ValueError, "memory: got inf; expected a finite number"),
            ({"state": ones(2, 2, 2, 4)}, TypeError, "state: got ndarray; expected the RecurrentState of an earlier"),
            (
                {"state": state, "x": ones(3, 1, 8), "convolution": 4},
                ValueError,
                r"state.memory: got shape \(2, 2, 2, 4\); expected \[B, H, K, V\] with B=3",
            ),
            (
                {"state": state, "convolution": 3},
                ValueError,
                r"state.recent: got shape \(2, 3, 16\); expected .* with B=2, recent=2, channels=16",
            ),
            ({"state": state, "heads": 4}, ValueError, r"state.memory: got shape \(2, 2, 2, 4\); expected .* H=4, K=1"),
            (
                {"state": state, "x": x[0], "cu_seqlens": [0, 1, 2, 3], "convolution": 4},
                ValueError,
                r"state.memory: got shape \(2, 2, 2, 4\); expected \[N, H, K, V\] with N=3",
            ),
            ({"state": state._replace(memory=None)}, TypeError, "state.memory: got NoneType; expected an array"),
            (
                {"state": state._replace(recent=None), "convolution": 4},
                TypeError,
                "state.recent: got NoneType; expected an array",
            ),
        ],
        "Retention": [
            (
                {"state": layers.RecurrentState(ones(3, 2, 4, 8))},
                ValueError,
                r"state.memory: got shape \(3, 2, 4, 8\); expected \[B, H, K, V\] .* B=2",
            ),
            (
                {"state": layers.RecurrentState(ones(2, 2, 4, 8))},
                TypeError,
                "state.position: got NoneType; expected an array",
            ),
            (
                {"state": layers.RecurrentState(ones(2, 2, 4, 8), position=ones(2))},
                TypeError,
                "state.position: got dtype float32; expected an integer dtype",
            ),
            (
                {"state": layers.RecurrentState(ones(2, 2, 4, 8), position=ones(2, dtype=np.int8))},
                TypeError,
                "state.position: got dtype int8; expected an integer dtype, int32 or int64",
            ),
            (
                {"state": layers.RecurrentState(ones(2, 2, 4, 8), position=np.array([0, -3], np.int32))},
                ValueError,
                "state.position: got -3; expected positions of at least 0",
            ),
            ({"key_width": 6}, ValueError, "key_width: got 6; expected an even width per head"),
            ({"rope_theta": 0}, ValueError, "rope_theta: got 0.0; expected a number above 0"),
        ],
        "MultiHeadAttention": [
            ({"kv_heads": 3}, ValueError, "kv_heads: got 3; expected a divisor of the 2 heads"),
            ({"kv_heads": 0}, ValueError, "kv_heads: got 0; expected an int of at least 1"),
            ({"width": 6, "x": ones(2, 3, 6)}, ValueError, "head_dim: got 3; expected an even number of the 3 dims"),
            ({"head_dim": 0}, ValueError, "head_dim: got 0; expected an int of at least 1"),
            ({"rotary_dim": 6}, ValueError, "rotary_dim: got 6; expected an even number of the 4 dims of a head"),
            (
                {"rope_theta": None, "rotary_dim": 4},
                ValueError,
                "rotary_dim: got 4; expected None, as rope_theta is None",
            ),
            (
                {"rope_theta": None, "rope_scaling": {}},
                ValueError,
                "rope_scaling: got {}; expected None, as rope_theta is None",
            ),
            ({"rope_scaling": "linear"}, TypeError, "rope_scaling: got str; expected a dict, as config.json has it"),
            (
                {"rope_scaling": {"rope_type": ["yarn"]}},
                ValueError,
                r"rope_scaling: got rope_type \['yarn'\]; expected",
            ),
            *(
                ({"rope_scaling": dict(linear, factor=factor)}, error, f"rope_scaling.factor: got {got}; expected a")
                for factor, error, got in (
                    (0, ValueError, "0.0"),
                    (-2.0, ValueError, "-2.0"),
                    (NAN, ValueError, "nan"),
                    (None, TypeError, "NoneType"),
                    ("8", TypeError, "str"),
                )
            ),
            (
                {"rope_scaling": dict(llama3, high_freq_factor=1.0)},
                ValueError,
                "rope_scaling.high_freq_factor: got 1.0; expected a number above low_freq_factor, 1.0",
            ),
            (
                {"rope_scaling": dict(llama3, original_max_position_embeddings=0)},
                ValueError,
                "rope_scaling.original_max_position_embeddings: got 0.0; expected a number above 0",
            ),
            ({"rope_theta": 1, "rope_scaling": yarn}, ValueError, "rope_theta: got 1.0; expected a number above 1"),
            (
                {"rope_scaling": dict(yarn, beta_slow=40)},
                ValueError,
                "rope_scaling.beta_fast: got 32.0; expected a number above beta_slow, 40.0",
            ),
            (
                {"rope_scaling": dict(yarn, attention_factor=0)},
                ValueError,
                "rope_scaling.attention_factor: got 0.0; expected a number above 0",
            ),
            (
                {"rope_scaling": dict(yarn, mscale="1", mscale_all_dim=1.0)},
                TypeError,
                "rope_scaling.mscale: got str; expected a number",
            ),
            (
                {"rope_scaling": dict(yarn, truncate="no")},
                TypeError,
                "rope_scaling.truncate: got str; expected True or False",
            ),
            ({"window": 0}, ValueError, "window: got 0; expected an int of at least 1"),
            ({"soft_cap": -1}, ValueError, "soft_cap: got -1.0; expected a number above 0"),
            ({"softmax_scale": None, "sinks": 1}, TypeError, "sinks: got int; expected True or False"),
            ({"cache": 3}, TypeError, "cache: got int; expected what empty_cache"),
            ({"cache": cache}, ValueError, "x: got 3 tokens; expected at most the 2 that the cache has room for"),
            (
                {"cache": cache, "x": x[:1, :1]},
                ValueError,
                r"cache.key: got shape \(2, 2, 2, 4\); expected .* with B=1",
            ),
            (
                {"cache": empty_cache(2, 9, heads=4)},
                ValueError,
                r"cache.key: got shape \(2, 9, 4, 2\); expected \[B, capacity, Hkv, K\] with B=2, Hkv=2, K=4",
            ),
            ({"cache": roomy._replace(value=cache.value)}, ValueError, "cache.value: got shape .* capacity=9"),
            (
                {"cache": roomy._replace(position=ones(2))},
                TypeError,
                "cache.position: got dtype float32; expected an int",
            ),
            (
                {"cache": roomy._replace(position=jnp.array([-1, 2]))},
                ValueError,
                "cache.position: got -1; expected positions of at least 0",
            ),
            ({"cache": roomy._replace(position=0)}, TypeError, "cache.position: got int; expected an array"),
            (
                {"cache": cache, "x": x[0], "cu_seqlens": np.array([0, 3])},
                ValueError,
                "cache: got one together with cu_seqlens; expected one of them",
            ),
        ],
        "empty_cache": [
            ({"batch": 0}, ValueError, "batch: got 0; expected an int of at least 1"),
            ({"capacity": -1}, ValueError, "capacity: got -1; expected an int of at least 1"),
            ({"dtype": np.int8}, TypeError, "dtype: got int8; expected a floating-point dtype"),
            ({"dtype": TINY}, TypeError, f"dtype: got float8_e4m3fn; {EXPECTED}"),
        ],
    }
    calls = {"GatedLinearAttention": gated, "Retention": retention, "MultiHeadAttention": softmax}
    more = {word for listed in (dtypes, *rows.values()) for changed, _, _ in listed for word in changed}
    found = {
        f"layers.{name}": Op(
            call, {"x": x}, [*inputs, *sizes, *dtypes, *rows[name]], (*inspect.signature(call).parameters, *more)
        )
        for name, call in calls.items()
    }
    small = {"key_heads": 2, "value_heads": 4, "key_dim": 2, "value_dim": 2}
    found["layers.GatedDeltaNet"] = Op(
        lambda width=8, **options: layers.GatedDeltaNet(width, **options, rngs=nnx.Rngs(0)),
        small,
        [
            ({"key_heads": 3}, ValueError, "key_heads: got 3; expected a divisor of the 4 value_heads"),
            ({"value_dim": 0}, ValueError, "value_dim: got 0; expected an int of at least 1"),
            ({"convolution": 0}, ValueError, "convolution: got 0; expected an int of at least 1"),
        ],
        (*small, "convolution"),
    )
    found["layers.KimiDeltaAttention"] = Op(
        lambda width=8, **options: layers.KimiDeltaAttention(width, **{"rngs": nnx.Rngs(0), **options}),
        {"heads": 2, "head_dim": 4},
        [
            ({"heads": 0}, ValueError, "heads: got 0; expected an int of at least 1"),
            ({"gate_bias": 1}, TypeError, "gate_bias: got int; expected True or False"),
            ({"rngs": None}, TypeError, "rngs: got NoneType; expected nnx.Rngs"),
            ({"rngs": jax.random.key(0)}, TypeError, "rngs: got PRNGKeyArray; expected nnx.Rngs"),
        ],
        ("heads", "head_dim", "gate_bias", "rngs"),
    )
    found["layers.Mamba2"] = Op(
        lambda width=8, **options: layers.Mamba2(width, **options, rngs=nnx.Rngs(0)),
        {"heads": 2, "head_dim": 4, "state_dim": 3},
        [
            ({"groups": 3}, ValueError, "groups: got 3; expected a divisor of the 2 heads"),
            ({"time_step_limit": 1.0}, ValueError, r"time_step_limit: got 1.0; expected \(shortest, longest\)"),
            *(
                ({"time_step_limit": limit}, error, f"time_step_limit: got {got}; expected ")
                for limit, error, got in (
                    ((1.0, 0.5), ValueError, r"\(1.0, 0.5\)"),
                    ((-1.0, 0.5), ValueError, r"\(-1.0, 0.5\)"),
                    ((0.0, 0.0), ValueError, r"\(0.0, 0.0\)"),
                    ((NAN, 1.0), ValueError, "nan"),
                    ((0.1, NAN), ValueError, "nan"),
                    ((INF, INF), ValueError, "inf"),
                    (("0", 1.0), TypeError, "str"),
                    ((0.0, None), TypeError, "NoneType"),
                )
            ),
            ({"state_dim": 0}, ValueError, "state_dim: got 0; expected an int of at least 1"),
        ],
        ("heads", "head_dim", "state_dim", "groups", "time_step_limit"),
    )
    found["layers.LightningAttention"] = Op(lightning, {"x": x}, LAYER_NUMBER[:-1])
    fitting = {name: ones(8, 8) for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")}
    found["layers.from_transformers"] = Op(
        lambda weights, prefix: nnx.state(
            layers.MultiHeadAttention.from_transformers(weights, 8, heads=2, prefix=prefix)
        ),
        {"weights": fitting, "prefix": ""},
        [
            ({"weights": None}, TypeError, "weights: got NoneType; expected a dict of arrays by name"),
            ({"weights": [ones(8, 8)]}, TypeError, "weights: got list; expected a dict of arrays by name"),
            ({"prefix": None}, TypeError, "prefix: got NoneType; expected a string"),
            *(
                (
                    {"weights": dict(fitting, **{"q_proj.weight": bad})},
                    ValueError,
                    rf"weights: got 1 name .*\n  q_proj.weight: got {type(bad).__name__}; expected an array",
                )
                for bad in ([[0.0]], None, 1.0, "x")
            ),
            ({"weights": {**fitting, 3: ones(8)}}, ValueError, r"weights: got 1 name .*\n  3: unknown"),
        ],
    )
    limits = layers.ServingLimits(tokens=8, sequences=3, slots=4, pages=6, page=2, longest=8)
    found["layers.ServingLimits"] = Op(
        lambda **sizes: vars(layers.ServingLimits(**sizes)),
        {"tokens": 8, "sequences": 3},
        [
            ({"tokens": 0}, ValueError, "tokens: got 0; expected an int of at least 1"),
            ({"sequences": None}, ValueError, "sequences: got None; expected an int of at least 1"),
            ({"slots": 2.0}, ValueError, "slots: got 2.0; expected an int of at least 1"),
            ({"page": 0}, ValueError, "page: got 0; expected an int of at least 1"),
        ],
        ("tokens", "sequences", "slots", "page"),
    )
    batch = {"limits": limits, "tokens": [3, 1], "lengths": [0, 5], "reads": [-1, 2], "writes": [1, 2]}
    batch |= {"pages": [[0, 1], [2, 3, 4]]}
    several = layers.ServingLimits(tokens=8, sequences=3, slots=4, pages=6, page=2, longest=8, checkpoints=2)
    drafts = {"limits": several, "writes": [[1, 3], [2]], "at": [[2, 3], [1]]}
    bare = layers.ServingLimits(tokens=8, sequences=3)
    windows = layers.ServingLimits(tokens=8, sequences=3, slots=4, pages=6, page=2, longest=8, window_pages=3)
    found["layers.ragged_batch"] = Op(
        lambda **lists: layers.ragged_batch(**lists),
        batch,
        [
            ({"limits": 8}, TypeError, "limits: got int; expected ServingLimits"),
            ({"tokens": 3}, TypeError, "tokens: got int; expected a list, with an entry for each sequence"),
            ({"tokens": [3, 1, 0, 0]}, ValueError, "tokens: got 4 sequences; expected at most the 3 of limits"),
            ({"tokens": [8, 1]}, ValueError, "tokens: got 9 of them; expected at most the 8 of limits.tokens"),
            ({"tokens": [3, -1]}, ValueError, "tokens: got -1 of sequence 1; expected a number of at least 0"),
            ({"tokens": [3, 1.0]}, TypeError, r"tokens: got \[1.0\] of sequence 1; expected integers"),
            ({"tokens": [3, 4]}, ValueError, "tokens: got 9 in sequence 1; expected at most 8, by limits"),
            ({"lengths": [0]}, ValueError, "lengths: got 1 sequences; expected the 2 of tokens"),
            ({"lengths": [0, -5]}, ValueError, "lengths: got -5 of sequence 1; expected a number of at least 0"),
            ({"lengths": [0, 9]}, ValueError, "lengths: got 9; expected 0 to 8, the tokens of 4 pages of 2"),
            ({"reads": [-1, 4]}, ValueError, "reads: got slot 4; expected slots from 0 to 3, or -1 for none"),
            ({"reads": [-2, 0]}, ValueError, "reads: got slot -2; expected slots from 0 to 3, or -1 for none"),
            ({"reads": "ab"}, TypeError, "reads: got str; expected a list"),
            ({"writes": [2, 2]}, ValueError, "writes: got slot 2 twice; expected each slot at most once"),
            ({"writes": [1, 2**40]}, ValueError, "writes: got slot 2147483647; expected slots from 0 to 3"),
            ({"at": [[1], [1]]}, ValueError, "at: got a list; expected None, as limits.checkpoints is None"),
            (drafts | {"at": [[3], [1]]}, ValueError, "at: got 1 of sequence 0; expected as many as its writes, 2"),
            (drafts | {"writes": [[1, 2], [2]]}, ValueError, "writes: got slot 2 twice; expected each slot at most"),
            (
                drafts | {"writes": [[1, 3, 0], [2]], "at": [[1, 2, 3], [1]]},
                ValueError,
                "writes: got 3 of sequence 0; expected at most 2, by limits.checkpoints",
            ),
            ({"pages": [[0], [2, 3, 4]]}, ValueError, "pages: got no page for tokens from 2 of sequence 0; expected"),
            ({"pages": [[0, 1], [2, 3, -1]]}, ValueError, "pages: got no page for tokens from 5 of sequence 1"),
            ({"pages": None}, ValueError, "pages: got no page for tokens from 0 of sequence 0; expected one"),
            ({"pages": [[0, 6], [2, 3, 4]]}, ValueError, "pages: got page 6; expected pages from 0 to 5, or -1"),
            ({"pages": [[0, 4], [2, 3, 4]]}, ValueError, "pages: got page 4 for new tokens in two places"),
            (
                {"pages": [[0] * 5, [2]]},
                ValueError,
                "pages: got 5 of sequence 0; expected at most 4, by limits.longest",
            ),
            ({"window_pages": [[0], []]}, ValueError, "window_pages: got a list; expected None, as limits have no win"),
            (
                {"limits": windows, "window_pages": [[0, 1], [-1, 2, 3]]},
                ValueError,
                "window_pages: got page 3; expected pages from 0 to 2",
            ),
            ({"limits": bare}, ValueError, "reads: got a list; expected None, as limits have no slots"),
            ({"whole_prompts": True}, ValueError, "whole_prompts: got True beside lengths of 5; expected sequences"),
            ({"whole_prompts": 1}, TypeError, "whole_prompts: got int; expected True or False"),
        ],
        (*batch, "at", "window_pages", "whole_prompts"),
    )

    def served(kind, x, batch, cache=None):
        layer = kind(8, 2, rngs=nnx.Rngs(0))
        return layer(x, layer.empty_cache(limits) if cache is None else cache, batch)

    made = layers.ragged_batch(**batch)
    unslotted = layers.RaggedBatch(made.cu_seqlens, made.lengths, table=made.table)
    pages = ejkernel.PagedCache(ones(6, 2, 2, 4), ones(6, 2, 2, 4))
    of_both = [
        ({"x": ones(8, 7)}, ValueError, r"x: got shape \(8, 7\); expected \[T, width\]"),
        ({"x": ones(2, 8, 8)}, ValueError, r"x: got shape \(2, 8, 8\); expected"),
        ({"x": ones(3, 8)}, ValueError, "cu_seqlens: got last value 4; expected at most the 3 tokens"),
    ]
    found["layers.MultiHeadAttention served"] = Op(
        functools.partial(served, layers.MultiHeadAttention),
        {"x": ones(8, 8), "batch": made},
        [
            *of_both,
            ({"cache": empty_cache(2, 9)}, TypeError, "cache: got KeyValueCache; expected what empty_cache or an"),
            ({"cache": pages._replace(value=None)}, TypeError, "cache.value: got NoneType; expected an array"),
            (
                {"cache": pages._replace(key=ones(6, 2, 1, 4))},
                ValueError,
                r"cache.key: got shape \(6, 2, 1, 4\); expected \[P, page, Hkv, K\] with Hkv=2, K=4",
            ),
            (
                {"batch": replace(made, lengths=np.array([0, -5, 0]))},
                ValueError,
                "batch.lengths: got -5; expected positions of at least 0",
            ),
            (
                {"batch": replace(made, table=None)},
                ValueError,
                "batch: got no table; expected pages=, as this layer keeps keys and values in them",
            ),
            (
                {"batch": replace(made, table=np.full((3, 4), 9))},
                ValueError,
                "table: got page 9; expected pages from 0 to 5",
            ),
        ],
        ("x", "cache", "batch", "cu_seqlens", "table"),
    )
    found["layers.GatedLinearAttention served"] = Op(
        functools.partial(served, layers.GatedLinearAttention),
        {"x": ones(8, 8), "batch": made},
        [
            *of_both,
            ({"cache": pages}, TypeError, "state: got PagedCache; expected what empty_cache or an earlier call"),
            (
                {"cache": layers.RecurrentState(ones(4, 2, 3, 4))},
                ValueError,
                r"state.memory: got shape \(4, 2, 3, 4\); expected \[slots, H, K, V\] with H=2, K=2, V=4",
            ),
            ({"batch": unslotted}, ValueError, "batch: got no slots; expected reads= and writes=, as this layer"),
            (
                {"batch": replace(made, writes=np.array([1, 1, -1]))},
                ValueError,
                "writes: got slot 1 twice; expected each slot at most once",
            ),
        ],
        ("x", "state", "batch", "cu_seqlens", "writes"),
    )
    rows["empty_cache"] += [
        ({"batch": bare, "capacity": None}, ValueError, "limits: got no pages; expected pages=, as this layer keeps"),
        ({"batch": limits}, ValueError, "capacity: got 3; expected None beside ServingLimits"),
    ]
    names = ("batch", "capacity", "dtype", "limits")
    found["layers.empty_cache"] = Op(empty_cache, {"batch": 2, "capacity": 3}, rows["empty_cache"], names)
    return found


if importlib.util.find_spec("flax"):
    OPS |= layer_ops()
CASES = [(name, *row) for name, op in OPS.items() for row in op.rows]
