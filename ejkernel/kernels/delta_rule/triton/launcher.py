"""How a call is cut in time, what its kernels are compiled for, and how they are launched."""

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
    "bounded_gates",
    "bounded_gradients",
    "decays",
    "folding",
    "gradients",
    "key_gates",
    "key_gradients",
    "prompts",
    "segments",
    "system",
    "walk",
)
DEVICE = {name: f"ejkernel.kernels.delta_rule.triton.device.{name}" for name in _NAMES}

# The least number of chunks in a time segment.
FEWEST_CHUNKS = 4


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


@dataclass(frozen=True)
class Plan:
    """How a call is cut; `vmap`, which adds rows to the batch, does not change it."""

    config: Config
    segment: int  # tokens of a time segment
    cuts_back: bool = True  # the backward is cut in time segments, too

    @staticmethod
    def of(call: Call) -> "Plan":
        config = configs.configure(capability(), call.dtype == np.float32, call.key_dim)
        programs = call.heads * cdiv(call.value_dim, min(config.forward.rows, padded(call.value_dim)))
        # as if packed sequences were of about the same length
        segments = config.fill // (programs * call.sequences)
        segments = min(segments, call.tokens // (config.chunk * FEWEST_CHUNKS))
        # the walk that finds the segments' transitions costs twice as much as the walk itself
        if segments < 3:
            segments = 1
        return Plan(config, config.chunk * cdiv(call.tokens, config.chunk * segments))

    def of_part(self, call: Call) -> "Plan":
        """The plan of one device's part of the call, fewer rows and heads, whose residuals are those of this plan."""
        return self if self.segmented(call) else replace(Plan.of(call), cuts_back=False)

    def segmented(self, call: Call) -> bool:
        return self.segment < call.tokens


@dataclass(frozen=True, kw_only=True)
class Constants(launching.Constants):
    """What kernels are compiled for; device code gets it as `CALL`."""

    middle: bool  # one gate a key dim, decays folded relative to a chunk's middle
    keys_may_coincide: bool  # a second launch takes chunks whose keys coincide, with more digits than bfloat16 has
    invert: str  # precision of the dots that make the systems' inverses
    solve: str  # precision of the dots that apply them
    blackwell_safe: bool  # only code that Triton 3.6 compiles for Blackwell, too; Hopper's is as it was timed
    fine: bool  # gates are summed with all digits of float32
    middle_limit: float  # bits that gates forget between a chunk's middle and its ends before they count as strong
    part_block: int = 0  # key dims that a program takes at once
    heads_per_program: int = 1
    flags: int = 1  # flags that a program reads at once, padded
    residuals: bool = False  # what the backward needs is stored
    back: bool = False  # from the last segment to the first
    time: str = "whole"  # or "segments", or "local", as `device.walk` has it
    strong: bool = False  # this launch takes the chunks whose gates are strong
    keys_coincide: bool = False  # this launch takes the chunks whose keys coincide


@dataclass(frozen=True)
class Launcher(launching.Launcher):
    """One call, its cut in blocks, and how its kernels are launched."""

    @staticmethod
    def of(
        call: Call, plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, cu_seqlens: jax.Array | None
    ) -> "Launcher":
        config, fine = plan.config, call.dtype == np.float32
        # only bfloat16 has the range, and no more digits than the products keep
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
            blackwell_safe=capability() != 90,
            fine=fine,
            # the decay from one chunk's middle to the next one's is one factor, which float32 has to hold
            middle_limit=40.0 if fine else 63.0 if middle else 80.0,
        )
        # an empty sequence has a segment, too, which passes its initial state on
        lengths = config.chunk, config.chunk, plan.segment
        return Launcher(call, plan, Packing.of_call(call, cu_seqlens, lengths), constants)

    def heads_per_program(self) -> int:
        """Heads of a chunk that a program solves one after the other."""
        return next(number for number in (self.config.heads, 4, 2, 1) if self.call.heads % number == 0)

    def gradient_options(self) -> dict[str, Any]:
        """Options of the launches of gradients: a program has a chunk and a block of value dims, a part of the sums."""
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
        """Numbers of every token, head and block of value dims."""
        number = cdiv(self.call.value_dim, self.gradient_options()["value_block"])
        return shape(self.call.batch, self.call.tokens, self.call.heads, number, *sizes, dtype=dtype)

    def parts(self, like: jax.Array) -> jax.ShapeDtypeStruct:
        """Parts of a gradient of `like`; in float32 if parts, or heads that share one of `like`, will be summed."""
        one_part = self.token_parts().shape[3] == 1 and like.shape[2] == self.call.heads
        return self.token_parts(like.shape[3], dtype=like.dtype if one_part else F32)

    def values(self) -> jax.ShapeDtypeStruct:
        """The gradient of the values, for every head of the call; in float32 if heads share values."""
        call = self.call
        return self.rows(call.value_dim, call.dtype if self.constants.value_heads == call.heads else F32)

    def chunked(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        """Numbers of every chunk and head."""
        return shape(self.blocks(self.config.chunk), self.call.heads, *sizes, dtype=dtype)

    def row_scalars(self, number: int) -> jax.ShapeDtypeStruct:
        """`number` scalars of every row of a chunk, those of one kind side by side."""
        call = self.call
        if call.segmented:
            return shape(call.batch, call.heads, number, call.tokens)
        return self.chunked(number, self.config.chunk)

    def segments(self, rows: int) -> jax.ShapeDtypeStruct:
        """A matrix of every time segment and head, whose columns are key dims."""
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
        **options: Any,
    ) -> Any:
        """Runs `kernel` over time segments and, where keys coincide, a second time in the memory of the results.

        The second run also updates the arrays `changed`, and has the further outputs `more`.
        """
        changed, more = changed or {}, more or {}
        absent = dict.fromkeys([*changed, *more])
        first = self._walk(kernel, inputs, {**outputs, **absent}, tile=tile, **options)
        if not self.constants.keys_may_coincide:
            return first
        before = {name: each for name, each in {**first._asdict(), **changed}.items() if each is not None}
        every = {**outputs, **{name: shape(*each.shape, dtype=each.dtype) for name, each in changed.items()}, **more}
        options |= {"tile": self.config.keys_coincide, "in_place": before, "keys_coincide": True}
        return self._walk(kernel, inputs, every, **options)

    def _walk(
        self, kernel: Any, inputs: Any, outputs: Mapping[str, Any], *, tile: Tile, further: int = 0, **options: Any
    ) -> Any:
        """Launches a program for each block of value dims, or of the `further` rows of a transition."""
        block, length = min(tile.rows, padded(self.call.value_dim)), self.plan.segment
        parts = cdiv(self.call.value_dim, block) + cdiv(further, block)
        if options.get("keys_coincide") and self.call.segmented:
            # each program marks the sequences whose results it stores
            marks = shape(self.call.batch, self.call.heads, parts, self.call.tokens, dtype=jnp.int32)
            outputs = {**outputs, "marks": marks}
        return self.launch(
            kernel,
            inputs,
            outputs,
            programs=self.blocks(length) * self.call.heads * parts,
            tile=tile,
            length=length,
            key_block=padded(self.call.key_dim),
            value_block=block,
            **options,
        )
