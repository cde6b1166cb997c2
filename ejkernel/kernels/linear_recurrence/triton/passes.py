"""The forward and the backward of a call, as launches that pass over its tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import padded
from ejkernel.kernels.chunks.triton import step as token_by_token
from ejkernel.kernels.chunks.triton.launching import F32, has_few_tokens
from ejkernel.kernels.chunks.triton.pools import Slots
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import across_heads, walks
from ejkernel.kernels.linear_recurrence.triton.gates import (
    Gates,
    Hats,
    fold_head_gates,
    fold_key_gates,
    head_gate_gradient,
    unfold_key_gates,
)
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.kernels.linear_recurrence.triton.walks import Segments, scan, segments, starts, walk


class Prepared(NamedTuple):
    """What a forward computes before its last walk: its residuals."""

    query: jax.Array  # with key gates, if there are any, folded in
    key: jax.Array  # likewise
    gates: Gates  # as walks read them
    first: jax.Array | None = None  # the states that time segments start from


def forward(keep: bool, call: Call, plan: Plan, x: Inputs) -> tuple[jax.Array, jax.Array, Prepared | None]:
    """Output, final states, and residuals if `keep` (none after the token-by-token kernel)."""
    launcher = Launcher.of(call, plan, x.cu_seqlens)
    if has_few_tokens(call):
        return (*step(launcher, x), None)
    prepared = _prepare(launcher, x)
    query, key, gates, first = prepared
    operands = (query, key, x.value, gates, first)
    walked = walk(launcher, "output", *operands, tile=plan.config.output, dtype=call.dtype, last=True)
    if not plan.keeps_starts:
        prepared = prepared._replace(first=x.initial_state)
    return walked.output, walked.final, prepared if keep else None


def begin(call: Call, plan: Plan, *arrays: Any) -> tuple[Prepared, Segments, jax.Array]:
    """What needs no initial state: folded operands, time segments, and the states that all tokens add."""
    query, key, value, log_decay, cu_seqlens = arrays
    launcher = Launcher.of(call, plan, cu_seqlens)
    folded = _fold(launcher, query, key, log_decay, start=True)
    added = segments(launcher, folded.key, value, folded.gates, last=True)
    return folded, added, scan(launcher, added, None, last=True)[1]


def finish(
    call: Call,
    plan: Plan,
    value: jax.Array,
    start: jax.Array,
    cu_seqlens: jax.Array | None,
    folded: Prepared,
    added: Segments,
) -> tuple[jax.Array, Prepared]:
    """The output and the residuals, from the first two results of `begin`."""
    launcher = Launcher.of(call, plan, cu_seqlens)
    query, key, gates, _ = folded
    first = starts(launcher, key, value, gates, start, added=added)
    walked = walk(launcher, "output", query, key, value, gates, first, tile=plan.config.output, dtype=call.dtype)
    return walked.output, folded._replace(first=first)


def begin_back(
    call: Call, plan: Plan, cu_seqlens: jax.Array | None, prepared: Prepared, d_output: jax.Array
) -> tuple[Segments, jax.Array]:
    """What needs no cotangent of the final states: time segments, and cotangents of initial states from the output."""
    launcher = Launcher.of(call, plan, cu_seqlens)
    added = segments(launcher, prepared.query, d_output, prepared.gates, reverse=True, last=True)
    return added, scan(launcher, added, None, reverse=True, last=True, last_scale=call.scale)[1]


def backward(
    wanted: Inputs,
    call: Call,
    plan: Plan,
    x: Inputs,
    prepared: Prepared | None,
    d_output: jax.Array,
    d_final: jax.Array | None,
    added: Segments | None = None,
) -> Inputs:
    """Cotangents of the inputs; the gradient of a gate a head costs about a quarter, and is zeros unless wanted.

    `added` is the first result of `begin_back`, if it is known already.
    """
    launcher = Launcher.of(call, plan, x.cu_seqlens)
    q_hat, k_hat, gates, first = prepared or _prepare(launcher, x)
    if not plan.keeps_starts:
        first = starts(launcher, k_hat, x.value, gates, x.initial_state)
    config, scale = plan.config, 1.0 / call.scale
    is_key = call.decay == "key"
    of_gates = bool(wanted.log_decay) or is_key
    tile = config.head_gate_gradient or config.gradient if of_gates and not is_key else config.gradient
    ends = starts(launcher, q_hat, d_output, gates, d_final, reverse=True, scale=scale, added=added)
    start_scale = 1.0 if plan.segmented(call) else scale
    across = of_gates and across_heads.applies(launcher, x.query, x.key)
    # the gradients of single heads are added up, and gates' gradients computed from them: float16 might overflow
    gradient_dtype = F32 if call.dtype == jnp.float16 else call.dtype
    of_value = walk(
        *(launcher, "dvalue", k_hat, q_hat, d_output, gates, ends),
        tile=config.output,
        dtype=gradient_dtype,
        last=x.initial_state is not None,
        start_scale=start_scale,
        last_scale=call.scale,
        every_chunk=across,
    )
    if across:
        d_query, d_key, dots, product = across_heads.gradients(
            launcher, x, gates, first, d_output, d_final, of_value.border
        )
    else:
        if of_gates and call.decay == "constant" and gates.flag is None and launcher.by_token:
            # the kernel whose rows are tokens has no constant gates
            assert x.log_decay is not None
            gates = fold_head_gates(launcher, x.log_decay)
        of_key = walk(
            *(launcher, "dkey", x.value, d_output, q_hat, gates, ends),
            tile=tile,
            dtype=F32 if is_key else gradient_dtype,
            start_scale=start_scale,
            gate_gradient=x.key if of_gates else None,
            in_parts=is_key,
        )
        of_query = walk(
            *(launcher, "dquery", d_output, x.value, k_hat, gates, first),
            tile=config.key_gate_query_gradient or tile if is_key else tile,
            dtype=F32 if is_key else gradient_dtype,
            gate_gradient=x.query if of_gates else None,
            stored=of_key.border if of_gates else None,
            in_parts=is_key,
        )
        d_query, d_key, product = of_query.output, of_key.output, of_query.border
        dots = of_query.row_dots, of_key.row_dots
    d_gate = None
    if is_key:
        hats = Hats(q_hat, k_hat, d_query, d_key, product)
        d_query, d_key, d_gate = unfold_key_gates(launcher, x, gates, d_output, hats, gradient_dtype)
    elif of_gates:
        assert x.log_decay is not None
        start = None if x.initial_state is None else _product(x.initial_state.astype(F32), of_value.final)
        d_gate = head_gate_gradient(launcher, x.log_decay, *dots, product, start)
        if call.decay == "constant":
            d_gate = _sum_tokens(call, d_gate, x.cu_seqlens)
            d_gate = jnp.where(jnp.isneginf(x.log_decay), 0, d_gate).astype(x.log_decay.dtype)
    elif x.log_decay is not None:
        d_gate = jnp.zeros_like(x.log_decay)
    of_tokens = (x.query, d_query), (x.key, d_key), (x.value, of_value.output)
    d_start = None if x.initial_state is None else of_value.final.astype(x.initial_state.dtype)
    d_query, d_key, d_value = (sum_shared(call, each, d_each) for each, d_each in of_tokens)
    return Inputs(d_query, d_key, d_value, d_gate, None, d_start)


def _product(state: jax.Array, d_state: jax.Array) -> jax.Array:
    """⟨S, dS⟩ of each head; a state of 0 may have an infinite gradient."""
    return jnp.where(state == 0, 0, state * d_state).sum((2, 3))


def sum_shared(call: Call, x: jax.Array, dx: jax.Array) -> jax.Array:
    """The gradient of `x`, the sum over the heads that share a head of it."""
    if x.shape[2] == call.heads:
        return dx.astype(call.dtype)
    return dx.reshape(*x.shape[:3], -1, x.shape[-1]).sum(3).astype(call.dtype)


def _sum_tokens(call: Call, d_gate: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gradient of one gate a sequence and head from one a token: `[B, T, H]` to `[N, H]`."""
    if not call.packed:
        return d_gate.sum(1)
    assert cu_seqlens is not None
    token = jnp.arange(call.tokens)[None, :, None]
    inside = (token >= cu_seqlens[:-1, None, None]) & (token < cu_seqlens[1:, None, None])
    return jnp.where(inside, d_gate, 0).sum(1)


def _prepare(launcher: Launcher, x: Inputs) -> Prepared:
    """All that the last walk of a forward needs."""
    folded = _fold(launcher, x.query, x.key, x.log_decay, start=x.initial_state is not None)
    return folded._replace(first=starts(launcher, folded.key, x.value, folded.gates, x.initial_state))


def _fold(launcher: Launcher, query: jax.Array, key: jax.Array, log_decay: jax.Array | None, start: bool) -> Prepared:
    """All of that but the states that time segments start from."""
    if launcher.call.decay == "key":
        return Prepared(*fold_key_gates(launcher, query, key, log_decay, start=start))
    if launcher.call.decay == "constant" and launcher.constants.whole:
        return Prepared(query, key, Gates(within=log_decay))
    return Prepared(query, key, Gates() if log_decay is None else fold_head_gates(launcher, log_decay))


def pooled_launcher(call: Call, *inputs: Any) -> tuple[Launcher, Inputs]:
    """The launcher of a call with a pool, as `pools.Kernels` has it."""
    arrays: Any = *inputs, None
    return Launcher.of(call, Plan.of(call), None), Inputs(*arrays)


def walk_prompts(launcher: Launcher, x: Inputs, slots: Slots) -> Any:
    """Output, pool and copies, by chunks, as `pools.Kernels` has it."""
    # a state from a slot meets the first gate
    query, key, gates, _ = _fold(launcher, x.query, x.key, x.log_decay, start=True)
    return walks.walk_prompts(launcher, query, key, x.value, gates, slots)


def step(launcher: Launcher, x: Inputs, slots: Slots | None = None, **options: Any) -> Any:
    """Output and final states, or the pool that has them, token by token."""
    # as much of a state as the registers hold
    block = min(launcher.config.step.rows, 16384 // padded(launcher.call.key_dim))
    return token_by_token.step(launcher, x, slots, block=block, value_gate=x.value_log_decay, **options)
