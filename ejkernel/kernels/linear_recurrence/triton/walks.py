"""The walk over a call's chunks, in the roles that `device.walk` lists."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.chunks.triton.pools import Slots
from ejkernel.kernels.linear_recurrence.triton.gates import Gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, Walk, device
from ejkernel.xla_utils.utils import cdiv

Role = Literal["segment", "output", "dvalue", "dquery", "dkey"]
Segments = tuple[jax.Array, jax.Array]  # states that time segments add `[segments, H, K, V]`, and their decays


class Border(StrEnum):
    """What a walk stores at the later end of each group of chunks."""

    NONE = "none"
    STATE = "state"
    READ = "read"  # the state as the rows of x read it
    PRODUCT = "product"  # ⟨S, dS⟩ with what the walk in reverse has stored: of each row, or their sum for a head's gate
    EVERY_CHUNK = "every chunk"  # nothing there, but the state before each chunk


@dataclass(frozen=True)
class Walked:
    """What a walk stores; role `segment` has the states that segments add as `final`, and their decays as `border`."""

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
    stored: jax.Array | None = None,
    other: Gates | None = None,
    in_parts: bool = False,
    every_chunk: bool = False,
) -> Walked:
    """One walk, in a role that `device.walk` lists, from `start` (of sequences, or of time segments).

    Args:
        last: Also stores the states that sequences, or with the role `segment` the last segments, end with.
        gate_gradient: The query or key, if gates have a gradient, to which the walk then contributes.
        stored: The borders of the walk in reverse, which the forward one multiplies its states with.
        other: The gates of the value dims, beside those of the key dims.
        in_parts: Leaves an output that is a sum, of more dims of x than a program carries, in parts side by side.
        every_chunk: Stores the states before each chunk, as borders `[chunks, H, V, K]`.
    """
    call, config, plan = launcher.call, launcher.config, launcher.plan
    by_key = role in ("dquery", "dkey")
    reverse = reverse or role in ("dvalue", "dkey")
    w = None if call.decay == "key" else gate_gradient
    border = Border.EVERY_CHUNK if every_chunk else Border.NONE
    if gate_gradient is not None:
        # gates of key dims need states as folded rows read them
        border = Border.PRODUCT if not reverse else Border.READ if call.decay == "key" else Border.STATE
    x_dim, z_dim = (call.value_dim, call.key_dim) if by_key else (call.key_dim, call.value_dim)
    block = _rows_of_state(launcher, tile, z_dim, role in ("output", "dvalue"))
    half_full = call.decay == "head" and config.stages_if_half_full is not None and 2 * block <= tile.rows
    if (role == "output" or every_chunk) and half_full:
        tile = replace(tile, stages=config.stages_if_half_full)
    tile = _with_rows(tile, block)
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
    if border == Border.EVERY_CHUNK:
        outputs["border"] = shape(launcher.blocks(config.chunk), call.heads, z_dim, x_dim, dtype=call.dtype)
    elif border == Border.PRODUCT:
        each = (sums, z_dim) if call.decay == "key" else (sums * parts,)
        outputs["border"] = shape(n_groups, call.heads, *each)
    elif border != Border.NONE:
        # rounded as the walk's own products round it, so that terms that cancel have the same error
        rounded = F32 if call.dtype == jnp.float16 else y.dtype
        outputs["border"] = shape(n_groups, call.heads, z_dim, x_dim, dtype=rounded)
    x_heads, y_heads, z_heads, w_heads = (call.heads if each is None else each.shape[2] for each in (x, y, z, w))
    # a constant gate may have been folded as a gate of each token
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
        precision=_precision(launcher),
        segmented=plan.segmented(call),
        row_dots=w is not None,
        both=other is not None,
        flat=not launcher.hopper,
    )
    inputs = {"x": x, "y": y, "z": z, "w": w, "within": gates.within, "factors": gates.factors, "flag": gates.flag}
    inputs["any_flag"] = gates.any_flag
    inputs |= {"other": None if other is None else other.factors, "start": start, "d_state": stored}
    by_token = w is not None and decay == "head" and launcher.by_token
    # the first kernel waits for the scores of flagged chunks: 230 µs instead of 156 (the second one is yet to be timed)
    apart = decay == "key" and role in ("output", "dvalue") and other is None and not call.segmented
    # programs of half the rows are many, and the kernel for strong gates is almost as fast. Two kernels, in each of
    # which some programs leave at once, take longer for the gates of Mamba-2 models, some of which are strong
    alone = decay == "head" and half_full
    in_place: dict[str, jax.Array] | None = None
    for strong in (True,) if alone else (False, True) if decay == "head" or apart else (False,):
        kernel, timed = device("walk").walk, tile
        if by_token and not strong:
            # two programs a multiprocessor have room for three stages
            kernel, timed = device("row_dots").walk_with_row_dots, replace(tile, stages=3)
        if strong and call.segmented and not alone:
            # where each program marks the sequences whose results it stores
            outputs["marks"] = shape(call.batch, call.heads, sums * parts, call.tokens, dtype=jnp.int32)
        results = launcher.launch(
            kernel,
            inputs,
            outputs,
            programs=n_segments * call.heads * sums * parts,
            tile=timed,
            length=plan.segment,
            # the second kernel completes the first one's results
            in_place=in_place,
            walk=replace(cut, strong=strong, alone=alone, apart=apart),
            decay=decay,
            reverse=reverse,
            start=start is not None,
            last=last,
            start_scale=float(start_scale),
            last_scale=float(last_scale),
        )
        in_place = {name: each for name, each in results._asdict().items() if each is not None}
    output = results.output
    if x is not None and not in_parts:
        output = _sum_parts(output, sums, z_dim, dtype)
    return Walked(output, results.final, results.row_dots, results.border)


def walk_prompts(
    launcher: Launcher, query: jax.Array, key: jax.Array, value: jax.Array, gates: Gates, slots: Slots
) -> Any:
    """Output, pool and copies, for the tokens that go by chunks; queries and keys have their gates folded in."""
    call, tile = launcher.call, launcher.config.output
    block = _rows_of_state(launcher, tile, call.value_dim, with_scores=True)
    key_block = min(padded(call.key_dim), tile.columns)
    sums, in_place = cdiv(call.key_dim, key_block), slots.in_place()
    results = launcher.launch(
        device("prompts").walk_prompts,
        {
            **{"query": query, "key": key, "value": value, **slots.inputs()},
            **{"within": gates.within, "factors": gates.factors, "flag": gates.flag},
        },
        {
            "output": launcher.rows(sums * call.value_dim, call.dtype if sums == 1 else F32),
            **{name: shape(*each.shape, dtype=each.dtype) for name, each in in_place.items()},
        },
        programs=launcher.prompts * call.heads * sums * cdiv(call.value_dim, block),
        tile=_with_rows(tile, block),
        in_place=in_place,
        query_heads=query.shape[2],
        key_heads=key.shape[2],
        value_heads=value.shape[2],
        key_block=key_block,
        value_block=block,
        # one gate a sequence has been folded as a gate of each token
        decay="head" if call.decay == "constant" else call.decay,
        precision=_precision(launcher),
    )
    return results._replace(output=_sum_parts(results.output, sums, call.value_dim, call.dtype))


def _rows_of_state(launcher: Launcher, tile: Tile, dim: int, with_scores: bool) -> int:
    """How many of the `dim` rows of the state a program takes; `with_scores` of key gates in memory."""
    # Triton 3.6 cannot pipeline scores of 64 rows, which take a warpgroup, beside a smaller product and a branch
    fewest = 64 if with_scores and launcher.call.decay == "key" and launcher.config.chunk == 64 else 16
    return min(tile.rows, max(padded(dim), fewest))


def _with_rows(tile: Tile, rows: int) -> Tile:
    """The tile with so many rows, and as much of the state a warp as it was measured with."""
    return replace(tile, rows=rows, warps=max(4, tile.warps * rows // tile.rows))


def _precision(launcher: Launcher) -> str:
    """That of dots: one pass of TF32 has float16's digits and float32's range."""
    precision: str = "tf32" if launcher.constants.wide else launcher.config.precision
    return precision


def _sum_parts(output: jax.Array, parts: int, dim: int, dtype: Any) -> jax.Array:
    """The sum of the parts, side by side, that programs of some dims each have of an output."""
    return output if parts == 1 else output.reshape(*output.shape[:3], parts, dim).sum(3).astype(dtype)


def segments(
    launcher: Launcher,
    y: jax.Array,
    z: jax.Array,
    gates: Gates,
    reverse: bool = False,
    other: Gates | None = None,
    last: bool = False,
) -> Segments:
    """The state that each time segment adds, and its decay; of the segments that sequences end with only if `last`."""
    tile = launcher.config.segments or launcher.config.output
    added = walk(launcher, "segment", None, y, z, gates, None, tile=tile, reverse=reverse, other=other, last=last)
    return added.final, added.border


def scan(
    launcher: Launcher,
    added: Segments,
    state: jax.Array | None,
    reverse: bool = False,
    scale: float = 1.0,
    last: bool = False,
    last_scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
    """The state at the start of each time segment and, if `last`, those that sequences end with."""
    call, (states, decays) = launcher.call, added
    block, columns = min(32, padded(call.key_dim)), min(256, padded(call.value_dim))
    results = launcher.launch(
        device("segments").scan_segments,
        {"segments": states, "decay": decays, "start": state},
        {"starts": shape(*states.shape), "final": launcher.states() if last else None},
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
    return results.starts, results.final


def starts(
    launcher: Launcher,
    y: jax.Array,
    z: jax.Array,
    gates: Gates,
    state: jax.Array | None,
    reverse: bool = False,
    scale: float = 1.0,
    other: Gates | None = None,
    added: Segments | None = None,
) -> jax.Array | None:
    """The state at the start of each time segment, or `state` itself (unscaled) where time is not cut.

    `added` is the result of `segments`, if it is known already.
    """
    if not launcher.plan.segmented(launcher.call):
        return state
    added = added or segments(launcher, y, z, gates, reverse, other)
    return scan(launcher, added, state, reverse, scale)[0]
