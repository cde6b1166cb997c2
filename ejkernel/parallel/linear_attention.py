"""The gated linear recurrence with its tokens spread over a mesh axis.

Each device finds what its slice of the tokens does to a state: multiply it by a decay, add a state. These pairs, whose
size does not depend on the number of tokens, are gathered in one collective, and each device composes the pairs
before its own into the state that its slice starts from. A decay is only ever multiplied by, never divided by.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ejkernel import _checks, _sharding
from ejkernel.kernels import _varying
from ejkernel.linear_attention import lightning_decay, retention_decay
from ejkernel.linear_attention import recurrent as on_one_device
from ejkernel.xla_utils.utils import prepare_lens, prepare_sequence_ids

Result = tuple[jax.Array, jax.Array]
PER_TOKEN = ("query", "key", "value", "g", "gk", "gv")


def recurrent(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    gk: jax.Array | None = None,
    gv: jax.Array | None = None,
    softmax_scale: float | jax.Array | None = None,
    initial_state: jax.Array | None = None,
    reverse: bool = False,
    cu_seqlens: jax.Array | None = None,
    *,
    axis_name: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> Result:
    """`ejkernel.recurrent` with the tokens sharded over a mesh axis, in one collective forward and one backward.

    Without `mesh` it is called inside the caller's own `shard_map`: arrays with a token dimension are this device's
    slice of it, everything else (`g_gamma`, `initial_state`, `cu_seqlens`) is the same on all devices, and so is the
    final state that comes back. With `mesh` it takes and returns global arrays and does the `shard_map` itself; other
    axes of the mesh stay as JAX has them.

    Args:
        axis_name: The mesh axis that the tokens are sharded over, in order; `T` is a multiple of its size.
        mesh: The mesh, or `None` inside a `shard_map`.

    The other arguments are `ejkernel.recurrent`'s, `cu_seqlens` counting the tokens of the whole stream: packed
    sequences may straddle devices.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ejkernel import parallel
        >>> mesh = jax.make_mesh((1,), ("time",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> query = key = value = jnp.ones((2, 100, 8, 64))
        >>> output, state = parallel.recurrent(query, key, value, axis_name="time", mesh=mesh)
        >>> output.shape, state.shape
        ((2, 100, 8, 64), (2, 8, 64, 64))
    """
    arrays: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "g": g,
        "gk": gk,
        "gv": gv,
        "g_gamma": g_gamma,
        "initial_state": initial_state,
        "cu_seqlens": cu_seqlens,
    }
    arrays = {name: x for name, x in arrays.items() if x is not None}
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "reverse": reverse, "platform": platform}
    if isinstance(softmax_scale, jax.Array | np.ndarray):
        arrays["softmax_scale"] = options.pop("softmax_scale")
    if mesh is None:
        return _on_slice(arrays, options, axis_name, _checks.bound_axis(axis_name))
    devices = _checks.mesh_axis(mesh, axis_name)
    # here, since what a shard_map is given must have the ranks that its specs say
    checked = _checks.linear_attention(query, key, value, g, g_gamma, gk, gv, initial_state, cu_seqlens)
    unbatched = checked.unbatched
    _checks.divisible_time(checked.query.shape[1], axis_name, devices)
    if checked.cu_seqlens is not None:
        arrays["cu_seqlens"] = checked.cu_seqlens
    sliced = jax.P(axis_name) if unbatched else jax.P(None, axis_name)
    specs = {name: sliced if name in PER_TOKEN else jax.P() for name in arrays}
    run = jax.shard_map(
        partial(_on_slice, options=options, axis=axis_name, devices=devices),
        mesh=_sharding.as_auto(mesh),
        in_specs=(specs,),
        out_specs=(sliced, jax.P()),
        axis_names={axis_name},
    )
    spec = _sharding.spec_of(_sharding.widest(query, key, value))
    results = _result_specs(_sharding.over(axis_name, spec, -3), cu_seqlens is not None)
    return _sharding.partitioned(run, results, arrays, mesh=mesh)


def recurrent_gla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    **options: Any,
) -> Result:
    """`ejkernel.recurrent_gla` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g, g_gamma, **options)


def simple_gla(query: jax.Array, key: jax.Array, value: jax.Array, g: jax.Array, **options: Any) -> Result:
    """`ejkernel.simple_gla` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, _checks.gate_per_head(g, query, key, value), **options)


def retention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
    """`ejkernel.retention` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g_gamma=retention_decay(query, key, value), **options)


def lightning_attn(
    query: jax.Array, key: jax.Array, value: jax.Array, layer_idx: ArrayLike, num_layers: int, **options: Any
) -> Result:
    """`ejkernel.lightning_attn` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, g_gamma=lightning_decay(query, key, value, layer_idx, num_layers), **options)


def linear_attention(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> Result:
    """`ejkernel.linear_attention` with the tokens sharded over a mesh axis; `options` are those of `recurrent` here."""
    return recurrent(query, key, value, **options)


def _result_specs(spec: jax.P, packed: bool) -> tuple[jax.P, jax.P]:
    """How output and final state are sharded where shardings are explicit, from that of an array with all heads."""
    *rows, tokens, heads, _ = spec
    return jax.P(*rows, tokens, heads, None), jax.P(None if packed else rows[0], heads, None, None)


def _on_slice(arrays: dict[str, Any], options: dict[str, Any], axis: str, devices: int) -> Result:
    """The call on this device's slice of the tokens, arrays by name."""
    initial = arrays.get("initial_state")
    local = {name: x for name, x in arrays.items() if name != "initial_state"}
    if "cu_seqlens" in local:
        _checks.heads(*map(local.get, PER_TOKEN[:3]))
        tokens = local["query"].shape[-3]
        borders = _checks.cu_seqlens(local["cu_seqlens"], devices * tokens)
        local["cu_seqlens"] = jnp.clip(borders - (lax.axis_index(axis) * tokens).astype(borders.dtype), 0, tokens)
    query, key, value, g, gk, gv = map(local.get, PER_TOKEN)
    _checks.linear_attention(query, key, value, g, local.get("g_gamma"), gk, gv, initial, local.get("cu_seqlens"))
    results = _result_specs(
        _sharding.spec_of(_sharding.widest(*map(local.__getitem__, PER_TOKEN[:3]))), "cu_seqlens" in local
    )
    return _sharding.partitioned(partial(_composed, options=options, axis=axis), results, local, initial)


def _composed(local: dict[str, Any], initial: jax.Array | None, options: dict[str, Any], axis: str) -> Result:
    """The call on this device's slice, with borders of sequences as they lie in it."""
    me = lax.axis_index(axis)
    _, added = on_one_device(**local, **options)  # [N, H, K, V]
    # without a record of what varies, the gradient of an invariant gather would leave out other devices' parts
    tracked = axis in _varying.axes(me)
    packed = _packed(*_total_decay(local), added)
    effects = lax.all_gather(packed, axis, to="invarying" if tracked else "varying")  # [devices, …]

    def compose(state: jax.Array, effect: jax.Array) -> tuple[jax.Array, jax.Array]:
        decay, value_decay, added = _unpacked(effect)
        return decay * value_decay * state + added, state

    start = jnp.zeros((), added.dtype) if initial is None else initial.astype(added.dtype)
    start, effects = _varying.align((jnp.broadcast_to(start, added.shape), effects))
    final, before = lax.scan(compose, start, effects, reverse=options["reverse"])
    output, _ = on_one_device(**local, **options, initial_state=lax.dynamic_index_in_dim(before, me, keepdims=False))
    return output, final


def _total_decay(arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """What a state is multiplied by over each sequence's tokens here: `[N, H, 1 or K, 1]` and `[N, H, 1, 1 or V]`."""
    unbatched, borders = arrays["query"].ndim == 3, arrays.get("cu_seqlens")
    tokens, heads = arrays["query"].shape[-3], _checks.heads(arrays["query"], arrays["key"], arrays["value"])
    dtype = jnp.float64 if arrays["query"].dtype == jnp.float64 else jnp.float32

    def over_tokens(name: str) -> jax.Array:
        gate = arrays[name].astype(dtype)
        if borders is None:
            return gate.sum(1)
        gate = gate if unbatched else gate[0]
        # by selecting: a sum of products with 0 would carry a NaN from one sequence to all
        sequence = prepare_sequence_ids(borders, total_tokens=tokens)
        return jax.ops.segment_sum(gate, sequence, borders.shape[0])[:-1]

    total = jnp.zeros((1, heads, 1), dtype)
    for name in ("g", "gk"):
        total = total + over_tokens(name) if name in arrays else total
    if "g_gamma" in arrays:
        lengths = jnp.full((1, 1), tokens, dtype) if borders is None else prepare_lens(borders)[:, None].astype(dtype)
        gamma = arrays["g_gamma"].astype(dtype).reshape(-1, heads)
        # no tokens, no decay: 0 · -inf would be NaN
        total = total + jnp.where(lengths > 0, gamma * lengths, 0)[..., None]
    value_total = over_tokens("gv") if "gv" in arrays else jnp.zeros((1, heads, 1), dtype)
    return jnp.exp(total)[..., :, None], jnp.exp(value_total)[..., None, :]


def _packed(decay: jax.Array, value_decay: jax.Array, added: jax.Array) -> jax.Array:
    """Both decays and the added state as one array, so that one collective carries them: `[N, H, K + 1, V + 1]`."""
    N, H, K, V = added.shape
    column = jnp.broadcast_to(decay, (N, H, K, 1))
    row = jnp.broadcast_to(value_decay, (N, H, 1, V))
    return jnp.block([[added, column], [row, jnp.ones((N, H, 1, 1), added.dtype)]])


def _unpacked(effect: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return effect[..., :-1, -1:], effect[..., -1:, :-1], effect[..., :-1, :-1]
