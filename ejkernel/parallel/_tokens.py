"""A recurrence with its tokens sharded over a mesh axis.

A slice of the tokens applies a transition to a state and adds a state. Each device computes this effect of its slice.
The effects, whose size does not depend on the number of tokens, are exchanged (`_exchange`), and give each slice its
start state. In the backward pass the cotangents of states are exchanged likewise. With its start state, and the
cotangent of its end state, a slice's work is that of a single device: the op's own implementation does it, in two
phases (`kernels._phases`) with the exchange between them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import _checks, _sharding
from ejkernel._checks import AnyArray, Borders
from ejkernel._dispatch import Implementation, resolve, warn_of_tangents
from ejkernel.kernels import _differentiable, _phases, _varying
from ejkernel.kernels._op import Op, by_jvp
from ejkernel.kernels.chunks.segments import runs
from ejkernel.parallel._exchange import Algebra, Exchange

Arrays = dict[str, Any]
Result = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class Recurrence:
    """What differs between recurrences; arrays are passed by name.

    Attributes:
        per_token: The names of the arrays that have a token dimension.
        check: Checks the arrays, and raises if they do not fit together.
        bind: `bind(arrays, **options)`: the static facts of a call, and the arrays that its implementations take.
        implementations: The op's implementations, the last of which is plain JAX.
        begin: `begin(implementation, call, inputs, cu_seqlens)`: the first result of `Phases.begin`, then the slice's
            transition and the states `[N, H, K, V]` that it adds.
        algebra: How effects are composed.
    """

    per_token: tuple[str, ...]
    check: Callable[[Arrays], _checks.RecurrenceArrays]
    bind: Callable[..., tuple[Any, tuple[jax.Array | None, ...]]]
    implementations: tuple[Implementation, ...]
    begin: Callable[..., tuple[Any, Any, jax.Array]]
    algebra: Algebra


def run_sharded(
    recurrence: Recurrence,
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    softmax_scale: float | AnyArray | None,
    initial_state: AnyArray | None,
    reverse: bool,
    cu_seqlens: Borders | None,
    segment_ids: AnyArray | None,
    axis: str,
    mesh: jax.sharding.Mesh | None,
    platform: str | None,
    more_options: Mapping[str, Any] | None = None,
    **gates: AnyArray | None,
) -> Result:
    """Runs `recurrence` on this device's slices of the tokens, or with `mesh` on global arrays.

    `gates` are the op's other arrays, and `more_options` the arguments of `Recurrence.bind` that only some ops have.
    """
    sequences = {"initial_state": initial_state, "cu_seqlens": cu_seqlens, "segment_ids": segment_ids}
    arrays: Arrays = {"query": query, "key": key, "value": value, **gates, **sequences}
    options = {"reverse": reverse, **(more_options or {})}
    # `shard_map` takes only arrays
    of_scale = arrays if isinstance(softmax_scale, jax.Array | np.ndarray) else options
    of_scale["softmax_scale"] = softmax_scale
    arrays = {name: x for name, x in arrays.items() if x is not None}
    run_slice = partial(_on_slice, recurrence=recurrence, options=options, axis=axis, platform=platform)
    if mesh is None:
        return run_slice(arrays, devices=_checks.bound_axis(axis))
    devices = _checks.mesh_axis(mesh, axis)
    # checked before `shard_map`, whose specs fit only arrays of the right ranks
    checked = recurrence.check(arrays)
    _checks.divisible_time(checked.query.shape[1], axis, devices)
    packed = checked.cu_seqlens is not None
    if packed:
        arrays["cu_seqlens"] = checked.cu_seqlens
    sliced = jax.P(axis) if checked.unbatched else jax.P(None, axis)
    specs = {name: sliced if name in (*recurrence.per_token, "segment_ids") else jax.P() for name in arrays}
    run = jax.shard_map(
        partial(run_slice, devices=devices),
        mesh=_sharding.as_auto(mesh),
        in_specs=(specs,),
        out_specs=(sliced, jax.P()),
        axis_names={axis},
    )
    results = _result_specs(_sharding.over(axis, _spec(arrays), -3), packed)
    return _sharding.partitioned(run, results, arrays, mesh=mesh)


def _spec(arrays: Arrays) -> jax.P:
    """The spec of the array with the most heads among query, key and value."""
    return _sharding.spec_of(_sharding.widest(*map(arrays.__getitem__, ("query", "key", "value"))))


def _result_specs(spec: jax.P, packed: bool) -> tuple[jax.P, jax.P]:
    """The specs of output and final state on `Explicit` axes, from the spec of an array with all heads."""
    *rows, tokens, heads, _ = spec
    return jax.P(*rows, tokens, heads, None), jax.P(None if packed else rows[0], heads, None, None)


def _on_slice(
    arrays: Arrays, recurrence: Recurrence, options: Arrays, axis: str, platform: str | None, devices: int
) -> Result:
    """The call on this device's slice of the tokens."""
    local, packed = dict(arrays), "cu_seqlens" in arrays
    if packed:
        _checks.heads(*map(local.get, ("query", "key", "value")))
        tokens = local["query"].shape[-3]
        borders = _checks.cu_seqlens(local["cu_seqlens"], devices * tokens)
        local["cu_seqlens"] = jnp.clip(borders - (lax.axis_index(axis) * tokens).astype(borders.dtype), 0, tokens)
    recurrence.check(local)
    results = _result_specs(_spec(local), packed)

    def run(local: Arrays) -> Result:
        scale = {name: local[name] for name in ("softmax_scale",) if name in local}
        checked = recurrence.check({name: x for name, x in local.items() if name not in scale})
        call, operands = recurrence.bind(checked, **scale, **options)
        chosen = resolve(recurrence.implementations, call, _sharding.explicit_mesh(*operands), platform=platform)
        output, final = _run(Static(recurrence, chosen, axis, devices, call), *operands)
        return (output[0] if checked.unbatched else output), final

    return _sharding.partitioned(run, results, local)


class Segments(NamedTuple):
    """How states pass between slices where rows hold several sequences; both `None` where a row is one sequence.

    Attributes:
        enters: `[B]`: whether the first sequence in this slice of a row starts from the state before the slice.
        passes: `[devices, B]`: for all slices, whether the state after a slice depends on the state before it.
    """

    enters: jax.Array | None
    passes: jax.Array | None

    def entering(self, states: jax.Array) -> jax.Array:
        """States `[N, H, K, V]` before this slice, or their cotangents; zeros where no sequence starts from them."""
        return states if self.enters is None else jnp.where(self.enters[:, None, None, None], states, 0)


@dataclass(frozen=True)
class Static:
    """What is fixed when a call is traced.

    Attributes:
        chosen: Implementations by the platform that is lowered for.
        call: The static facts of a call on one slice.
    """

    recurrence: Recurrence
    chosen: tuple[tuple[str, Implementation], ...]
    axis: str
    devices: int
    call: Any

    @property
    def plain(self) -> bool:
        """Whether no kernels are chosen, so that JAX can differentiate the passes themselves."""
        return all(each == self.recurrence.implementations[-1] for _, each in self.chosen)

    def exchange(self, reverse: bool) -> Exchange:
        return Exchange(self.recurrence.algebra, self.axis, self.devices, reverse)

    def segments(self, ids: jax.Array | None) -> Segments:
        """The `Segments` of this slice, whose `segment_ids` are `ids`."""
        call = self.call
        if not call.segmented:
            return Segments(None, None)
        assert ids is not None
        local, order = runs(ids), -1 if call.reverse else 1
        visited, several = ids[:, ::order], local.first_visited(call).sum(1) > 1
        facts = jnp.stack([x.astype(ids.dtype) for x in (visited[:, 0], visited[:, -1], local.valid.any(1), several)])
        # of all slices, in the order in which they are visited; `some` says whether a slice has tokens besides padding
        first, last, some, several = jnp.moveaxis(self.exchange(call.reverse).gather(facts), 1, 0)[:, ::order]
        filled = (some > 0).astype(np.int32)
        slices_before = jnp.cumsum(filled, 0) - filled
        continues = jnp.concatenate([jnp.zeros_like(first[:1], bool), first[1:] == last[:-1]]) & (first >= 0)
        enters = continues | (slices_before == 0)
        passes = (some == 0) | (enters & (several == 0))
        enters = lax.dynamic_index_in_dim(enters[::order], lax.axis_index(self.axis), keepdims=False)
        return Segments(enters, passes[::order])


@partial(jax.jit, static_argnums=0)
def _run(static: Static, *arrays: jax.Array | None) -> Result:
    """The call on this device's slice, to which `cu_seqlens` are clipped."""
    call = static.call
    *inputs, initial, cu_seqlens = arrays
    inputs, cu_seqlens, _ = _varying.align((tuple(inputs), cu_seqlens, lax.axis_index(static.axis)))
    # initial states are the same along this axis, and vary over other axes as the inputs do
    others = _varying.axes(inputs[0]) - {static.axis}
    initial = None if initial is None else _varying.over(initial.astype(call.state_dtype), others)
    if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
        shape = (call.batch, call.tokens, call.heads, call.value_dim)
        return _varying.like(jnp.zeros(shape, call.dtype), inputs[0]), _initial_or_zeros(call, initial, others)
    return _differentiable.call(OP, static, (inputs, cu_seqlens, initial))


def _initial_or_zeros(call: Any, initial: jax.Array | None, axes: frozenset[str]) -> jax.Array:
    if initial is not None:
        return initial
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.over(jnp.zeros(shape, call.state_dtype), axes)


def _forward_with_residuals(static: Static, operands: Any) -> tuple[Result, Any]:
    """Output and final states; and residuals: start states, those of the exchange, and those of each implementation."""
    call, (inputs, cu_seqlens, initial) = static.call, operands
    initial = _initial_or_zeros(call, initial, _varying.axes(inputs[0]) - {static.axis})

    def run(implementation: Implementation, inputs: Any, cu_seqlens: jax.Array | None, initial: jax.Array) -> Any:
        carry, transition, added = static.recurrence.begin(implementation, call, inputs, cu_seqlens)
        segments = static.segments(cu_seqlens)
        final, start, exchanged = static.exchange(call.reverse).forward(initial, transition, added, segments.passes)
        start = segments.entering(start)
        output, residuals = _phases.phases_of(implementation, call).finish(call, inputs, cu_seqlens, carry, start)
        return (output, final, start, (exchanged, segments)), residuals

    branches = {device: partial(run, each) for device, each in static.chosen}
    (output, final, start, exchanged), residuals = _by_platform(branches, inputs, cu_seqlens, initial)
    return (output, final), (start, exchanged, residuals)


def _forward(static: Static, operands: Any) -> Result:
    return _forward_with_residuals(static, operands)[0]


def _backward(static: Static, operands: Any, residuals: Any, cotangents: Any, wanted: Any) -> tuple[Any, None, Any]:
    """The cotangents of the inputs and of the initial states."""
    call, (inputs, cu_seqlens, initial), (d_output, d_final) = static.call, operands, cotangents
    start, exchanged, residuals = residuals
    if d_output is None:
        shape = (call.batch, call.tokens, call.heads, call.value_dim)
        d_output = _varying.like(jnp.zeros(shape, call.dtype), inputs[0])
    d_final = _initial_or_zeros(call, d_final, _varying.axes(inputs[0]) - {static.axis})
    exchange = static.exchange(not call.reverse)
    if not exchange.tracked:
        # JAX takes the final states of the devices for different results, each with a cotangent
        d_final = lax.psum(d_final, static.axis)

    def run(
        number: int,
        implementation: Implementation,
        arrays: Any,
        residuals: Any,
        d_output: jax.Array,
        d_final: jax.Array,
    ) -> Any:
        phases, (inputs, cu_seqlens, start, (exchanged, segments)) = _phases.phases_of(implementation, call), arrays
        common = call, inputs, cu_seqlens, start, residuals[number]
        carry, d_start = phases.begin_back(*common, d_output)
        d_initial, d_end = exchange.backward(d_final, exchanged, segments.entering(d_start), segments.passes)
        return (phases.finish_back(*common, carry, (d_output, d_end)), d_initial), ()

    branches = {device: partial(run, i, each) for i, (device, each) in enumerate(static.chosen)}
    arrays = inputs, cu_seqlens, start, exchanged
    (d_inputs, d_initial), _ = _by_platform(branches, arrays, residuals, d_output, d_final)
    if not exchange.tracked:
        # JAX takes the initial states of the devices for different inputs, and sums their cotangents
        d_initial = jnp.where(lax.axis_index(static.axis) == 0, d_initial, 0)
    return d_inputs, None, None if initial is None else d_initial


def _reference(static: Static, operands: Any) -> Result:
    """`_forward` by the implementation in plain JAX."""
    plain = replace(static, chosen=(("default", static.recurrence.implementations[-1]),))
    return _forward(plain, operands)


def _tangent(static: Static, operands: Any, residuals: Any, tangents: Any) -> tuple[Result, Result]:
    if not static.plain:
        warn_of_tangents("tangents of a recurrence whose tokens are sharded")
    return by_jvp(_reference)(static, operands, residuals, tangents)


OP = Op(_forward, _reference, _forward_with_residuals, _backward, _tangent, splits=False)


def _by_platform(branches: Mapping[str, Callable[..., Any]], *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    """Runs the branch of the platform lowered for; branches return `(common, residuals)`.

    `common` has the same structure in all branches, `residuals` do not: a tuple of the residuals of all branches is
    returned, with zeros for branches not taken. JAX would differentiate such a choice by a conditional, which XLA does
    not simplify; so each pass makes the choice itself, and no choice is differentiated.
    """
    if len(branches) == 1:
        common, residuals = next(iter(branches.values()))(*arrays)
        return common, (residuals,)
    by_branch = [jax.eval_shape(branch, *arrays)[1] for branch in branches.values()]
    shapes = [jax.tree.leaves(each) for each in by_branch]

    def padded_branch(number: int, branch: Callable[..., Any], *arrays: Any) -> Any:
        common, residuals = branch(*arrays)
        mine = jax.tree.leaves(residuals)
        return common, [mine if i == number else [*map(_zeros, each)] for i, each in enumerate(shapes)]

    padded = {device: partial(padded_branch, i, branch) for i, (device, branch) in enumerate(branches.items())}
    common, leaves = lax.platform_dependent(*arrays, **padded)
    trees = (jax.tree.unflatten(jax.tree.structure(one), each) for one, each in zip(by_branch, leaves, strict=True))
    return common, tuple(trees)


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _varying.over(jnp.zeros(like.shape, like.dtype), like.manual_axis_type.varying)
