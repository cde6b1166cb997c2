"""Parameters of layers: their initial values, their partitioning and their dtypes; and projections of few tokens."""

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
    """Initialises a layer's parameters, from the layer's arguments `dtype`, `param_dtype` and `rngs`."""

    def __init__(self, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.dtype = None if dtype is None else _checks.floating_dtype("dtype", dtype)
        self.param_dtype = _checks.floating_dtype("param_dtype", param_dtype)
        if not isinstance(rngs, nnx.Rngs):
            raise TypeError(f"rngs: got {type(rngs).__name__}; expected nnx.Rngs")
        self.rngs = rngs

    def column_parallel(self, width: int, features: int, *, bias: bool = False) -> nnx.Linear:
        """A projection into heads, `[…, width]` to `[…, features]`, whose columns are sharded along `MODEL_AXIS`."""
        return self._linear(width, features, (None, MODEL_AXIS), bias)

    def row_parallel(self, features: int, width: int, *, bias: bool = False) -> nnx.Linear:
        """A projection out of heads, `[…, features]` to `[…, width]`, which sums over `MODEL_AXIS`."""
        return self._linear(features, width, (MODEL_AXIS, None), bias)

    def replicated(self, width: int, features: int, *, bias: bool = False) -> nnx.Linear:
        """A projection from `[…, width]` to so few `[…, features]` that every device holds all of it."""
        return self._linear(width, features, (None, None), bias)

    def _linear(self, rows: int, columns: int, partition: tuple[str | None, ...], bias: bool) -> nnx.Linear:
        # annotations only: with eager sharding, a user without a mesh would need one
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
        """A small parameter, kept in at least float32, as checkpoints have it."""
        return nnx.Param(values.astype(wide_dtype(self.param_dtype)))

    def norm(self, dims: int, epsilon: float) -> "RMSNorm":
        """A norm with a scale in at least float32: a bfloat16 scale that is stored less 1 may need more digits."""
        return RMSNorm(dims, epsilon, wide_dtype(self.param_dtype))


class Projection(nnx.Linear):
    """A linear map whose output has the name `PROJECTED`, for policies of `jax.checkpoint`."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        if out_sharding is None:
            out_sharding = product_sharding(inputs, self.kernel[...])
        product = functools.partial(super().__call__, out_sharding=out_sharding)
        if math.prod(inputs.shape[:-1]) != 1:
            return checkpoint_name(product(inputs), PROJECTED)

        def as_two_rows(x: jax.Array) -> jax.Array:
            # for one row, XLA writes the products to memory before it sums them, which moves three times the bytes
            return product(jnp.concatenate([x, x], -2))[..., :1, :]

        return checkpoint_name(jax.lax.platform_dependent(inputs, cuda=as_two_rows, default=product), PROJECTED)


@jax.custom_jvp
def _barrier(arrays: Any) -> Any:
    """`jax.lax.optimization_barrier` for the arrays, but not for their gradients."""
    return jax.lax.optimization_barrier(arrays)


@_barrier.defjvp
def _barrier_jvp(primals: Any, tangents: Any) -> Any:
    # without a barrier XLA adds up an array's gradients before devices exchange them
    return _barrier(*primals), tangents[0]


def product_sharding(x: jax.Array, kernel: jax.Array) -> jax.NamedSharding | None:
    """The sharding of `x @ kernel` on a mesh with `Explicit` axes: that of the rows of `x` and the kernel's columns."""
    mesh = _sharding.explicit_mesh(x, kernel)
    if mesh is None:
        return None
    return jax.NamedSharding(mesh, jax.P(*_sharding.spec_of(x)[:-1], _sharding.spec_of(kernel)[-1]))


def parts(linear: nnx.Linear, inputs: jax.Array, sizes: Sequence[int], groups: int = 1) -> list[jax.Array]:
    """The output of `linear`, split into parts of these sizes within each of the `groups` of its columns."""
    slices = [slice(*each) for each in itertools.pairwise(np.cumsum([0, *sizes]))]
    tokens = math.prod(inputs.shape[:-1])
    if not isinstance(linear, Projection) or tokens < linear.in_features:
        whole = split_heads(linear(inputs), groups)
        return [merge_heads(whole[..., each]) for each in slices]
    # a product for each part: slicing the kernel copies less than slicing the output
    operands = inputs, linear.kernel[...], None if linear.bias is None else linear.bias[...]
    x, kernel, bias = linear.promote_dtype(operands, dtype=linear.dtype)

    def part(each: slice) -> jax.Array:
        # without a barrier XLA joins small products with large ones, and copies both out of the result
        tokens, columns = _barrier((x, merge_heads(split_heads(kernel, groups)[..., each])))
        dims = ((x.ndim - 1,), (0,)), ((), ())
        sharding = product_sharding(x, columns)
        output = linear.dot_general(tokens, columns, dims, precision=linear.precision, out_sharding=sharding)
        if bias is not None:
            output += matching(merge_heads(split_heads(bias, groups)[..., each]), output)
        return checkpoint_name(output, PROJECTED)

    return [part(each) for each in slices]


def apart(x: jax.Array) -> Iterator[jax.Array]:
    """Yields `x [rows, 1, width]` as `[rows, width]` for one projection after another, with barriers between.

    XLA joins products of the same input into one, for which it may have to concatenate their kernels at every call.
    What a barrier separates is a different input to XLA, and is not joined.
    """
    x = x[:, 0]
    while True:
        yield x
        x = jax.lax.optimization_barrier(x)


def together(linears: Sequence[nnx.Linear], inputs: Iterator[jax.Array]) -> list[jax.Array]:
    """The outputs of several projections of what `apart` yields, joined into one product where that is faster.

    On GPUs, XLA joins up to four projections without copies of their kernels if their features are multiples of 128.
    """
    joins = all(isinstance(each, Projection) and each.out_features % 128 == 0 for each in linears)
    shared = itertools.repeat(next(inputs)) if joins and len(linears) <= 4 else inputs
    return [each(x) for each, x in zip(linears, shared, strict=False)]


def side_by_side(linears: Sequence[nnx.Linear], inputs: Iterator[jax.Array]) -> tuple[jax.Array, list[int]]:
    """The outputs of `together` concatenated, and where each of them starts."""
    outputs = together(linears, inputs)
    # the widest first, which is the order in XLA's joined product: nothing is copied then
    order = sorted(range(len(outputs)), key=lambda each: -outputs[each].shape[-1])
    starts = [0] * len(outputs)
    for before, each in itertools.pairwise(order):
        starts[each] = starts[before] + outputs[before].shape[-1]
    return jnp.concatenate([outputs[each] for each in order], -1), starts


def _in_dtype_of_first(arrays: Arrays, /, *, dtype: Any = None, inexact: bool = True) -> Arrays:
    """All `arrays` in `dtype`, or in that of the first: Flax's default would promote a bfloat16 input to float32."""
    dtype = arrays[0].dtype if dtype is None else dtype
    return tuple(None if each is None else each.astype(dtype) for each in arrays)  # type: ignore[return-value]


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x²) + epsilon) * scale` in at least float32; means are over the last axis, or each group of it."""

    def __init__(self, dims: int, epsilon: float, param_dtype: DTypeLike) -> None:
        self.epsilon = _checks.positive("epsilon", epsilon)
        self.scale = nnx.Param(jnp.ones(dims, param_dtype))

    def __call__(self, x: jax.Array, groups: int = 1) -> jax.Array:
        x = unit_mean_square(x if groups == 1 else split_heads(x, groups), self.epsilon)
        x = x if groups == 1 else merge_heads(x)
        return x * matching(self.scale[...], x)


def unit_mean_square(x: jax.Array, epsilon: float) -> jax.Array:
    """`x / sqrt(mean(x²) + epsilon)` in at least float32, with the mean over the last axis: a norm without a scale."""
    dims = x.shape[-1]
    return normalized(wide(x), dims * epsilon) * np.sqrt(dims).astype(wide_dtype(x.dtype))


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype that norms and gates are computed in: float64 for float64, float32 for all others."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def matching(parameter: jax.Array, x: jax.Array) -> jax.Array:
    """`parameter` in the dtype and rank of `x`, so that JAX promotes nothing implicitly."""
    return parameter.astype(x.dtype).reshape(*[1] * (x.ndim - parameter.ndim), *parameter.shape)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def merge_heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def repeated(x: jax.Array, times: int) -> jax.Array:
    """Each head of `x [..., heads, dim]` repeated `times`, as by `jnp.repeat`, and sharded as `x` is."""
    *rows, heads, dim = x.shape
    shared = jnp.broadcast_to(x[..., None, :], (*rows, heads, times, dim))
    return shared.reshape(*rows, heads * times, dim)


def head_width(name: str, width: int, heads: int) -> int:
    """The width of each of `heads` that share `width` evenly; an error if they do not."""
    _checks.positive_int("heads", heads)
    if _checks.positive_int(name, width) % heads:
        _checks.fail(name, width, f"a multiple of the {heads} heads")
    return width // heads


def group_count(name: str, groups: int, heads: int, whose: str = "heads") -> int:
    """`groups`, which has to divide `heads`."""
    _checks.positive_int(whose, heads)
    if heads % _checks.positive_int(name, groups):
        _checks.fail(name, groups, f"a divisor of the {heads} {whose}")
    return groups
