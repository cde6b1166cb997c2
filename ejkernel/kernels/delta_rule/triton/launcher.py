"""One call on its way to the device: how it is cut, and what every kernel is told of it."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.chunks.triton.launching import F32, Launching, Tile, capability, padded, shape
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.delta_rule.call import Call, Decay
from ejkernel.kernels.delta_rule.triton import configs
from ejkernel.kernels.delta_rule.triton.configs import Config
from ejkernel.xla_utils.utils import cdiv

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
DEVICE = {
    "decays": "ejkernel.kernels.delta_rule.triton.device.decays",
    "folding": "ejkernel.kernels.delta_rule.triton.device.folding",
    "gradients": "ejkernel.kernels.delta_rule.triton.device.gradients",
    "key_gates": "ejkernel.kernels.delta_rule.triton.device.key_gates",
    "key_gradients": "ejkernel.kernels.delta_rule.triton.device.key_gradients",
    "segments": "ejkernel.kernels.delta_rule.triton.device.segments",
    "step": "ejkernel.kernels.delta_rule.triton.device.step",
    "system": "ejkernel.kernels.delta_rule.triton.device.system",
    "walk": "ejkernel.kernels.delta_rule.triton.device.walk",
}

# A time segment has at least so many.
FEWEST_CHUNKS = 4


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
        config = configs.configure(capability(), call.dtype == np.float32, call.key_dim)
        programs = call.heads * cdiv(call.value_dim, min(config.forward.block, padded(call.value_dim)))
        # packed sequences may be of any length, but most often are alike
        segments = config.fill // (programs * call.sequences)
        segments = min(segments, call.tokens // (config.chunk * FEWEST_CHUNKS))
        # what a segment does to states costs as much again, and twice that
        if segments < 3:
            segments = 1
        return Plan(config, config.chunk * cdiv(call.tokens, config.chunk * segments))

    def segmented(self, call: Call) -> bool:
        return self.segment < call.tokens


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
    middle: bool  # one gate a key dim, folded against the middle of a chunk
    alike: bool  # chunks whose keys are alike are taken with more digits than 16 bit have
    precision: str  # of dots on float32 operands
    invert: str  # of those that make an inverse
    solve: str  # of those that apply it
    flat: bool  # code is of the kind that Triton 3.6 compiles for Blackwell too; Hopper's is as it was timed


@dataclass(frozen=True)
class Launcher(Launching):
    """One call, its cut in blocks, and how its kernels are launched."""

    call: Call
    plan: Plan
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
            # float16 has too small a range for that, and float32 more digits than products of that
            middle=call.decay == "key" and call.dtype == jnp.bfloat16,
            alike=call.dtype == jnp.bfloat16,
            precision=config.precision,
            invert=config.invert,
            # one pass of TF32 has three digits more than bfloat16
            solve="tf32" if call.dtype == jnp.bfloat16 else config.precision,
            flat=capability() != 90,
        )
        # an empty sequence has a segment: it still hands its initial state on
        lengths = config.chunk, config.chunk, plan.segment
        return Launcher(call, plan, Packing.of(call.tokens, cu_seqlens, lengths), facts)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def facts_of_all(self) -> dict[str, Any]:
        return super().facts_of_all | {"CALL": self.facts}

    def heads_a_program(self) -> int:
        """Of a chunk, one after the other, in a kernel that has nothing else to walk along."""
        return next(number for number in (self.config.heads, 4, 2, 1) if self.call.heads % number == 0)

    def rows(self, dim: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Of every token and head."""
        return shape(self.call.batch, self.call.tokens, self.call.heads, dim, dtype=dtype)

    def by_parts(self) -> dict[str, Any]:
        """How the kernels of gradients are launched, over chunks, by blocks of value dims whose parts are added up."""
        call, config = self.call, self.config
        block = min(config.gradients.block, padded(call.value_dim))
        return {
            "programs": self.blocks(config.chunk) * call.heads * cdiv(call.value_dim, block),
            "tile": config.gradients,
            "length": config.chunk,
            "BK": min(config.key_block, padded(call.key_dim)),
            "BV": block,
        }

    def token_parts(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Of every token, head and block of value dims."""
        number = cdiv(self.call.value_dim, self.by_parts()["BV"])
        return shape(self.call.batch, self.call.tokens, self.call.heads, number, *sizes, dtype=dtype)

    def parts(self, like: jax.Array) -> jax.ShapeDtypeStruct:
        """Parts of a gradient of `like`, in float32 if they, or heads that share it, are to be added up."""
        found = self.token_parts(like.shape[3], dtype=like.dtype)
        alone = found.shape[3] == 1 and like.shape[2] == self.call.heads
        return found if alone else self.token_parts(like.shape[3])

    def values(self) -> jax.ShapeDtypeStruct:
        """The values' gradient, of every head."""
        call = self.call
        return self.rows(call.value_dim, call.dtype if self.facts.value_heads == call.heads else F32)

    def chunked(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Of every chunk and head."""
        return shape(self.blocks(self.config.chunk), self.call.heads, *sizes, dtype=dtype)

    def states(self) -> jax.ShapeDtypeStruct:
        """Of every sequence and head."""
        return shape(self.call.sequences, self.call.heads, self.call.key_dim, self.call.value_dim)

    def segments(self, rows: int) -> jax.ShapeDtypeStruct:
        """Of every time segment and head, rows of key dims."""
        return shape(self.blocks(self.plan.segment), self.call.heads, rows, self.call.key_dim)

    def gates(self) -> dict[str, Any]:
        """How the gates of key dims are summed up."""
        fine = self.call.dtype == F32
        return {"LEVELS": self.config.chunk.bit_length() - 1, "FINE": fine, "LIMIT": 40.0 if fine else 80.0}

    def walk(
        self,
        kernel: Any,
        *arrays: Any,
        outputs: Sequence[Any],
        tile: Tile,
        changed: Sequence[Any] = (),
        more: Sequence[Any] = (),
        **rest: Any,
    ) -> list[Any]:
        """Runs `kernel` over time segments, and where keys are alike once more, in the same memory.

        That may also change some arrays, and makes `more` outputs.
        """
        none = [None] * (len(changed) + len(more))
        standins = [None] * (len(outputs) + len(changed))
        every = [*outputs, *none]
        found = self._walk(kernel, *arrays, *standins, outputs=every, tile=tile, ALIKE=False, **rest)[: len(outputs)]
        if not self.facts.alike:
            return [*found, *none]
        every = [*outputs, *(shape(*each.shape, dtype=each.dtype) for each in changed), *more]
        return self._walk(
            kernel,
            *(*arrays, *found, *changed),
            outputs=every,
            tile=self.config.alike,
            aliases={len(arrays) + i: i for i in range(len(standins)) if every[i] is not None},
            ALIKE=True,
            **rest,
        )

    def _walk(self, kernel: Any, *arrays: Any, tile: Tile, further: int = 0, **rest: Any) -> list[jax.Array]:
        """A block of value dims, or of as many `further` rows, a program."""
        block, length = min(tile.block, padded(self.call.value_dim)), self.plan.segment
        parts = cdiv(self.call.value_dim, block) + cdiv(further, block)
        return self.launch(
            kernel,
            *arrays,
            programs=self.blocks(length) * self.call.heads * parts,
            tile=tile,
            length=length,
            segment=True,
            BK=padded(self.call.key_dim),
            BV=block,
            **rest,
        )
