"""How a call of a recurrence is launched on NVIDIA GPUs: what its kernels are given, and how they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.xla_utils.utils import cdiv

F32 = jnp.float32


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def capability() -> int:
    """Of the GPU that is here, or else of the one whose configurations were measured."""
    return _launch.capability() or 90


def at_most_float32(x: jax.Array | None) -> jax.Array | None:
    """An array as kernels can take it."""
    return x.astype(F32) if x is not None and x.dtype == jnp.float64 else x


def padded(dim: int) -> int:
    """The least power of two that holds `dim`; dots need 16."""
    return max(16, 1 << (dim - 1).bit_length())


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut: rows of the walked state (or key dims) a program, warps, pipeline stages, and columns.

    Of more dims than columns each part has programs of its own, whose outputs are added.
    """

    block: int
    warps: int
    stages: int
    columns: int = 256


@dataclass(frozen=True)
class Launching:
    """One call, its cut in blocks, and how its kernels are launched."""

    call: Any
    plan: Any
    packing: Packing

    @property
    def facts_of_all(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        return {"PACKED": self.call.packed}

    def blocks(self, length: int) -> int:
        """Blocks of `length` tokens; of packed sequences, as many as there may be."""
        if self.call.packed:
            return self.call.tokens // length + self.call.sequences + 1
        return self.call.batch * cdiv(self.call.tokens, length)

    def launch(
        self,
        kernel: Any,
        *arrays: Any,
        outputs: Sequence[Any],
        programs: int,
        tile: Tile,
        length: int = 0,
        aliases: dict[int, int] | None = None,
        segment: bool = False,
        **constants: Any,
    ) -> list[jax.Array]:
        """Runs `kernel` over blocks of `length` tokens; absent arrays and outputs are stood in for.

        One for a time `segment` is told its tokens.
        """
        owners = [self.packing.owners[length]] if length else []
        sizes = [self.call.tokens, self.call.sequences] + ([self.plan.segment] if segment else [])
        results = _launch.launch(
            kernel,
            *(self.packing.table if each is None else each for each in arrays),
            self.packing.table,
            *owners,
            *sizes,
            outputs=[shape(1) if each is None else each for each in outputs],
            programs=programs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            aliases=aliases,
            **self.facts_of_all,
            **constants,
        )
        return list(results)
