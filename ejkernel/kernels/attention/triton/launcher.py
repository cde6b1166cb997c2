"""What every kernel of a call is told of it."""

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
from ejkernel.kernels._launch import Tile, padded
from ejkernel.kernels.attention import dropout
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.masks import int32_ids
from ejkernel.kernels.attention.triton.plan import Plan
from ejkernel.xla_utils.utils import cdiv

LOG2E = math.log2(math.e)  # logs are to base 2 in the kernels
_FAR = (1 << 31) - 1  # as far as int32 goes
# as in `device.tiles`
_WAYS = 64
_ALIGNED = 16
_PRESENT, _ROWS, _QUERIES, _KEYS = 1, 2, 4, 8

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
_NAMES = ("forward", "backward", "bias", "decoding", "tangent")
DEVICE = {name: f"ejkernel.kernels.attention.triton.device.{name}" for name in _NAMES}


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


def aligned(pairs: Array | None) -> Array | None:
    """A mask or a bias whose rows begin where wide loads can: byte by byte, they would take most of the time."""
    if pairs is None or pairs.shape[3] == 1:
        return pairs
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, -pairs.shape[3] % _ALIGNED)))


def _layout(pairs: Array | None) -> tuple[int, int]:
    """Which axes of a mask or a bias are not broadcast, and its heads."""
    if pairs is None:
        return 0, 1
    rows, heads, queries, keys = pairs.shape
    axes = (_ROWS if rows > 1 else 0) | (_QUERIES if queries > 1 else 0) | (_KEYS if keys > 1 else 0)
    return _PRESENT | axes, heads


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What kernels are compiled for; device code gets it as `CALL`."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_block: int  # dims, padded
    value_block: int
    rows: int  # queries a tile
    columns: int  # keys a tile
    joined: bool  # as in `Tile`
    packed: bool
    ids: bool  # rows hold several sequences
    offsets: int  # none, one for all rows, or one each
    left: bool  # whether keys are bounded on that side
    right: bool
    mask: int  # its layout, as in `device.tiles`
    mask_heads: int
    bias: int
    bias_heads: int
    sinks: int
    sink_heads: int
    sink_block: int
    scale: float
    cap: float
    linear: bool  # the scale is applied with the exponential
    fast_tanh: bool
    least: int  # what dropout keeps draws from this on, 0 if all
    share: float  # what is kept is multiplied by this
    placed: bool  # draws are counted in a call that this one is a part of
    precision: str
    parts: int = 1  # of the keys, the heads or the tiles, for programs of their own
    part_block: int = 1
    has_d_lse: bool = False
    folded: bool = False  # what is taken off scores travels with them
    of_key: bool = False  # the key's gradient is asked for
    of_value: bool = False
    bounds_by_row: bool = False


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
        """The call's arrays, by the names that kernels have for them."""
        named = self.inputs._asdict()
        return {"words" if name == "dropout_key" else name: each for name, each in named.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """Rows, queries, keys, sequences, how far apart those are that are looked at first, and bounds of distance."""
        call, count = self.call, self.call.sequences or 0
        left, right = (_FAR if each is None else min(each, _FAR) for each in (call.left, call.right))
        sizes = {"B": call.batch, "S": call.queries, "L": call.keys, "N": count, "apart": cdiv(count + 1, _WAYS)}
        return sizes | {"left": left, "right": right}

    def blocks(self, size: int, of_keys: bool = False) -> int:
        """Blocks of `size` tokens of queries or keys; of packed sequences, as many as there may be."""
        count = self.call.keys if of_keys else self.call.queries
        if self.call.sequences is not None:
            return count // size + self.call.sequences + 1
        return self.call.batch * cdiv(count, size)

    def ranges(self, size: int, of_keys: bool = True) -> dict[str, Array | None]:
        """Of each block of `size` keys or queries, padding aside, the least and the largest id; and if all have it."""
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
        **constants: Any,
    ) -> Any:
        """Runs `kernel`, which is told the call's sizes and constants, and more of these."""
        known = replace(self._constants, rows=tile.rows, columns=tile.columns, joined=tile.joined, **constants)
        return _launch.launch(kernel, {**inputs, **self.sizes}, outputs, constants=known, programs=programs, tile=tile)

    @cached_property
    def _constants(self) -> Constants:
        call, inputs = self.call, self.inputs
        offset, sinks = inputs.query_offset, inputs.sinks
        mask, mask_heads = _layout(inputs.mask)
        bias, bias_heads = _layout(inputs.bias)
        return Constants(
            heads=call.heads,
            kv_heads=call.kv_heads,
            key_dim=call.key_dim,
            value_dim=call.value_dim,
            key_block=padded(call.key_dim),
            value_block=padded(call.value_dim),
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
            sinks=0 if sinks is None else sinks.shape[1],
            sink_heads=1 if sinks is None else sinks.shape[0],
            sink_block=1 if sinks is None else padded(sinks.shape[1], 1),
            scale=float(call.scale),
            cap=float(call.soft_cap or 0.0),
            linear=call.soft_cap is None and inputs.bias is None and call.scale > 0,
            fast_tanh=self.plan.fast_tanh,
            least=dropout.least(call),
            share=1 / (1 - call.dropout),
            placed=inputs.dropout_key is not None and dropout.is_placed(inputs.dropout_key),
            precision="tf32x3" if inputs.query.dtype == np.float32 else "ieee",
        )
