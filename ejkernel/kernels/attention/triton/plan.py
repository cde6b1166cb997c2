"""Tile sizes by GPU, dtype and head dim, as data, and how a call is cut. Hopper's are measured; the others fit."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.linear_recurrence.triton.configs import LARGE, MEDIUM, MEMORY, SMALL
from ejkernel.xla_utils.utils import cdiv


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut: queries and keys a tile, warps, pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Config:
    """All that a call's kernels are cut by.

    Attributes:
        forward: The pass that gives the output.
        query: The pass that gives the query's gradient.
        key: The pass that gives the key's and the value's gradient.
        bias: The pass that gives the bias' gradient.
        decoding: Few queries against many keys; its rows are a group's queries, however many they are.
        fill: Programs that occupy the chip; with fewer, work is cut further where it can be.
    """

    forward: Tile
    query: Tile
    key: Tile
    bias: Tile
    decoding: Tile
    fill: int


# by shared memory a program may use, and by the larger of the padded head dims
_HALF = {
    LARGE: {
        64: Config(
            Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 1), Tile(16, 128, 4, 3), 528
        ),
        128: Config(
            Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3), Tile(64, 64, 4, 1), Tile(16, 64, 4, 3), 528
        ),
        256: Config(
            Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), 528
        ),
    },
    MEDIUM: {
        64: Config(
            Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 1), Tile(16, 64, 4, 3), 432
        ),
        128: Config(
            Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), 432
        ),
        256: Config(
            Tile(64, 32, 4, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2), 432
        ),
    },
    SMALL: {
        64: Config(
            Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(16, 64, 4, 2), 512
        ),
        128: Config(
            Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2), 512
        ),
        256: Config(
            Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), 512
        ),
    },
}
_FULL = {  # float32, whose products take three passes and twice the memory
    LARGE: {
        64: Config(
            Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(32, 32, 4, 1), Tile(16, 64, 4, 2), 528
        ),
        128: Config(
            Tile(64, 32, 4, 2), Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2), 528
        ),
        256: Config(
            Tile(64, 32, 8, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), 528
        ),
    },
    MEDIUM: {
        64: Config(
            Tile(64, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 32, 4, 2), 432
        ),
        128: Config(
            Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), 432
        ),
        256: Config(
            Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 432
        ),
    },
    SMALL: {
        64: Config(
            Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), 512
        ),
        128: Config(
            Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 512
        ),
        256: Config(
            Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), 512
        ),
    },
}
# A group's queries up to this many are decoded: their keys are cut in parts, of which there are at most so many.
FEW_ROWS = 64
MOST_PARTS = 64


def configure(capability: int, wide: bool, largest_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the larger of D and Dv."""
    table = (_FULL if wide else _HALF)[MEMORY.get(capability, SMALL)]
    return table[next(dim for dim in table if largest_dim <= dim)]


def power(dim: int, least: int = 16) -> int:
    """The least power of two that holds `dim`; dots need 16."""
    return max(least, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Plan:
    """How a call is cut; folding `vmap` into the batch keeps it.

    Attributes:
        config: Tile sizes.
        fast_tanh: Whether the soft cap takes the GPU's own instruction, as exact as bfloat16 can tell.
        decoding_parts: How many parts of the keys are attended to side by side; 0 if the call is not decoded.
        head_parts: In how many parts the query heads of a key head give it their gradients.
        mixed: Whether tiles that need no mask are walked along with those that do: two short walks take longer than one.
    """

    config: Config
    fast_tanh: bool
    decoding_parts: int
    head_parts: int
    mixed: bool

    @staticmethod
    def of(call: Call) -> "Plan":
        capability = _launch.capability()
        wide = operand_dtype(call) == np.float32
        config = configure(capability or 90, wide, max(call.key_dim, call.value_dim))
        rows = call.batch * call.kv_heads
        parts = 0
        if call.sequences is None and call.queries * call.groups <= FEW_ROWS:
            parts = max(1, min(config.fill // rows, cdiv(call.keys, config.decoding.keys), MOST_PARTS))
        programs = rows * cdiv(call.keys, config.key.keys)
        head_parts = next(
            each for each in range(1, call.groups + 1) if call.groups % each == 0 and programs * each >= config.fill // 4
            or each == call.groups
        )
        fast = capability is not None and operand_dtype(call) == jnp.bfloat16
        mixed = False
        return Plan(config, fast, parts, head_parts, mixed)


def operand_dtype(call: Call) -> np.dtype:
    """What the products' operands are brought to."""
    return np.dtype(jnp.result_type(call.query_dtype, call.key_dtype, call.value_dtype))
