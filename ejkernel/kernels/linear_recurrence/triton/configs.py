"""Tile sizes by GPU and shape class, as data. Hopper's are measured; the others fit their shared memory."""

from dataclasses import dataclass

from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL
from ejkernel.kernels.chunks.triton.launching import Tile


@dataclass(frozen=True)
class Config:
    """All that a call's kernels are cut by.

    Attributes:
        chunk: Tokens that interact through one matrix of scores.
        group: Chunks over which a gate's gradient is summed, and between whose ends no state is stored (one gate a
            head and token: twice or four times as many; one a head in bfloat16: four times, where time is not cut).
        limit: Bits of decay in half a chunk beyond which key gates take the exact path.
        precision: Of the dots on float32 operands.
        output: The walk that gives the output, and the value's gradient.
        gradient: The walks that give the query's and the key's gradient.
        exact: The exact path of strong key gates; its gradients take twice the warps.
        step: The token-by-token kernel.
        fill: Programs that occupy the chip; fewer, and time is cut in segments.
        dots: Instead of `gradient` where one gate a head has a gradient, whose row dots leave the chip waiting (with
            rows that are tokens, in three stages whatever it says).
        segments: Instead of `output` for the states of time segments alone.
        unfold: Key dims that a program unfolds where there would be few programs.
        halved: Stages of `output` where the value dims fill half of its rows, so that two programs fit on a
            multiprocessor (with one gate a head; in the backward where the states of all chunks are stored).
        meeting: Instead of `gradient`, with as many columns, for the query's with key gates, which waits for the
            states that it meets at borders: two programs on a multiprocessor fill each other's waits.
    """

    chunk: int
    group: int
    limit: float
    precision: str
    output: Tile
    gradient: Tile
    exact: Tile
    step: Tile
    fill: int
    dots: Tile | None = None
    segments: Tile | None = None
    unfold: int = 128
    halved: int | None = None
    meeting: Tile | None = None


_STEP = Tile(64, 4, 1)
_HALF = {  # bfloat16 and float16, by the padded dim of the state's columns
    LARGE: {
        64: Config(64, 4, 80.0, "ieee", Tile(128, 4, 3), Tile(128, 4, 3), Tile(64, 4, 1), _STEP, 132, Tile(64, 4, 3)),
        128: Config(
            *(64, 4, 80.0, "ieee", Tile(128, 8, 3), Tile(128, 8, 3), Tile(64, 4, 1)),
            *(_STEP, 132, Tile(64, 4, 2), Tile(64, 4, 3), 64, 2, Tile(64, 4, 2)),
        ),
        256: Config(
            *(64, 4, 80.0, "ieee", Tile(128, 8, 2), Tile(128, 8, 3, 128), Tile(64, 4, 1)),
            *(_STEP, 132, Tile(64, 4, 2, 128), Tile(128, 8, 3), 32),
        ),
        512: Config(
            *(64, 4, 80.0, "ieee", Tile(128, 8, 2), Tile(128, 8, 3, 128), Tile(64, 4, 1)),
            *(_STEP, 132, Tile(64, 4, 2, 128), None, 32, None, Tile(64, 4, 2, 128)),
        ),
    },
    MEDIUM: {
        128: Config(32, 8, 80.0, "ieee", Tile(64, 4, 3), Tile(64, 4, 3), Tile(64, 4, 1), _STEP, 216),
        256: Config(32, 8, 80.0, "ieee", Tile(64, 8, 2), Tile(64, 8, 2), Tile(64, 4, 1), _STEP, 216),
    },
    SMALL: {
        128: Config(32, 8, 80.0, "ieee", Tile(64, 4, 2), Tile(64, 4, 2), Tile(64, 4, 1), _STEP, 256),
        256: Config(32, 8, 80.0, "ieee", Tile(32, 4, 1), Tile(32, 4, 1), Tile(64, 4, 1), _STEP, 256),
    },
}
_FULL = {  # float32, and float16 with key gates, which is carried as float32 for its range
    LARGE: {
        128: Config(32, 8, 40.0, "tf32x3", Tile(32, 4, 2), Tile(32, 4, 2), Tile(64, 4, 1), _STEP, 264),
        256: Config(16, 16, 40.0, "tf32x3", Tile(32, 8, 2), Tile(32, 8, 2), Tile(64, 4, 1), _STEP, 264),
    },
    MEDIUM: {
        128: Config(32, 8, 40.0, "tf32x3", Tile(32, 4, 2), Tile(32, 4, 2), Tile(64, 4, 1), _STEP, 216),
        256: Config(16, 16, 40.0, "tf32x3", Tile(32, 4, 2), Tile(32, 4, 2), Tile(64, 4, 1), _STEP, 216),
    },
    SMALL: {
        128: Config(16, 16, 40.0, "tf32x3", Tile(32, 4, 2), Tile(32, 4, 2), Tile(64, 4, 1), _STEP, 256),
        256: Config(16, 16, 40.0, "tf32x3", Tile(32, 4, 1), Tile(32, 4, 1), Tile(64, 4, 1), _STEP, 256),
    },
}


def configure(capability: int, wide: bool, largest_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the larger of K and V."""
    table = (_FULL if wide else _HALF)[MEMORY.get(capability, SMALL)]
    return table[min((dim for dim in table if dim >= largest_dim), default=max(table))]
