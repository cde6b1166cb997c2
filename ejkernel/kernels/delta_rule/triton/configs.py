"""Tile sizes by GPU and shape class, as data. Hopper's are measured; the others fit their shared memory."""

from dataclasses import dataclass

from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL
from ejkernel.kernels.chunks.triton.launching import Tile

_STEP = Tile(64, 4, 1)
_THIN, _WIDE, _SHALLOW = Tile(32, 4, 1), Tile(64, 4, 1), Tile(16, 4, 1)


@dataclass(frozen=True)
class Config:
    """All that a call's kernels are cut by.

    Attributes:
        chunk: Tokens that one triangular system solves for.
        precision: Of the dots on float32 operands.
        invert: Of the dots that make an inverse, on float32 operands too.
        system: The kernel that solves the systems; it takes all key dims at once.
        heads: Heads that a program of it goes through, if they divide by that.
        gated: The same where key dims have gates of any strength, by blocks of these.
        forward: The walk over chunks, by blocks of value dims.
        alone: The same where nothing is kept for a walk back and no key dim has a gate, which leaves memory.
        effects: The walk that finds what time segments do to states.
        backward: The walk back.
        gradients: The kernel of all gradients, by blocks of value dims.
        key_block: Key dims that the latter takes at once.
        step: The token-by-token kernel.
        fill: Programs that occupy the chip; fewer, and time is cut in segments.
        alike: The walks where keys are alike.
    """

    chunk: int
    precision: str
    invert: str
    system: Tile
    heads: int
    gated: Tile
    forward: Tile
    alone: Tile
    effects: Tile
    backward: Tile
    gradients: Tile
    key_block: int
    step: Tile
    fill: int
    alike: Tile = _THIN


_AHEAD, _FURTHER, _DEEP = Tile(64, 4, 2), Tile(64, 4, 3), Tile(64, 8, 1)
_THIN_AHEAD, _LARGE = Tile(32, 4, 2), Tile(128, 8, 1)
_LARGE_AHEAD, _LARGE_FURTHER = Tile(128, 8, 2), Tile(128, 8, 3)
_BF16, _TF32 = ("tf32x3", "bf16x3"), ("tf32x3", "tf32x3")
_HALF = {  # bfloat16, by the padded key dim
    LARGE: {
        128: Config(
            64,
            *_BF16,
            _AHEAD,
            8,
            _THIN_AHEAD,
            _LARGE_AHEAD,
            _LARGE_FURTHER,
            _FURTHER,
            _LARGE_AHEAD,
            _LARGE,
            128,
            _STEP,
            132,
            _WIDE,
        ),
        256: Config(64, *_BF16, _WIDE, 1, _THIN_AHEAD, _DEEP, _DEEP, _DEEP, _DEEP, _LARGE, 128, _STEP, 132),
    },
    MEDIUM: {
        128: Config(32, *_BF16, _WIDE, 1, _WIDE, _AHEAD, _AHEAD, _AHEAD, _AHEAD, _WIDE, 64, _STEP, 216),
        256: Config(32, *_BF16, _WIDE, 1, _WIDE, _THIN, _THIN, _THIN, _THIN, _WIDE, 64, _STEP, 216),
    },
    SMALL: {
        128: Config(32, *_BF16, _WIDE, 1, _WIDE, _THIN, _THIN, _THIN, _THIN, _WIDE, 64, _STEP, 256),
        256: Config(32, *_BF16, _WIDE, 1, _THIN, _THIN, _THIN, _THIN, _THIN, _WIDE, 64, _STEP, 256),
    },
}
_FULL = {  # float32
    LARGE: {
        128: Config(32, *_TF32, _WIDE, 1, _WIDE, _THIN, _THIN, _THIN, _THIN, _WIDE, 32, _STEP, 264),
        256: Config(16, *_TF32, _THIN, 1, _THIN, _THIN, _THIN, _THIN, _THIN, _WIDE, 32, _STEP, 264),
    },
    MEDIUM: {
        128: Config(32, *_TF32, _THIN, 1, _THIN, _THIN, _THIN, _THIN, _THIN, _WIDE, 32, _STEP, 216),
        256: Config(16, *_TF32, _THIN, 1, _THIN, _SHALLOW, _SHALLOW, _SHALLOW, _SHALLOW, _WIDE, 32, _STEP, 216),
    },
    SMALL: {
        128: Config(16, *_TF32, _THIN, 1, _THIN, _THIN, _THIN, _THIN, _THIN, _THIN, 32, _STEP, 256),
        256: Config(16, *_TF32, _THIN, 1, _THIN, _SHALLOW, _SHALLOW, _SHALLOW, _SHALLOW, _THIN, 32, _STEP, 256),
    },
}


def configure(capability: int, wide: bool, key_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the number of key dims."""
    table = _FULL if wide else _HALF
    return table[MEMORY.get(capability, SMALL)][128 if key_dim <= 128 else 256]
