"""Tile sizes by GPU, dtype, head dim and options, as data, and the choice among them for a call.

Hopper's are measured, with a table of their own for options of the GPU page's rows; the others fit into memory. Head
dims up to 512 (the entries for 1024, both dims together) are not measured yet: they are kept as the pages promise them,
for Gemma 4's global layers.
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch
from ejkernel.kernels._launch import Tile, padded
from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL
from ejkernel.kernels.attention.call import Call, common_dtype
from ejkernel.xla_utils.utils import cdiv

_SQUARE, _FLAT = Tile(64, 64), Tile(16, 64, stages=2)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tiles of a call's kernels.

    Attributes:
        forward: Of the pass that gives the output.
        query: Of the pass that gives the query's gradient.
        key: Of the pass that gives the key's and the value's gradient.
        bias: Of the pass that gives the bias' gradient.
        decoding: Of few queries against many keys; its rows are a group's queries, however many they are.
        apart: Whether the pass of `key` runs once for each of its gradients, as the registers hold the sums of one.
        tangent: Of the pass that gives the output's tangent. `None` is `query` with half the columns, as the pass walks
            twice as many arrays.
    """

    forward: Tile
    query: Tile
    key: Tile
    bias: Tile = _SQUARE
    decoding: Tile = _FLAT
    apart: bool = False
    tangent: Tile | None = None

    @property
    def tangent_tile(self) -> Tile:
        return self.tangent or replace(self.query, columns=max(16, self.query.columns // 2))


# By shared memory a program may use, and by the padded dims of a key and a value together.
# fmt: off
_HALF = {
    LARGE: {
        128: Config(forward=Tile(64, 64, stages=3), query=Tile(64, 64, stages=3), key=Tile(64, 64, stages=3),
            decoding=Tile(16, 128, stages=2), tangent=Tile(64, 64, stages=2)),
        256: Config(forward=Tile(128, 64, warps=8, stages=3), query=Tile(128, 64, warps=8, stages=3),
            key=Tile(64, 128, warps=8, stages=3), decoding=Tile(16, 128, stages=2),
            tangent=Tile(128, 64, warps=8, stages=2)),
        384: Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(128, 64, warps=8, stages=2),
            key=Tile(32, 128, warps=8, stages=3)),
        512: Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(128, 32, warps=8, stages=2),
            key=Tile(32, 128, warps=8, stages=2), apart=True),
        1024: Config(forward=Tile(64, 32, warps=8, stages=2, joined=True), query=Tile(64, 32, warps=8, joined=True),
            key=Tile(32, 64, warps=8, joined=True), bias=Tile(64, 32, warps=8),
            decoding=Tile(16, 32, warps=8, stages=2), apart=True),
    },
    MEDIUM: {
        128: Config(forward=Tile(64, 64, stages=3), query=Tile(64, 64, stages=2), key=Tile(64, 64, stages=2),
            decoding=Tile(16, 64, stages=3)),
        256: Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(64, 64, stages=2),
            key=Tile(32, 64, stages=2)),
        512: Config(forward=Tile(64, 32, stages=2), query=Tile(64, 32, warps=8, stages=2),
            key=Tile(32, 64, warps=8, stages=2), bias=Tile(32, 32), decoding=Tile(16, 32, stages=2)),
        1024: Config(forward=Tile(64, 16, warps=8, stages=2, joined=True), query=Tile(16, 32, warps=8, joined=True),
            key=Tile(32, 16, warps=8, joined=True), bias=Tile(16, 16, warps=8), decoding=Tile(16, 16, warps=8),
            apart=True),
    },
    SMALL: {
        128: Config(forward=Tile(64, 64, stages=2), query=Tile(64, 64, stages=2), key=Tile(64, 64, stages=2)),
        256: Config(forward=Tile(64, 64, stages=2), query=Tile(64, 32, stages=2), key=Tile(32, 64, stages=2),
            bias=Tile(32, 32), decoding=Tile(16, 32, stages=2)),
        512: Config(forward=Tile(64, 32), query=Tile(32, 32), key=Tile(32, 32), bias=Tile(32, 32),
            decoding=Tile(16, 32)),
        1024: Config(forward=Tile(32, 16, warps=8, joined=True), query=Tile(16, 16, stages=2, joined=True),
            key=Tile(16, 16, stages=2, joined=True), bias=Tile(16, 16), decoding=Tile(16, 16, warps=8), apart=True),
    },
}
_FULL = {  # float32, whose products take three passes and twice the memory
    LARGE: {
        128: Config(forward=Tile(64, 64, stages=2), query=Tile(64, 32, stages=2), key=Tile(32, 64, stages=2),
            bias=Tile(32, 32)),
        256: Config(forward=Tile(64, 32, stages=2), query=Tile(64, 32), key=Tile(32, 64), bias=Tile(32, 32),
            decoding=Tile(16, 32, stages=2)),
        512: Config(forward=Tile(64, 32, warps=8), query=Tile(32, 32), key=Tile(32, 32), bias=Tile(32, 32),
            decoding=Tile(16, 32)),
    },
    MEDIUM: {
        128: Config(forward=Tile(64, 32, stages=2), query=Tile(32, 32, stages=2), key=Tile(32, 32, stages=2),
            bias=Tile(32, 32), decoding=Tile(16, 32, stages=2)),
        256: Config(forward=Tile(32, 32), query=Tile(32, 32), key=Tile(32, 32), bias=Tile(32, 32),
            decoding=Tile(16, 32)),
        512: Config(forward=Tile(16, 32), query=Tile(16, 16), key=Tile(16, 16), bias=Tile(16, 16),
            decoding=Tile(16, 16)),
    },
    SMALL: {
        128: Config(forward=Tile(32, 32), query=Tile(32, 32), key=Tile(32, 32), bias=Tile(32, 32),
            decoding=Tile(16, 32)),
        256: Config(forward=Tile(32, 16), query=Tile(16, 16), key=Tile(16, 16), bias=Tile(16, 16),
            decoding=Tile(16, 16)),
        512: Config(forward=Tile(16, 16), query=Tile(16, 16), key=Tile(16, 16), bias=Tile(16, 16),
            decoding=Tile(16, 16)),
    },
}
# Two small programs a multiprocessor, one of which computes while the other waits: faster where walks are short, or
# where there is more to do to a score.
PACKED, SHORT, LONG = "packed", "short", "long"
# Tiles of a mask or a bias wait in shared memory with those of keys; of a bias in float32, fewer find room.
MASKED, BIASED, BIASED_WIDE = "masked", "biased", "biased, in float32"
_DECODING = Tile(16, 128, stages=2)
_BIASED_128 = Config(forward=Tile(64, 64, stages=3, joined=True), query=Tile(64, 64, stages=3),
    key=Tile(64, 64, stages=2), decoding=_DECODING)
_HOPPER_512 = Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(128, 32, warps=8, stages=3),
    key=Tile(32, 128, warps=8, stages=3), apart=True)
_BY_WALK: dict[tuple[str | int, int, str], Config] = {
    (LARGE, 256, PACKED): Config(forward=Tile(64, 32, stages=3, joined=True), query=Tile(64, 64, stages=2, joined=True),
        key=Tile(32, 64, stages=3, joined=True), decoding=_DECODING),
    (LARGE, 256, SHORT): Config(forward=Tile(64, 64, stages=3), query=Tile(64, 64, stages=2),
        key=Tile(32, 64, stages=3), decoding=_DECODING),
    (LARGE, 128, MASKED): Config(forward=Tile(128, 64, warps=8, stages=3, joined=True), query=Tile(64, 64, stages=3),
        key=Tile(64, 64, stages=3), decoding=_DECODING),
    (LARGE, 256, MASKED): Config(forward=Tile(128, 64, warps=8, stages=3, joined=True),
        query=Tile(128, 64, warps=8, stages=3), key=Tile(64, 128, warps=8, stages=3), decoding=_DECODING,
        tangent=Tile(128, 64, warps=8, stages=2, joined=True)),
    (LARGE, 128, BIASED): _BIASED_128,
    (LARGE, 128, BIASED_WIDE): _BIASED_128,
    (LARGE, 256, BIASED): Config(forward=Tile(128, 64, warps=8, stages=3, joined=True),
        query=Tile(128, 64, warps=8, stages=3), key=Tile(32, 128, warps=8, stages=3), bias=Tile(128, 128, warps=8),
        decoding=_DECODING),
    (LARGE, 256, BIASED_WIDE): Config(forward=Tile(128, 64, warps=8, stages=3, joined=True),
        query=Tile(128, 32, warps=8, stages=3), key=Tile(32, 128, warps=8, stages=3), bias=Tile(128, 128, warps=8),
        decoding=_DECODING),
    (LARGE, 384, BIASED): Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(128, 64, warps=8, stages=2),
        key=Tile(32, 128, warps=8, stages=2), apart=True),
    (LARGE, 384, BIASED_WIDE): Config(forward=Tile(128, 64, warps=8, stages=2), query=Tile(128, 32, warps=8, stages=2),
        key=Tile(32, 128, warps=8, stages=2), apart=True),
    (LARGE, 512, BIASED_WIDE): Config(forward=Tile(128, 32, warps=8, stages=2), query=Tile(64, 32, stages=2),
        key=Tile(32, 64, stages=2), apart=True),
    # Hopper's memory to the last byte; a mask or a bias takes some, and Blackwell needs more
    **{(90, 512, walk): _HOPPER_512 for walk in (PACKED, SHORT, LONG)},
}
# fmt: on
# Of the pass that computes delta from the output and its cotangent.
ROWS = Tile(64, 64, warps=8)
# Programs that fill a GPU; with fewer, work is split further where it can be.
FILL = 264
# Calls with at most this many queries of a group are decoded with split keys, in at most so many parts.
FEW_ROWS = 64
MOST_PARTS = 64


def configure(capability: int, wide: bool, dims: int, walk: str) -> Config:
    """The configuration for a GPU's compute capability, the operands' width, their padded dims, and kind of walk."""
    memory = MEMORY.get(capability, SMALL)
    table = (_FULL if wide else _HALF)[memory]
    size = next(each for each in table if dims <= each)
    if wide:
        return table[size]
    return _BY_WALK.get((capability, size, walk)) or _BY_WALK.get((memory, size, walk)) or table[size]


@dataclass(frozen=True)
class Plan:
    """The tiles of a call, and into how many parts its work is split; folding `vmap` into the batch keeps both.

    Attributes:
        config: Tile sizes.
        fast_tanh: Whether the soft cap takes the GPU's own instruction, whose error bfloat16 does not show.
        decoding_parts: How many parts the keys are split into; 0 if the call is not decoded.
        head_parts: Into how many parts the query heads of a key head are split for its gradients.
    """

    config: Config
    fast_tanh: bool
    decoding_parts: int
    head_parts: int

    @staticmethod
    def of(call: Call) -> "Plan":
        capability = _launch.capability()
        wide = operand_dtype(call) == np.float32
        config = configure(capability or 90, wide, padded_dims(call), _walk(call))
        rows = call.batch * call.kv_heads
        parts = 0
        if decodes(call):
            parts = max(1, min(FILL // rows, cdiv(call.keys, config.decoding.columns), MOST_PARTS))
        programs = rows * cdiv(call.keys, config.key.columns)
        enough = (each for each in range(1, call.groups) if call.groups % each == 0 and programs * each >= FILL // 2)
        fast = capability is not None and operand_dtype(call) == jnp.bfloat16
        return Plan(config, fast, parts, next(enough, call.groups))

    def of_part(self, call: Call) -> "Plan":
        """The plan of a device's part of the call, which has fewer rows, and perhaps fewer queries of a key head."""
        return Plan.of(call)


def padded_dims(call: Call) -> int:
    """The padded dims of a key and a value together, by which the tables of tiles are ordered."""
    return padded(call.key_dim) + padded(call.value_dim)


def decodes(call: Call) -> bool:
    """Whether a call has so few queries that its keys are split among programs instead."""
    return call.sequences is None and call.queries * call.groups <= FEW_ROWS


def _walk(call: Call) -> str:
    if call.bias_shape is not None and call.bias_dtype is not None:
        return BIASED if call.bias_dtype.itemsize == 2 or 1 in call.bias_shape[2:] else BIASED_WIDE
    if call.mask_shape is not None:
        return MASKED
    if call.sequences is not None or call.segment_ids:
        return PACKED
    return SHORT if call.left is not None or call.soft_cap is not None else LONG


def operand_dtype(call: Call) -> np.dtype:
    """The dtype that the products' operands are cast to."""
    return common_dtype(call.query_dtype, call.key_dtype, call.value_dtype)
