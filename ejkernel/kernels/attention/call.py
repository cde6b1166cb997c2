"""The static facts of a call of softmax attention: what is fixed when it is traced."""

import functools
from collections.abc import Container
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec


def common_dtype(*dtypes: Any) -> np.dtype:
    """The dtype that holds all of these by JAX's default promotion, whatever promotion the user has set."""
    return _common_dtype(dtypes, jax.config.read("jax_enable_x64"))


@functools.cache
def _common_dtype(dtypes: tuple[Any, ...], x64: bool) -> np.dtype:
    """`common_dtype` in this mode of 64-bit types, found once: JAX's own rules took a quarter of an eager call."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(*dtypes))


# The public names of the arguments that fields of `Call` come from.
OPTIONS = {
    "soft_cap": "logits_soft_cap",
    "left": "sliding_window",
    "right": "causal",
    "mask_shape": "attention_mask",
    "bias_shape": "bias",
    "sinks": "softmax_aux",
    "sequences": "cu_seqlens",
    "separate": "cu_seqlens_kv",
    "offset": "query_offset",
}


@dataclass(frozen=True)
class Call:
    """Static facts of one call; the arrays travel beside it, positionally, in this order:

    | array | shape |
    |---|---|
    | `query` | `[B, S, H, D]` |
    | `key` | `[B, L, Hkv, D]` |
    | `value` | `[B, L, Hkv, Dv]` |
    | `mask` | bool `[1 or B, 1 or Hkv or H, 1 or S, 1 or L]`, or `None` |
    | `bias` | floating, shaped as `mask`, or `None` |
    | `sinks` | `[1 or Hkv or H, sinks]` or `None` |
    | `dropout_key` | uint32 `[2]`, the words of a key, if `dropout` is above 0; `[4]` on a device's part of a call |
    | `cu_seqlens`, `cu_seqlens_kv` | `[N + 1]` with `B = 1`, or `None` (`flash_attention` only) |
    | `query_offset` | int32 `[1]`, `[B]` or packed `[N]`, or `None` for 0 (`flash_attention` only) |
    | `segment_ids`, `segment_ids_kv` | integers `[B, S]`, `[B, L]` of one dtype, or `None` (`flash_attention` only) |

    `attention` has at most one of `mask` and `bias`; in `flash_attention` both apply. `left` and `right` bound the keys
    that a query sees by their distance, `None` being no bound; `causal` and the window both end up in them.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    query_dtype: np.dtype
    key_dtype: np.dtype
    value_dtype: np.dtype
    scale: float
    dtype: np.dtype
    softmax_dtype: np.dtype
    # options, which have a default
    soft_cap: float | None = None
    left: int | None = None
    right: int | None = None
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    bias_dtype: np.dtype | None = None
    sinks: int | None = None
    dropout: float = 0.0
    sequences: int | None = None  # packed in one row
    separate: bool = False  # whether keys have borders of their own
    offset: bool = False
    segment_ids: bool = False
    segment_ids_kv: bool = False  # whether keys have ids of their own
    return_lse: bool = False
    return_weights: bool = False
    block_sizes: tuple[int, int] | None = None  # of queries and of keys

    def result_specs(self, query: PartitionSpec) -> Any:
        """How the results are sharded where shardings are explicit and the query's is this."""
        rows, tokens, heads, _ = query
        output = PartitionSpec(rows, tokens, heads, None)
        if self.return_weights:
            return output, PartitionSpec(rows, heads, tokens, None)
        return (output, PartitionSpec(rows, tokens, heads)) if self.return_lse else output

    def dims(self) -> dict[str, str]:
        """The dimensions of the arrays by name, a letter each."""
        tokens = {"query": "BSHD", "key": "BLHD", "value": "BLHD", "mask": "BHSL", "bias": "BHSL", "sinks": "HZ"}
        offset = "B" if self.sequences is None else "N"
        borders = {"cu_seqlens": "N", "cu_seqlens_kv": "N", "query_offset": offset}
        return {**tokens, "dropout_key": "*", **borders, "segment_ids": "BS", "segment_ids_kv": "BL"}

    def part(self, rows: int, heads: int, shapes: dict[str, tuple[int, ...] | None]) -> "Call":
        """One device's part of the call, where so many devices share its `rows` and `heads`."""
        key = shapes["key"]
        assert key is not None
        return replace(
            self,
            batch=self.batch // rows,
            heads=self.heads // heads,
            kv_heads=key[2],
            mask_shape=shapes["mask"],
            bias_shape=shapes["bias"],
        )

    @property
    def groups(self) -> int:
        """How many query heads each key/value head serves."""
        return self.heads // self.kv_heads

    @property
    def wide(self) -> np.dtype:
        """The dtype of sums: float32, or float64 if anything is float64."""
        parts = (self.query_dtype, self.key_dtype, self.value_dtype, self.softmax_dtype)
        return np.dtype(np.float64 if np.dtype(np.float64) in parts else np.float32)

    @property
    def precision(self) -> lax.Precision:
        """The precision of products: one fast pass loses nothing of half-precision inputs, and would of others."""
        narrow = {each.itemsize for each in (self.query_dtype, self.key_dtype, self.value_dtype)} == {2}
        return lax.Precision.DEFAULT if narrow else lax.Precision.HIGHEST

    @property
    def residual_dtype(self) -> np.dtype:
        """The output's dtype as a residual: at least the values', as a narrower output would spoil the gradients."""
        return common_dtype(self.dtype, self.value_dtype)


def lacking(call: Call, supported: Container[str]) -> str | None:
    """An option of `call` that is not among the `supported` ones, or `None`.

    Implementations list what they support, so that they refuse options that are added later.
    """
    for each in fields(call):
        if each.default is not MISSING and getattr(call, each.name) != each.default and each.name not in supported:
            return f"it has no {OPTIONS.get(each.name, each.name)}"
    return None
