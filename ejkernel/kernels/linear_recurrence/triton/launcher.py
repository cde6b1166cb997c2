"""One call as it is launched: its arrays, and the constants of its kernels."""

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


def device(name: str) -> Any:
    """A module of device code, imported only now: `import ejkernel` must not import Triton."""
    return importlib.import_module(f"ejkernel.kernels.linear_recurrence.triton.device.{name}")


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
    """The role of one walk, and the sizes of its operands x, y, z and w, which `device.walk` lists."""

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
    precision: str  # of dots
    segmented: bool  # time is cut in segments
    row_dots: bool
    both: bool  # key and value dims decay
    flat: bool  # tiles are summed in one step: rows first does not compile for Blackwell (Triton 3.6)
    strong: bool = False  # the second of two kernels, for strong gates
    alone: bool = False  # with head gates, the kernel for strong gates takes all
    apart: bool = False  # with key gates, time segments whose chunks are all flagged are left to the second kernel


@dataclass(frozen=True, kw_only=True)
class Constants(launching.Constants):
    """What kernels are compiled for: the `CALL` of device code."""

    group: int
    wide: bool  # operands are carried as float32
    walk: Walk | None = None
    output_heads: int = 0
    heads_at_once: int = 0
    dims: int = 0  # of each row that a thread has
    bounded: bool = False  # chunks of bounded gates have kernels of their own
    log_rows: int = 0  # log2 of the rows of a chunk that a thread has
    parts: int = 1  # of an array that is to be summed over them
    product_parts: int = 1  # the same of S·dS
    decays: int = 1  # of a time segment: one, or one a dim
    reverse: bool = False
    start_scale: float = 1.0
    last_scale: float = 1.0
    limit: float = 0.0  # bits of decay in half a chunk beyond which it is flagged
    fine: bool = False  # sums are in float64


@dataclass(frozen=True)
class Launcher(launching.Launcher):
    """One call of the gated linear recurrence, and how its kernels are launched."""

    @staticmethod
    def of(call: Call, plan: Plan, cu_seqlens: jax.Array | None) -> "Launcher":
        config = plan.config
        constants = Constants(**Constants.facts(call, config), group=plan.group, wide=Plan.carried(call))
        # an empty sequence has a segment, which copies its initial state to its final state
        lengths = config.chunk, config.chunk * plan.group, plan.segment
        return Launcher(call, plan, Packing.of_call(call, cu_seqlens, lengths), constants)

    @property
    def hopper(self) -> bool:
        return capability() == 90

    @property
    def by_token(self) -> bool:
        """Whether the walks with row dots have rows that are tokens: for calls that were timed on a GPU."""
        call = self.call
        fits = self.constants.whole or self.constants.listed
        timed = self.hopper and fits and call.key_dim == 128 and call.value_dim in (64, 128)
        return timed and call.dtype == jnp.bfloat16 and self.config.head_gate_gradient is not None
