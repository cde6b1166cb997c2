"""Tile sizes by GPU and shape class, as data. Hopper's are measured; the others fit their shared memory."""

from dataclasses import dataclass

from ejkernel.kernels._launch import Tile
from ejkernel.kernels._shared_memory import LARGE, MEDIUM, MEMORY, SMALL

_OF_32_ROWS, _OF_64_ROWS, _OF_128_ROWS = Tile(32), Tile(64), Tile(128)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The tile sizes of a call's kernels.

    Attributes:
        chunk: Tokens that interact through one matrix of scores.
        group: Chunks between two stored states, over which a gate's gradient is summed (with one gate a head and token
            twice or four times as many; with one a head in bfloat16 four times, if time is not cut).
        limit: Bits of decay in half a chunk beyond which key gates take the exact path.
        precision: Of the dots on float32 operands.
        output: The walk that gives the output, and the value's gradient.
        gradient: The walks that give the query's and the key's gradient.
        exact: The exact path of strong key gates; its gradients take twice the warps.
        bounded: Scores of bounded key gates; rows are the key dims that a program takes at once.
        bounded_gradients: Their gradients, likewise.
        step: The token-by-token kernel.
        fill: Programs that occupy the chip; with fewer, time is cut in segments.
        head_gate_gradient: Instead of `gradient` where one gate a head has a gradient; smaller, since row dots leave
            the chip waiting (the walk whose rows are tokens always has three stages).
        segments: Instead of `output` for the states that time segments add: 180 instead of 204 µs.
        unfold: Key dims that a program unfolds where there would be few programs.
        stages_if_half_full: Stages of `output` where the value dims fill half of its rows, so that two programs fit on
            a multiprocessor (with one gate a head; in the backward where the states of all chunks are stored).
        key_gate_query_gradient: Instead of `gradient`, with as many columns, for the query's with key gates, which
            waits for the states stored at borders: two programs on a multiprocessor fill each other's waits.
    """

    chunk: int
    group: int
    limit: float = 80.0
    precision: str = "ieee"
    output: Tile
    gradient: Tile
    exact: Tile = _OF_64_ROWS
    bounded: Tile = _OF_128_ROWS
    bounded_gradients: Tile = _OF_32_ROWS
    step: Tile = _OF_64_ROWS
    fill: int
    head_gate_gradient: Tile | None = None
    segments: Tile | None = None
    unfold: int = 128
    stages_if_half_full: int | None = None
    key_gate_query_gradient: Tile | None = None


# fmt: off
_HALF = {  # bfloat16, by the padded dim of the state's columns
    LARGE: {
        64: Config(chunk=64, group=4, output=Tile(128, warps=8, stages=3), gradient=Tile(128, stages=3), fill=132,
            head_gate_gradient=Tile(64, stages=3)),
        128: Config(chunk=64, group=4, output=Tile(128, warps=8, stages=3), gradient=Tile(128, warps=8, stages=3),
            fill=132, head_gate_gradient=Tile(64, stages=2), segments=Tile(64, stages=3), unfold=64,
            stages_if_half_full=2, key_gate_query_gradient=Tile(64, stages=2)),
        256: Config(chunk=64, group=4, output=Tile(128, warps=8, stages=2),
            gradient=Tile(128, 128, warps=8, stages=3), fill=132,
            head_gate_gradient=Tile(64, 128, stages=2), segments=Tile(128, warps=8, stages=3), unfold=32),
        512: Config(chunk=64, group=4, output=Tile(128, warps=8, stages=2),
            gradient=Tile(128, 128, warps=8, stages=3), fill=132,
            head_gate_gradient=Tile(64, 128, stages=2), unfold=32,
            key_gate_query_gradient=Tile(64, 128, stages=2)),
    },
    MEDIUM: {
        128: Config(chunk=32, group=8, output=Tile(64, stages=3), gradient=Tile(64, stages=3), fill=216),
        256: Config(chunk=32, group=8, output=Tile(64, warps=8, stages=2), gradient=Tile(64, warps=8, stages=2),
            fill=216),
    },
    SMALL: {
        128: Config(chunk=32, group=8, output=Tile(64, stages=2), gradient=Tile(64, stages=2), fill=256),
        256: Config(chunk=32, group=8, output=Tile(32), gradient=Tile(32), fill=256),
    },
}
_FULL = {  # float32, and float16, which is carried as float32 for its range
    LARGE: {
        128: Config(chunk=32, group=8, limit=40.0, precision="tf32x3", output=Tile(32, stages=2),
            gradient=Tile(32, stages=2), fill=264),
        256: Config(chunk=16, group=16, limit=40.0, precision="tf32x3", output=Tile(32, warps=8, stages=2),
            gradient=Tile(32, warps=8, stages=2), fill=264),
    },
    MEDIUM: {
        128: Config(chunk=32, group=8, limit=40.0, precision="tf32x3", output=Tile(32, stages=2),
            gradient=Tile(32, stages=2), fill=216),
        256: Config(chunk=16, group=16, limit=40.0, precision="tf32x3", output=Tile(32, stages=2),
            gradient=Tile(32, stages=2), fill=216),
    },
    SMALL: {
        128: Config(chunk=16, group=16, limit=40.0, precision="tf32x3", output=Tile(32, stages=2),
            gradient=Tile(32, stages=2), fill=256),
        256: Config(chunk=16, group=16, limit=40.0, precision="tf32x3", output=Tile(32), gradient=Tile(32),
            fill=256),
    },
}
# fmt: on


def configure(capability: int, wide: bool, largest_dim: int) -> Config:
    """The configuration for a GPU's compute capability, the operands' width and the larger of K and V."""
    table = (_FULL if wide else _HALF)[MEMORY.get(capability, SMALL)]
    return table[min((dim for dim in table if dim >= largest_dim), default=max(table))]
