"""The walk over a call's chunks, in the roles that `device.walk` lists."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.kernels.chunks.triton.launching import F32, Tile, padded, shape
from ejkernel.kernels.linear_recurrence.call import Decay
from ejkernel.kernels.linear_recurrence.triton.gates import Gates
from ejkernel.kernels.linear_recurrence.triton.launcher import Launcher, device
from ejkernel.kernels.linear_recurrence.triton.plan import Plan
from ejkernel.xla_utils.utils import cdiv

Role = Literal["segment", "output", "dvalue", "dquery", "dkey"]
Segments = tuple[jax.Array, jax.Array]  # states that time segments add `[segments, H, K, V]`, and their decays


@dataclass(frozen=True)
class Shape:
    """Sizes that the kernel is compiled for; `x`, `y`, `z` and `w` are its operands."""

    heads: int
    x_heads: int
    y_heads: int
    z_heads: int
    w_heads: int
    x_dim: int
    z_dim: int
    x_block: int  # x dims a program, padded
    z_block: int  # rows of the state a program
    chunk: int
    group: int
    whole: bool  # no chunk has a ragged end
    segmented: bool  # time is cut in segments
    flip: bool  # the last token comes first


@dataclass(frozen=True)
class Numbers:
    """How operands are multiplied, and by what the output and the states at the ends."""

    precision: str
    wide: bool  # operands are carried as float32
    scale: float
    start_scale: float
    last_scale: float


@dataclass(frozen=True)
class Walk:
    """What one walk is for."""

    role: Role
    decay: Decay
    reverse: bool
    start: bool  # there is a state to start from
    last: bool  # the last state is wanted
    rowdot: bool
    border: int
    both: bool = False  # key and value dims decay
    strong: int = 0
    flat: bool = False  # numbers are added up at once, not by rows first, which Triton 3.6 has no code for on Blackwell


@dataclass(frozen=True)
class Walked:
    """What a walk gives, as far as its role does; segments' decays come in the place of borders.

    At the borders of groups it is a state's gradient in reverse, and forward what the states are that meet it.
    """

    output: jax.Array
    last: jax.Array
    rowdots: jax.Array
    borders: jax.Array


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
    rowdot = None if call.decay == "key" else gate_gradient
    # a folded key meets states as its rows see them
    border = 4 if every_chunk else 0 if gate_gradient is None else 3 if not reverse else 2 if call.decay == "key" else 1
    x_dim, z_dim = (call.value_dim, call.key_dim) if by_key else (call.key_dim, call.value_dim)
    # Triton 3.6 cannot pipeline scores of 64 rows, which take a warpgroup, beside a smaller product and a branch
    fewest = 64 if role in ("output", "dvalue") and call.decay == "key" and config.chunk == 64 else 16
    block = min(tile.block, max(padded(z_dim), fewest))
    if (role == "output" or every_chunk) and call.decay == "head" and config.halved and 2 * block <= tile.block:
        tile = replace(tile, stages=config.halved)
    # as much of the state a warp as the tile was measured with
    tile = replace(tile, block=block, warps=max(4, tile.warps * block // tile.block))
    x_block = min(padded(x_dim), tile.columns)
    sums, parts = cdiv(x_dim, x_block), cdiv(z_dim, block)
    n_segments, n_groups = launcher.blocks(plan.segment), launcher.blocks(config.chunk * plan.group)
    state = (call.heads, call.key_dim, call.value_dim)
    entered = shape(launcher.blocks(config.chunk), call.heads, z_dim, x_dim, dtype=call.dtype)
    outputs: list[Any]
    if x is None:
        decays = (call.key_dim if call.decay == "key" else 1) + (call.value_dim if other else 0)
        decay_of_each = shape(n_segments, call.heads, decays)
        outputs = [None, shape(n_segments, *state), None, entered if every_chunk else decay_of_each]
    else:
        outputs = [
            shape(call.batch, call.tokens, call.heads, sums * z_dim, dtype=dtype if sums == 1 else F32),
            shape(call.sequences, *state) if last else None,
            None if rowdot is None else shape(call.batch, call.tokens, sums * parts, call.heads),
            None,
        ]
        if every_chunk:
            outputs[3] = entered
        elif border == 3:
            outputs[3] = shape(n_groups, call.heads, *((sums, z_dim) if call.decay == "key" else (sums * parts,)))
        elif border:
            # one of the two that meet as its own walk has rounded it, so that what cancels takes its error along
            seen = F32 if call.dtype == jnp.float16 else y.dtype
            outputs[3] = shape(n_groups, call.heads, z_dim, x_dim, dtype=seen)
    x_heads, y_heads, z_heads, w_heads = (call.heads if each is None else each.shape[2] for each in (x, y, z, rowdot))
    sizes = Shape(
        heads=call.heads,
        x_heads=x_heads,
        y_heads=y_heads,
        z_heads=z_heads,
        w_heads=w_heads,
        x_dim=x_dim,
        z_dim=z_dim,
        x_block=x_block,
        z_block=block,
        chunk=config.chunk,
        group=plan.group,
        whole=launcher.whole,
        segmented=plan.segmented(call),
        flip=call.reverse,
    )
    carried = Plan.carried(call)
    # one pass of TF32 has float16's digits and float32's range
    precision = "tf32" if carried else config.precision
    numbers = Numbers(precision, carried, float(call.scale), float(start_scale), float(last_scale))
    # a constant gate may have been folded as one of each token
    decay = "head" if call.decay == "constant" and gates.flag is not None else call.decay
    asked = role, decay, reverse, start is not None, last, rowdot is not None, border, other is not None
    kind = Walk(*asked, flat=not launcher.hopper)
    results: list[Any] = [None] * 4
    given = (x, y, z, rowdot, gates.within, gates.factor, other and other.factor, gates.flag, start, meets)
    by_token = rowdot is not None and decay == "head" and launcher.by_token
    for strong in range(2 if decay == "head" else 1):
        kernel, cut = device("walk").walk, tile
        if by_token and not strong:
            # two programs a multiprocessor have room for three stages
            kernel, cut = device("row_dots").walk_with_row_dots, replace(tile, stages=3)
        results = launcher.launch(
            kernel,
            *(*given, *results),
            outputs=outputs,
            programs=n_segments * call.heads * sums * parts,
            tile=cut,
            length=plan.segment,
            segment=True,
            # the second kernel completes what the first one has left out
            aliases={len(given) + i: i for i, each in enumerate(outputs) if each is not None} if strong else None,
            SHAPE=sizes,
            NUMBERS=numbers,
            WALK=replace(kind, strong=strong),
        )
    output, *rest = results
    if sums > 1 and x is not None and not in_parts:
        output = output.reshape(*output.shape[:3], sums, z_dim).sum(3).astype(dtype)
    return Walked(output, *rest)


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
    return own.last, own.borders


def scan(
    launcher: Launcher,
    own: Segments,
    state: jax.Array | None,
    reverse: bool = False,
    scale: float = 1.0,
    last: bool = False,
    last_scale: float = 1.0,
) -> list[jax.Array]:
    """The state at the start of each time segment and, if asked for, those that sequences end with."""
    call = launcher.call
    block, columns = min(32, padded(call.key_dim)), min(256, padded(call.value_dim))
    return launcher.launch(
        device("segments").scan_segments,
        *(*own, state),
        outputs=[
            shape(*own[0].shape),
            shape(call.sequences, call.heads, call.key_dim, call.value_dim) if last else None,
        ],
        programs=call.sequences * call.heads * cdiv(call.key_dim, block) * cdiv(call.value_dim, columns),
        tile=Tile(block, 4, 2),
        segment=True,
        H=call.heads,
        K=call.key_dim,
        V=call.value_dim,
        BK=block,
        BV=columns,
        DECAYS=own[1].shape[-1],
        KEYED=call.decay == "key",
        START=state is not None,
        START_SCALE=float(scale),
        LAST=last,
        LAST_SCALE=float(last_scale),
        REVERSE=reverse,
    )


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
