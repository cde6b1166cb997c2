"""The walk over a call's chunks, in the roles that `device.walk` lists."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.triton.gates import Gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, Walk, device
from ejkernel.xla_utils.utils import cdiv

Role = Literal["segment", "output", "dvalue", "dquery", "dkey"]
Segments = tuple[jax.Array, jax.Array]  # states that time segments add `[segments, H, K, V]`, and their decays


# Whether walks whose key gates are flagged in all chunks are left to a kernel of their own, with its scores fetched
# ahead: an empty launch more where none are, for the output and the value's gradient.
APART = True


class Border(StrEnum):
    """What a walk stores at the later end of each group of chunks."""

    NONE = "none"
    STATE = "state"  # its state
    SEEN = "seen"  # its state as the rows of x see it
    MET = "met"  # sums of products of its state with that of the walk in reverse, of each row or for a head of all
    ENTERED = "entered"  # nothing there, but the state with which it enters each chunk


@dataclass(frozen=True)
class Walked:
    """What a walk gives, as far as its role does; segments' decays come in the place of borders."""

    output: jax.Array
    final: jax.Array
    row_dots: jax.Array
    border: jax.Array


def walk(
    launcher: Launcher,
    role: Role,
    x: jax.Array | None,
    y: jax.Array,
    z: jax.Array,
    gates: Gates,
    start: jax.Array | None,
    *,
    tile: Tile,
    reverse: bool = False,
    dtype: Any = F32,
    last: bool = False,
    start_scale: float = 1.0,
    last_scale: float = 1.0,
    gate_gradient: jax.Array | None = None,
    meets: jax.Array | None = None,
    other: Gates | None = None,
    in_parts: bool = False,
    every_chunk: bool = False,
) -> Walked:
    """One walk. `gate_gradient` asks for what the gates' gradient needs of it, and is the query or key itself.

    `meets` is what the walk in reverse has left at the borders, which the one forward needs for that.
    `other` are the gates of the value dims, beside those of the key dims. With more dims of x than a program carries
    the output is a sum, which is left to the caller where it may come `in_parts`, side by side. `every_chunk` asks for
    the states with which the walk enters each of them, as borders `[chunks, H, V, K]`.
    """
    call, config, plan = launcher.call, launcher.config, launcher.plan
    by_key = role in ("dquery", "dkey")
    reverse = reverse or role in ("dvalue", "dkey")
    w = None if call.decay == "key" else gate_gradient
    border = Border.ENTERED if every_chunk else Border.NONE
    if gate_gradient is not None:
        # a folded key meets states as its rows see them
        border = Border.MET if not reverse else Border.SEEN if call.decay == "key" else Border.STATE
    x_dim, z_dim = (call.value_dim, call.key_dim) if by_key else (call.key_dim, call.value_dim)
    # Triton 3.6 cannot pipeline scores of 64 rows, which take a warpgroup, beside a smaller product and a branch
    fewest = 64 if role in ("output", "dvalue") and call.decay == "key" and config.chunk == 64 else 16
    block = min(tile.rows, max(padded(z_dim), fewest))
    half_full = call.decay == "head" and config.stages_if_half_full and 2 * block <= tile.rows
    if (role == "output" or every_chunk) and half_full:
        tile = replace(tile, stages=config.stages_if_half_full)
    # as much of the state a warp as the tile was measured with
    tile = replace(tile, rows=block, warps=max(4, tile.warps * block // tile.rows))
    x_block = min(padded(x_dim), tile.columns)
    sums, parts = cdiv(x_dim, x_block), cdiv(z_dim, block)
    n_segments, n_groups = launcher.blocks(plan.segment), launcher.blocks(config.chunk * plan.group)
    state = (call.heads, call.key_dim, call.value_dim)
    outputs: dict[str, Any] = dict.fromkeys(("output", "final", "row_dots", "border"))
    if x is None:
        decays = (call.key_dim if call.decay == "key" else 1) + (call.value_dim if other else 0)
        outputs |= {"final": shape(n_segments, *state), "border": shape(n_segments, call.heads, decays)}
    else:
        outputs["output"] = launcher.rows(sums * z_dim, dtype if sums == 1 else F32)
        outputs["final"] = shape(call.sequences, *state) if last else None
        outputs["row_dots"] = None if w is None else shape(call.batch, call.tokens, sums * parts, call.heads)
    if border == Border.ENTERED:
        outputs["border"] = shape(launcher.blocks(config.chunk), call.heads, z_dim, x_dim, dtype=call.dtype)
    elif border == Border.MET:
        each = (sums, z_dim) if call.decay == "key" else (sums * parts,)
        outputs["border"] = shape(n_groups, call.heads, *each)
    elif border != Border.NONE:
        # one of the two that meet as its own walk has rounded it, so that what cancels takes its error along
        seen = F32 if call.dtype == jnp.float16 else y.dtype
        outputs["border"] = shape(n_groups, call.heads, z_dim, x_dim, dtype=seen)
    x_heads, y_heads, z_heads, w_heads = (call.heads if each is None else each.shape[2] for each in (x, y, z, w))
    # a constant gate may have been folded as one of each token
    decay = "head" if call.decay == "constant" and gates.flag is not None else call.decay
    cut = Walk(
        role=role,
        border=border,
        x_heads=x_heads,
        y_heads=y_heads,
        z_heads=z_heads,
        w_heads=w_heads,
        x_dim=x_dim,
        z_dim=z_dim,
        x_block=x_block,
        z_block=block,
        # one pass of TF32 has float16's digits and float32's range
        precision="tf32" if launcher.constants.wide else config.precision,
        segmented=plan.segmented(call),
        row_dots=w is not None,
        both=other is not None,
        flat=not launcher.hopper,
    )
    given = {"x": x, "y": y, "z": z, "w": w, "within": gates.within, "factors": gates.factors, "flag": gates.flag}
    given["any_flag"] = gates.any_flag
    given |= {"other": None if other is None else other.factors, "start": start, "d_state": meets}
    by_token = w is not None and decay == "head" and launcher.by_token
    before: dict[str, jax.Array] | None = None
    apart = APART and decay == "key" and role in ("output", "dvalue") and other is None and not call.segmented
    for strong in (False, True) if decay == "head" or apart else (False,):
        kernel, timed = device("walk").walk, tile
        if by_token and not strong:
            # two programs a multiprocessor have room for three stages
            kernel, timed = device("row_dots").walk_with_row_dots, replace(tile, stages=3)
        if strong and call.segmented:
            # where each program marks the sequences that it gives results for
            outputs["mine"] = shape(call.batch, call.heads, sums * parts, call.tokens, dtype=jnp.int32)
        results = launcher.launch(
            kernel,
            given,
            outputs,
            programs=n_segments * call.heads * sums * parts,
            tile=timed,
            length=plan.segment,
            # the second kernel completes what the first one has left out
            in_place=before,
            walk=replace(cut, strong=strong, apart=apart),
            decay=decay,
            reverse=reverse,
            start=start is not None,
            last=last,
            start_scale=float(start_scale),
            last_scale=float(last_scale),
        )
        before = {name: each for name, each in results._asdict().items() if each is not None}
    output = results.output
    if sums > 1 and x is not None and not in_parts:
        output = output.reshape(*output.shape[:3], sums, z_dim).sum(3).astype(dtype)
    return Walked(output, results.final, results.row_dots, results.border)


def segments(
    launcher: Launcher,
    y: jax.Array,
    z: jax.Array,
    gates: Gates,
    reverse: bool = False,
    other: Gates | None = None,
    last: bool = False,
) -> Segments:
    """What each time segment adds to a state, and its decay; those that sequences end with only if `last`."""
    tile = launcher.config.segments or launcher.config.output
    own = walk(launcher, "segment", None, y, z, gates, None, tile=tile, reverse=reverse, other=other, last=last)
    return own.final, own.border


def scan(
    launcher: Launcher,
    own: Segments,
    state: jax.Array | None,
    reverse: bool = False,
    scale: float = 1.0,
    last: bool = False,
    last_scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The state at the start of each time segment and, if asked for, those that sequences end with."""
    call, (added, decays) = launcher.call, own
    block, columns = min(32, padded(call.key_dim)), min(256, padded(call.value_dim))
    found = launcher.launch(
        device("segments").scan_segments,
        {"segments": added, "decay": decays, "start": state},
        {"starts": shape(*added.shape), "final": launcher.states() if last else None},
        programs=call.sequences * call.heads * cdiv(call.key_dim, block) * cdiv(call.value_dim, columns),
        tile=Tile(block, stages=2),
        key_block=block,
        value_block=columns,
        decays=decays.shape[-1],
        start=state is not None,
        start_scale=float(scale),
        last=last,
        last_scale=float(last_scale),
        reverse=reverse,
    )
    return found.starts, found.final


def starts(
    launcher: Launcher,
    y: jax.Array,
    z: jax.Array,
    gates: Gates,
    state: jax.Array | None,
    reverse: bool = False,
    scale: float = 1.0,
    other: Gates | None = None,
    own: Segments | None = None,
) -> jax.Array | None:
    """The state at the start of each time segment, or `state` itself (unscaled) where time is not cut.

    `own` is what `segments` has found, if it was asked before.
    """
    if not launcher.plan.segmented(launcher.call):
        return state
    own = segments(launcher, y, z, gates, reverse, other) if own is None else own
    return scan(launcher, own, state, reverse, scale)[0]
