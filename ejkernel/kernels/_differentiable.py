"""How every op is differentiated: in reverse mode, in forward mode, and any number of times.

An op (`_op.Op`) is a forward pass, a map that is linear in the inputs' tangents, and the transpose of that map, which
is the backward pass:

| JAX needs | what runs |
|---|---|
| the outputs | `forward` |
| reverse mode | `forward_with_residuals`, then `backward` |
| forward mode | `tangent`, after `forward_with_residuals` where it needs residuals |
| second derivatives | derivatives of the tangents or cotangents of `reference` |

Residuals are functions of the inputs, stored so that they need not be computed again. So derivatives never pass through
them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from ejkernel import _dispatch
from ejkernel.kernels import _kernel_cache, _mapping, _pallas, _partitioned
from ejkernel.kernels._op import (
    Leaves,
    LinearMap,
    Op,
    Zero,
    by_jvp,
    has_tangent,
    instantiated,
    is_zero,
    present,
    zeros_like,
)

SAVED = "ejkernel_op"


def call(op: Op, static: Any, inputs: Any) -> Any:
    """The outputs of `op`, with all of its derivatives."""
    return _forward(op, static, False, inputs)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _forward(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    """The outputs, and the residuals if they are to be kept, else `None`."""

    def run(static: Any, inputs: Any) -> tuple[Any, Any]:
        return _forward_as_primitive(op, static, keep, inputs)

    if op.fold is None:
        return run(static, inputs)
    return _mapping.foldable(run, op.fold, static)(inputs)


def _forward_as_primitive(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    """The forward pass as one primitive, which `_partitioned` lowers."""
    leaves, tree = jax.tree.flatten(inputs)
    closed, shapes = jax.make_jaxpr(_jitted_forward(op, static, keep, tree), return_shape=True)(*leaves)
    if closed.effects:  # a primitive must not hide the effects of an interpreter
        return _run_forward(op, static, keep, inputs)
    devices = _partitioned.needs_devices() if op.splits else None
    results = _forward_primitive().bind(
        *leaves, op=op, static=static, keep=keep, tree=tree, closed=_Traced(closed), devices=devices
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def splitting(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run(call, *arrays)` as an op without a backward pass: devices share its heads, see `_partitioned`."""

    def forward(call: Any, arrays: Any) -> Any:
        return run(call, *arrays)

    op = Op(forward, forward)
    return lambda facts, *arrays: call(op, facts, arrays)


@dataclass(frozen=True)
class _Traced:
    """A computation that JAX does not look into: since 0.12 it refuses primitives that hold some of its functions."""

    jaxpr: Any


def _run_forward(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    with _kernel_cache.one_pass():
        return op.with_residuals(static, inputs) if keep else (op.forward(static, inputs), None)


@functools.cache
def _jitted_forward(op: Op, static: Any, keep: bool, tree: Any) -> Callable[..., tuple[Any, Any]]:
    """The forward pass as a function of the inputs' leaves, jitted so that equal calls are traced only once."""

    def forward(*leaves: Any) -> tuple[Any, Any]:
        return _run_forward(op, static, keep, jax.tree.unflatten(tree, leaves))

    return jax.jit(forward)


@functools.cache
def _forward_primitive() -> Any:
    """Maps the inputs to the outputs and the residuals."""
    from jax.extend.core import Primitive, jaxpr_as_fun
    from jax.interpreters import batching, mlir

    primitive = Primitive("ejkernel_forward")
    primitive.multiple_results = True

    @primitive.def_impl
    def _(*leaves: Any, op: Op, static: Any, keep: bool, tree: Any, **_: Any) -> Any:
        return jax.tree.leaves(_jitted_forward(op, static, keep, tree)(*leaves))

    @primitive.def_abstract_eval
    def _(*avals: Any, closed: Any, **_: Any) -> Any:
        return closed.jaxpr.out_avals

    def lower(ctx: Any, *values: Any, op: Op, static: Any, keep: bool, tree: Any, closed: Any, devices: Any) -> Any:
        def run(static: Any, *leaves: Any) -> Any:
            return jax.tree.leaves(_run_forward(op, static, keep, jax.tree.unflatten(tree, leaves)))

        body = None
        if op.splits:
            takes = _partitioned.Operands(inputs=tuple(range(tree.num_leaves)))
            gives = _partitioned.Operands(outputs=tuple(range(len(closed.jaxpr.out_avals))))
            body = _partitioned.Body(static, present(tree), takes, gives, run, run)
        whole = jaxpr_as_fun(closed.jaxpr)
        if op.one_device and not _pallas.one_device(ctx.module_context.axis_context):

            def whole(*leaves: Any) -> Any:
                return jax.tree.leaves(op.reference(static, jax.tree.unflatten(tree, leaves)))

        return _partitioned.lower(ctx, *values, body=body, run=whole)

    def batched(leaves: Any, dims: Any, *, op: Op, static: Any, keep: bool, tree: Any, **_: Any) -> Any:
        # only ops without a `fold` come here: `_mapping.foldable` maps the others
        rows = jax.tree.unflatten(tree, list(map(_mapping.first_axis, leaves, dims)))
        larger = _mapping.mapped_op(op, tree, tuple(each is not None for each in dims))
        results = jax.tree.leaves(_forward_as_primitive(larger, static, keep, rows))
        return results, [0] * len(results)

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batched
    return primitive


@functools.partial(_forward.defjvp, symbolic_zeros=True)
def _forward_jvp(op: Op, static: Any, keep: bool, primals: tuple[Any], tangents: tuple[Any]) -> Any:
    inputs, d_inputs = primals[0], jax.tree.leaves(tangents[0], is_leaf=lambda x: isinstance(x, Zero))
    # the differentiable function again: its residuals may be differentiated once more
    outputs, residuals = jax.tree.map(_named, _forward(op, static, True, inputs))
    wanted = tuple(not isinstance(each, Zero) and has_tangent(each) for each in d_inputs)
    leaves, tree = jax.tree.flatten(outputs)
    # holds the outputs themselves, not copies: whoever else keeps the outputs keeps the same arrays
    known = op.known(outputs, residuals)
    linear_map = LinearMap(op, static, jax.tree.structure(inputs), jax.tree.structure(known), tree, wanted)
    moving = [each for each, is_wanted in zip(d_inputs, wanted, strict=True) if is_wanted]
    avals = tuple(map(jax.typeof, leaves))
    operands = (*jax.tree.leaves(inputs), *jax.tree.leaves(known), *moving)
    devices = _partitioned.needs_devices() if op.splits else None
    results = _tangent().bind(*operands, linear_map=linear_map, outputs=avals, devices=devices)
    again, d_outputs = _halves(results)
    outputs = jax.tree.unflatten(tree, map(_either().bind, leaves, again))
    kept = residuals if keep else None
    # symbolic: inside `shard_map` the zero of an array of booleans has to vary over the axes that the array varies over
    zeros = jax.tree.map(lambda x: Zero(jax.typeof(x).to_tangent_aval()), kept)
    return (outputs, kept), (jax.tree.unflatten(tree, d_outputs), zeros)


def _named(x: Any) -> Any:
    """`x` with a name for policies of `jax.checkpoint`: if it is saved, the forward pass does not run again."""
    return checkpoint_name(x, SAVED)


def _run_tangent(*operands: Any, linear_map: LinearMap, outputs: Any, devices: Any = None) -> list[Any]:
    with _kernel_cache.one_pass():
        tangent = linear_map.op.tangent or by_jvp(linear_map.op.reference)
        results = linear_map.jvp(*linear_map.split(operands), tangent)
    return [x.astype(aval.dtype) for x, aval in zip(results, (*outputs, *outputs), strict=True)]


def _run_transpose(
    *operands: Any, linear_map: LinearMap, outputs: Any, nonzero: tuple[bool, ...], devices: Any = None
) -> list[Any]:
    inputs, residuals, cotangents = linear_map.split(operands)
    with _kernel_cache.one_pass():
        return linear_map.backward(inputs, residuals, nonzero, cotangents)


@functools.cache
def _tangent() -> Any:
    """Maps the inputs, the residuals and tangents of the wanted inputs to the outputs and the outputs' tangents.

    Only the tangents are linear in the tangents. The outputs that come first are never differentiated: see `_either`.
    """

    def results(operands: Any, linear_map: LinearMap, outputs: Any, devices: Any) -> Any:
        return [*outputs, *(each.to_tangent_aval() for each in outputs)]

    return _linear_primitive("ejkernel_tangent", _run_tangent, results)


def _halves(results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Outputs and their tangents, from the results of `_tangent`."""
    return results[: len(results) // 2], results[len(results) // 2 :]


@functools.cache
def _either() -> Any:
    """Chooses between an output of the forward pass and the same output as `_tangent` computes it once more.

    Where a program computes both, it is the second: nothing then needs the forward pass, and XLA removes it. Where the
    tangents are computed later or never, as in reverse mode, it is the first.
    """
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir, partial_eval

    primitive = Primitive("ejkernel_either")
    primitive.def_impl(lambda first, second: second)
    primitive.def_abstract_eval(lambda first, second: first)
    mlir.register_lowering(primitive, lambda ctx, first, second: [second])
    ad.primitive_jvps[primitive] = lambda values, tangents: (primitive.bind(*values), tangents[0])

    def batched(values: Any, dims: Any) -> Any:
        if None in dims:  # only the tangents are mapped
            return values[0], dims[0]
        return primitive.bind(*map(_mapping.first_axis, values, dims)), 0

    def if_known(trace: Any, first: Any, second: Any) -> Any:
        is_first = first.is_known() and not second.is_known()
        return first if is_first else trace.default_process_primitive(primitive, (first, second), {})

    def under_checkpoint(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
        """For `jax.checkpoint`: the equations of both passes, whether the result is unknown, and what is saved."""
        if unknown[0]:
            missing = [x for x, each in zip(equation.invars, instantiated, strict=True) if not each]
            return None, equation, [True], [True], missing
        first = equation.replace(invars=[equation.invars[0]] * 2)
        again = first if instantiated[0] else None
        return first if unknown[1] else equation, again, [False], [instantiated[0]], []

    batching.primitive_batchers[primitive] = batched
    partial_eval.custom_partial_eval_rules[primitive] = if_known
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = under_checkpoint
    return primitive


@functools.cache
def _transpose() -> Any:
    """Maps the inputs, the residuals and the outputs' nonzero cotangents to cotangents of the wanted inputs."""

    def results(operands: Any, linear_map: LinearMap, outputs: Any, nonzero: Any, devices: Any) -> Any:
        return [each.to_tangent_aval() for each in linear_map.choose(linear_map.split(operands)[0])]

    return _linear_primitive("ejkernel_transpose", _run_transpose, results)


def _linear_primitive(name: str, run: Callable[..., list[Any]], results: Callable[..., Any]) -> Any:
    """A primitive that is linear in its last operands; `results` returns the types of what `run` computes."""
    # not at the top: `import ejkernel` must not import Pallas, which the first of these does
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir

    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def jitted(**params: Any) -> Any:
        return jax.jit(functools.partial(run, **params))

    @primitive.def_impl
    def _(*operands: Any, **params: Any) -> Any:
        return jitted(**params)(*operands)

    @primitive.def_effectful_abstract_eval
    def _(*avals: Any, **params: Any) -> Any:
        effects: Any = frozenset()
        if _pallas.INTERPRET is not None:  # a primitive must not hide the effects of an interpreter
            shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
            with _dispatch.unheard():  # reverse mode comes here too, and runs no tangents
                effects = jax.make_jaxpr(functools.partial(run, **params))(*shapes).effects
        return list(results(avals, **params)), effects

    def lower(ctx: Any, *values: Any, linear_map: LinearMap, **params: Any) -> Any:
        body = linear_map.body(run, params) if linear_map.op.splits else None
        return _partitioned.lower(ctx, *values, body=body, run=functools.partial(run, linear_map=linear_map, **params))

    mlir.register_lowering(primitive, lower)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_mapping.batched, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = _transposed
    return primitive


def _jvp(primitive: Any, operands: Any, tangents: Any, *, linear_map: LinearMap, **params: Any) -> Any:
    """The derivative of a linear map: itself in its last operands, that of `Op.reference` in the inputs."""
    results = primitive.bind(*operands, linear_map=linear_map, **params)
    inputs, residuals, linear = linear_map.split(operands)
    d_inputs, _, d_linear = linear_map.split([instantiated(x, t) for x, t in zip(operands, tangents, strict=True)])
    if all(is_zero(each) for each in linear_map.split(tangents)[0]):
        d_results = primitive.bind(*inputs, *residuals, *d_linear, linear_map=linear_map, **params)
        if primitive is _tangent():  # the outputs do not depend on the linear operands
            d_results = [*map(zeros_like, _halves(results)[0]), *_halves(d_results)[1]]
        return results, d_results
    moving = [i for i, x in enumerate(inputs) if has_tangent(x)]

    def run(some: list[Any], linear: Leaves) -> list[Any]:
        leaves = list(inputs)
        for i, each in zip(moving, some, strict=True):
            leaves[i] = each
        if primitive is _tangent():
            return linear_map.jvp(leaves, residuals, linear, by_jvp(linear_map.op.reference))
        return linear_map.vjp_of_reference(leaves, params["nonzero"], linear)

    primals, d_primals = ([each[i] for i in moving] for each in (inputs, d_inputs))
    d_results = jax.jvp(run, (primals, linear), (d_primals, d_linear))[1]
    return results, [x.astype(like.dtype) for x, like in zip(d_results, results, strict=True)]


def _transposed(
    cotangents: Any, *operands: Any, linear_map: LinearMap, outputs: Any, devices: Any, nonzero: Any = None
) -> list[Any]:
    """The transpose of `_tangent` is `_transpose`, which has a parameter `nonzero`, and the other way round."""
    inputs, residuals, _ = linear_map.split(operands)
    facts = {"linear_map": linear_map, "outputs": outputs, "devices": devices}
    if nonzero is None:
        _, cotangents = _halves(cotangents)
        nonzero = tuple(not is_zero(each) for each in cotangents)
        d_outputs = [each for each in cotangents if not is_zero(each)]
        results = _transpose().bind(*inputs, *residuals, *d_outputs, nonzero=nonzero, **facts)
    else:
        moving = [instantiated(x, t) for x, t in zip(linear_map.choose(inputs), cotangents, strict=True)]
        _, tangents = _halves(_tangent().bind(*inputs, *residuals, *moving, **facts))
        results = [each for each, is_nonzero in zip(tangents, nonzero, strict=True) if is_nonzero]
    return [None] * (len(inputs) + len(residuals)) + list(results)


def refuse_derivatives(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes arrays or `None`, with an error for whoever differentiates the call called `name`."""
    differentiable = jax.custom_jvp(function)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        if all(is_zero(each) or not has_tangent(each) for each in jax.tree.leaves(tangents)):
            results = differentiable(*primals)
            return results, jax.tree.map(zeros_like, results)
        raise TypeError(f"{name} is not differentiable with respect to any argument: it is for serving")

    return differentiable
