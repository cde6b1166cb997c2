"""One call on its way to the device: its arrays, and what every kernel is told of it."""

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton import launching
from ejkernel.kernels.chunks.triton.launching import capability
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton.plan import Plan

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
_NAMES = (
    *("across_heads", "bounded_key_gates", "head_gates", "key_gates", "row_dots", "segments", "strong_key_gates"),
    "walk",
)
DEVICE = {name: f"ejkernel.kernels.linear_recurrence.triton.device.{name}" for name in _NAMES}


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


class Inputs(NamedTuple):
    """The arrays of a call, as `Call` lists them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None
    value_log_decay: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None = None


@dataclass(frozen=True)
class Walk:
    """What one walk is for, and the sizes of its operands `x`, `y`, `z` and `w`, which `device.walk` lists."""

    role: str
    border: str
    x_heads: int
    y_heads: int
    z_heads: int
    w_heads: int
    x_dim: int
    z_dim: int
    x_block: int  # x dims a program, padded
    z_block: int  # rows of the state a program
    precision: str
    segmented: bool  # time is cut in segments
    row_dots: bool
    both: bool  # key and value dims decay
    flat: bool  # numbers are added up at once, not by rows first, which Triton 3.6 has no code for on Blackwell
    strong: bool = False
    apart: bool = False  # with key gates, programs whose chunks are all flagged have a kernel of their own


@dataclass(frozen=True, kw_only=True)
class Constants(launching.Constants):
    """What kernels are compiled for; device code gets it as `CALL`."""

    group: int
    wide: bool  # operands are carried as float32
    walk: Walk | None = None
    output_heads: int = 0
    heads_at_once: int = 0
    dims: int = 0  # of a row that a thread has
    bounded: bool = False  # chunks of bounded gates are left to kernels of their own
    log_rows: int = 0  # of a chunk, that a thread has, to base 2
    parts: int = 1  # in which an array comes, to be added up
    product_parts: int = 1
    decays: int = 1  # of a time segment: one, or one a dim
    reverse: bool = False
    start_scale: float = 1.0
    last_scale: float = 1.0
    limit: float = 0.0  # bits of decay in half a chunk beyond which it is flagged
    fine: bool = False  # sums are taken in float64


@dataclass(frozen=True)
class Launcher(launching.Launcher):
    """One call, its cut in blocks, and how its kernels are launched."""

    @staticmethod
    def of(call: Call, plan: Plan, cu_seqlens: jax.Array | None) -> "Launcher":
        config = plan.config
        constants = Constants(**Constants.facts(call, config), group=plan.group, wide=Plan.carried(call))
        # an empty sequence has a segment: it still hands its initial state on
        lengths = config.chunk, config.chunk * plan.group, plan.segment
        return Launcher(call, plan, Packing.of_call(call, cu_seqlens, lengths), constants)

    @property
    def hopper(self) -> bool:
        return capability() == 90

    @property
    def by_token(self) -> bool:
        """Whether row dots in bfloat16 come from the kernel whose rows are tokens: where it was timed on a GPU."""
        call = self.call
        fits = self.constants.whole or self.constants.listed
        timed = self.hopper and fits and call.key_dim == 128 and call.value_dim in (64, 128)
        return timed and call.dtype == jnp.bfloat16 and self.config.head_gate_gradient is not None
