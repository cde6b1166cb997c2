"""One way to differentiate an op and to map it with `vmap`.

An op is a forward pass, a map that is linear in the inputs' tangents, and that map's transpose, the backward pass:

| JAX asks for | what runs |
|---|---|
| the outputs | `forward` |
| reverse mode | `forward_with_residuals`, then `backward` |
| forward mode | `tangent`, after `forward_with_residuals` where it needs residuals |
| second derivatives | derivatives of the tangents or cotangents of `reference` |

Residuals are only remembered values of functions of the inputs, so derivatives never pass through them.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel import _dispatch
from ejkernel.kernels import _kernel_cache, _pallas, _partitioned

SAVED = "ejkernel_op"
Zero = jax.custom_derivatives.SymbolicZero
Leaves = tuple[Any, ...]


@dataclass(frozen=True)
class Op:
    """How an op computes and differentiates; `static` is whatever is fixed when it is traced, and hashable.

    `inputs`, outputs and residuals are trees of arrays. Arrays of integers, booleans and random keys have no tangents.

    Attributes:
        forward: `forward(static, inputs)` gives the outputs.
        reference: The same outputs as `forward`, in a form that JAX can differentiate any number of times.
        forward_with_residuals: `forward_with_residuals(static, inputs)` gives the outputs, and what `backward` can use
            again. `None` instead of the function stands for no residuals.
        backward: `backward(static, inputs, residuals, cotangents, wanted)` gives the inputs' cotangents, as a tree like
            `inputs`. A cotangent is `None` where it is zero. `wanted`, also like `inputs`, says which ones are asked
            for; the others may be `None` or anything. `None` instead of the function stands for that of `reference`.
        tangent: `tangent(static, inputs, residuals, tangents)` gives the outputs once more, and the outputs' tangents.
            `tangents` is like `inputs`, with `None` where there is no tangent. `None` instead of the function stands
            for `by_jvp(reference)`.
        keeps: The part of the outputs that `backward` needs; its `residuals` are then the pair of that and residuals.
        fold: `fold(static, size, inputs, mapped, wanted)` makes one call of `size` mapped ones: the static facts and
            the inputs of that call, whose outputs, residuals and cotangents are then those of the single ones, joined
            along their first axis. Leaves of `inputs` that `mapped` names have the mapped axis first. It gives `None`
            where that is impossible: then calls run one by one. Without `fold`, JAX maps the functions themselves.
        splits: Whether devices may share its rows and heads, see `_partitioned`: the first of its static facts that has
            `dims` is then a call, and all of `inputs` are that call's arrays.
        one_device: Whether it runs on one device alone; in a program for several, `reference` runs, which XLA splits.
            Such an op has no residuals.
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
        if self.forward_with_residuals is None:
            return self.forward(static, inputs), None
        return self.forward_with_residuals(static, inputs)


def call(op: Op, static: Any, inputs: Any) -> Any:
    """The outputs of `op`, with all of its derivatives."""
    return _forward(op, static, False, inputs)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _forward(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    """Outputs, and residuals or `None`."""

    def run(static: Any, inputs: Any) -> tuple[Any, Any]:
        return _one_operation(op, static, keep, inputs)

    if op.fold is None:
        return run(static, inputs)
    return foldable(run, op.fold, static)(inputs)


def _one_operation(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    """The forward pass as one operation, which is lowered as `_partitioned` says."""
    leaves, tree = jax.tree.flatten(inputs)
    closed, shapes = jax.make_jaxpr(_jitted_forward(op, static, keep, tree), return_shape=True)(*leaves)
    if closed.effects:  # an interpreter's, which no operation may hide
        return _run_forward(op, static, keep, inputs)
    devices = _partitioned.needs_devices() if op.splits else None
    found = _forward_pass().bind(*leaves, op=op, static=static, keep=keep, tree=tree, closed=closed, devices=devices)
    return jax.tree.unflatten(jax.tree.structure(shapes), found)


def _run_forward(op: Op, static: Any, keep: bool, inputs: Any) -> tuple[Any, Any]:
    with _kernel_cache.one_pass():
        return op.with_residuals(static, inputs) if keep else (op.forward(static, inputs), None)


@functools.cache
def _jitted_forward(op: Op, static: Any, keep: bool, tree: Any) -> Callable[..., tuple[Any, Any]]:
    """The forward pass of the inputs' leaves; jitted, it is traced once for all calls that are alike."""

    def forward(*leaves: Any) -> tuple[Any, Any]:
        return _run_forward(op, static, keep, jax.tree.unflatten(tree, leaves))

    return jax.jit(forward)


@functools.cache
def _forward_pass() -> Any:
    """Takes the inputs to outputs and residuals."""
    from jax.extend.core import Primitive, jaxpr_as_fun
    from jax.interpreters import batching, mlir

    primitive = Primitive("ejkernel_forward")
    primitive.multiple_results = True

    @primitive.def_impl
    def _(*leaves: Any, op: Op, static: Any, keep: bool, tree: Any, **_: Any) -> Any:
        return jax.tree.leaves(_jitted_forward(op, static, keep, tree)(*leaves))

    @primitive.def_abstract_eval
    def _(*avals: Any, closed: Any, **_: Any) -> Any:
        return closed.out_avals

    def lower(ctx: Any, *values: Any, op: Op, static: Any, keep: bool, tree: Any, closed: Any, devices: Any) -> Any:
        def run(static: Any, *leaves: Any) -> Any:
            return jax.tree.leaves(_run_forward(op, static, keep, jax.tree.unflatten(tree, leaves)))

        body = None
        if op.splits:
            takes = _partitioned.Operands(inputs=tuple(range(tree.num_leaves)))
            gives = _partitioned.Operands(outputs=tuple(range(len(closed.out_avals))))
            body = _partitioned.Body(static, _present(tree), takes, gives, run, run)
        whole = jaxpr_as_fun(closed)
        if op.one_device and not _pallas.one_device(ctx.module_context.axis_context):

            def whole(*leaves: Any) -> Any:
                return jax.tree.leaves(op.reference(static, jax.tree.unflatten(tree, leaves)))

        return _partitioned.lower(ctx, *values, body=body, run=whole)

    def batched(leaves: Any, dims: Any, *, op: Op, static: Any, keep: bool, tree: Any, **_: Any) -> Any:
        # without a `fold`; an op that has one is mapped before it gets here
        rows = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(leaves, dims, strict=True)]
        larger = _vmapped(op, tree, tuple(each is not None for each in dims))
        found = jax.tree.leaves(_one_operation(larger, static, keep, jax.tree.unflatten(tree, rows)))
        return found, [0] * len(found)

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = batched
    return primitive


def _present(tree: Any) -> tuple[bool, ...]:
    """Which arrays of inputs there are, of all that there may be."""
    leaves = jax.tree.leaves(jax.tree.unflatten(tree, range(tree.num_leaves)), is_leaf=lambda x: x is None)
    return tuple(each is not None for each in leaves)


@functools.partial(_forward.defjvp, symbolic_zeros=True)
def _forward_jvp(op: Op, static: Any, keep: bool, primals: tuple[Any], tangents: tuple[Any]) -> Any:
    inputs, d_inputs = primals[0], jax.tree.leaves(tangents[0], is_leaf=lambda x: isinstance(x, Zero))
    # the differentiable function again: its residuals may be differentiated once more
    outputs, residuals = jax.tree.map(_named, _forward(op, static, True, inputs))
    wanted = tuple(not isinstance(each, Zero) and _has_tangent(each) for each in d_inputs)
    leaves, tree = jax.tree.flatten(outputs)
    # the outputs themselves, not copies among the residuals: whoever else keeps them keeps the same arrays
    known = residuals if op.keeps is None else (op.keeps(outputs), residuals)
    problem = _Problem(op, static, jax.tree.structure(inputs), jax.tree.structure(known), tree, wanted)
    moving = [each for each, asked in zip(d_inputs, wanted, strict=True) if asked]
    avals = tuple(map(jax.typeof, leaves))
    operands = (*jax.tree.leaves(inputs), *jax.tree.leaves(known), *moving)
    devices = _partitioned.needs_devices() if op.splits else None
    found = _tangent().bind(*operands, problem=problem, outputs=avals, devices=devices)
    again, d_outputs = _halves(found)
    outputs = jax.tree.unflatten(tree, map(_either().bind, leaves, again))
    kept = residuals if keep else None
    return (outputs, kept), (jax.tree.unflatten(tree, d_outputs), jax.tree.map(_zeros_like, kept))


def by_jvp(function: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """An `Op.tangent` by JAX, which differentiates `function(static, inputs)`, the outputs, forwards."""

    def tangent(static: Any, inputs: Any, residuals: Any, tangents: Any) -> tuple[Any, Any]:
        tree: Any = jax.tree.structure(inputs)
        leaves, moving = jax.tree.leaves(inputs), tree.flatten_up_to(tangents)
        run = _of_chosen(function, static, inputs, tuple(each is not None for each in moving))
        primals = [x for x, each in zip(leaves, moving, strict=True) if each is not None]
        return jax.jvp(run, primals, [each for each in moving if each is not None])

    return tangent


def _of_chosen(function: Callable[..., Any], static: Any, inputs: Any, chosen: tuple[bool, ...]) -> Callable[..., Any]:
    """`function(static, inputs)` as a function of the chosen leaves alone."""
    leaves, tree = jax.tree.flatten(inputs)

    def run(*some: Any) -> Any:
        following = iter(some)
        whole = [next(following) if each else x for x, each in zip(leaves, chosen, strict=True)]
        return function(static, jax.tree.unflatten(tree, whole))

    return run


def _named(x: Any) -> Any:
    """`x` by a name that policies of `jax.checkpoint` know: a backward pass that has it runs no forward pass again."""
    return checkpoint_name(x, SAVED)


@dataclass(frozen=True)
class _Problem:
    """What the tangents' map and its transpose know when they are traced.

    Attributes:
        inputs: the structure of the inputs, whose leaves are the first operands
        residuals: that of the residuals, whose leaves follow
        outputs: that of the outputs
        wanted: which leaves of the inputs have tangents, or cotangents that are asked for
    """

    op: Op
    static: Any
    inputs: Any
    residuals: Any
    outputs: Any
    wanted: tuple[bool, ...]

    def split(self, operands: Sequence[Any]) -> tuple[Leaves, Leaves, Leaves]:
        """Inputs, residuals, and what the map is linear in."""
        inputs, residuals = self.inputs.num_leaves, self.inputs.num_leaves + self.residuals.num_leaves
        return tuple(operands[:inputs]), tuple(operands[inputs:residuals]), tuple(operands[residuals:])

    def trees(self, *leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Each of these, of which the first are the inputs' leaves, as a tree like the inputs."""
        return tuple(jax.tree.unflatten(self.inputs, each[: self.inputs.num_leaves]) for each in leaves)

    def chosen(self, inputs: Sequence[Any]) -> list[Any]:
        """The wanted ones."""
        return [each for each, asked in zip(inputs, self.wanted, strict=True) if asked]

    def jvp(self, inputs: Sequence[Any], residuals: Sequence[Any], moving: Sequence[Any], tangent: Any) -> list[Any]:
        """The outputs and their tangents, by this `Op.tangent`."""
        following = iter(moving)
        found = tangent(
            self.static,
            jax.tree.unflatten(self.inputs, inputs),
            jax.tree.unflatten(self.residuals, residuals),
            jax.tree.unflatten(self.inputs, [next(following) if asked else None for asked in self.wanted]),
        )
        return jax.tree.leaves(found)

    def cotangents(self, inputs: Sequence[Any], given: tuple[bool, ...], cotangents: Sequence[Any]) -> list[Any]:
        """The wanted inputs' cotangents, by JAX."""
        run = _of_chosen(self.op.reference, self.static, jax.tree.unflatten(self.inputs, inputs), self.wanted)
        outputs, pull = jax.vjp(run, *self.chosen(inputs))
        leaves, following = jax.tree.leaves(outputs), iter(cotangents)
        full = [next(following) if there else _zeros_like(x) for x, there in zip(leaves, given, strict=True)]
        return list(pull(jax.tree.unflatten(self.outputs, full)))

    def backward(
        self, inputs: Sequence[Any], residuals: Sequence[Any], given: tuple[bool, ...], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The wanted inputs' cotangents, by the op's own backward pass if it has one."""
        if self.op.backward is None:
            return self.cotangents(inputs, given, cotangents)
        following = iter(cotangents)
        found = self.op.backward(
            self.static,
            jax.tree.unflatten(self.inputs, inputs),
            jax.tree.unflatten(self.residuals, residuals),
            jax.tree.unflatten(self.outputs, [next(following) if there else None for there in given]),
            jax.tree.unflatten(self.inputs, self.wanted),
        )
        # a cotangent that nobody wants may be missing
        leaves = self.inputs.flatten_up_to(found)
        return [g.astype(x.dtype) for g, x in zip(self.chosen(leaves), self.chosen(inputs), strict=True)]

    def body(self, run: Callable[..., list[Any]], params: dict[str, Any]) -> _partitioned.Body:
        """`run`, the map or its transpose, for `_partitioned`."""

        def on_part(static: Any, *operands: Any) -> list[Any]:
            return run(*operands, problem=replace(self, static=static), **params)

        def known(static: Any, *leaves: Any) -> Any:
            outputs, residuals = self.op.with_residuals(static, jax.tree.unflatten(self.inputs, leaves))
            return jax.tree.leaves(
                (outputs, residuals if self.op.keeps is None else (self.op.keeps(outputs), residuals))
            )

        inputs = tuple(range(self.inputs.num_leaves))
        wanted = tuple(i for i in inputs if self.wanted[i])
        outputs = tuple(range(self.outputs.num_leaves))
        residuals = tuple(range(len(outputs), len(outputs) + self.residuals.num_leaves))
        kinds = _partitioned.Operands
        if "given" in params:
            given = tuple(i for i in outputs if params["given"][i])
            takes, gives = kinds(inputs, (*residuals, *given)), kinds(inputs=wanted)
        else:
            takes, gives = kinds((*inputs,), residuals, wanted), kinds(outputs=(*outputs, *outputs))
        return _partitioned.Body(self.static, _present(self.inputs), takes, gives, on_part, known)


def _run_tangent(*operands: Any, problem: _Problem, outputs: Any, devices: Any = None) -> list[Any]:
    with _kernel_cache.one_pass():
        found = problem.jvp(*problem.split(operands), problem.op.tangent or by_jvp(problem.op.reference))
    return [x.astype(aval.dtype) for x, aval in zip(found, (*outputs, *outputs), strict=True)]


def _run_transpose(
    *operands: Any, problem: _Problem, outputs: Any, given: tuple[bool, ...], devices: Any = None
) -> list[Any]:
    inputs, residuals, cotangents = problem.split(operands)
    with _kernel_cache.one_pass():
        return problem.backward(inputs, residuals, given, cotangents)


@functools.cache
def _tangent() -> Any:
    """Takes tangents of the wanted inputs to those of the outputs. Operands: inputs, residuals, these tangents.

    The first half of its results are the outputs, the second, which is linear, is their tangents. Nothing
    differentiates the first: see `_either`.
    """

    def results(operands: Any, problem: _Problem, outputs: Any, devices: Any) -> Any:
        return [*outputs, *(each.to_tangent_aval() for each in outputs)]

    return _linear_primitive("ejkernel_tangent", _run_tangent, results)


def _halves(found: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    return found[: len(found) // 2], found[len(found) // 2 :]


@functools.cache
def _either() -> Any:
    """Takes an output of the forward pass, and the same one as `_tangent` gives it, to that output.

    Where both are computed it is the second: then XLA finds that nothing needs the forward pass, and removes it. Where
    tangents are computed later, or never, as in reverse mode, it is the first.
    """
    from jax.extend.core import Primitive
    from jax.interpreters import ad, batching, mlir, partial_eval

    primitive = Primitive("ejkernel_either")
    primitive.def_impl(lambda first, second: second)
    primitive.def_abstract_eval(lambda first, second: first)
    mlir.register_lowering(primitive, lambda ctx, first, second: [second])
    ad.primitive_jvps[primitive] = lambda values, tangents: (primitive.bind(*values), tangents[0])

    def batched(values: Any, dims: Any) -> Any:
        if None in dims:  # tangents alone are mapped
            return values[0], dims[0]
        return primitive.bind(*(jnp.moveaxis(x, d, 0) for x, d in zip(values, dims, strict=True))), 0

    def known(trace: Any, first: Any, second: Any) -> Any:
        is_first = first.is_known() and not second.is_known()
        return first if is_first else trace.default_process_primitive(primitive, (first, second), {})

    def known_or_computed_again(saveable: Any, unknown: Any, there: Any, equation: Any) -> Any:
        """For `jax.checkpoint`: the equations of both passes, what is unknown and what is there, and what to keep."""
        if unknown[0]:
            missing = [x for x, each in zip(equation.invars, there, strict=True) if not each]
            return None, equation, [True], [True], missing
        first = equation.replace(invars=[equation.invars[0]] * 2)
        return first if unknown[1] else equation, first if there[0] else None, [False], [there[0]], []

    batching.primitive_batchers[primitive] = batched
    partial_eval.custom_partial_eval_rules[primitive] = known
    partial_eval.partial_eval_jaxpr_custom_rules[primitive] = known_or_computed_again
    return primitive


@functools.cache
def _transpose() -> Any:
    """Takes the cotangents of the outputs that are `given` to those of the wanted inputs."""

    def results(operands: Any, problem: _Problem, outputs: Any, given: Any, devices: Any) -> Any:
        return [each.to_tangent_aval() for each in problem.chosen(problem.split(operands)[0])]

    return _linear_primitive("ejkernel_transpose", _run_transpose, results)


def _linear_primitive(name: str, run: Callable[..., list[Any]], results: Callable[..., Any]) -> Any:
    """A primitive that is linear in its last operands; `results` gives the types of what `run` computes."""
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
        if _pallas.INTERPRET is not None:  # an interpreter has effects, which no operation may hide
            shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in avals]
            with _dispatch.unheard():  # reverse mode comes here too, and runs no tangents
                effects = jax.make_jaxpr(functools.partial(run, **params))(*shapes).effects
        return list(results(avals, **params)), effects

    def lower(ctx: Any, *values: Any, problem: _Problem, **params: Any) -> Any:
        body = problem.body(run, params) if problem.op.splits else None
        return _partitioned.lower(ctx, *values, body=body, run=functools.partial(run, problem=problem, **params))

    mlir.register_lowering(primitive, lower)
    batching.fancy_primitive_batchers[primitive] = functools.partial(_batched, primitive)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = _transposed
    return primitive


def _jvp(primitive: Any, operands: Any, tangents: Any, *, problem: _Problem, **params: Any) -> Any:
    """Linear in the last operands; in the inputs, the derivative of what `reference` says."""
    results = primitive.bind(*operands, problem=problem, **params)
    inputs, residuals, linear = problem.split(operands)
    d_inputs, _, d_linear = problem.split([_instantiated(x, t) for x, t in zip(operands, tangents, strict=True)])
    moved = problem.split(tangents)[0]
    if all(_is_zero(each) for each in moved):
        found = primitive.bind(*inputs, *residuals, *d_linear, problem=problem, **params)
        if "given" not in params:  # the outputs do not move with these
            found = [*map(_zeros_like, _halves(results)[0]), *_halves(found)[1]]
        return results, found
    moving = [i for i, x in enumerate(inputs) if _has_tangent(x)]

    def run(some: list[Any], linear: Leaves) -> list[Any]:
        leaves = list(inputs)
        for i, each in zip(moving, some, strict=True):
            leaves[i] = each
        if "given" in params:
            return problem.cotangents(leaves, params["given"], linear)
        return problem.jvp(leaves, residuals, linear, by_jvp(problem.op.reference))

    primals, d_primals = ([each[i] for i in moving] for each in (inputs, d_inputs))
    found = jax.jvp(run, (primals, linear), (d_primals, d_linear))[1]
    return results, [x.astype(like.dtype) for x, like in zip(found, results, strict=True)]


def _transposed(
    cotangents: Any, *operands: Any, problem: _Problem, outputs: Any, devices: Any, given: Any = None
) -> list[Any]:
    inputs, residuals, _ = problem.split(operands)
    rest = [None] * (len(inputs) + len(residuals))
    if given is None:
        _, cotangents = _halves(cotangents)
        given = tuple(not _is_zero(each) for each in cotangents)
        there = [each for each in cotangents if not _is_zero(each)]
        found = _transpose().bind(
            *inputs, *residuals, *there, problem=problem, outputs=outputs, given=given, devices=devices
        )
        return rest + list(found)
    moving = [_instantiated(x, t) for x, t in zip(problem.chosen(inputs), cotangents, strict=True)]
    found = _tangent().bind(*inputs, *residuals, *moving, problem=problem, outputs=outputs, devices=devices)
    return rest + [each for each, there in zip(_halves(found)[1], given, strict=True) if there]


def _batched(
    primitive: Any, axis: Any, operands: Any, dims: Any, *, problem: _Problem, outputs: Any, **params: Any
) -> Any:
    """Calls mapped over `axis` as one: folded into each other, by JAX's own rules, or one by one."""
    op, mapped, size = problem.op, tuple(each is not None for each in dims), axis.size
    name = axis.name if isinstance(axis.name, str) else None
    if not any(mapped) and (name is None or op.fold is not None):  # and no collective over the axis, either
        found = primitive.bind(*operands, problem=problem, outputs=outputs, **params)
        return found, [None] * len(found)
    rows = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    spread = [_spread(x, size, each) for x, each in zip(rows, mapped, strict=True)]

    def bind(problem: _Problem, operands: Sequence[Any], shape: Callable[..., tuple[int, ...]]) -> Any:
        avals = tuple(_shaped(shape(*each.shape), each) for each in outputs)
        return primitive.bind(*operands, problem=problem, outputs=avals, **params)

    if op.fold is None:
        # what has a cotangent has one in each call
        axes = tuple(a or b for a, b in zip(problem.split(mapped)[0], problem.wanted, strict=True))
        inputs = (whole if each else x for x, whole, each in zip(rows, spread, axes, strict=False))
        larger = replace(problem, op=_vmapped(op, problem.inputs, axes, name))
        found = bind(larger, (*inputs, *spread[len(axes) :]), lambda *shape: (size, *shape))
    elif folded := op.fold(problem.static, size, *problem.trees(rows, mapped, problem.wanted)):
        static, inputs = folded
        larger = replace(problem, static=static)
        others = [_joined(x) for x in spread[problem.inputs.num_leaves :]]
        found = bind(larger, (*jax.tree.leaves(inputs), *others), lambda first, *shape: (size * first, *shape))
        found = [_parted(x, size) for x in found]
    else:
        found = jax.lax.map(lambda each: bind(problem, each, lambda *shape: shape), spread)
    return found, [0] * len(found)


@functools.cache
def _vmapped(op: Op, tree: Any, axes: tuple[bool, ...], name: str | None = None) -> Op:
    """`op` mapped over these leaves of its inputs, and over all outputs, residuals and cotangents.

    `name` is that of the axis, if its functions have collectives over it.
    """
    mapped = jax.tree.unflatten(tree, [0 if each else None for each in axes])
    vmap = functools.partial(jax.vmap, axis_name=name)

    def vmapped(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda static, inputs: vmap(functools.partial(function, static), (mapped,))(inputs)

    def backward(static: Any, inputs: Any, residuals: Any, cotangents: Any, wanted: Any) -> Any:
        def run(inputs: Any, residuals: Any, cotangents: Any) -> Any:
            assert op.backward is not None
            found = tree.flatten_up_to(op.backward(static, inputs, residuals, cotangents, wanted))
            return [each if asked else None for each, asked in zip(found, jax.tree.leaves(wanted), strict=True)]

        found = vmap(run, (mapped, 0, 0))(inputs, residuals, cotangents)
        return jax.tree.unflatten(tree, found)

    def tangent(static: Any, inputs: Any, residuals: Any, tangents: Any) -> tuple[Any, Any]:
        assert op.tangent is not None
        return vmap(functools.partial(op.tangent, static), (mapped, 0, 0))(inputs, residuals, tangents)

    forward, reference, with_residuals = map(vmapped, (op.forward, op.reference, op.with_residuals))
    own = None if op.backward is None else backward, None if op.tangent is None else tangent
    return Op(forward, reference, with_residuals, *own, op.keeps, splits=False)


def foldable(run: Callable[..., Any], fold: Callable[..., Any], static: Any) -> Callable[[Any], Any]:
    """`run(static, inputs)` as a function of the inputs that `vmap` maps as `fold` says."""

    @jax.custom_batching.custom_vmap
    def mapped(inputs: Any) -> Any:
        return run(static, inputs)

    @mapped.def_vmap
    def rule(size: int, batched: list[Any], inputs: Any) -> tuple[Any, Any]:
        nothing = jax.tree.map(lambda _: False, inputs)
        if folded := fold(static, size, inputs, batched[0], nothing):
            results = foldable(run, fold, folded[0])(folded[1])
            results = jax.tree.map(lambda x: _parted(x, size), results)
        else:
            results = jax.lax.map(mapped, jax.tree.map(lambda x, each: _spread(x, size, each), inputs, batched[0]))
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def refuse_derivatives(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays or `None`, of which a derivative is an error that says so of the call called `name`."""
    differentiable = jax.custom_jvp(function)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        if all(_is_zero(each) or not _has_tangent(each) for each in jax.tree.leaves(tangents)):
            results = differentiable(*primals)
            return results, jax.tree.map(_zeros_like, results)
        raise TypeError(f"{name} is not differentiable with respect to any argument: it is for serving")

    return differentiable


def fold_rows(inputs: Any, size: int, mapped: Any, shared: Iterable[str] = ()) -> Any:
    """`inputs` of `size` calls as those of one whose rows are all of theirs, for `Op.fold`.

    Fields of these names are not mapped, and stay as they are.
    """
    same = {name: getattr(inputs, name) for name in shared}
    if same:
        nothing = dict.fromkeys(same)
        inputs, mapped = inputs._replace(**nothing), mapped._replace(**nothing)
    folded = jax.tree.map(lambda x, each: _joined(_spread(x, size, each)), inputs, mapped)
    return folded._replace(**same) if same else folded


def _spread(x: Any, size: int, is_mapped: bool) -> Any:
    return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))


def _joined(x: jax.Array) -> jax.Array:
    """`[calls, rows, …]` as `[calls · rows, …]`."""
    return x.reshape(-1, *x.shape[2:])


def _parted(x: jax.Array, size: int) -> jax.Array:
    """Undoes `_joined`."""
    return x.reshape(size, -1, *x.shape[1:])


def _shaped(shape: tuple[int, ...], like: Any) -> Any:
    """The type of an array of this shape, varying over the mesh axes that `like` varies over."""
    whole = NamedSharding(like.sharding.mesh, PartitionSpec(*(None for _ in shape)))
    return jax.core.ShapedArray(shape, like.dtype, sharding=whole, manual_axis_type=like.manual_axis_type)


def _has_tangent(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_zero(x: Any) -> bool:
    from jax.interpreters import ad

    return isinstance(x, ad.Zero | Zero)


def _zeros_like(x: Any) -> Any:
    """The tangent of what does not move."""
    return jnp.zeros_like(x) if _has_tangent(x) else np.zeros(x.shape, jax.dtypes.float0)


def _instantiated(x: Any, tangent: Any) -> Any:
    return _zeros_like(x) if _is_zero(tangent) else tangent
