"""What an op is: its forward, backward and tangent passes, as `_differentiable` runs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _partitioned

Zero = jax.custom_derivatives.SymbolicZero
Leaves = tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """How an op computes and differentiates.

    Every function below takes `static` first: whatever is fixed when the op is traced, and hashable. `inputs`, outputs
    and residuals are trees of arrays. Arrays of integers, booleans and random keys have no tangents.

    Attributes:
        forward: `forward(static, inputs)` returns the outputs.
        reference: Returns the same outputs as `forward`, in a form that JAX can differentiate any number of times.
        forward_with_residuals: `forward_with_residuals(static, inputs)` returns the outputs and the residuals for
            `backward`. `None` if there are no residuals.
        backward: `backward(static, inputs, residuals, cotangents, wanted)` returns the cotangents of the inputs, as a
            tree like `inputs`. An output's cotangent is `None` where it is zero. `wanted`, a tree like `inputs`, says
            which cotangents are needed; the others may be `None` or anything. `None` stands for JAX's gradient of
            `reference`.
        tangent: `tangent(static, inputs, residuals, tangents)` returns the outputs once more, and their tangents.
            `tangents` is a tree like `inputs`, with `None` where an input has no tangent. `None` stands for
            `by_jvp(reference)`.
        keeps: Returns the part of the outputs that `backward` needs; `backward` then gets the pair of that part and
            the residuals as its `residuals`.
        fold: `fold(static, size, inputs, mapped, wanted)` turns `size` calls mapped by `vmap` into one call, and
            returns its static facts and inputs. The outputs, residuals and cotangents of that call must be those of
            the single calls, joined along their first axis. Leaves of `inputs` that `mapped` names have the mapped
            axis first. `fold` returns `None` where one call is impossible: then the calls run one after the other.
            Without a `fold`, JAX maps the functions themselves.
        splits: Whether devices may share the op's rows and heads, see `_partitioned`: the first of its static facts
            that has `dims` is then a call, and all of `inputs` are that call's arrays.
        one_device: Whether the op runs on a single device only. In a program for several devices `reference` runs
            instead, which XLA partitions. Such an op has no residuals.
    """

    forward: Callable[..., Any]
    reference: Callable[..., Any]
    forward_with_residuals: Callable[..., tuple[Any, Any]] | None = None
    backward: Callable[..., Any] | None = None
    tangent: Callable[..., Any] | None = None
    keeps: Callable[[Any], Any] | None = None
    fold: Callable[..., tuple[Any, Any] | None] | None = None
    splits: bool = True
    one_device: bool = False

    def with_residuals(self, static: Any, inputs: Any) -> tuple[Any, Any]:
        """The outputs, and the residuals or `None`."""
        if self.forward_with_residuals is None:
            return self.forward(static, inputs), None
        return self.forward_with_residuals(static, inputs)

    def known(self, outputs: Any, residuals: Any) -> Any:
        """What `backward` and `tangent` get as their `residuals`."""
        return residuals if self.keeps is None else (self.keeps(outputs), residuals)


def by_jvp(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """An `Op.tangent` that is JAX's derivative of `function(static, inputs)`, which returns the outputs."""

    def tangent(static: Any, inputs: Any, residuals: Any, tangents: Any) -> tuple[Any, Any]:
        tree: Any = jax.tree.structure(inputs)
        leaves, moving = jax.tree.leaves(inputs), tree.flatten_up_to(tangents)
        run = _of_chosen(function, static, inputs, tuple(each is not None for each in moving))
        primals = [x for x, each in zip(leaves, moving, strict=True) if each is not None]
        return jax.jvp(run, primals, [each for each in moving if each is not None])

    return tangent


def _of_chosen(function: Callable[..., Any], static: Any, inputs: Any, chosen: tuple[bool, ...]) -> Callable[..., Any]:
    """`function(static, inputs)` as a function of the chosen leaves of `inputs`; the other leaves are fixed."""
    leaves, tree = jax.tree.flatten(inputs)

    def run(*some: Any) -> Any:
        following = iter(some)
        whole = [next(following) if each else x for x, each in zip(leaves, chosen, strict=True)]
        return function(static, jax.tree.unflatten(tree, whole))

    return run


@dataclass(frozen=True)
class LinearMap:
    """The map from tangents of an op's inputs to tangents of its outputs, or the transpose of that map.

    Its operands are the leaves of the inputs, the leaves of the residuals, and then the arrays in which it is linear.

    Attributes:
        inputs: The tree structure of the inputs.
        residuals: The tree structure of the residuals.
        outputs: The tree structure of the outputs.
        wanted: Which leaves of the inputs have tangents, or need cotangents.
    """

    op: Op
    static: Any
    inputs: Any
    residuals: Any
    outputs: Any
    wanted: tuple[bool, ...]

    def split(self, operands: Sequence[Any]) -> tuple[Leaves, Leaves, Leaves]:
        """The leaves of the inputs, those of the residuals, and the arrays in which the map is linear."""
        inputs, residuals = self.inputs.num_leaves, self.inputs.num_leaves + self.residuals.num_leaves
        return tuple(operands[:inputs]), tuple(operands[inputs:residuals]), tuple(operands[residuals:])

    def input_trees(self, *operands: Sequence[Any]) -> tuple[Any, ...]:
        """The first leaves of each of these sequences, as many as there are inputs, as a tree like the inputs."""
        return tuple(jax.tree.unflatten(self.inputs, each[: self.inputs.num_leaves]) for each in operands)

    def choose(self, inputs: Sequence[Any]) -> list[Any]:
        """Those of the inputs that are wanted."""
        return [each for each, is_wanted in zip(inputs, self.wanted, strict=True) if is_wanted]

    def jvp(self, inputs: Sequence[Any], residuals: Sequence[Any], moving: Sequence[Any], tangent: Any) -> list[Any]:
        """The outputs and then their tangents, by an `Op.tangent`; `moving` are tangents of the wanted inputs."""
        following = iter(moving)
        results = tangent(
            self.static,
            jax.tree.unflatten(self.inputs, inputs),
            jax.tree.unflatten(self.residuals, residuals),
            jax.tree.unflatten(self.inputs, [next(following) if is_wanted else None for is_wanted in self.wanted]),
        )
        return jax.tree.leaves(results)

    def vjp_of_reference(
        self, inputs: Sequence[Any], nonzero: tuple[bool, ...], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Cotangents of the wanted inputs, by JAX's gradient of `Op.reference`.

        `nonzero` says which outputs have a cotangent, and `cotangents` are these.
        """
        run = _of_chosen(self.op.reference, self.static, jax.tree.unflatten(self.inputs, inputs), self.wanted)
        outputs, pull = jax.vjp(run, *self.choose(inputs))
        leaves, following = jax.tree.leaves(outputs), iter(cotangents)
        full = [next(following) if each else zeros_like(x) for x, each in zip(leaves, nonzero, strict=True)]
        return list(pull(jax.tree.unflatten(self.outputs, full)))

    def backward(
        self, inputs: Sequence[Any], residuals: Sequence[Any], nonzero: tuple[bool, ...], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Cotangents of the wanted inputs, by `Op.backward` if the op has one."""
        if self.op.backward is None:
            return self.vjp_of_reference(inputs, nonzero, cotangents)
        following = iter(cotangents)
        results = self.op.backward(
            self.static,
            jax.tree.unflatten(self.inputs, inputs),
            jax.tree.unflatten(self.residuals, residuals),
            jax.tree.unflatten(self.outputs, [next(following) if each else None for each in nonzero]),
            jax.tree.unflatten(self.inputs, self.wanted),
        )
        # cotangents that are not wanted may be missing
        leaves = self.inputs.flatten_up_to(results)
        return [g.astype(x.dtype) for g, x in zip(self.choose(leaves), self.choose(inputs), strict=True)]

    def body(self, run: Callable[..., list[Any]], params: dict[str, Any]) -> _partitioned.Body:
        """`run`, which computes the map or its transpose, in the form that `_partitioned` splits over devices."""

        def on_part(static: Any, *operands: Any) -> list[Any]:
            return run(*operands, linear_map=replace(self, static=static), **params)

        def outputs_and_residuals(static: Any, *leaves: Any) -> Any:
            outputs, residuals = self.op.with_residuals(static, jax.tree.unflatten(self.inputs, leaves))
            return jax.tree.leaves((outputs, self.op.known(outputs, residuals)))

        inputs = tuple(range(self.inputs.num_leaves))
        wanted = tuple(i for i in inputs if self.wanted[i])
        outputs = tuple(range(self.outputs.num_leaves))
        residuals = tuple(range(len(outputs), len(outputs) + self.residuals.num_leaves))
        kinds = _partitioned.Operands
        if "nonzero" in params:
            nonzero = tuple(i for i in outputs if params["nonzero"][i])
            takes, gives = kinds(inputs, (*residuals, *nonzero)), kinds(inputs=wanted)
        else:
            takes, gives = kinds(inputs, residuals, wanted), kinds(outputs=(*outputs, *outputs))
        return _partitioned.Body(self.static, present(self.inputs), takes, gives, on_part, outputs_and_residuals)


def present(tree: Any) -> tuple[bool, ...]:
    """Which of the arrays in a tree of this structure are not `None`."""
    leaves = jax.tree.leaves(jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf=lambda x: x is None)
    return tuple(each is not None for each in leaves)


def has_tangent(x: Any) -> bool:
    """Whether an array of this dtype has tangents."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def is_zero(tangent: Any) -> bool:
    """Whether a tangent is a symbolic zero."""
    from jax.interpreters import ad

    return isinstance(tangent, ad.Zero | Zero)


def zeros_like(x: Any) -> Any:
    """The zero tangent of `x`."""
    return jnp.zeros_like(x) if has_tangent(x) else np.zeros(x.shape, jax.dtypes.float0)


def instantiated(x: Any, tangent: Any) -> Any:
    """The tangent of `x` as an array."""
    return zeros_like(x) if is_zero(tangent) else tangent
