"""The short convolution on TPUs, as Pallas kernels."""

import functools
import importlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _differentiable, _pallas, _varying
from ejkernel.kernels._op import Op
from ejkernel.kernels.convolution import xla
from ejkernel.kernels.convolution.call import Call, Inputs, fold
from ejkernel.kernels.convolution.pallas import plan
from ejkernel.kernels.convolution.pallas.plan import EDGE, HALO, LANES
from ejkernel.kernels.convolution.places import Places, places
from ejkernel.kernels.convolution.states import final_states, initial_states, put, take

Results = tuple[jax.Array, jax.Array]
DEVICE = "ejkernel.kernels.convolution.pallas.device.block"
F32 = jnp.float32


def supports(call: Call) -> str | None:
    """Why these kernels cannot serve the call, or `None` if they can."""
    if call.dtype not in plan.DTYPES:
        return f"dtype {call.dtype} is none of bfloat16, float32"
    if call.history > EDGE:
        return f"more than {EDGE + 1} taps (W={call.taps})"
    if 0 in (call.batch, call.tokens, call.channels, call.sequences):
        return "an array without elements"
    return None


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """The output and the final states; arrays as `Inputs` lists them."""
    if call.unit_dim:
        return xla.with_norms_apart(run, call, *arrays)
    return _differentiable.call(OP, call, Inputs(*_varying.align(arrays)))


def _forward(call: Call, inputs: Inputs) -> Results:
    where = places(call, inputs)
    has_states = inputs.initial_state is not None and call.history > 0
    output = _output(call, inputs if where is None else inputs._replace(initial_state=None), where)
    if where is not None and has_states:
        # computed by the same kernel, so that they have the same bits
        heads = replace(call, batch=call.sequences, tokens=call.history, layout="rows")
        tokens = take(call, inputs.x, *where.heads(call))
        head_output = _output(heads, inputs._replace(x=tokens, cu_seqlens=None, segment_ids=None), None)
        output = put(call, output, *where.heads(call), head_output)
    return output, final_states(call, where, inputs.x, inputs.initial_state)


def _output(call: Call, inputs: Inputs, where: Places | None) -> jax.Array:
    """The output from one kernel, which reads initial states only if each row is one sequence."""

    def launch(inputs: Inputs, where: Places | None) -> list[jax.Array]:
        kernel = _Kernel(call, inputs, where, None)
        kernel.write("output", call.dtype)
        return kernel.run("forward")

    def fallback(inputs: Inputs, where: Places | None) -> list[jax.Array]:
        return [xla.forward(call, inputs)[0]]

    return _pallas.launch(launch, fallback, [_shape(inputs.x)], inputs, where)[0]


def _backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """Cotangents of `x`, weight and bias from one kernel, and of initial states, which are small, from XLA."""
    (d_output, d_final), where = cotangents, places(call, inputs)
    d_output = jnp.zeros_like(inputs.x) if d_output is None else d_output

    def launch(inputs: Inputs, where: Places | None, d_output: jax.Array) -> list[jax.Array]:
        kernel = _Kernel(call, inputs, where, d_output)
        kernel.write("d_x", call.dtype)
        return kernel.run("backward")

    def fallback(inputs: Inputs, where: Places | None, d_output: jax.Array) -> list[jax.Array]:
        d_x, d_weight, d_bias = xla.token_gradient(call, inputs, where, d_output)
        return [d_x, jnp.concatenate([d_weight, d_bias[None]])[: shapes[1].shape[0]]]

    # the weight's rows, and that of the bias if there is one
    rows = call.taps + (inputs.bias is not None)
    shapes = [_shape(inputs.x), jax.ShapeDtypeStruct((rows, call.channels), F32)]
    d_x, d_sums = _pallas.launch(launch, fallback, shapes, inputs, where, d_output)
    return xla.finish(call, inputs, where, (d_output, d_final), (d_x, d_sums[: call.taps], d_sums[-1]))


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


class _Kernel:
    """Builds a `pallas_call`; arrays have the names that device code uses for them."""

    def __init__(self, call: Call, inputs: Inputs, where: Places | None, d_output: jax.Array | None) -> None:
        self.backward = d_output is not None
        self.call, self.inputs, self.where = call, inputs, where
        self.sizes = sizes = plan.sizes(call, self.backward)
        self.arrays: dict[str, Any] = {}
        self.blocks: dict[str, Any] = {}
        self.outputs: dict[str, jax.ShapeDtypeStruct] = {}
        self._read_tokens("x", inputs.x)
        self._read_edge("before", inputs.x, -1)
        if d_output is not None:
            self._read_tokens("d_output", d_output)
            self._read_edge("behind", inputs.x, sizes.tokens // HALO)
            self._read_edge("d_behind", d_output, sizes.tokens // HALO)
        self._read_weight("weight", inputs.weight)
        if inputs.bias is not None:
            self._read_weight("bias", inputs.bias[None])
        if inputs.initial_state is not None and call.history and where is None:
            states = initial_states(call, inputs.initial_state)
            self._read("states", states, (1, call.history, sizes.channels), lambda b, d, t: (b, 0, d))
        plain = jnp.ones((1, 1), jnp.int32)
        if sizes.masked:
            places, plain = self._places()
            self._read("places", places, (1, 2, sizes.tokens + LANES), lambda b, d, t: (b, 0, t))
        self.plain = plain

    def _read(self, name: str, x: jax.Array, block: tuple[int, ...], index: Any) -> None:
        self.arrays[name], self.blocks[name] = x, (block, self._in_order(index))

    def _in_order(self, index: Any) -> Any:
        """`index(row, channel block, token block)` as a function of the grid's indices."""
        if self.backward:
            return lambda d, b, t, _: index(b, d, t)
        return lambda b, d, t, _: index(b, d, t)

    def _read_tokens(self, name: str, x: jax.Array) -> None:
        self._read(name, x, self._tokens(), lambda b, d, t: (b, t, d))

    def _tokens(self) -> tuple[int, ...]:
        return 1, self.sizes.tokens, self.sizes.channels

    def _read_edge(self, name: str, x: jax.Array, offset: int) -> None:
        """Reads the `HALO` tokens that begin `offset · HALO` tokens after a block's first; clipped to the row."""
        each, last = self.sizes.tokens // HALO, max(self.call.tokens - 1, 0) // HALO
        block = 1, HALO, self.sizes.channels
        self._read(name, x, block, lambda b, d, t: (b, jnp.clip(t * each + offset, 0, last), d))

    def _read_weight(self, name: str, x: jax.Array) -> None:
        self._read(name, x.astype(F32), (x.shape[0], self.sizes.channels), lambda b, d, t: (0, d))

    def _places(self) -> tuple[jax.Array, jax.Array]:
        """Positions and use of the tokens of each block and some behind it, and which blocks need no masks."""
        call, sizes, where = self.call, self.sizes, self.where
        token = jnp.arange(call.tokens, dtype=jnp.int32)[None]
        if where is None:
            position = jnp.full((call.batch, call.tokens), call.history, jnp.int32)
            used = position >= 0
        else:
            position, used = where.position, where.used(call, self.inputs.initial_state is not None)
        # tokens before the row's first are zeros without a mask
        plain = used & (position >= jnp.minimum(token, call.history))
        pad = sizes.blocks * sizes.tokens + LANES - call.tokens
        position = jnp.pad(position, ((0, 0), (0, pad)), constant_values=-1)
        both = jnp.stack([position, jnp.pad(used, ((0, 0), (0, pad))).astype(jnp.int32)], 1).astype(F32)
        # tokens behind the last block are not used; a block with tokens past the row's end needs masks
        inside = jnp.pad(plain, ((0, 0), (0, sizes.blocks * sizes.tokens - call.tokens)))
        plain = jnp.pad(inside, ((0, 0), (0, LANES)), constant_values=True)

        def windows(x: jax.Array) -> jax.Array:
            starts = range(0, sizes.blocks * sizes.tokens, sizes.tokens)
            return jnp.stack([x[..., start : start + sizes.tokens + LANES] for start in starts], -2)

        return windows(both).reshape(call.batch, 2, -1), windows(plain).all(-1).astype(jnp.int32)

    def write(self, name: str, dtype: Any) -> None:
        self.outputs[name] = jax.ShapeDtypeStruct(self.inputs.x.shape, dtype)
        self.blocks[name] = (self._tokens(), self._in_order(lambda b, d, t: (b, t, d)))

    def run(self, kernel: str) -> list[jax.Array]:
        """Runs `forward` or `backward` of the device code."""
        # not at the top: `import ejkernel` must not import Pallas
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        call, sizes = self.call, self.sizes
        grid: tuple[int, ...] = (call.batch, sizes.channel_blocks, sizes.blocks)
        order: Any = ("parallel", "parallel", "parallel")
        scratch: dict[str, tuple[int, ...]] = {"tokens": (sizes.tokens + 2 * EDGE, LANES)}
        if self.backward:
            rows = call.taps + (self.inputs.bias is not None)
            self.outputs["d_sums"] = jax.ShapeDtypeStruct((rows, call.channels), F32)
            self.blocks["d_sums"] = ((rows, sizes.channels), self._in_order(lambda b, d, t: (0, d)))
            grid, order = (grid[1], grid[0], grid[2]), ("parallel", "arbitrary", "arbitrary")
            scratch["d_tokens"] = (sizes.tokens + EDGE, LANES)
        if sizes.masked:
            scratch["masks"] = (2, sizes.tokens + EDGE, LANES)
        names = (*self.arrays, *self.outputs, *scratch)
        outputs = pl.pallas_call(
            functools.partial(getattr(importlib.import_module(DEVICE), kernel), sizes, names),
            out_shape=[_varying.shape_like(x.shape, x.dtype, self.inputs.x) for x in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.arrays],
                out_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.outputs],
                scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch.values()],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=order),
            interpret=_pallas.INTERPRET or False,
            name=f"convolution_{kernel}",
        )(_varying.like(self.plain, self.inputs.x), *self.arrays.values())
        return list(outputs)


OP = Op(_forward, xla.reference, backward=_backward, tangent=xla.tangent_behind_kernels, fold=fold)
