"""A recurrence with its tokens spread over a mesh axis.

What a slice of the tokens does to a state is to keep some of it and to add a state. Each device finds this effect for
its slice; the effects, whose size does not depend on the number of tokens, are exchanged (`_exchange`), and those
before its own make the state that its slice starts from. On the way back the cotangents of states travel likewise. With
the right state at its start and the right cotangent at its end, a slice's work is that of one device alone: so the rest
is the op's own, in two phases (`kernels._phases`) with the exchange between them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import _checks, _sharding
from ejkernel._dispatch import Implementation, resolve
from ejkernel.kernels import _phases, _varying
from ejkernel.parallel._exchange import Algebra, Exchange

Arrays = dict[str, Any]
Result = tuple[jax.Array, jax.Array]


class Checked(Protocol):
    """What is known of a call once its arrays are checked."""

    @property
    def query(self) -> jax.Array: ...
    @property
    def cu_seqlens(self) -> jax.Array | None: ...
    @property
    def unbatched(self) -> bool: ...


@dataclass(frozen=True)
class Recurrence:
    """A recurrence, arrays by name.

    Attributes:
        per_token: Which arrays have tokens.
        check: Raises what does not fit together.
        bind: From what was checked and the options, the static facts of a call and the arrays beside them.
        implementations: What can run the call.
        begin: `begin(implementation, call, inputs, cu_seqlens)`: as `Phases.begin`, with the effect of the tokens on
            states in place of the final states: what keeps of them and what is added `[N, H, K, V]`.
        algebra: Of effects.
    """

    per_token: tuple[str, ...]
    check: Callable[[Arrays], Checked]
    bind: Callable[..., tuple[Any, tuple[jax.Array | None, ...]]]
    implementations: tuple[Implementation, ...]
    begin: Callable[..., tuple[Any, Any, jax.Array]]
    algebra: Algebra


def spread(
    recurrence: Recurrence,
    arrays: Arrays,
    options: Arrays,
    axis: str,
    mesh: jax.sharding.Mesh | None,
    platform: str | None,
) -> Result:
    """The call of `recurrence` on these arrays, those that are `None` left out: on slices, or with `mesh` on all."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if isinstance(options["softmax_scale"], jax.Array | np.ndarray):
        arrays["softmax_scale"] = options["softmax_scale"]
        options = {name: option for name, option in options.items() if name != "softmax_scale"}
    over = partial(_on_slice, recurrence=recurrence, options=options, axis=axis, platform=platform)
    if mesh is None:
        return over(arrays, devices=_checks.bound_axis(axis))
    devices = _checks.mesh_axis(mesh, axis)
    # here, since what a shard_map is given must have the ranks that its specs say
    checked = recurrence.check(arrays)
    _checks.divisible_time(checked.query.shape[1], axis, devices)
    packed = checked.cu_seqlens is not None
    if packed:
        arrays["cu_seqlens"] = checked.cu_seqlens
    sliced = jax.P(axis) if checked.unbatched else jax.P(None, axis)
    specs = {name: sliced if name in recurrence.per_token else jax.P() for name in arrays}
    run = jax.shard_map(
        partial(over, devices=devices),
        mesh=_sharding.as_auto(mesh),
        in_specs=(specs,),
        out_specs=(sliced, jax.P()),
        axis_names={axis},
    )
    results = _result_specs(_sharding.over(axis, _spec(arrays), -3), packed)
    return _sharding.partitioned(run, results, arrays, mesh=mesh)


def _spec(arrays: Arrays) -> jax.P:
    """How an array with as many heads as any of the three is sharded."""
    return _sharding.spec_of(_sharding.widest(*map(arrays.__getitem__, ("query", "key", "value"))))


def _result_specs(spec: jax.P, packed: bool) -> tuple[jax.P, jax.P]:
    """How output and final state are sharded where shardings are explicit, from that of an array with all heads."""
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
        chosen = resolve(recurrence.implementations, call, *operands, platform=platform)
        output, final = _run(_Spread(recurrence, chosen, axis, devices), call, *operands)
        return (output[0] if checked.unbatched else output), final

    return _sharding.partitioned(run, results, local)


@dataclass(frozen=True)
class _Spread:
    """What is known of how a call is spread: by what platforms serve it, and over which axis."""

    recurrence: Recurrence
    chosen: tuple[tuple[str, Implementation], ...]
    axis: str
    devices: int

    @property
    def plain(self) -> bool:
        """Whether no kernels are chosen, which JAX could not differentiate."""
        return all(each == self.recurrence.implementations[-1] for _, each in self.chosen)

    def exchange(self, reverse: bool) -> Exchange:
        return Exchange(self.recurrence.algebra, self.axis, self.devices, reverse)


@partial(jax.jit, static_argnums=(0, 1))
def _run(spread: _Spread, call: Any, *arrays: jax.Array | None) -> Result:
    """The call on this device's slice, with borders of sequences as they lie in it."""
    *inputs, initial, cu_seqlens = arrays
    inputs, cu_seqlens, _ = _varying.align((tuple(inputs), cu_seqlens, lax.axis_index(spread.axis)))
    # what is the same on all devices of the axis varies over other axes as the rest does
    others = _varying.axes(inputs[0]) - {spread.axis}
    initial = None if initial is None else _varying.over(initial.astype(call.state_dtype), others)
    if 0 in (call.batch, call.tokens, call.heads, call.sequences, call.key_dim, call.value_dim):
        shape = (call.batch, call.tokens, call.heads, call.value_dim)
        return _varying.like(jnp.zeros(shape, call.dtype), inputs[0]), _first(call, initial, others)
    return _composed(spread, call, False, inputs, cu_seqlens, initial)[0]


def _first(call: Any, initial: jax.Array | None, axes: frozenset[str]) -> jax.Array:
    """The states that sequences start from."""
    if initial is not None:
        return initial
    shape = (call.sequences, call.heads, call.key_dim, call.value_dim)
    return _varying.over(jnp.zeros(shape, call.state_dtype), axes)


def _phased(
    spread: _Spread, call: Any, keep: bool, inputs: Any, cu_seqlens: jax.Array | None, initial: jax.Array | None
) -> tuple[Result, Any]:
    """Output and final states and, to `keep`, what the way back needs of what was found."""
    first = _first(call, initial, _varying.axes(inputs[0]) - {spread.axis})

    def run(implementation: Implementation, inputs: Any, cu_seqlens: jax.Array | None, first: jax.Array) -> Any:
        memory, keeping, added = spread.recurrence.begin(implementation, call, inputs, cu_seqlens)
        final, start, keeping = spread.exchange(call.reverse)(first, keeping, added)
        output, kept = _phases.phases_of(implementation).finish(call, inputs, cu_seqlens, memory, start)
        return (output, final, start, keeping), kept

    branches = {device: partial(run, each) for device, each in spread.chosen}
    (output, final, start, keeping), kept = _by_platform(branches, inputs, cu_seqlens, first)
    return (output, final), (start, keeping, kept) if keep else None


def _phased_back(spread: _Spread, call: Any, residuals: Any, cotangents: Result) -> tuple[Any, Any]:
    """Those of the inputs and of the initial states."""
    inputs, cu_seqlens, initial, start, keeping, kept = residuals
    d_output, d_final = cotangents
    exchange = spread.exchange(not call.reverse)
    if not exchange.tracked:
        # then each device's final state counts as its own
        d_final = lax.psum(d_final, spread.axis)

    def run(
        number: int, implementation: Implementation, arrays: Any, kept: Any, d_output: jax.Array, d_final: jax.Array
    ) -> Any:
        phases, (inputs, cu_seqlens, start, keeping) = _phases.phases_of(implementation), arrays
        given = call, inputs, cu_seqlens, start, kept[number]
        memory, d_start = phases.begin_back(*given, d_output)
        d_initial, d_end = exchange.mirrored(d_final, keeping, d_start)
        return (phases.finish_back(*given, memory, (d_output, d_end)), d_initial), ()

    branches = {device: partial(run, i, each) for i, (device, each) in enumerate(spread.chosen)}
    (d_inputs, d_initial), _ = _by_platform(branches, (inputs, cu_seqlens, start, keeping), kept, d_output, d_final)
    if not exchange.tracked:
        # and so does each one's initial state
        d_initial = jnp.where(lax.axis_index(spread.axis) == 0, d_initial, 0)
    return d_inputs, None if initial is None else d_initial


_composed: Any = jax.custom_vjp(_phased, nondiff_argnums=(0, 1, 2))
_cotangents: Any = jax.custom_vjp(_phased_back, nondiff_argnums=(0, 1))


def _forward(spread: _Spread, call: Any, keep: bool, *arrays: Any) -> tuple[Any, Any]:
    # what JAX can differentiate as it stands; of kernels, calling the differentiable function again has its rule
    run = _phased if spread.plain else _composed
    results, found = run(spread, call, True, *arrays)
    return (results, found if keep else None), (*arrays, *found)


def _backward(spread: _Spread, call: Any, keep: bool, residuals: Any, cotangents: Any) -> tuple[Any, None, Any]:
    del keep
    run = _phased_back if spread.plain else _cotangents
    d_inputs, d_initial = run(spread, call, residuals, cotangents[0])
    return d_inputs, None, d_initial


def _cotangents_forward(spread: _Spread, call: Any, residuals: Any, cotangents: Result) -> tuple[Any, Any]:
    return _cotangents(spread, call, residuals, cotangents), (*residuals[:3], cotangents)


def _cotangents_backward(spread: _Spread, call: Any, saved: Any, cotangents: Any) -> tuple[Any, Result]:
    """Second derivatives are rare, so they go through the implementation that is plain JAX."""
    inputs, cu_seqlens, initial, d_results = saved
    plain = replace(spread, chosen=(("default", spread.recurrence.implementations[-1]),))

    def gradients(inputs: Any, initial: Any, d_results: Result) -> Any:
        def run(inputs: Any, initial: Any) -> Result:
            return _composed(plain, call, False, inputs, cu_seqlens, initial)[0]

        return jax.vjp(run, inputs, initial)[1](d_results)

    d_inputs, d_initial, dd_results = jax.vjp(gradients, inputs, initial, d_results)[1](cotangents)
    # all that was kept is of these
    return (d_inputs, None, d_initial, None, None, None), dd_results


_composed.defvjp(_forward, _backward)
_cotangents.defvjp(_cotangents_forward, _cotangents_backward)


def _by_platform(branches: Mapping[str, Callable[..., Any]], *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    """What the branch of the platform gives that is lowered for: what all give, and what each gives on its own.

    The latter are zeros of the others. A choice that is differentiated would be made again on the way back, by a
    conditional that XLA does not look through; so it is made once in each rule.
    """
    if len(branches) == 1:
        common, own = next(iter(branches.values()))(*arrays)
        return common, (own,)
    owns = [jax.eval_shape(branch, *arrays)[1] for branch in branches.values()]
    shapes = [jax.tree.leaves(own) for own in owns]

    def alike(number: int, branch: Callable[..., Any], *arrays: Any) -> Any:
        common, own = branch(*arrays)
        return common, [jax.tree.leaves(own) if i == number else [*map(_zeros, each)] for i, each in enumerate(shapes)]

    filled = {device: partial(alike, i, branch) for i, (device, branch) in enumerate(branches.items())}
    common, found = lax.platform_dependent(*arrays, **filled)
    return common, tuple(
        jax.tree.unflatten(jax.tree.structure(own), each) for own, each in zip(owns, found, strict=True)
    )


def _zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    return _varying.over(jnp.zeros(like.shape, like.dtype), like.manual_axis_type.varying)
