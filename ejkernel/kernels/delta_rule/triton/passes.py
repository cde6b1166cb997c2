"""A call's forward and backward, as passes over its tokens."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.triton import step as token_by_token
from ejkernel.kernels.chunks.triton.launching import has_few_tokens
from ejkernel.kernels.chunks.triton.pools import Slots
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, Plan, device
from ejkernel.kernels.delta_rule.triton.systems import Folded, Systems, solve
from ejkernel.xla_utils.utils import cdiv

# The gradients of chunks with bounded gates: key dims that a program takes at once, and the programs that fill a GPU.
BOUNDED = Tile(32)
FULL_GRID = 512


class Inputs(NamedTuple):
    """The arrays of a call, as `Call` lists them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None


class Residuals(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    u: jax.Array  # what tokens write, U [B, T, H, V]
    u_roundoff: jax.Array | None  # what rounding took off U, filled where keys coincide [B, T, H, V]
    systems: Systems
    folded: Folded | None  # with one gate a key dim
    states: jax.Array  # at the chunks' starts, transposed [chunks, H, V, K]
    transitions: jax.Array | None  # of time segments: the matrices that states are multiplied by [segments, H, K, K]


def forward(keep: bool, call: Call, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Output, final states and, where `keep`, residuals; the token-by-token kernel leaves none."""
    launcher = Launcher.of(call, plan, x.query, x.key, x.value, x.cu_seqlens)
    if has_few_tokens(call):
        return (*step(launcher, x), None)
    return _walk(launcher, keep, x, _start_states(call, x.cu_seqlens, x.log_decay, x.initial_state))


def _start_states(
    call: Call, cu_seqlens: jax.Array | None, log_decay: jax.Array | None, state: jax.Array | None
) -> jax.Array | None:
    """The initial states after the gates of their sequences' first tokens."""
    return None if state is None else entering_states(call, state, (log_decay, None), cu_seqlens)


def _walk(
    launcher: Launcher, keep: bool, x: Inputs, start: jax.Array | None
) -> tuple[jax.Array, jax.Array, Residuals | None]:
    """Solves the chunks' systems, and carries the states through the chunks."""
    call, config, dtype = launcher.call, launcher.config, launcher.call.dtype
    systems, folded = solve(launcher, keep, x.query, x.key, x.beta, x.log_decay)
    inputs = {
        **folded._asdict(),
        "value": x.value,
        "solved_scores": systems.solved_scores,
        "inverse": systems.inverse,
        "row_scalars": systems.row_scalars,
        "weak": systems.weak,
        "any_weak": systems.any_weak,
        "query": x.query,
        "key": x.key,
    }
    where_keys_coincide: dict[str, Any] = {
        "changed": {"row_squares": systems.row_squares},
        "more": {
            "u_roundoff": launcher.rows(call.value_dim, dtype) if keep else None,
            "system_roundoff": launcher.kept(config.chunk, dtype=dtype),
        },
    }
    kernel, time, transitions = device("walk").forward, "whole", None
    if launcher.plan.segmented(call):
        local = launcher.walk(
            kernel,
            inputs | {"start": start},
            {
                "output": None,
                "u": None,
                "states": launcher.segments(call.key_dim),
                "final": launcher.segments(call.value_dim),
            },
            tile=config.local,
            further=call.key_dim,
            start=start is not None,
            time="local",
            **where_keys_coincide | {"more": where_keys_coincide["more"] | {"u_roundoff": None}},
        )
        time, transitions = "segments", local.states
        start = _scan_segments(launcher, local.final, transitions, start, back=False)
    walked = launcher.walk(
        kernel,
        inputs | {"start": start},
        {
            "output": launcher.rows(call.value_dim, dtype),
            "u": launcher.rows(call.value_dim, dtype) if keep else None,
            "states": launcher.chunked(call.value_dim, call.key_dim, dtype=dtype) if keep else None,
            "final": launcher.states(),
        },
        tile=config.forward if keep or call.decay == "key" else config.forward_only,
        start=start is not None,
        residuals=keep,
        time=time,
        **where_keys_coincide,
    )
    if not keep:
        return walked.output, walked.final, None
    if not launcher.plan.cuts_back:
        transitions = None
    # the backward needs the transposed inverse alone
    systems = systems._replace(inverse=None, row_squares=walked.row_squares, system_roundoff=walked.system_roundoff)
    folded_keys = folded if call.decay == "key" else None
    residuals = Residuals(walked.u, walked.u_roundoff, systems, folded_keys, walked.states, transitions)
    return walked.output, walked.final, residuals


def _scan_segments(
    launcher: Launcher, local_states: jax.Array, transitions: jax.Array, start: jax.Array | None, back: bool
) -> jax.Array:
    """The states, or cotangents, that time segments start from, `[segments, H, V, K]`; `start` has the sequences'."""
    call, block = launcher.call, 16
    (start_states,) = launcher.launch(
        device("segments").scan_segments,
        {"local_states": local_states, "transitions": transitions, "start": start},
        {"start_states": launcher.segments(call.value_dim)},
        programs=call.sequences * call.heads * cdiv(call.value_dim, block),
        tile=Tile(block),
        key_block=padded(call.key_dim),
        part_block=min(32, padded(call.key_dim)),
        value_block=block,
        back=back,
        start=start is not None,
    )
    return start_states


def backward(
    wanted: Inputs,
    call: Call,
    plan: Plan,
    x: Inputs,
    residuals: Residuals | None,
    d_output: jax.Array,
    d_final: jax.Array | None,
) -> Inputs:
    """Cotangents of the inputs, all of them, whichever are wanted."""
    if not plan.cuts_back:
        plan = replace(plan, segment=call.tokens)
    launcher = Launcher.of(call, plan, x.query, x.key, x.value, x.cu_seqlens)
    start, start_vjp = None, None
    if x.initial_state is not None:
        start, start_vjp = jax.vjp(lambda *y: _start_states(call, x.cu_seqlens, *y), x.log_decay, x.initial_state)
    if residuals is None:
        residuals = _walk(launcher, True, x, start)[2]
        assert residuals is not None
    walked = _walk_back(launcher, x, residuals, d_output, d_final, start_vjp is not None)
    systems, folded = residuals.systems, residuals.folded
    inputs = {
        "query": x.query,
        "key": x.key,
        "beta": x.beta,
        "gate": x.log_decay,
        "d_output": d_output,
        "u": residuals.u,
        "u_roundoff": residuals.u_roundoff,
        "d_r": walked.d_r,
        "states": residuals.states,
        "d_states": walked.d_states,
        "row_squares": systems.row_squares,
    }
    if folded is not None:
        gradients = _key_gradients(launcher, inputs | {"strength": folded.strength})
    else:
        gradients = _gradients(launcher, inputs | {"row_scalars": systems.row_scalars, "weak": systems.weak})
    d_log_decay = d_state = None
    if x.log_decay is not None:
        d_gate = gradients.d_gate
        d_log_decay = (
            _sum_parts(d_gate, x.log_decay) if folded is not None else d_gate.sum(-1).astype(x.log_decay.dtype)
        )
    if start_vjp is not None:
        d_first_gate, d_state = start_vjp(walked.d_start)
        d_log_decay = None if d_log_decay is None else d_log_decay + d_first_gate
    return Inputs(
        _sum_parts(gradients.d_query, x.query),
        _sum_parts(gradients.d_key, x.key),
        _sum_parts(gradients.d_value[..., None, :], x.value),
        gradients.d_beta.sum(-1).astype(x.beta.dtype),
        d_log_decay,
        d_state,
        None,
    )


def _walk_back(
    launcher: Launcher,
    x: Inputs,
    residuals: Residuals,
    d_output: jax.Array,
    d_final: jax.Array | None,
    with_start: bool,
) -> Any:
    """dR, the cotangents of the states at the chunks' ends and, where `with_start`, of the states at the start."""
    call, config, systems = launcher.call, launcher.config, residuals.systems
    inputs = {
        **(residuals.folded or Folded(x.query, x.key))._asdict(),
        "d_output": d_output,
        "solved_scores": systems.solved_scores,
        "inverse_transposed": systems.inverse_transposed,
        "row_scalars": systems.row_scalars,
        "weak": systems.weak,
        "any_weak": systems.any_weak,
        "row_squares": systems.row_squares,
        "system_roundoff": systems.system_roundoff,
    }
    kernel, time = device("walk").backward, "whole"
    if residuals.transitions is not None:
        local = launcher.walk(
            kernel,
            inputs | {"d_final": d_final},
            {"d_r": None, "d_states": None, "d_start": launcher.segments(call.value_dim)},
            tile=config.backward,
            start=d_final is not None,
            time="local",
        )
        time = "segments"
        d_final = _scan_segments(launcher, local.d_start, residuals.transitions, d_final, back=True)
    return launcher.walk(
        kernel,
        inputs | {"d_final": d_final},
        {
            "d_r": launcher.rows(call.value_dim, call.dtype),
            "d_states": launcher.chunked(call.value_dim, call.key_dim, dtype=call.dtype),
            "d_start": launcher.states() if with_start else None,
        },
        tile=config.backward,
        start=d_final is not None,
        last=with_start,
        time=time,
    )


def _arrays(outputs: Any) -> dict[str, jax.Array]:
    """A launch's outputs by name, without those that it does not have."""
    return {name: each for name, each in outputs._asdict().items() if each is not None}


def _gradients(launcher: Launcher, inputs: dict[str, Any]) -> Any:
    """Gradients of query, key, value, beta and log decay; all but the value's in parts `[B, T, H, parts, ·]`."""
    heads, options = launcher.call.heads, launcher.gradient_options()
    options["flags"] = padded(heads)
    outputs = {
        "d_query": launcher.parts(inputs["query"]),
        "d_key": launcher.parts(inputs["key"]),
        "d_value": launcher.values(),
        "d_beta": launcher.token_parts(),
        "d_gate": None if inputs["gate"] is None else launcher.token_parts(),
    }
    kernel = device("gradients").gradients
    gradients = launcher.launch(kernel, inputs, outputs, **options)
    if launcher.constants.keys_may_coincide:
        options |= {"programs": options["programs"] // heads, "in_place": _arrays(gradients), "keys_coincide": True}
        gradients = launcher.launch(kernel, inputs, outputs, **options)
    return gradients


def _key_gradients(launcher: Launcher, inputs: dict[str, Any]) -> Any:
    """`_gradients` with one gate a key dim; further launches take chunks whose gates are too strong for the first."""
    call, options = launcher.call, launcher.gradient_options()
    middle = inputs["strength"] is not None
    flags_per_head = 1 if middle else cdiv(call.key_dim, options["key_block"])
    options["flags"] = padded(call.heads * flags_per_head)
    flags = (launcher.kept if call.segmented else launcher.chunked)(flags_per_head, dtype=jnp.int32)
    decayed = {f"d_{name}": launcher.parts(inputs[name]) for name in ("query", "key", "gate")}
    others = {"d_value": launcher.values(), "d_beta": launcher.token_parts()}
    kernel = device("key_gradients").gradients_keyed
    outputs = {**decayed, **others, "flag": None if middle else flags}
    gradients = launcher.launch(kernel, inputs, outputs, **options)
    if not middle:
        inputs = inputs | {"strength": gradients.flag}
    per_chunk: dict[str, Any] = options | {"programs": options["programs"] // call.heads}
    before = {name: getattr(gradients, name) for name in decayed}
    strong = launcher.launch(kernel, inputs, decayed, strong=True, in_place=before, **per_chunk)
    gradients = gradients._replace(**strong._asdict())
    if middle and not launcher.constants.blackwell_safe:
        gradients = _bounded_gradients(launcher, inputs, options, gradients)
    if launcher.constants.keys_may_coincide:
        before, outputs = _arrays(gradients), {**decayed, **others}
        gradients = launcher.launch(kernel, inputs, outputs, keys_coincide=True, in_place=before, **per_chunk)
    return gradients


def _bounded_gradients(launcher: Launcher, inputs: dict[str, Any], options: dict[str, Any], gradients: Any) -> Any:
    """Fills the gradients of chunks with bounded gates into `gradients`."""
    before, heads = _arrays(gradients), launcher.call.heads
    chunks = options["programs"] // heads
    # as many heads a program as leave programs for all multiprocessors
    each = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or chunks * (heads // n) >= FULL_GRID))
    bounded = launcher.launch(
        device("bounded_gradients").gradients_bounded,
        inputs,
        {name: shape(*x.shape, dtype=x.dtype) for name, x in before.items()},
        in_place=before,
        **options | {"programs": chunks * (heads // each), "flags": padded(each), "tile": BOUNDED},
        part_block=min(BOUNDED.rows, padded(launcher.call.key_dim)),
        heads_per_program=each,
    )
    return gradients._replace(**bounded._asdict())


def _sum_parts(x: jax.Array, like: jax.Array) -> jax.Array:
    """Sums the parts `[B, T, H, parts, ·]` of a gradient of `like`, over parts and over heads that share one."""
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3).astype(like.dtype)


def pooled_launcher(call: Call, *inputs: Any) -> tuple[Launcher, Inputs]:
    """The launcher of a call with a pool, as `pools.Kernels` has it."""
    arrays: Any = *inputs, None, None
    x = Inputs(*arrays)
    launcher = Launcher.of(call, Plan.of(call), x.query, x.key, x.value, None)
    # whether keys coincide is found by the sequence, and would depend on where it was cut
    return replace(launcher, constants=replace(launcher.constants, keys_may_coincide=False)), x


def walk_prompts(launcher: Launcher, x: Inputs, slots: Slots) -> Any:
    """Output, pool and copies, by chunks, as `pools.Kernels` has it."""
    call, config, in_place = launcher.call, launcher.config, slots.in_place()
    systems, folded = solve(launcher, False, x.query, x.key, x.beta, x.log_decay)
    tile = config.forward if call.decay == "key" else config.forward_only
    block = min(tile.rows, padded(call.value_dim))
    return launcher.launch(
        device("prompts").walk_prompts,
        {
            **folded._asdict(),
            **{"value": x.value, "solved_scores": systems.solved_scores, "inverse": systems.inverse},
            **{"row_scalars": systems.row_scalars, **slots.inputs()},
        },
        {
            "output": launcher.rows(call.value_dim, call.dtype),
            **{name: shape(*each.shape, dtype=each.dtype) for name, each in in_place.items()},
        },
        programs=launcher.prompts * call.heads * cdiv(call.value_dim, block),
        tile=tile,
        in_place=in_place,
        key_block=padded(call.key_dim),
        value_block=block,
    )


def step(launcher: Launcher, x: Inputs, slots: Slots | None = None, **options: Any) -> Any:
    """Output and final states, or the pool that has them, token by token."""
    return token_by_token.step(launcher, x, slots, block=launcher.config.step.rows, beta=x.beta, **options)
