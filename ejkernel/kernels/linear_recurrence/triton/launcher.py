"""One call on its way to the device: what every kernel is told of it."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton.configs import Config, Tile
from ejkernel.kernels.linear_recurrence.triton.plan import Plan, cdiv

F32 = jnp.float32


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
DEVICE = {
    "across_heads": "ejkernel.kernels.linear_recurrence.triton.device.across_heads",
    "head_gates": "ejkernel.kernels.linear_recurrence.triton.device.head_gates",
    "key_gates": "ejkernel.kernels.linear_recurrence.triton.device.key_gates",
    "row_dots": "ejkernel.kernels.linear_recurrence.triton.device.row_dots",
    "segments": "ejkernel.kernels.linear_recurrence.triton.device.segments",
    "step": "ejkernel.kernels.linear_recurrence.triton.device.step",
    "strong_key_gates": "ejkernel.kernels.linear_recurrence.triton.device.strong_key_gates",
    "walk": "ejkernel.kernels.linear_recurrence.triton.device.walk",
}


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


@dataclass(frozen=True)
class Launcher:
    """One call, its cut in blocks, and how its kernels are launched."""

    call: Call
    plan: Plan
    packing: Packing

    @staticmethod
    def of(call: Call, plan: Plan, cu_seqlens: jax.Array | None) -> "Launcher":
        # an empty sequence has a segment: it still hands its initial state on
        lengths = plan.config.chunk, plan.config.chunk * plan.group, plan.segment
        return Launcher(call, plan, Packing.of(call.tokens, cu_seqlens, lengths))

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def whole(self) -> bool:
        """Whether no chunk has a ragged end, which spares masks."""
        return not self.call.packed and self.call.tokens % self.config.chunk == 0

    @property
    def hopper(self) -> bool:
        return (_launch.capability() or 90) == 90

    @property
    def by_token(self) -> bool:
        """Whether row dots in bfloat16 come from the kernel whose rows are tokens: where it was timed on a GPU."""
        call = self.call
        timed = self.hopper and self.whole and call.key_dim == 128 and call.value_dim in (64, 128)
        return timed and call.dtype == jnp.bfloat16 and self.config.dots is not None

    def blocks(self, length: int) -> int:
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
        """Runs `kernel` over blocks of `length` tokens; absent arrays and outputs are stood in for."""
        given = [self.packing.table if each is None else each for each in arrays]
        wanted = [shape(1) if each is None else each for each in outputs]
        owners = [self.packing.owners[length]] if length else []
        sizes = [self.call.tokens, self.call.sequences] + ([self.plan.segment] if segment else [])
        return list(
            _launch.launch(
                kernel,
                *given,
                self.packing.table,
                *owners,
                *sizes,
                outputs=wanted,
                programs=programs,
                num_warps=tile.warps,
                num_stages=tile.stages,
                aliases=aliases,
                PACKED=self.call.packed,
                **constants,
            )
        )
