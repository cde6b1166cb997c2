"""A recurrence with its tokens spread over a mesh axis.

What a slice of the tokens does to a state is to keep some of it and to add a state. Each device finds this effect for
its slice; the effects, whose size does not depend on the number of tokens, are gathered in one collective, and each
device composes those before its own into the state that its slice starts from.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel import _checks, _sharding
from ejkernel.kernels import _varying

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
        run: The op on one device.
        effect: What the tokens at hand do to states, in one array, so that one collective carries it: `[N, H, …]`.
        parts: An effect as what keeps of a state and what is added to it, `[N, H, K, V]`.
        keep: What is kept of a state.
    """

    per_token: tuple[str, ...]
    check: Callable[[Arrays], Checked]
    run: Callable[..., Result]
    effect: Callable[[Arrays, Arrays], jax.Array]
    parts: Callable[[jax.Array], tuple[Any, jax.Array]]
    keep: Callable[[Any, jax.Array], jax.Array]


def spread(
    recurrence: Recurrence, arrays: Arrays, options: Arrays, axis: str, mesh: jax.sharding.Mesh | None
) -> Result:
    """The call of `recurrence` on these arrays, those that are `None` left out: on slices, or with `mesh` on all."""
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if isinstance(options["softmax_scale"], jax.Array | np.ndarray):
        arrays["softmax_scale"] = options["softmax_scale"]
        options = {name: option for name, option in options.items() if name != "softmax_scale"}
    if mesh is None:
        return _on_slice(arrays, recurrence, options, axis, _checks.bound_axis(axis))
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
        partial(_on_slice, recurrence=recurrence, options=options, axis=axis, devices=devices),
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


def _on_slice(arrays: Arrays, recurrence: Recurrence, options: Arrays, axis: str, devices: int) -> Result:
    """The call on this device's slice of the tokens."""
    local, packed = dict(arrays), "cu_seqlens" in arrays
    if packed:
        _checks.heads(*map(local.get, ("query", "key", "value")))
        tokens = local["query"].shape[-3]
        borders = _checks.cu_seqlens(local["cu_seqlens"], devices * tokens)
        local["cu_seqlens"] = jnp.clip(borders - (lax.axis_index(axis) * tokens).astype(borders.dtype), 0, tokens)
    recurrence.check(local)
    initial = local.pop("initial_state", None)
    results = _result_specs(_spec(local), packed)
    run = partial(_composed, recurrence=recurrence, options=options, axis=axis)
    return _sharding.partitioned(run, results, local, initial)


def _composed(local: Arrays, initial: jax.Array | None, recurrence: Recurrence, options: Arrays, axis: str) -> Result:
    """The call on this device's slice, with borders of sequences as they lie in it."""
    me = lax.axis_index(axis)
    effect = recurrence.effect(local, options)
    # without a record of what varies, the gradient of an invariant gather would leave out other devices' parts
    tracked = axis in _varying.axes(me)
    effects = lax.all_gather(effect, axis, to="invarying" if tracked else "varying")  # [devices, …]

    def compose(state: jax.Array, effect: jax.Array) -> tuple[jax.Array, jax.Array]:
        keeping, added = recurrence.parts(effect)
        return recurrence.keep(keeping, state) + added, state

    added = recurrence.parts(effect)[1]
    start = jnp.zeros((), added.dtype) if initial is None else initial.astype(added.dtype)
    start, effects = _varying.align((jnp.broadcast_to(start, added.shape), effects))
    final, before = lax.scan(compose, start, effects, reverse=options["reverse"])
    output, _ = recurrence.run(**local, **options, initial_state=lax.dynamic_index_in_dim(before, me, keepdims=False))
    return output, final
