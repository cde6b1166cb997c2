"""A call's forward and backward, as passes over its tokens."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.first_gates import entering_states
from ejkernel.kernels.chunks.triton.launching import has_few_tokens
from ejkernel.kernels.chunks.triton.packing import Packing
from ejkernel.kernels.chunks.triton.pools import Slots
from ejkernel.kernels.chunks.triton.step import step
from ejkernel.kernels.delta_rule.call import Call
from ejkernel.kernels.delta_rule.triton.launcher import Launcher, Plan, device
from ejkernel.kernels.delta_rule.triton.systems import Folded, Systems, solve
from ejkernel.xla_utils.utils import cdiv

# Of the kernel of gradients of chunks of bounded gates, by blocks of these key dims, and programs that occupy a chip.
BOUNDED = Tile(32)
MANY = 512


class Inputs(NamedTuple):
    """The arrays of a call, as `Call` lists them."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None


class Kept(NamedTuple):
    """What a forward leaves for its backward."""

    added: jax.Array  # what tokens add to the state [B, T, H, V]
    added_rest: jax.Array | None  # what rounding has taken off it, where keys coincide [B, T, H, V]
    systems: Systems
    weights: jax.Array  # of a chunk's rows, as device code's `WEIGHTS` lists them [chunks, H, 5, C]
    folded: Folded | None
    states: jax.Array  # that chunks begin with, transposed [chunks, H, V, K]
    transitions: jax.Array | None  # what time segments make of states, by the key dims of these [segments, H, K, K]


def forward(keep: bool, call: Call, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array, Kept | None]:
    """Output, final states and, if to be kept, what the backward needs (nothing after the token-by-token kernel)."""
    launcher = Launcher.of(call, plan, x.query, x.key, x.value, x.cu_seqlens)
    if has_few_tokens(call):
        return (*_step(launcher, x), None)
    return _walk(launcher, keep, x, _entering(call, x.cu_seqlens, x.log_decay, x.initial_state))


def _entering(
    call: Call, cu_seqlens: jax.Array | None, log_decay: jax.Array | None, state: jax.Array | None
) -> jax.Array | None:
    """The states that sequences are entered with, after their first tokens' gates."""
    return None if state is None else entering_states(call, state, (log_decay, None), cu_seqlens)


def _walk(
    launcher: Launcher, keep: bool, x: Inputs, start: jax.Array | None
) -> tuple[jax.Array, jax.Array, Kept | None]:
    call, config, dtype = launcher.call, launcher.config, launcher.call.dtype
    keyed = call.decay == "key"
    systems, weights, folded = solve(launcher, keep, x.query, x.key, x.beta, x.log_decay)
    walked = {
        **folded._asdict(),
        "value": x.value,
        "reads": systems.reads,
        "inverse": systems.inverse,
        "weights": weights,
        "weak": systems.weak,
        "any_weak": systems.any_weak,
        "own_query": x.query,
        "own_key": x.key,
    }
    time, transitions = "whole", None
    of_coinciding: dict[str, Any] = {
        "changed": {"squares": systems.squares},
        "more": {
            "added_rest": launcher.rows(call.value_dim, dtype) if keep else None,
            "rests": launcher.kept(config.chunk, dtype=dtype),
        },
    }
    kernel = device("walk").forward
    if launcher.plan.segmented(call):
        found = launcher.walk(
            kernel,
            walked | {"start": start},
            {
                "output": None,
                "added": None,
                "states": launcher.segments(call.key_dim),
                "final": launcher.segments(call.value_dim),
            },
            tile=config.effects,
            further=call.key_dim,
            start=start is not None,
            time="effects",
            **of_coinciding | {"more": of_coinciding["more"] | {"added_rest": None}},
        )
        transitions = found.states
        time, start = "segments", _scan_segments(launcher, found.final, transitions, start, back=False)
    found = launcher.walk(
        kernel,
        walked | {"start": start},
        {
            "output": launcher.rows(call.value_dim, dtype),
            "added": launcher.rows(call.value_dim, dtype) if keep else None,
            "states": launcher.chunked(call.value_dim, call.key_dim, dtype=dtype) if keep else None,
            "final": launcher.states(),
        },
        tile=config.forward if keep or keyed else config.forward_only,
        start=start is not None,
        keep=keep,
        time=time,
        **of_coinciding,
    )
    if not keep:
        return found.output, found.final, None
    if not launcher.plan.cuts_back:
        transitions = None
    # the inverse has been used
    systems = systems._replace(inverse=None, squares=found.squares, rests=found.rests)
    kept = Kept(found.added, found.added_rest, systems, weights, folded if keyed else None, found.states, transitions)
    return found.output, found.final, kept


def _scan_segments(
    launcher: Launcher, effects: jax.Array, transitions: jax.Array, start: jax.Array | None, back: bool
) -> jax.Array:
    """What time segments are entered with, `[segments, H, V, K]`, sequences with `start`."""
    call, block = launcher.call, 16
    (found,) = launcher.launch(
        device("segments").scan_segments,
        {"effects": effects, "transitions": transitions, "start": start},
        {"found": launcher.segments(call.value_dim)},
        programs=call.sequences * call.heads * cdiv(call.value_dim, block),
        tile=Tile(block),
        key_block=padded(call.key_dim),
        part_block=min(32, padded(call.key_dim)),
        value_block=block,
        back=back,
        start=start is not None,
    )
    return found


def backward(
    wanted: Inputs,
    call: Call,
    plan: Plan,
    x: Inputs,
    kept: Kept | None,
    d_output: jax.Array,
    d_final: jax.Array | None,
) -> Inputs:
    """Cotangents of the inputs, all of them, whichever are wanted."""
    cu_seqlens = x.cu_seqlens
    if not plan.cuts_back:
        plan = replace(plan, segment=call.tokens)
    launcher = Launcher.of(call, plan, x.query, x.key, x.value, cu_seqlens)
    start, pull = _entering(call, x.cu_seqlens, x.log_decay, x.initial_state), None
    if x.initial_state is not None:
        start, pull = jax.vjp(lambda *x: _entering(call, cu_seqlens, *x), x.log_decay, x.initial_state)
    if kept is None:
        kept = _walk(launcher, True, x, start)[2]
        assert kept is not None
    config, dtype, systems = launcher.config, call.dtype, kept.systems
    folded = kept.folded or Folded(x.query, x.key)
    walked = {
        **folded._asdict(),
        "d_output": d_output,
        "reads": systems.reads,
        "transposed": systems.transposed,
        "weights": kept.weights,
        "weak": systems.weak,
        "any_weak": systems.any_weak,
        "squares": systems.squares,
        "rests": systems.rests,
    }
    time, kernel = "whole", device("walk").backward
    if kept.transitions is not None:
        effects = launcher.walk(
            kernel,
            walked | {"d_final": d_final},
            {"d_r": None, "d_states": None, "d_start": launcher.segments(call.value_dim)},
            tile=config.backward,
            start=d_final is not None,
            time="effects",
        ).d_start
        time, d_final = "segments", _scan_segments(launcher, effects, kept.transitions, d_final, back=True)
    walked_back = launcher.walk(
        kernel,
        walked | {"d_final": d_final},
        {
            "d_r": launcher.rows(call.value_dim, dtype),
            "d_states": launcher.chunked(call.value_dim, call.key_dim, dtype=dtype),
            "d_start": launcher.states() if pull is not None else None,
        },
        tile=config.backward,
        start=d_final is not None,
        last=pull is not None,
        time=time,
    )
    given = {
        "query": x.query,
        "key": x.key,
        "beta": x.beta,
        "gate": x.log_decay,
        "d_output": d_output,
        "added": kept.added,
        "added_rest": kept.added_rest,
        "d_r": walked_back.d_r,
        "states": kept.states,
        "d_states": walked_back.d_states,
        "squares": systems.squares,
    }
    if call.decay == "key":
        found = _key_gradients(launcher, given | {"kinds": folded.kinds})
    else:
        found = _gradients(launcher, given | {"weights": kept.weights, "weak": systems.weak})
    d_query, d_key = _sum_parts(found.d_query, x.query), _sum_parts(found.d_key, x.key)
    d_value = _sum_parts(found.d_value[..., None, :], x.value)
    d_log_decay = d_state = None
    if x.log_decay is not None:
        keyed = call.decay == "key"
        d_gate = found.d_gate
        d_log_decay = _sum_parts(d_gate, x.log_decay) if keyed else d_gate.sum(-1).astype(x.log_decay.dtype)
    if pull is not None:
        of_first, d_state = pull(walked_back.d_start)
        d_log_decay = None if d_log_decay is None else d_log_decay + of_first
    d_beta = found.d_beta.sum(-1).astype(x.beta.dtype)
    return Inputs(d_query, d_key, d_value, d_beta, d_log_decay, d_state, None)


def _gradients(launcher: Launcher, given: dict[str, Any]) -> Any:
    """Of query, key, value, beta and log decay, all but the value's in parts `[B, T, H, parts, ·]`."""
    small, heads, cut = launcher.token_parts(), launcher.call.heads, launcher.by_parts()
    outputs = {
        "d_query": launcher.parts(given["query"]),
        "d_key": launcher.parts(given["key"]),
        "d_value": launcher.values(),
        "d_beta": small,
        "d_gate": None if given["gate"] is None else small,
    }
    kernel, look = device("gradients").gradients, padded(heads)
    found = launcher.launch(kernel, given, outputs, look=look, **cut)
    if not launcher.constants.keys_may_coincide:
        return found
    before = {name: each for name, each in found._asdict().items() if each is not None}
    again = cut | {"programs": cut["programs"] // heads, "in_place": before, "keys_coincide": True}
    return launcher.launch(kernel, given, outputs, look=look, **again)


def _key_gradients(launcher: Launcher, given: dict[str, Any]) -> Any:
    """`_gradients` where key dims have gates; a second kernel is for those that are too strong for the first."""
    call, cut = launcher.call, launcher.by_parts()
    middle = given["kinds"] is not None
    number = 1 if middle else cdiv(call.key_dim, cut["key_block"])
    flags = (launcher.kept if call.segmented else launcher.chunked)(number, dtype=jnp.int32)
    moving = {f"d_{name}": launcher.parts(given[name]) for name in ("query", "key", "gate")}
    others = {"d_value": launcher.values(), "d_beta": launcher.token_parts()}
    kernel, cut = device("key_gradients").gradients_keyed, cut | {"look": padded(call.heads * flags.shape[-1])}
    found = launcher.launch(kernel, given, {**moving, **others, "flag": None if middle else flags}, **cut)
    if not middle:
        given = given | {"kinds": found.flag}
    rare: dict[str, Any] = cut | {"programs": cut["programs"] // call.heads}
    before = {name: getattr(found, name) for name in moving}
    strong = launcher.launch(kernel, given, moving, strong=True, in_place=before, **rare)
    found = found._replace(**strong._asdict())
    if middle and not launcher.constants.flat:
        found = _bounded_gradients(launcher, given, cut, found)
    if launcher.constants.keys_may_coincide:
        before = {name: getattr(found, name) for name in (*moving, *others)}
        found = launcher.launch(kernel, given, {**moving, **others}, keys_coincide=True, in_place=before, **rare)
    return found


def _bounded_gradients(launcher: Launcher, given: dict[str, Any], cut: dict[str, Any], found: Any) -> Any:
    """`found`, with what chunks of bounded gates have in it."""
    before = {name: each for name, each in found._asdict().items() if each is not None}
    outputs = {name: shape(*each.shape, dtype=each.dtype) for name, each in before.items()}
    heads, chunks = launcher.call.heads, cut["programs"] // launcher.call.heads
    # as many heads a program as leave programs for all processors
    each = next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or chunks * (heads // n) >= MANY))
    bounded = launcher.launch(
        device("bounded_gradients").gradients_bounded,
        given,
        outputs,
        in_place=before,
        **cut | {"programs": chunks * (heads // each), "look": padded(each), "tile": BOUNDED},
        part_block=min(BOUNDED.rows, padded(launcher.call.key_dim)),
        each=each,
    )
    return found._replace(**bounded._asdict())


def _sum_parts(x: jax.Array, like: jax.Array) -> jax.Array:
    """Adds up the parts of a gradient of `like`, `[B, T, H, parts, ·]`, and the heads that share one of its own."""
    return x.reshape(*like.shape[:3], -1, like.shape[3]).sum(3).astype(like.dtype)


def pooled_step(call: Call, packing: Packing, slots: Slots, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Output and pool, one token after the other."""
    arrays: Any = *inputs, None, None
    x = Inputs(*arrays)
    launcher = replace(Launcher.of(call, Plan.of(call), x.query, x.key, x.value, None), packing=packing)
    found = _step(launcher, x, slots)
    return found.output, found.pool


def _step(launcher: Launcher, x: Inputs, slots: Slots | None = None) -> Any:
    return step(launcher, x, slots, block=launcher.config.step.rows, beta=x.beta)
