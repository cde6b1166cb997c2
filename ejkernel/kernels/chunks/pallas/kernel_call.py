"""One kernel on its way to a TPU: its arrays, which block of each a visit sees, and its launch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _pallas, _varying
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.pallas.plan import LANES, TOKENS, Sizes, table

F32 = jnp.float32


class Inputs(NamedTuple):
    """The arrays of a call, or the cotangents of all but `cu_seqlens`; `None` for those that are absent."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array | None  # of the delta rule
    log_decay: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None


@dataclass(frozen=True)
class Recurrence:
    """In what the recurrences differ."""

    name: str  # that the names of its kernels start with
    program: Callable[[], Any]  # gives the class of its device code, a `Program`; called when a kernel is launched
    xla: Callable[[Any, Inputs], tuple[jax.Array, jax.Array]]  # of call and inputs, where XLA would split kernels


class Layout(NamedTuple):
    """How an array lies in memory, and which block of it a visit sees."""

    shape: tuple[int, ...]
    block: tuple[int, ...]
    index: Callable[..., Any]  # of the block, from row, program of heads, visit and the table of visits


@dataclass
class KernelCall:
    """A `pallas_call` being put together; arrays have the names that device code uses for them."""

    recurrence: Recurrence
    call: Call
    sizes: Sizes
    table: jax.Array
    inputs: dict[str, jax.Array] = field(default_factory=dict)
    outputs: dict[str, jax.ShapeDtypeStruct] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)

    @staticmethod
    def of(recurrence: Recurrence, call: Call, sizes: Sizes, inputs: Inputs, backward: bool) -> "KernelCall":
        """A kernel that reads the call's arrays, but for the initial state."""
        visits = table(call, sizes, inputs.cu_seqlens, call.reverse != backward)
        kernel = KernelCall(recurrence, call, sizes, visits)
        for name in TOKENS:
            kernel.read_tokens(name, getattr(inputs, name))
        if inputs.log_decay is not None:
            kernel._read_gates(inputs.log_decay)
        if inputs.beta is not None:
            kernel.read("beta", inputs.beta.swapaxes(1, 2), kernel.by_head())
        return kernel

    def _read_gates(self, log_decay: jax.Array) -> None:
        if self.call.decay == "key":
            self.read_tokens("log_decay", log_decay)
        elif self.call.decay == "head":
            self.read("log_decay", log_decay.swapaxes(1, 2), self.by_head())
        else:
            layout = self._by_sequence(self.programs, 1, self.sizes.heads, LANES)
            wide = jnp.broadcast_to(log_decay.reshape(*layout.shape[:3], 1), layout.shape)
            self.read("log_decay", wide, layout)

    @property
    def programs(self) -> int:
        """How many share a row's heads."""
        return self.call.heads // self.sizes.heads

    def read(self, name: str, x: jax.Array, layout: Layout) -> None:
        self.inputs[name], self.layouts[name] = x.reshape(layout.shape), layout

    def read_tokens(self, name: str, x: jax.Array) -> None:
        """`x [B, T, heads, D]`, heads beside one another in the lanes."""
        self.read(name, x, self.tokens(*x.shape[2:]))

    def write(self, name: str, layout: Layout, dtype: Any = F32) -> None:
        self.outputs[name], self.layouts[name] = jax.ShapeDtypeStruct(layout.shape, dtype), layout

    def tokens(self, heads: int, dim: int) -> Layout:
        """`[B, T, heads · dim]`."""
        block_heads = max(1, self.sizes.heads * heads // self.call.heads)
        # programs that read the same heads; JAX's own division asks which TPU it is for
        sharing = np.int32(self.programs * block_heads // heads)
        return Layout(
            (self.call.batch, self.call.tokens, heads * dim),
            (1, self.sizes.block, block_heads * dim),
            lambda b, h, i, t: (b, t[0, i], jax.lax.div(h, sharing)),
        )

    def by_head(self) -> Layout:
        """One number a head and token `[B, programs, heads, T]`: tokens lie along the lanes."""
        heads = self.sizes.heads
        shape = self.call.batch, self.programs, heads, self.call.tokens
        return Layout(shape, (1, 1, heads, self.sizes.block), lambda b, h, i, t: (b, h, 0, t[0, i]))

    def states(self) -> Layout:
        """`[N, H, K, V]`."""
        return self._by_sequence(self.call.heads, self.sizes.heads, self.call.key_dim, self.call.value_dim)

    def _by_sequence(self, size: int, block: int, *others: int) -> Layout:
        packed, zeros = self.call.packed, (0,) * len(others)
        shape = self.call.sequences, size, *others
        return Layout(shape, (1, block, *others), lambda b, h, i, t: (t[1, i] if packed else b, h, *zeros))

    def block_states(self, backward: bool) -> Layout:
        """The state before each visit `[B, visits, H, V, K]`, in the order of the tokens."""
        call, visits, reverse = self.call, self.table.shape[1], self.call.reverse != backward
        return Layout(
            (call.batch, visits, call.heads, call.value_dim, call.key_dim),
            (1, 1, self.sizes.heads, call.value_dim, call.key_dim),
            lambda b, h, i, t: (b, visits - 1 - i if reverse else i, h, 0, 0),
        )

    def run(self, kernel: str, scratch: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        """Launches `forward` or `backward` of the device code; its outputs by name."""
        # not at the top: `import ejkernel` must not import Pallas
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        like = next(iter(self.inputs.values()))
        memory = {name: pltpu.VMEM(shape, F32) for name, shape in scratch.items()}
        if self.call.decay == "key":
            memory["kinds"] = pltpu.SMEM((3,), jnp.int32)
        names = (*self.inputs, *self.outputs, *memory)
        results = pl.pallas_call(
            functools.partial(getattr(self.recurrence.program(), kernel), self.sizes, names),
            out_shape=[_varying.shape_like(x.shape, x.dtype, like) for x in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.call.batch, self.programs, self.table.shape[1]),
                in_specs=[pl.BlockSpec(*self.layouts[name][1:]) for name in self.inputs],
                out_specs=[pl.BlockSpec(*self.layouts[name][1:]) for name in self.outputs],
                scratch_shapes=[*memory.values()],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=_pallas.INTERPRET or False,
            name=f"{self.recurrence.name}_{self.call.decay}_{kernel}",
        )(_varying.like(self.table, like), *self.inputs.values())
        return dict(zip(self.outputs, results, strict=True))
