"""Tile sizes by GPU and shape class, as data. Hopper's are measured; the others fit their shared memory."""

from dataclasses import dataclass

from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL
from ejkernel.kernels.linear_recurrence.triton.configs import Tile


@dataclass(frozen=True)
class Config:
    """All that a call's kernels are cut by.

    Attributes:
        chunk: Tokens that one triangular system solves for.
        precision: Of the dots on float32 operands.
        invert: Of the dots that make an inverse, on float32 operands too.
        system: The kernel that solves the systems; its block is what is taken at once of key dims with gates.
        forward: The walk over chunks, by blocks of value dims.
        backward: The walk back.
        gradients: The kernel of all gradients, by blocks of value dims.
        key_block: Key dims without gates that the latter takes at once.
        step: The token-by-token kernel.
    """

    chunk: int
    precision: str
    invert: str
    system: Tile
    forward: Tile
    backward: Tile
    gradients: Tile
    key_block: int
    step: Tile


_STEP = Tile(64, 4, 1)
_THIN, _WIDE, _SHALLOW = Tile(32, 4, 1), Tile(64, 4, 1), Tile(16, 4, 1)
_BF16, _TF32 = ("tf32x3", "bf16x3"), ("tf32x3", "tf32x3")
_HALF = {  # bfloat16, by the padded key dim
    LARGE: {
        128: Config(64, *_BF16, _WIDE, Tile(128, 8, 2), Tile(128, 8, 2), Tile(128, 8, 1), 128, _STEP),
        256: Config(64, *_BF16, _WIDE, Tile(64, 8, 1), Tile(64, 8, 1), Tile(128, 8, 2), 64, _STEP),
    },
    MEDIUM: {
        128: Config(32, *_BF16, _WIDE, Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 4, 1), 64, _STEP),
        256: Config(32, *_BF16, _WIDE, _THIN, _THIN, Tile(64, 4, 1), 64, _STEP),
    },
    SMALL: {
        128: Config(32, *_BF16, _WIDE, _THIN, _THIN, _WIDE, 64, _STEP),
        256: Config(32, *_BF16, _THIN, _THIN, _THIN, _WIDE, 64, _STEP),
    },
}
_FULL = {  # float32
    LARGE: {
        128: Config(32, *_TF32, _WIDE, _THIN, _THIN, _WIDE, 32, _STEP),
        256: Config(16, *_TF32, _THIN, _THIN, _THIN, _WIDE, 32, _STEP),
    },
    MEDIUM: {
        128: Config(32, *_TF32, _THIN, _THIN, _THIN, _WIDE, 32, _STEP),
        256: Config(16, *_TF32, _THIN, _SHALLOW, _SHALLOW, _WIDE, 32, _STEP),
    },
    SMALL: {
        128: Config(16, *_TF32, _THIN, _THIN, _THIN, _THIN, 32, _STEP),
        256: Config(16, *_TF32, _THIN, _SHALLOW, _SHALLOW, _THIN, 32, _STEP),
    },
}


def configure(capability: int, wide: bool, key_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the number of key dims."""
    table = _FULL if wide else _HALF
    return table[MEMORY.get(capability, SMALL)][128 if key_dim <= 128 else 256]
