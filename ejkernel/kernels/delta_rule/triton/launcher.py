"""One call on its way to the device: how it is cut, and what every kernel is told of it."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton import launching
from ejkernel.kernels.chunks.triton.launching import F32, capability
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton import configs
from ejkernel.kernels.delta_rule.triton.configs import Config
from ejkernel.xla_utils.utils import cdiv

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
_NAMES = (
    "bounded_gradients",
    "decays",
    "folding",
    "gradients",
    "key_gates",
    "key_gradients",
    "segments",
    "system",
    "walk",
)
DEVICE = {name: f"ejkernel.kernels.delta_rule.triton.device.{name}" for name in _NAMES}

# A time segment has at least so many.
FEWEST_CHUNKS = 4


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


@dataclass(frozen=True)
class Plan:
    """How a call is cut: the configuration, and tokens a time segment. Folding `vmap` into the batch keeps it.

    Unless `cuts_back`, the backward takes time as a whole.
    """

    config: Config
    segment: int
    cuts_back: bool = True

    @staticmethod
    def of(call: Call) -> "Plan":
        config = configs.configure(capability(), call.dtype == np.float32, call.key_dim)
        programs = call.heads * cdiv(call.value_dim, min(config.forward.rows, padded(call.value_dim)))
        # packed sequences may be of any length, but most often are of about the same
        segments = config.fill // (programs * call.sequences)
        segments = min(segments, call.tokens // (config.chunk * FEWEST_CHUNKS))
        # what a segment does to states costs as much again, and twice that
        if segments < 3:
            segments = 1
        return Plan(config, config.chunk * cdiv(call.tokens, config.chunk * segments))

    def of_part(self, call: Call) -> "Plan":
        """The plan of a device's part, which has fewer rows and heads; it keeps no more for the backward than this."""
        return self if self.segmented(call) else replace(Plan.of(call), cuts_back=False)

    def segmented(self, call: Call) -> bool:
        return self.segment < call.tokens


@dataclass(frozen=True, kw_only=True)
class Constants(launching.Constants):
    """What kernels are compiled for; device code gets it as `CALL`."""

    middle: bool  # one gate a key dim, folded against the middle of a chunk
    keys_may_coincide: bool  # chunks whose keys coincide are taken once more, with more digits than 16 bit have
    invert: str  # of those that make an inverse
    solve: str  # of those that apply it
    flat: bool  # code is of the kind that Triton 3.6 compiles for Blackwell too; Hopper's is as it was timed
    fine: bool  # gates are summed up with all digits of float32
    limit: float  # bits of decay from a chunk's middle beyond which gates are too strong for that reference
    part_block: int = 0  # dims that a program takes at once
    each: int = 1  # heads that a program goes through
    look: int = 1  # flags that it looks at, padded
    keep: bool = False  # what the backward needs is stored
    back: bool = False  # from the last segment to the first
    time: str = "whole"  # as `device.walk` has it
    strong: bool = False  # this launch takes the chunks whose gates are too strong for the other
    keys_coincide: bool = False  # this launch takes the chunks whose keys coincide


@dataclass(frozen=True)
class Launcher(launching.Launcher):
    """One call, its cut in blocks, and how its kernels are launched."""

    @staticmethod
    def of(
        call: Call, plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, cu_seqlens: jax.Array | None
    ) -> "Launcher":
        config, fine = plan.config, call.dtype == np.float32
        # float16 has too small a range for that, and float32 more digits than products of that
        middle = call.decay == "key" and call.dtype == jnp.bfloat16
        constants = Constants(
            **Constants.facts(call, config),
            query_heads=query.shape[2],
            key_heads=key.shape[2],
            value_heads=value.shape[2],
            middle=middle,
            keys_may_coincide=call.dtype == jnp.bfloat16,
            invert=config.invert,
            # one pass of TF32 has three digits more than bfloat16
            solve="tf32" if call.dtype == jnp.bfloat16 else config.precision,
            flat=capability() != 90,
            fine=fine,
            # a state leaves a chunk's middle and enters the next one's by one factor, which float32 has to have
            limit=40.0 if fine else 63.0 if middle else 80.0,
        )
        # an empty sequence has a segment: it still hands its initial state on
        lengths = config.chunk, config.chunk, plan.segment
        return Launcher(call, plan, Packing.of_call(call, cu_seqlens, lengths), constants)

    def heads_a_program(self) -> int:
        """Of a chunk, one after the other, in a kernel that has nothing else to walk along."""
        return next(number for number in (self.config.heads, 4, 2, 1) if self.call.heads % number == 0)

    def by_parts(self) -> dict[str, Any]:
        """How the kernels of gradients are launched, over chunks, by blocks of value dims whose parts are added up."""
        call, config = self.call, self.config
        block = min(config.gradients.rows, padded(call.value_dim))
        return {
            "programs": self.blocks(config.chunk) * call.heads * cdiv(call.value_dim, block),
            "tile": config.gradients,
            "length": config.chunk,
            "key_block": min(config.key_block, padded(call.key_dim)),
            "value_block": block,
        }

    def token_parts(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Of every token, head and block of value dims."""
        number = cdiv(self.call.value_dim, self.by_parts()["value_block"])
        return shape(self.call.batch, self.call.tokens, self.call.heads, number, *sizes, dtype=dtype)

    def parts(self, like: jax.Array) -> jax.ShapeDtypeStruct:
        """Parts of a gradient of `like`, in float32 if they, or heads that share it, are to be added up."""
        found = self.token_parts(like.shape[3], dtype=like.dtype)
        alone = found.shape[3] == 1 and like.shape[2] == self.call.heads
        return found if alone else self.token_parts(like.shape[3])

    def values(self) -> jax.ShapeDtypeStruct:
        """The values' gradient, of every head."""
        call = self.call
        return self.rows(call.value_dim, call.dtype if self.constants.value_heads == call.heads else F32)

    def chunked(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Of every chunk and head."""
        return shape(self.blocks(self.config.chunk), self.call.heads, *sizes, dtype=dtype)

    def weights(self, number: int) -> jax.ShapeDtypeStruct:
        """So many numbers of every chunk's rows, each for all of them: by chunks, or by rows with several sequences."""
        call = self.call
        if call.segmented:
            return shape(call.batch, call.heads, number, call.tokens)
        return self.chunked(number, self.config.chunk)

    def segments(self, rows: int) -> jax.ShapeDtypeStruct:
        """Of every time segment and head, rows of key dims."""
        return shape(self.blocks(self.plan.segment), self.call.heads, rows, self.call.key_dim)

    def walk(
        self,
        kernel: Any,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        *,
        tile: Tile,
        changed: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> Any:
        """Runs `kernel` over time segments, and where keys coincide once more, in the same memory.

        That may also change some arrays, and makes `more` outputs.
        """
        changed, more = changed or {}, more or {}
        none = dict.fromkeys([*changed, *more])
        found = self._walk(kernel, inputs, {**outputs, **none}, tile=tile, **rest)
        if not self.constants.keys_may_coincide:
            return found
        before = {name: each for name, each in {**found._asdict(), **changed}.items() if each is not None}
        every = {**outputs, **{name: shape(*each.shape, dtype=each.dtype) for name, each in changed.items()}, **more}
        again: dict[str, Any] = {"tile": self.config.keys_coincide, "in_place": before, "keys_coincide": True}
        return self._walk(kernel, inputs, every, **again, **rest)

    def _walk(self, kernel: Any, *arrays: Any, tile: Tile, further: int = 0, **rest: Any) -> Any:
        """A block of value dims, or of as many `further` rows, a program."""
        block, length = min(tile.rows, padded(self.call.value_dim)), self.plan.segment
        parts = cdiv(self.call.value_dim, block) + cdiv(further, block)
        if rest.get("keys_coincide") and self.call.segmented:
            # where each program marks the sequences that it gives results for
            marks = shape(self.call.batch, self.call.heads, parts, self.call.tokens, dtype=jnp.int32)
            arrays = arrays[0], {**arrays[1], "mine": marks}
        return self.launch(
            kernel,
            *arrays,
            programs=self.blocks(length) * self.call.heads * parts,
            tile=tile,
            length=length,
            key_block=padded(self.call.key_dim),
            value_block=block,
            **rest,
        )
