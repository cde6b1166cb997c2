"""One call on its way to the device: what every kernel is told of it."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import Launching, capability
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton.configs import Config
from ejkernel.kernels.linear_recurrence.triton.plan import Plan

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
class Launcher(Launching):
    """One call, its cut in blocks, and how its kernels are launched."""

    call: Call
    plan: Plan

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
        return capability() == 90

    @property
    def by_token(self) -> bool:
        """Whether row dots in bfloat16 come from the kernel whose rows are tokens: where it was timed on a GPU."""
        call = self.call
        timed = self.hopper and self.whole and call.key_dim == 128 and call.value_dim in (64, 128)
        return timed and call.dtype == jnp.bfloat16 and self.config.dots is not None
