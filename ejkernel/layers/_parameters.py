"""Parameters of layers: how they are made and partitioned, and in which dtype they are computed with."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from ejkernel import _checks, _sharding
from ejkernel._normalization import normalized

Arrays = TypeVar("Arrays", bound=tuple[Any, ...])
MODEL_AXIS = "model"
PROJECTED = "ejkernel_projected"


class ParamInit:
    """Makes a layer's parameters, from its arguments `dtype`, `param_dtype` and `rngs`."""

    def __init__(self, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = None if dtype is None else _checks.floating_dtype("dtype", dtype)
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"rngs: got {type(rngs).__name__}; expected nnx.Rngs")
        self.rngs = rngs

    def column_parallel(self, width: int, features: int, *, bias: bool = False) -> nnx.Linear:
        """Into heads: `[…, width]` to `[…, features]`, whose columns are split over `MODEL_AXIS`."""
        return self._linear(width, features, (None, MODEL_AXIS), bias)

    def row_parallel(self, features: int, width: int, *, bias: bool = False) -> nnx.Linear:
        """Out of heads: `[…, features]` to `[…, width]`, summed over `MODEL_AXIS`."""
        return self._linear(features, width, (MODEL_AXIS, None), bias)

    def replicated(self, width: int, features: int, *, bias: bool = False) -> nnx.Linear:
        """`[…, width]` to `[…, features]`, few enough to have on every device."""
        return self._linear(width, features, (None, None), bias)

    def _linear(self, rows: int, columns: int, partition: tuple[str | None, ...], bias: bool) -> nnx.Linear:
        # annotations only: placing parameters as they are made would demand a mesh of those who have none
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), partition, eager_sharding=False)
        zeros = nnx.with_partitioning(nnx.initializers.zeros_init(), partition[1:], eager_sharding=False)
        return Projection(
            rows,
            columns,
            use_bias=bias,
            kernel_init=kernel,
            bias_init=zeros,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            promote_dtype=_in_dtype_of_first,
            rngs=self.rngs,
        )

    def uniform(self, shape: tuple[int, ...], low: float, high: float, dtype: DTypeLike) -> jax.Array:
        return jax.random.uniform(self.rngs.params(), shape, dtype, low, high)

    def param(self, values: jax.Array) -> nnx.Param:
        """A handful of numbers that nothing is gained by rounding: in at least float32, as their checkpoints are."""
        return nnx.Param(values.astype(wide_dtype(self.param_dtype)))

    def norm(self, dims: int, epsilon: float) -> "RMSNorm":
        """Its scale likewise: one that is stored less 1, in bfloat16, is not of bfloat16 once 1 is added."""
        return RMSNorm(dims, epsilon, wide_dtype(self.param_dtype))


class Projection(nnx.Linear):
    """A linear map, whose output policies of `jax.checkpoint` know by the name `PROJECTED`."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if out_sharding is None:
            out_sharding = product_sharding(inputs, self.kernel[...])
        product = functools.partial(super().__call__, out_sharding=out_sharding)
        if math.prod(inputs.shape[:-1]) != 1:
            return checkpoint_name(product(inputs), PROJECTED)

        def of_two(x: jax.Array) -> jax.Array:
            # for a single row XLA writes all products to memory and reads them again: three times the kernel's bytes
            return product(jnp.concatenate([x, x], -2))[..., :1, :]

        return checkpoint_name(jax.lax.platform_dependent(inputs, cuda=of_two, default=product), PROJECTED)


@jax.custom_jvp
def _unjoined(arrays: Any) -> Any:
    """A barrier around arrays for XLA's optimisations, but none around their gradients."""
    return jax.lax.optimization_barrier(arrays)


@_unjoined.defjvp
def _unjoined_jvp(primals: Any, tangents: Any) -> Any:
    # gradients of the same array are added up first, so that devices sum them once
    return _unjoined(*primals), tangents[0]


def product_sharding(x: jax.Array, kernel: jax.Array) -> jax.NamedSharding | None:
    """On a mesh with `Explicit` axes, how `x @ kernel` is sharded: as the rows of the one and the columns of the other.

    What both are sharded along is summed.
    """
    mesh = _sharding.explicit_mesh(x, kernel)
    if mesh is None:
        return None
    return jax.NamedSharding(mesh, jax.P(*_sharding.spec_of(x)[:-1], _sharding.spec_of(kernel)[-1]))


def parts(linear: nnx.Linear, inputs: jax.Array, sizes: Sequence[int], groups: int = 1) -> list[jax.Array]:
    """The output of `linear` in parts of these sizes, side by side in each of the `groups` of its columns."""
    slices = [slice(*each) for each in itertools.pairwise(np.cumsum([0, *sizes]))]
    tokens = math.prod(inputs.shape[:-1])
    if not isinstance(linear, Projection) or tokens < linear.in_features:
        whole = split_heads(linear(inputs), groups)
        return [merge_heads(whole[..., each]) for each in slices]
    # a product for each part: copies of the kernel's columns are smaller than copies of the output's
    given = inputs, linear.kernel[...], None if linear.bias is None else linear.bias[...]
    x, kernel, bias = linear.promote_dtype(given, dtype=linear.dtype)

    def part(each: slice) -> jax.Array:
        own = merge_heads(split_heads(kernel, groups)[..., each])
        # or XLA joins small products with large ones, and copies both out of the result
        tokens, own = _unjoined((x, own))
        dims = ((x.ndim - 1,), (0,)), ((), ())
        sharding = product_sharding(x, own)
        found = linear.dot_general(tokens, own, dims, precision=linear.precision, out_sharding=sharding)
        if bias is not None:
            found += matching(merge_heads(split_heads(bias, groups)[..., each]), found)
        return checkpoint_name(found, PROJECTED)

    return [part(each) for each in slices]


def apart(x: jax.Array) -> Iterator[jax.Array]:
    """`x [rows, 1, width]`, a few tokens without their axis, again and again, each time as a value of its own.

    XLA joins products that share their inputs, and copies their kernels together for it at every call, unless it can
    read them where they are. It does not join products of different values.
    """
    x = x[:, 0]
    while True:
        yield x
        x = jax.lax.optimization_barrier(x)


def together(linears: Sequence[nnx.Linear], inputs: Iterator[jax.Array]) -> list[jax.Array]:
    """The outputs of several projections of `apart`'s inputs, by one product if XLA reads the kernels where they are.

    For GPUs it does so with up to four of them whose features are multiples of 128.
    """
    fits = all(isinstance(each, Projection) and each.out_features % 128 == 0 for each in linears)
    same = itertools.repeat(next(inputs)) if fits and len(linears) <= 4 else inputs
    return [each(x) for each, x in zip(linears, same, strict=False)]


def side_by_side(linears: Sequence[nnx.Linear], inputs: Iterator[jax.Array]) -> tuple[jax.Array, list[int]]:
    """What `together` returns, side by side, and where each starts."""
    outputs = together(linears, inputs)
    # the widest first, as in XLA's product, of which nothing is copied then
    order = sorted(range(len(outputs)), key=lambda each: -outputs[each].shape[-1])
    starts = [0] * len(outputs)
    for before, each in itertools.pairwise(order):
        starts[each] = starts[before] + outputs[before].shape[-1]
    return jnp.concatenate([outputs[each] for each in order], -1), starts


def _in_dtype_of_first(arrays: Arrays, /, *, dtype: Any = None, inexact: bool = True) -> Arrays:
    """All of `arrays` in `dtype`, or in the first one's: Flax's default would make a bfloat16 input float32."""
    dtype = arrays[0].dtype if dtype is None else dtype
    return tuple(None if each is None else each.astype(dtype) for each in arrays)  # type: ignore[return-value]


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + epsilon) * scale` over the last axis, in at least float32; over `groups` of it apart."""

    def __init__(self, dims: int, epsilon: float, param_dtype: DTypeLike) -> None:
        self.epsilon = _checks.positive("epsilon", epsilon)
        self.scale = nnx.Param(jnp.ones(dims, param_dtype))

    def __call__(self, x: jax.Array, groups: int = 1) -> jax.Array:
        x = unit_mean_square(x if groups == 1 else split_heads(x, groups), self.epsilon)
        x = x if groups == 1 else merge_heads(x)
        return x * matching(self.scale[...], x)


def unit_mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    """`x / sqrt(mean(x²) + epsilon)` over the last axis, in at least float32: a norm without a scale."""
    dims = x.shape[-1]
    return normalized(wide(x), dims * epsilon) * np.sqrt(dims).astype(wide_dtype(x.dtype))


def wide(x: jax.Array) -> jax.Array:
    """`x` in float32, or in float64 if it is so already: what norms and gates are computed in."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def matching(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` in the dtype of `x`, with its last dims: nothing is left to implicit promotion."""
    return parameter.astype(x.dtype).reshape(*[1] * (x.ndim - parameter.ndim), *parameter.shape)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def repeated(x: jax.Array, times: int) -> jax.Array:
    """Each head of `x [..., heads, dim]` several `times`, one after the other; they are sharded as `x` is."""
    *rows, heads, dim = x.shape
    shared = jnp.broadcast_to(x[..., None, :], (*rows, heads, times, dim))
    return shared.reshape(*rows, heads * times, dim)


def head_width(name: str, width: int, heads: int) -> int:
    """How wide a head is when `heads` of them share `width` evenly."""
    _checks.positive_int("heads", heads)
    if _checks.positive_int(name, width) % heads:
        _checks.fail(name, width, f"a multiple of the {heads} heads")
    return width // heads


def group_count(name: str, groups: int, heads: int, whose: str = "heads") -> int:
    """A number of heads, each shared by a group of equally many of the `heads`."""
    _checks.positive_int(whose, heads)
    if heads % _checks.positive_int(name, groups):
        _checks.fail(name, groups, f"a divisor of the {heads} {whose}")
    return groups
