"""One call of softmax attention on its way to Triton: the arrays, sizes and constants that its kernels share."""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile
from ejkernel.kernels.attention import constants, dropout
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import by_group, int32_ids, live_tokens
from ejkernel.kernels.attention.triton.plan import Plan
from ejkernel.xla_utils.utils import cdiv

LOG2E = math.log2(math.e)  # logarithms are to base 2 in the kernels
_FAR = (1 << 31) - 1  # the largest int32
# as in `device.tiles`
_WAYS = 64
_ALIGNED = 16
_PRESENT, _ROWS, _QUERIES, _KEYS = 1, 2, 4, 8


def device(name: str) -> Any:
    """A module of device code; nothing imports it before, since `import ejkernel` must not import Triton."""
    return importlib.import_module(f"ejkernel.kernels.attention.triton.device.{name}")


def aligned(pairs: Array | None) -> Array | None:
    """A mask or a bias with rows padded so that each begins aligned: loads byte by byte would take most of the time."""
    if pairs is None or pairs.shape[3] == 1:
        return pairs
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, -pairs.shape[3] % _ALIGNED)))


def _layout(pairs: Array | None) -> tuple[int, int]:
    """The flags of `device.tiles` for a mask's or a bias' axes that are not broadcast, and its number of heads."""
    if pairs is None:
        return 0, 1
    rows, heads, queries, keys = pairs.shape
    axes = (_ROWS if rows > 1 else 0) | (_QUERIES if queries > 1 else 0) | (_KEYS if keys > 1 else 0)
    return _PRESENT | axes, heads


@dataclass(frozen=True, kw_only=True)
class Constants(constants.Constants):
    """Constants of kernels without pages. The fields with defaults are those of some kernels alone."""

    joined: bool  # as in `Tile`
    packed: bool
    ids: bool  # whether rows hold several sequences, told apart by ids
    offsets: int  # how many query offsets: 0, 1 for all rows, or 2 for one each
    left: bool  # whether keys are bounded on that side
    right: bool
    mask: int  # its layout, as in `device.tiles`
    mask_heads: int
    bias: int
    bias_heads: int
    scaled_late: bool  # whether scores are scaled only in the exponent
    fast_tanh: bool
    drop_below: int  # dropout drops weights whose random word is less; 0 without dropout
    keep_factor: float  # what dropout multiplies the other weights by
    part_of_call: bool  # whether dropout counts heads and rows in a call that this one is a device's part of
    parts: int = 1  # how many programs share the keys, the heads or the tiles
    part_block: int = 1
    has_d_lse: bool = False
    folded: bool = False  # whether products subtract log-sum-exp and delta, see `device.backward.terms`
    of_key: bool = False  # whether the key's gradient is wanted
    of_value: bool = False
    bounds_by_row: bool = False


def without_masked(call: Call, inputs: Inputs, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """`arrays`, by the names of `Inputs`, with 0 for queries and keys that the mask leaves without a partner.

    What the mask hides must not matter even if it is NaN, and 0 · NaN would let it.
    """
    if inputs.mask is None:
        return dict(arrays)
    queries, keys = live_tokens(call, by_group(call, inputs.mask, 1))
    live = {"query": queries, "d_output": queries, "key": keys, "value": keys}
    return {name: None if x is None else jnp.where(live[name], x, 0) for name, x in arrays.items()}


@dataclass(frozen=True)
class Launcher:
    """One call on its way to the device."""

    call: Call
    plan: Plan
    inputs: Inputs

    @staticmethod
    def of(call: Call, plan: Plan, inputs: Inputs) -> "Launcher":
        names = ("cu_seqlens", "cu_seqlens_kv")
        borders = {name: each.astype(jnp.int32) for name in names if (each := getattr(inputs, name)) is not None}
        inputs = inputs._replace(mask=aligned(inputs.mask), bias=aligned(inputs.bias), **borders)
        if inputs.segment_ids is not None and inputs.segment_ids_kv is not None:
            ids, ids_kv = int32_ids(inputs.segment_ids, inputs.segment_ids_kv)
            inputs = inputs._replace(segment_ids=ids, segment_ids_kv=ids_kv)
        return Launcher(call, plan, inputs)

    @property
    def arrays(self) -> dict[str, Array | None]:
        """The call's arrays, by their names in device code."""
        named = self.inputs._asdict()
        return {"words" if name == "dropout_key" else name: each for name, each in named.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Batch, queries, keys, sequences; the stride of a search's first pass over sequences; bounds of distance."""
        call, count = self.call, self.call.sequences or 0
        left, right = (_FAR if each is None else min(each, _FAR) for each in (call.left, call.right))
        sizes = {"B": call.batch, "S": call.queries, "L": call.keys, "N": count, "apart": cdiv(count + 1, _WAYS)}
        return sizes | {"left": left, "right": right}

    def blocks(self, size: int, of_keys: bool = False) -> int:
        """How many blocks of `size` queries or keys there are; of packed sequences, how many there may be."""
        count = self.call.keys if of_keys else self.call.queries
        if self.call.sequences is not None:
            return count // size + self.call.sequences + 1
        return self.call.batch * cdiv(count, size)

    def ranges(self, size: int, of_keys: bool = True) -> dict[str, Array | None]:
        """The least and the largest id of each block of `size` keys or queries, padding aside, and if all are equal."""
        ids = self.inputs.segment_ids_kv if of_keys else self.inputs.segment_ids
        if ids is None:
            return dict.fromkeys(("least", "largest", "whole"))
        blocks = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % size)), constant_values=-1).reshape(ids.shape[0], -1, size)
        least, largest = jnp.where(blocks < 0, _FAR, blocks).min(-1), blocks.max(-1)
        whole = (blocks.min(-1) == largest).astype(jnp.int32)
        return {"least": least, "largest": largest, "whole": whole}

    def launch(
        self,
        kernel: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        programs: int,
        tile: Tile,
        **others: Any,
    ) -> Any:
        """The outputs of `kernel`, which gets the constants `others` besides those of the call."""
        merged = replace(self._constants, rows=tile.rows, columns=tile.columns, joined=tile.joined, **others)
        return _launch.launch(kernel, {**inputs, **self.sizes}, outputs, constants=merged, programs=programs, tile=tile)

    @cached_property
    def _constants(self) -> Constants:
        call, inputs = self.call, self.inputs
        offset = inputs.query_offset
        mask, mask_heads = _layout(inputs.mask)
        bias, bias_heads = _layout(inputs.bias)
        return Constants(
            **constants.common(call, inputs.sinks, inputs.query.dtype == np.float32),
            rows=0,
            columns=0,
            joined=False,
            packed=call.sequences is not None,
            ids=call.segment_ids,
            offsets=0 if offset is None else min(offset.shape[0], 2),
            left=call.left is not None,
            right=call.right is not None,
            mask=mask,
            mask_heads=mask_heads,
            bias=bias,
            bias_heads=bias_heads,
            scaled_late=call.soft_cap is None and inputs.bias is None and call.scale > 0,
            fast_tanh=self.plan.fast_tanh,
            drop_below=dropout.threshold(call),
            keep_factor=1 / (1 - call.dropout),
            part_of_call=inputs.dropout_key is not None and dropout.is_placed(inputs.dropout_key),
        )
