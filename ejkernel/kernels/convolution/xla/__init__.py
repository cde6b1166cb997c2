"""The short convolution in plain JAX: sums of shifted arrays. Runs anywhere."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel._dispatch import warn_of_tangents
from ejkernel._normalization import normalized
from ejkernel.kernels import _differentiable, _varying
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.convolution.call import Call, Inputs
from ejkernel.kernels.convolution.places import Places, places
from ejkernel.kernels.convolution.states import final_gradient, final_states, initial_states, put, take

Results = tuple[jax.Array, jax.Array]
Join = Callable[[list[jax.Array], int], jax.Array]
EPSILON = 1e-6  # added to a head's squared norm
# Tokens whose cotangents are computed at once: few enough that intermediate arrays stay in a CPU's cache.
_BLOCK = 128


def supports(call: Call) -> str | None:
    """Plain JAX serves every call."""
    return None


def run(call: Call, *arrays: jax.Array | None) -> Results:
    """The output and the final states; arrays as `Inputs` lists them."""
    inputs = Inputs(*_varying.align(arrays))
    if 0 in (call.batch, call.tokens, call.channels, call.sequences):
        return jnp.zeros_like(inputs.x), initial_states(call, inputs.initial_state)
    return _differentiable.call(OP, call, inputs)


def forward(call: Call, inputs: Inputs) -> Results:
    """The output and the final states, without derivatives."""
    return _forward(call, inputs, _join_bits)


def reference(call: Call, inputs: Inputs) -> Results:
    """The output and the final states, in a form that JAX can differentiate."""
    return _forward(call, inputs, jnp.concatenate)


def _forward(call: Call, inputs: Inputs, join: Join) -> Results:
    where = places(call, inputs)
    before = initial_states(call, inputs.initial_state if where is None else None, call.batch)
    position = None if where is None else where.position
    output = activated(call, _sums(call, inputs, _taps(call, before, inputs.x, position, join)))
    if position is not None:
        output = jnp.where((position >= 0)[..., None], output, 0)
    output = output.astype(call.dtype)
    if where is not None and inputs.initial_state is not None and call.history:
        heads = activated(call, _sums(call, inputs, head_taps(call, inputs, where))).astype(call.dtype)
        output = put(call, output, *where.heads(call), heads)
    return output, final_states(call, where, inputs.x, inputs.initial_state)


def backward(call: Call, inputs: Inputs, residuals: None, cotangents: Any, wanted: Inputs) -> Inputs:
    """Cotangents of the inputs. There are no residuals: computing the sums again costs less than reading them."""
    d_output, d_final = cotangents
    d_output = jnp.zeros_like(inputs.x) if d_output is None else d_output
    where = places(call, inputs)
    return finish(call, inputs, where, (d_output, d_final), token_gradient(call, inputs, where, d_output))


def finish(
    call: Call, inputs: Inputs, where: Places | None, cotangents: Any, token_gradients: Any, all_tokens: bool = False
) -> Inputs:
    """All cotangents of the inputs: the results of `token_gradient` plus the contributions of states.

    `all_tokens` says that `token_gradients` include the tokens that read initial states in rows of several sequences.
    """
    (d_output, d_final), (d_x, d_weight, d_bias) = cotangents, token_gradients
    has_states = inputs.initial_state is not None and bool(call.history)
    d_heads = head_gradient(call, inputs, where, d_output) if has_states else None
    if where is not None and d_heads is not None and not all_tokens:
        d_x, d_weight, d_bias = _with_heads(call, inputs, where, d_heads, token_gradients)
    d_states = initial_gradient(call, inputs, d_heads)
    if d_final is not None:
        d_x, d_states = final_gradient(call, where, d_final, d_x, d_states)
    d_bias = None if inputs.bias is None else d_bias
    return Inputs(d_x, d_weight, d_bias, None if inputs.initial_state is None else d_states, None, None)


def _with_heads(
    call: Call, inputs: Inputs, where: Places, d_heads: jax.Array, others: tuple[jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `x`, weight and bias: those from the `others`, plus those from tokens that read initial states."""
    (d_x, d_weight, d_bias), (at, there) = others, where.heads(call)
    of_heads = _d_x(call, inputs, None, jnp.pad(d_heads, ((0, 0), (0, call.history), (0, 0))))
    d_x = put(call, d_x, at, there, of_heads.astype(d_x.dtype), add=True)
    products = [jnp.where(there[..., None], d_heads * tap, 0) for tap in head_taps(call, inputs, where)]
    return d_x, d_weight + _sums_of_tokens(products), d_bias + d_heads.sum((0, 1))


class _Block(NamedTuple):
    """The cotangent of a block's sums, `[B, tokens, D]`, and its part of the cotangents of weight and bias."""

    sums: jax.Array
    weight: jax.Array
    bias: jax.Array


def token_gradient(
    call: Call, inputs: Inputs, where: Places | None, d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `x`, weight and bias, computed block by block, so that intermediate arrays are small.

    If rows hold several sequences, tokens that read initial states are left out.
    """
    T, H = call.tokens, call.history
    block = min(T, max(_BLOCK, H))
    x, d_output, zeros = _bits(inputs.x), _bits(d_output), jnp.zeros((call.batch, H, call.channels), call.sum_dtype)
    used = None if where is None else where.used(call, inputs.initial_state is not None)
    position = None if where is None else jnp.pad(where.position, ((0, 0), (0, H)), constant_values=-1)

    def cut(each: jax.Array | None, start: Any, size: int) -> Any:
        return None if each is None else lax.dynamic_slice_in_dim(each, start, size, 1)

    def gradient(tokens: jax.Array, start: Any, size: int) -> _Block:
        """The cotangents of the block from `start` on; `tokens` are its tokens and the `W - 1` before them."""
        taps = _slices(call, tokens, cut(position, start, size))
        d_sums = d_activated(call, _sums(call, inputs, taps), _of_bits(call, cut(d_output, start, size)))
        if used is not None:
            d_sums = jnp.where(cut(used, start, size)[..., None], d_sums, 0)
        return _Block(d_sums, _sums_of_tokens([d_sums * tap for tap in taps]), d_sums.sum((0, 1)))

    def put_tokens(d_x: jax.Array, d_sums: jax.Array, behind: jax.Array, start: Any) -> jax.Array:
        """`d_x` with the block from `start` on, given the cotangents of its sums and of the sums behind it."""
        later = jnp.concatenate([d_sums, behind[:, :H]], 1)
        d_block = _d_x(call, inputs, cut(position, start, later.shape[1]), later).astype(call.dtype)
        return lax.dynamic_update_slice_in_dim(d_x, _bits(d_block), start, 1)

    def step(i: Any, carry: tuple[jax.Array, _Block]) -> tuple[jax.Array, _Block]:
        d_x, before = carry
        this = gradient(cut(x, i * block - H, block + H), i * block, block)
        d_x = put_tokens(d_x, before.sums, this.sums, (i - 1) * block)
        return d_x, _Block(this.sums, before.weight + this.weight, before.bias + this.bias)

    before = _bits(initial_states(call, inputs.initial_state if where is None else None, call.batch))
    last = gradient(jnp.concatenate([before, x[:, :block]], 1), 0, block)
    blocks, remainder = divmod(T, block)
    d_x = _varying.like(jnp.zeros_like(x), x)
    if blocks > 1:
        d_x, last = lax.fori_loop(1, blocks, step, (d_x, last))
    d_weight, d_bias, start = last.weight, last.bias, (blocks - 1) * block
    if remainder:
        tail = gradient(x[:, T - remainder - H :], T - remainder, remainder)
        d_x = put_tokens(d_x, last.sums, jnp.concatenate([tail.sums, zeros], 1), start)
        last, d_weight, d_bias, start = tail, d_weight + tail.weight, d_bias + tail.bias, T - remainder
    return _of_bits(call, put_tokens(d_x, last.sums, zeros, start)), d_weight, d_bias


def _sums_of_tokens(products: list[jax.Array]) -> jax.Array:
    """The weight's cotangent `[W, D]` from the products of each lag; its last row is that of lag 0."""
    return jnp.stack([each.sum((0, 1)) for each in products[::-1]])


def activated(call: Call, sums: jax.Array) -> jax.Array:
    return units(call, jax.nn.silu(sums) if call.activation == "silu" else sums)


def units(call: Call, x: jax.Array) -> jax.Array:
    """Each head of `x [..., D]` divided by its norm, if the call has one."""
    if not call.unit_dim:
        return x
    return normalized(x.reshape(*x.shape[:-1], call.heads, call.unit_dim), EPSILON).reshape(x.shape)


def with_norms_apart(run: Callable[..., Results], call: Call, *arrays: jax.Array | None) -> Results:
    """`run(call, *arrays)` for kernels without norms: XLA divides the output's heads by their norms, in wide dtypes."""
    output, final = run(replace(call, unit_dim=0), *arrays)
    return units(call, output.astype(call.sum_dtype)).astype(call.dtype), final


def d_activated(call: Call, sums: jax.Array, d_output: jax.Array) -> jax.Array:
    """The cotangent of the sums."""
    d_output = d_output.astype(call.sum_dtype)
    if call.unit_dim:
        plain = replace(call, unit_dim=0)
        (d_output,) = jax.vjp(lambda x: units(call, x), activated(plain, sums))[1](d_output)
    if call.activation is None:
        return d_output
    share = jax.nn.sigmoid(sums)
    return d_output * (share * (1 + sums * (1 - share)))


def _taps(call: Call, before: jax.Array, x: jax.Array, position: jax.Array | None, join: Join) -> list[jax.Array]:
    """`_slices` of `x [B, T, D]` with `before [B, W - 1, D]` in front of it."""
    # The concatenation is written to memory. Fused into the sums, it would have branches, on which it depends whether a
    # compiler contracts a product and a sum: bits would depend on a call's length.
    return _slices(call, lax.optimization_barrier(join([before, x], 1)), position)


def _slices(call: Call, longer: jax.Array, position: jax.Array | None) -> list[jax.Array]:
    """Tokens delayed by 0 to `W - 1` tokens, in the dtype of sums; `longer` begins with the `W - 1` tokens before them.

    A delayed token is 0 if, by `position`, it belongs to another sequence or is padding.
    """
    T = longer.shape[1] - call.history
    starts = [call.history - lag for lag in range(call.taps)]
    taps = [_of_bits(call, longer[:, start : start + T]).astype(call.sum_dtype) for start in starts]
    if position is None:
        return taps
    return [jnp.where((position >= lag)[..., None], tap, 0) for lag, tap in enumerate(taps)]


def _join_bits(arrays: list[jax.Array], axis: int) -> jax.Array:
    return jnp.concatenate([_bits(each) for each in arrays], axis)


def _bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers of the same bits: on CPUs, XLA converts 16-bit floats to float32 to move them."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _of_bits(call: Call, x: jax.Array) -> jax.Array:
    """The inverse of `_bits`."""
    return lax.bitcast_convert_type(x, call.dtype) if x.dtype == jnp.uint16 else x


def head_taps(call: Call, inputs: Inputs, where: Places | None) -> list[jax.Array]:
    """`_taps` of the first `W - 1` tokens of each sequence, which read initial states: `[N, W - 1, D]`."""
    states = initial_states(call, inputs.initial_state)
    if where is None:
        heads = jnp.pad(inputs.x[:, : call.history], ((0, 0), (0, max(call.history - call.tokens, 0)), (0, 0)))
    else:
        heads = take(call, inputs.x, *where.heads(call))
    return _taps(call, states, heads, None, jnp.concatenate)


def _sums(call: Call, inputs: Inputs, taps: list[jax.Array]) -> jax.Array:
    """The sums before the activation, always added up in the same order."""
    weight = inputs.weight.astype(call.sum_dtype)[::-1, None, None]
    first, *others = [tap * row for tap, row in zip(taps, weight, strict=True)]
    sums = sum(others, first)
    return sums if inputs.bias is None else sums + inputs.bias.astype(call.sum_dtype)[None, None]


def _d_x(call: Call, inputs: Inputs, position: jax.Array | None, d_sums: jax.Array) -> jax.Array:
    """The cotangent of tokens, given those of their sums and of the `W - 1` sums behind: `[B, tokens + W - 1, D]`."""
    weight, T = inputs.weight.astype(call.sum_dtype)[::-1, None, None], d_sums.shape[1] - call.history
    later = [d_sums[:, lag : lag + T] for lag in range(call.taps)]
    if position is not None:
        later = [jnp.where((position[:, lag : lag + T] >= lag)[..., None], each, 0) for lag, each in enumerate(later)]
    first, *others = [each * row for each, row in zip(later, weight, strict=True)]
    return sum(others, first)


def head_gradient(call: Call, inputs: Inputs, where: Places | None, d_output: jax.Array) -> jax.Array:
    """The cotangent of the sums of tokens that read initial states, `[N, W - 1, D]`; 0 for tokens that do not exist."""
    if where is None:
        at = jnp.broadcast_to(jnp.arange(call.history, dtype=jnp.int32)[None], (call.sequences, call.history))
        there = at < call.tokens
    else:
        at, there = where.heads(call)
    d_heads = d_activated(call, _sums(call, inputs, head_taps(call, inputs, where)), take(call, d_output, at, there))
    return jnp.where(there[..., None], d_heads, 0)


def initial_gradient(call: Call, inputs: Inputs, d_heads: jax.Array | None) -> jax.Array:
    """The cotangent of the initial states that comes from the output, `[N, W - 1, D]`."""
    d_states = jnp.zeros((call.sequences, call.history, call.channels), call.sum_dtype)
    if d_heads is None:
        return d_states
    weight = inputs.weight.astype(call.sum_dtype)[None]
    for place in range(call.history):
        # for the token at `place`, row `j` of the state is multiplied by row `j - place` of the weight
        read = d_heads[:, place : place + 1] * weight[:, : call.history - place]
        d_states += jnp.pad(read, ((0, 0), (place, 0), (0, 0)))
    return d_states


def tangent_behind_kernels(call: Call, inputs: Inputs, residuals: None, tangents: Inputs) -> tuple[Results, Results]:
    """Results and their tangents, for kernels without tangents of their own."""
    warn_of_tangents("tangents of causal_conv1d")
    return by_jvp(reference)(call, inputs, residuals, tangents)


OP = Op(forward, reference, backward=backward)
