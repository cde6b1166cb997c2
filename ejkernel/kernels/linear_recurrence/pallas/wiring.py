"""One kernel on its way to a TPU: its arrays, which block of each a visit sees, and its launch."""

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _pallas, _varying
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.pallas.plan import LANES, Sizes

F32 = jnp.float32
# where each kernel is; imported when one is launched
DEVICE = {
    "forward": "ejkernel.kernels.linear_recurrence.pallas.device.walk",
    "backward": "ejkernel.kernels.linear_recurrence.pallas.device.walk",
}
Block = tuple[tuple[int, ...], Any]  # its shape, and where it is: from row, program of heads, visit and the table


@dataclass
class Wiring:
    """Arrays are named as the device code names them."""

    device: ClassVar[dict[str, str]] = DEVICE
    family: ClassVar[str] = "recurrence"  # which kernels are named after

    call: Call
    sizes: Sizes
    table: jax.Array
    inputs: dict[str, jax.Array] = field(default_factory=dict)
    outputs: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)

    @property
    def programs(self) -> int:
        """Of heads."""
        return self.call.heads // self.sizes.heads

    def read_tokens(self, name: str, x: jax.Array) -> None:
        """`x [B, T, heads, D]`, heads as lanes."""
        *_, heads, dim = x.shape
        self.inputs[name] = x.reshape(*x.shape[:2], heads * dim)
        self.blocks[name] = self._tokens(heads, dim)

    def write_tokens(self, name: str, dim: int, dtype: Any) -> None:
        """An array `[B, T, H · dim]`."""
        shape = (self.call.batch, self.call.tokens, self.call.heads * dim)
        self.outputs[name] = jax.ShapeDtypeStruct(shape, dtype)
        self.blocks[name] = self._tokens(self.call.heads, dim)

    def _tokens(self, heads: int, dim: int) -> Block:
        mine = max(1, self.sizes.heads * heads // self.call.heads)
        # programs whose heads share what they read; JAX's own division asks which TPU it is for
        sharing = np.int32(self.programs * mine // heads)
        return (1, self.sizes.block, mine * dim), lambda b, h, i, t: (b, t[0, i], jax.lax.div(h, sharing))

    def read_states(self, name: str, x: jax.Array) -> None:
        self.inputs[name], self.blocks[name] = x, self._states()

    def write_states(self, name: str, dtype: Any) -> None:
        call = self.call
        shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
        self.outputs[name], self.blocks[name] = jax.ShapeDtypeStruct(shape, dtype), self._states()

    def _states(self) -> Block:
        packed = self.call.packed
        shape = (1, self.sizes.heads, self.call.key_dim, self.call.value_dim)
        return shape, lambda b, h, i, t: (t[1, i] if packed else b, h, 0, 0)

    def write_met(self) -> None:
        """The state that each visit meets, in the order of the tokens."""
        call = self.call
        shape = (call.batch, self.table.shape[1], call.heads, call.value_dim, call.key_dim)
        self.outputs["met"], self.blocks["met"] = jax.ShapeDtypeStruct(shape, F32), self._met(call.reverse)

    def read_met(self, met: jax.Array) -> None:
        self.inputs["met"], self.blocks["met"] = met, self._met(not self.call.reverse)

    def _met(self, reverse: bool) -> Block:
        last = self.table.shape[1] - 1
        shape = (1, 1, self.sizes.heads, self.call.value_dim, self.call.key_dim)
        return shape, lambda b, h, i, t: (b, last - i if reverse else i, h, 0, 0)

    def read_along(self, name: str, x: jax.Array) -> None:
        """`x [B, T, H]`, tokens along the lanes: one number a head and token is little to turn."""
        self.inputs[name], self.blocks[name] = x.swapaxes(1, 2).reshape(self._along), self._by_head_along()

    def write_along(self, name: str) -> None:
        self.outputs[name], self.blocks[name] = jax.ShapeDtypeStruct(self._along, F32), self._by_head_along()

    @property
    def _along(self) -> tuple[int, ...]:
        return self.call.batch, self.programs, self.sizes.heads, self.call.tokens

    def _by_head_along(self) -> Block:
        return (1, 1, self.sizes.heads, self.sizes.block), lambda b, h, i, t: (b, h, 0, t[0, i])

    def read_gates(self, log_decay: jax.Array) -> None:
        call, heads = self.call, self.sizes.heads
        if call.decay == "key":
            return self.read_tokens("gates", log_decay)
        if call.decay == "constant":
            shape = (call.sequences, self.programs, heads, LANES)
            self.inputs["gates"] = jnp.broadcast_to(log_decay.reshape(*shape[:3], 1), shape)
            packed = call.packed
            self.blocks["gates"] = (1, 1, heads, LANES), lambda b, h, i, t: (t[1, i] if packed else b, h, 0, 0)
            return None
        return self.read_along("gates", log_decay)

    def write_gates(self, log_decay: jax.Array) -> None:
        """The gradient of the gates, of each token."""
        call = self.call
        if call.decay == "key":
            return self.write_tokens("d_gates", call.key_dim, log_decay.dtype)
        return self.write_along("d_gates")

    def run(self, kernel: str, scratch: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        """Launches a kernel of the device code; its outputs by name."""
        # not at the top: `import ejkernel` must not import Pallas
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        device = importlib.import_module(self.device[kernel])
        like = next(iter(self.inputs.values()))
        names = (*self.inputs, *self.outputs, *scratch)
        results = pl.pallas_call(
            functools.partial(getattr(device, kernel), self.sizes, names),
            out_shape=[_varying.shape_like(x.shape, x.dtype, like) for x in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.call.batch, self.programs, self.table.shape[1]),
                in_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.inputs],
                out_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.outputs],
                scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch.values()],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=_pallas.INTERPRET or False,
            name=f"{self.family}_{self.call.decay}_{kernel}",
        )(_varying.like(self.table, like), *self.inputs.values())
        return dict(zip(self.outputs, results, strict=True))

    def by_head(self, x: jax.Array) -> jax.Array:
        """`[B, T, H · D]` to `[B, T, H, D]`."""
        return x.reshape(*x.shape[:2], self.call.heads, -1)

    def heads_last(self, x: jax.Array) -> jax.Array:
        """What `write_along` gave, `[B, T, H]`."""
        return x.reshape(self.call.batch, self.call.heads, self.call.tokens).swapaxes(1, 2)
