"""Tile sizes by GPU and shape class, as data. Hopper's are measured; the others fit their shared memory."""

from dataclasses import dataclass
from typing import Any

from ejkernel.kernels._launch import Tile
from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL

_STEP, _THIN = Tile(64), Tile(32)


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a call's kernels are cut.

    Attributes:
        chunk: Tokens of a chunk, which has one triangular system.
        precision: Of dots on float32 operands.
        invert: The same for the dots that make the systems' inverses.
        system: The kernel that solves the systems, all key dims at once.
        heads: Heads that a program of that kernel solves one after the other, if this divides the number of heads.
        gated: The kernel that solves systems with one gate a key dim, by blocks of key dims.
        forward: The walk over chunks, by blocks of value dims.
        forward_only: The same walk without residuals and without gates of key dims: the shared memory that these leave
            holds a third stage, which makes the walk 10 % faster.
        local: The walk that finds time segments' local states and transitions.
        backward: The walk back.
        gradients: The kernel of all gradients, by blocks of value dims.
        key_block: Key dims that this kernel takes at once.
        step: The token-by-token kernel.
        fill: Programs that fill the GPU; with fewer, time is cut in segments.
        keys_coincide: The second run of the walks, where keys coincide.
    """

    chunk: int
    precision: str = "tf32x3"
    invert: str
    system: Tile
    heads: int = 1
    gated: Tile
    forward: Tile
    forward_only: Tile
    local: Tile
    backward: Tile
    gradients: Tile
    key_block: int
    step: Tile = _STEP
    fill: int
    keys_coincide: Tile = _THIN


def _walks(tile: Tile) -> dict[str, Any]:
    """All walks with the same tiles."""
    return dict.fromkeys(("forward", "forward_only", "local", "backward"), tile)


# fmt: off
_HALF = {  # bfloat16, by the padded key dim
    LARGE: {
        128: Config(chunk=64, invert="bf16x3", system=Tile(64, stages=2), heads=8, gated=Tile(32, stages=2),
            forward=Tile(128, warps=8, stages=2), forward_only=Tile(128, warps=8, stages=3),
            local=Tile(64, stages=3), backward=Tile(128, warps=8, stages=2),
            gradients=Tile(128, warps=8), key_block=128, fill=132, keys_coincide=Tile(64)),
        256: Config(chunk=64, invert="bf16x3", system=Tile(64), gated=Tile(32, stages=2), **_walks(Tile(64, warps=8)),
            gradients=Tile(128, warps=8), key_block=128, fill=132),
    },
    MEDIUM: {
        128: Config(chunk=32, invert="bf16x3", system=Tile(64), gated=Tile(64), **_walks(Tile(64, stages=2)),
            gradients=Tile(64), key_block=64, fill=216),
        256: Config(chunk=32, invert="bf16x3", system=Tile(64), gated=Tile(64), **_walks(Tile(32)),
            gradients=Tile(64), key_block=64, fill=216),
    },
    SMALL: {
        128: Config(chunk=32, invert="bf16x3", system=Tile(64), gated=Tile(64), **_walks(Tile(32)),
            gradients=Tile(64), key_block=64, fill=256),
        256: Config(chunk=32, invert="bf16x3", system=Tile(64), gated=Tile(32), **_walks(Tile(32)),
            gradients=Tile(64), key_block=64, fill=256),
    },
}
_FULL = {  # float32
    LARGE: {
        128: Config(chunk=32, invert="tf32x3", system=Tile(64), gated=Tile(64), **_walks(Tile(32)),
            gradients=Tile(64), key_block=32, fill=264),
        256: Config(chunk=16, invert="tf32x3", system=Tile(32), gated=Tile(32), **_walks(Tile(32)),
            gradients=Tile(64), key_block=32, fill=264),
    },
    MEDIUM: {
        128: Config(chunk=32, invert="tf32x3", system=Tile(32), gated=Tile(32), **_walks(Tile(32)),
            gradients=Tile(64), key_block=32, fill=216),
        256: Config(chunk=16, invert="tf32x3", system=Tile(32), gated=Tile(32), **_walks(Tile(16)),
            gradients=Tile(64), key_block=32, fill=216),
    },
    SMALL: {
        128: Config(chunk=16, invert="tf32x3", system=Tile(32), gated=Tile(32), **_walks(Tile(32)),
            gradients=Tile(32), key_block=32, fill=256),
        256: Config(chunk=16, invert="tf32x3", system=Tile(32), gated=Tile(32), **_walks(Tile(16)),
            gradients=Tile(32), key_block=32, fill=256),
    },
}
# fmt: on


def configure(capability: int, wide: bool, key_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the number of key dims."""
    table = _FULL if wide else _HALF
    return table[MEMORY.get(capability, SMALL)][128 if key_dim <= 128 else 256]
