"""One call on its way to the device: how it is cut, and what every kernel is told of it."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _launch
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.delta_rule.call import Call, Decay
from ejkernel.kernels.delta_rule.triton import configs
from ejkernel.kernels.delta_rule.triton.configs import Config
from ejkernel.kernels.linear_recurrence.triton.configs import Tile
from ejkernel.kernels.linear_recurrence.triton.launcher import F32, shape
from ejkernel.kernels.linear_recurrence.triton.plan import cdiv, padded

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
DEVICE = {
    "gradients": "ejkernel.kernels.delta_rule.triton.device.gradients",
    "key_gates": "ejkernel.kernels.delta_rule.triton.device.key_gates",
    "key_gradients": "ejkernel.kernels.delta_rule.triton.device.key_gradients",
    "step": "ejkernel.kernels.delta_rule.triton.device.step",
    "system": "ejkernel.kernels.delta_rule.triton.device.system",
    "walk": "ejkernel.kernels.delta_rule.triton.device.walk",
}


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


@dataclass(frozen=True)
class Plan:
    """How a call is cut: the configuration, and tokens a time segment. Folding `vmap` into the batch keeps it."""

    config: Config
    segment: int

    @staticmethod
    def of(call: Call) -> "Plan":
        config = configs.configure(_launch.capability() or 90, call.dtype == np.float32, call.key_dim)
        return Plan(config, config.chunk * cdiv(call.tokens, config.chunk))


@dataclass(frozen=True)
class Facts:
    """What every kernel is compiled for; device code gets it as `CALL`."""

    heads: int
    query_heads: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    chunk: int
    decay: Decay
    scale: float
    whole: bool  # no chunk has a ragged end, which spares masks
    flip: bool  # the last token comes first
    precision: str  # of dots on float32 operands
    invert: str  # of those that make an inverse
    solve: str  # of those that apply it


@dataclass(frozen=True)
class Launcher:
    """One call, its cut in blocks, and how its kernels are launched."""

    call: Call
    plan: Plan
    packing: Packing
    facts: Facts

    @staticmethod
    def of(call: Call, plan: Plan, arrays: Sequence[jax.Array], cu_seqlens: jax.Array | None) -> "Launcher":
        config = plan.config
        facts = Facts(
            heads=call.heads,
            query_heads=arrays[0].shape[2],
            key_heads=arrays[1].shape[2],
            value_heads=arrays[2].shape[2],
            key_dim=call.key_dim,
            value_dim=call.value_dim,
            chunk=config.chunk,
            decay=call.decay,
            scale=float(call.scale),
            whole=not call.packed and call.tokens % config.chunk == 0,
            flip=call.reverse,
            precision=config.precision,
            invert=config.invert,
            # one pass of TF32 has three digits more than bfloat16
            solve="tf32" if call.dtype == jnp.bfloat16 else config.precision,
        )
        # an empty sequence has a segment: it still hands its initial state on
        lengths = config.chunk, config.chunk, plan.segment
        return Launcher(call, plan, Packing.of(call.tokens, cu_seqlens, lengths), facts)

    @property
    def config(self) -> Config:
        return self.plan.config

    def blocks(self, length: int) -> int:
        if self.call.packed:
            return self.call.tokens // length + self.call.sequences + 1
        return self.call.batch * cdiv(self.call.tokens, length)

    def rows(self, dim: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Of every token and head."""
        return shape(self.call.batch, self.call.tokens, self.call.heads, dim, dtype=dtype)

    def parts(self, number: int, like: jax.Array) -> jax.ShapeDtypeStruct:
        """Of every token and head, a gradient of `like` in a number of parts; in float32 if they are to be added up."""
        dtype = like.dtype if number == 1 and like.shape[2] == self.call.heads else F32
        return shape(self.call.batch, self.call.tokens, self.call.heads, number, like.shape[3], dtype=dtype)

    def chunked(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Of every chunk and head."""
        return shape(self.blocks(self.config.chunk), self.call.heads, *sizes, dtype=dtype)

    def states(self) -> jax.ShapeDtypeStruct:
        """Of every sequence and head."""
        return shape(self.call.sequences, self.call.heads, self.call.key_dim, self.call.value_dim)

    def gates(self) -> dict[str, Any]:
        """How the gates of key dims are summed up."""
        fine = self.call.dtype == F32
        return {"LEVELS": self.config.chunk.bit_length() - 1, "FINE": fine, "LIMIT": 40.0 if fine else 80.0}

    def launch(
        self,
        kernel: Any,
        *arrays: Any,
        outputs: Sequence[Any],
        programs: int,
        tile: Tile,
        length: int = 0,
        segment: bool = False,
        aliases: dict[int, int] | None = None,
        **constants: Any,
    ) -> list[jax.Array]:
        """Runs `kernel` over blocks of `length` tokens; absent arrays and outputs are stood in for."""
        owners = [self.packing.owners[length]] if length else []
        sizes = [self.call.tokens, self.call.sequences] + ([length] if segment else [])
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
            CALL=self.facts,
            PACKED=self.call.packed,
            **constants,
        )
        return list(results)

    def walk(self, kernel: Any, *arrays: Any, tile: Tile, **rest: Any) -> list[jax.Array]:
        """Runs `kernel` over time segments, a block of value dims a program."""
        block, length = min(tile.block, padded(self.call.value_dim)), self.plan.segment
        return self.launch(
            kernel,
            *arrays,
            programs=self.blocks(length) * self.call.heads * cdiv(self.call.value_dim, block),
            tile=tile,
            length=length,
            segment=True,
            BK=padded(self.call.key_dim),
            BV=block,
            **rest,
        )
