"""The passes over the tokens that make up a call of the recurrence, as launches of Triton kernels."""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import _launch
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import configs
from ejkernel.kernels.linear_recurrence.triton.configs import Config, Tile

# Sequences of so few tokens are walked one token at a time.
FEW_TOKENS = 8
F32 = jnp.float32


def _kernels() -> Any:
    # not at the top: `import ejkernel` must not import Triton
    return importlib.import_module("ejkernel.kernels.linear_recurrence.triton.kernels")


def _key_kernels() -> Any:
    return importlib.import_module("ejkernel.kernels.linear_recurrence.triton.key_kernels")


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power(dim: int) -> int:
    """The least power of two that holds `dim`; dots need 16."""
    return max(16, 1 << (dim - 1).bit_length())


def _heads_at_once(heads: int) -> int:
    """Heads that one program of the exact path looks after."""
    return math.gcd(heads, 8)


def _shape(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclass(frozen=True)
class Plan:
    """How a call is cut: the configuration, tokens a time segment, and chunks a group.

    Over a group a gate's gradient is summed, and between its ends no state is stored. Folding `vmap` into the batch
    keeps the plan.
    """

    config: Config
    segment: int
    group: int

    @staticmethod
    def of(call: Call) -> "Plan":
        wide = call.dtype == F32 or Plan.carried(call)
        capability = _launch.capability() or 90
        config = configs.configure(capability, wide, max(call.key_dim, call.value_dim))
        rows = 1 if call.packed else call.batch
        programs = rows * call.heads * _cdiv(call.value_dim, min(config.output.block, _power(call.value_dim)))
        # with one gate a head, the states at the ends of groups are most of what has to be stored; where time is cut,
        # in segments of whole groups, these must not be long
        for times in (2, 4) if call.decay == "head" else (1,):
            unit = config.chunk * config.group * times
            segments = max(1, min(config.fill // programs, call.tokens // unit))
            if segments > 1:
                break
        return Plan(config, unit * _cdiv(call.tokens, unit * segments), config.group * times)

    @staticmethod
    def carried(call: Call) -> bool:
        """Whether the call's operands are carried as float32: float16 has too small a range for folded gates."""
        return call.dtype == jnp.float16 and call.decay == "key"

    def segmented(self, call: Call) -> bool:
        return self.segment < call.tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """The decays as the walks read them; which are there depends on the kind of decay."""

    constant: jax.Array | None = None  # constant: the gates themselves, where all chunks are whole [N, H]
    flag: jax.Array | None = None  # whether a chunk's gates are too strong for one reference [chunks, H]
    factor: jax.Array | None = None  # decays of a state through each chunk [chunks, H, 2], or both ways [.., 4, K]
    weight: jax.Array | None = None  # head: weights of each chunk's rows, and sums of their gates [chunks, H, C, 4]
    late: jax.Array | None = None  # key: log decay of each chunk's later half [chunks, H, K]
    score: jax.Array | None = None  # key: scores of flagged chunks [chunks, H, C, C]


@dataclass(frozen=True)
class Launcher:
    """One call on its way to the device: its cut in blocks, and what every kernel is told of it."""

    call: Call
    plan: Plan
    table: jax.Array  # borders of sequences and counts of chunks, groups, segments before each; unused if not packed
    owners: dict[int, jax.Array]  # the sequence of each block, by tokens a block

    @staticmethod
    def of(call: Call, plan: Plan, cu_seqlens: jax.Array | None) -> "Launcher":
        lengths = plan.config.chunk, plan.config.chunk * plan.group, plan.segment
        if cu_seqlens is None:
            nothing = jnp.zeros((1,), jnp.int32)
            return Launcher(call, plan, nothing, dict.fromkeys(lengths, nothing))
        borders = jnp.concatenate([cu_seqlens.astype(jnp.int32), jnp.full((1,), call.tokens, jnp.int32)])
        size = jnp.array(lengths, jnp.int32)[:, None]
        # a sequence without tokens still hands its initial state on
        counts = jnp.maximum(-(-jnp.diff(borders) // size), jnp.where(size == plan.segment, 1, 0))
        before = jnp.pad(jnp.cumsum(counts, 1, dtype=jnp.int32), ((0, 0), (1, 0)))
        # comparing all is one kernel; searching is one a step, and those are launched one after the other
        method = "compare_all" if call.sequences <= 4096 else "sort"
        owners = {}
        for i, length in enumerate(lengths):
            blocks = jnp.arange(call.tokens // length + call.sequences + 1, dtype=jnp.int32)
            owner = jnp.searchsorted(before[i, 1:], blocks, side="right", method=method).astype(jnp.int32)
            owners[length] = jnp.minimum(owner, call.sequences)
        return Launcher(call, plan, jnp.concatenate([borders[None], before]), owners)

    @property
    def group(self) -> int:
        """Chunks over which a gate's gradient is summed."""
        return self.plan.group

    @property
    def whole(self) -> bool:
        """Whether no chunk has a ragged end, which spares masks."""
        return not self.call.packed and self.call.tokens % self.plan.config.chunk == 0

    def blocks(self, length: int) -> int:
        if self.call.packed:
            return self.call.tokens // length + self.call.sequences + 1
        return self.call.batch * _cdiv(self.call.tokens, length)

    @staticmethod
    def decay(kind: str, key_rows: bool = False) -> int:
        """What the kernels call a kind of decay."""
        names = {"none": "NONE", "constant": "CONSTANT", "head": "HEAD"}
        names["key"] = "KEY_ROWS" if key_rows else "KEY_COLUMNS"
        return getattr(_kernels(), names[kind]).value

    def launch(
        self,
        kernel: Any,
        *arrays: Any,
        outputs: Sequence[Any],
        programs: int,
        tile: Tile,
        length: int = 0,
        aliases: dict[int, int] | None = None,
        segment: bool = False,
        **constants: Any,
    ) -> list[jax.Array]:
        """Runs `kernel` over blocks of `length` tokens; absent arrays and outputs are stood in for."""
        given = [self.table if each is None else each for each in arrays]
        wanted = [jax.ShapeDtypeStruct((1,), F32) if each is None else each for each in outputs]
        owners = [self.owners[length]] if length else []
        sizes = [self.call.tokens, self.call.sequences] + ([self.plan.segment] if segment else [])
        return list(
            _launch.launch(
                kernel,
                *given,
                self.table,
                *owners,
                *sizes,
                outputs=wanted,
                programs=programs,
                num_warps=tile.warps,
                num_stages=tile.stages,
                aliases=aliases,
                PACKED=self.call.packed,
                **constants,
            )
        )

    def walk(
        self,
        x: jax.Array | None,
        y: jax.Array,
        z: jax.Array,
        gates: "Gates",
        start: jax.Array | None,
        *,
        tile: Tile,
        rows: str,
        reverse: bool = False,
        dtype: Any = F32,
        last: bool = False,
        start_scale: float = 1.0,
        last_scale: float = 1.0,
        rowdot: jax.Array | None = None,
        border: int = 0,
        scores: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Output, last state, row dots and borders of one walk; without `x`, states and decays of the segments."""
        kernels = _kernels()
        call, config = self.call, self.plan.config
        key_rows = rows == "key"
        dim_x, dim_z = (call.value_dim, call.key_dim) if key_rows else (call.key_dim, call.value_dim)
        state_row, state_column = (call.value_dim, 1) if key_rows else (1, call.value_dim)
        # Triton 3.6 cannot pipeline scores of 64 rows, which take a warpgroup, beside a smaller product and a branch
        fewest = 64 if scores and call.decay == "key" and config.chunk == 64 else 16
        block = min(tile.block, max(_power(dim_z), fewest))
        parts = _cdiv(dim_z, block)
        n_segments, n_groups = self.blocks(self.plan.segment), self.blocks(config.chunk * self.group)
        key_decay = call.decay == "key"
        state = (call.heads, call.key_dim, call.value_dim)
        if x is None:
            outputs = [
                None,
                _shape(n_segments, *state),
                None,
                _shape(n_segments, call.heads, call.key_dim if key_decay else 1),
            ]
        else:
            outputs = [
                _shape(call.batch, call.tokens, call.heads, dim_z, dtype=dtype),
                _shape(call.sequences, *state) if last else None,
                None if rowdot is None else _shape(call.batch, call.tokens, call.heads, parts),
                None,
            ]
            if border:
                seen = F32 if call.dtype == jnp.float16 else y.dtype
                size = (call.heads, call.value_dim, call.key_dim)
                # one of the two as its own walk has rounded it, so that what cancels takes its error along
                outputs[3] = _shape(n_groups, *size, dtype=seen if reverse else F32)
        heads = [call.heads if each is None else each.shape[2] for each in (x, y, z, rowdot)]
        decay = self.decay("head" if call.decay == "constant" and not self.whole else call.decay, key_rows)
        results: list[Any] = [None] * 4
        given = (x, y, z, rowdot, gates.constant, gates.weight, gates.factor, gates.flag, gates.score, start)
        for strong in range(2 if decay == self.decay("head") else 1):
            results = self.launch(
                kernels.walk,
                *(*given, *results),
                outputs=outputs,
                programs=n_segments * call.heads * parts,
                tile=tile,
                length=self.plan.segment,
                segment=True,
                # the second kernel completes what the first one has left out
                aliases={len(given) + i: i for i, each in enumerate(outputs) if each is not None} if strong else None,
                H=call.heads,
                HX=heads[0],
                HY=heads[1],
                HZ=heads[2],
                HW=heads[3],
                DX=dim_x,
                DZ=dim_z,
                BX=_power(dim_x),
                BZ=block,
                C=config.chunk,
                G=self.group,
                STATE_ROW=state_row,
                STATE_COLUMN=state_column,
                DECAY=decay,
                SCALE=float(call.scale),
                START_SCALE=float(start_scale),
                LAST_SCALE=float(last_scale),
                WHOLE=self.whole,
                FLIP=call.reverse,
                REVERSE=reverse,
                START=start is not None,
                SEGMENTED=self.plan.segmented(call),
                OUTPUT=x is not None,
                SCORES=scores,
                LAST=last,
                STRONG=strong,
                ROWDOT=rowdot is not None,
                BORDER=border,
                WIDE=Plan.carried(call),
                # one pass of TF32 has float16's digits and float32's range
                PRECISION="tf32" if Plan.carried(call) else config.precision,
            )
        out, final, dots, borders = results
        return out, final, dots, borders

    def starts(
        self,
        y: jax.Array,
        z: jax.Array,
        gates: "Gates",
        state: jax.Array | None,
        reverse: bool = False,
        scale: float = 1.0,
    ) -> jax.Array | None:
        """The state at the start of each time segment, or `state` itself (unscaled) where time is not cut."""
        kernels = _kernels()
        call = self.call
        if not self.plan.segmented(call):
            return state
        tile = self.plan.config.output
        _, own, _, decay = self.walk(None, y, z, gates, None, tile=tile, rows="value", reverse=reverse)
        block = min(32, _power(call.key_dim))
        (starts,) = self.launch(
            kernels.scan_segments,
            *(own, decay, state),
            outputs=[_shape(*own.shape)],
            programs=call.sequences * call.heads * _cdiv(call.key_dim, block),
            tile=Tile(block, 4, 2),
            segment=True,
            H=call.heads,
            K=call.key_dim,
            V=call.value_dim,
            BK=block,
            BV=_power(call.value_dim),
            DECAYS=call.key_dim if call.decay == "key" else 1,
            START=state is not None,
            START_SCALE=float(scale),
            REVERSE=reverse,
        )
        return starts


def forward(call: Call, plan: Plan, *arrays: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Output, final states, and what the backward can use again (nothing after the token-by-token kernel)."""
    launcher = Launcher.of(call, plan, arrays[5])
    if call.tokens <= (3 * call.sequences if call.packed else FEW_TOKENS):
        return (*_step(launcher, *arrays[:5]), None)
    prepared = _prepare(launcher, *arrays[:5])
    query, key, gates, starts = prepared
    output, last, _, _ = launcher.walk(
        *(query, key, arrays[2], gates, starts),
        tile=plan.config.output,
        rows="value",
        dtype=call.dtype,
        last=True,
        scores=True,
    )
    return output, last, prepared


def backward(
    wanted: bool, call: Call, plan: Plan, arrays: Any, prepared: Any, doutput: jax.Array, dlast: jax.Array | None
) -> tuple[Any, ...]:
    """Cotangents of query, key, value, log decay (zeros unless `wanted`) and initial state."""
    query, key, value, log_decay, initial_state, cu_seqlens = arrays
    launcher = Launcher.of(call, plan, cu_seqlens)
    qhat, khat, gates, starts = prepared or _prepare(launcher, *arrays[:5])
    config = plan.config
    is_key = call.decay == "key"
    wanted = wanted or is_key
    scale = 1.0 / call.scale
    tile = config.dots or config.gradient if wanted and not is_key else config.gradient
    ends = launcher.starts(qhat, doutput, gates, dlast, reverse=True, scale=scale)
    back: dict[str, Any] = {"reverse": True, "start_scale": 1.0 if plan.segmented(call) else scale}
    # heads that share a key are added up in float32
    shared = F32 if call.heads != call.kv_heads else call.dtype
    dvalue, dstart, _, _ = launcher.walk(
        *(khat, qhat, doutput, gates, ends),
        tile=config.output,
        rows="value",
        dtype=shared,
        last=initial_state is not None,
        last_scale=call.scale,
        scores=True,
        **back,
    )
    dquery, _, query_dots, memory = launcher.walk(
        *(doutput, value, khat, gates, starts),
        tile=tile,
        rows="key",
        dtype=F32 if is_key else call.dtype,
        rowdot=query if wanted and not is_key else None,
        border=1 if wanted else 0,
    )
    dkey, _, key_dots, dmemory = launcher.walk(
        *(value, doutput, qhat, gates, ends),
        tile=tile,
        rows="key",
        dtype=F32 if is_key else shared,
        rowdot=key if wanted and not is_key else None,
        border=(2 if is_key else 1) if wanted else 0,
        **back,
    )
    dgate = None
    if is_key:
        hats = (qhat, khat, dquery, dkey, memory, dmemory)
        dquery, dkey, dgate = _unfold(launcher, arrays, gates, doutput, hats, shared)
    elif wanted:
        first = None if initial_state is None else _met(initial_state.astype(F32), dstart)
        dgate = _head_gate_gradient(launcher, log_decay, query_dots, key_dots, memory, dmemory, first)
        if call.decay == "constant":
            dgate = _sum_tokens(call, dgate, cu_seqlens)
            dgate = jnp.where(jnp.isneginf(log_decay), 0, dgate).astype(log_decay.dtype)
    elif log_decay is not None:
        dgate = jnp.zeros_like(log_decay)
    dkey, dvalue = _sum_shared(call, dkey), _sum_shared(call, dvalue)
    return dquery, dkey, dvalue, dgate, None if initial_state is None else dstart.astype(initial_state.dtype)


def _met(state: jax.Array, dstate: jax.Array) -> jax.Array:
    """⟨S, dS⟩ of each head; the gradient of nothing may be infinite."""
    return jnp.where(state == 0, 0, state * dstate).sum((2, 3))


def _sum_shared(call: Call, x: jax.Array) -> jax.Array:
    """Adds up the query heads that share a key."""
    if call.heads == call.kv_heads:
        return x
    return x.reshape(*x.shape[:2], call.kv_heads, -1, x.shape[-1]).sum(3).astype(call.dtype)


def _sum_tokens(call: Call, dgate: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """The gradient of one gate a sequence and head from one a token: `[B, T, H]` to `[N, H]`."""
    if cu_seqlens is None:
        return dgate.sum(1)
    token = jnp.arange(call.tokens)[None, :, None]
    inside = (token >= cu_seqlens[:-1, None, None]) & (token < cu_seqlens[1:, None, None])
    return jnp.where(inside, dgate, 0).sum(1)


def _prepare(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array, Gates, jax.Array | None]:
    """Queries and keys with key gates folded in, the gates as walks read them, and the segments' first states."""
    if launcher.call.decay == "key":
        query, key, gates = _fold(launcher, query, key, log_decay)
    elif launcher.call.decay == "constant" and launcher.whole:
        gates = Gates(constant=log_decay)
    elif log_decay is not None:
        gates = _fold_head(launcher, log_decay)
    else:
        gates = Gates()
    return query, key, gates, launcher.starts(key, value, gates, initial_state)


def _step(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array | None,
    initial_state: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    kernels, call, tile = _kernels(), launcher.call, launcher.plan.config.step
    block = min(tile.block, _power(call.value_dim))
    in_place = initial_state is not None and initial_state.dtype == F32
    state = (call.sequences, call.heads, call.key_dim, call.value_dim)
    output, last = launcher.launch(
        kernels.step,
        *(query, key, value, log_decay, initial_state),
        outputs=[_shape(call.batch, call.tokens, call.heads, call.value_dim, dtype=call.dtype), _shape(*state)],
        # packed streams have one more sequence: the padding behind the last
        programs=(call.sequences + call.packed) * call.heads * _cdiv(call.value_dim, block),
        tile=tile,
        aliases={4: 1} if in_place else None,
        H=call.heads,
        HKV=call.kv_heads,
        K=call.key_dim,
        V=call.value_dim,
        BK=_power(call.key_dim),
        BV=block,
        DECAY=launcher.decay(call.decay),
        SCALE=float(call.scale),
        FLIP=call.reverse,
        START=initial_state is not None,
    )
    return output, last


def _fold_head(launcher: Launcher, log_decay: jax.Array) -> Gates:
    call, config = launcher.call, launcher.plan.config
    chunk, chunks, heads = config.chunk, launcher.blocks(config.chunk), call.heads
    block = min(4, 1 << (heads - 1).bit_length())
    weight, factor, flag = launcher.launch(
        _kernels().fold_head_gates,
        log_decay,
        outputs=[
            _shape(chunks, heads, chunk, 4),
            _shape(chunks, heads, 2),
            _shape(chunks, heads, dtype=jnp.int32),
        ],
        programs=chunks * _cdiv(heads, block),
        tile=Tile(block, 1, 1),
        length=chunk,
        H=heads,
        BH=block,
        C=chunk,
        DECAY=launcher.decay(call.decay),
        LIMIT=config.limit,
        FLIP=call.reverse,
    )
    return Gates(flag=flag, factor=factor, weight=weight)


def _head_gate_gradient(
    launcher: Launcher,
    log_decay: jax.Array,
    query_dots: jax.Array,
    key_dots: jax.Array,
    memory: jax.Array,
    dmemory: jax.Array,
    first: jax.Array | None,
) -> jax.Array:
    kernels, call, config = _kernels(), launcher.call, launcher.plan.config
    length = config.chunk * launcher.group
    groups = launcher.blocks(length)
    shared: dict[str, Any] = {"length": length, "H": call.heads, "C": config.chunk, "G": launcher.group}
    (border,) = launcher.launch(
        kernels.meet_states,
        *(memory, dmemory),
        outputs=[_shape(groups, call.heads)],
        programs=groups * call.heads,
        tile=Tile(16, 4, 1),
        K=call.key_dim,
        V=call.value_dim,
        BK=_power(call.key_dim),
        SCALE=float(call.scale),
        **shared,
    )
    block = min(4, 1 << (call.heads - 1).bit_length())
    (dgate,) = launcher.launch(
        kernels.sum_head_gates,
        *(log_decay, query_dots, key_dots, border, first),
        outputs=[_shape(call.batch, call.tokens, call.heads, dtype=log_decay.dtype if call.decay == "head" else F32)],
        programs=groups * _cdiv(call.heads, block),
        tile=Tile(block, 8, 1),
        BH=block,
        NZ=query_dots.shape[-1],
        DECAY=launcher.decay(call.decay),
        START=first is not None,
        FLIP=call.reverse,
        **shared,
    )
    return dgate


def _fold(
    launcher: Launcher, query: jax.Array, key: jax.Array, log_decay: jax.Array | None
) -> tuple[jax.Array, jax.Array, Gates]:
    kernels, call, config = _key_kernels(), launcher.call, launcher.plan.config
    chunk, chunks, heads, dim = config.chunk, launcher.blocks(config.chunk), call.heads, call.key_dim
    # float16 has too small a range for folded gates
    folded = F32 if call.dtype == jnp.float16 else call.dtype
    hat = _shape(call.batch, call.tokens, heads, dim, dtype=folded)
    fine = call.dtype == F32
    shared: dict[str, Any] = {
        "length": chunk,
        "H": heads,
        "HKV": call.kv_heads,
        "K": dim,
        "C": chunk,
        "FLIP": call.reverse,
    }
    qhat, khat, factor, late, flag = launcher.launch(
        kernels.fold_gates,
        *(query, key, log_decay),
        outputs=[
            hat,
            hat,
            _shape(chunks, heads, 4, dim),
            _shape(chunks, heads, dim),
            _shape(chunks, heads, dtype=jnp.int32),
        ],
        programs=chunks * heads,
        tile=Tile(_power(dim), max(1, _power(dim) // 128), 1),
        BK=_power(dim),
        LIMIT=config.limit,
        **shared,
    )
    programs = chunks * heads // _heads_at_once(heads)
    qhat, khat, score, _ = launcher.launch(
        kernels.exact_scores,
        *(query, key, log_decay, flag, qhat, khat),
        # the last is where each program keeps the sums of a chunk's gates
        outputs=[
            hat,
            hat,
            _shape(chunks, heads, chunk, chunk, dtype=folded),
            None if fine else _shape(programs, chunk, _power(dim)),
        ],
        programs=programs,
        tile=config.exact,
        aliases={4: 0, 5: 1},
        HEADS=_heads_at_once(heads),
        LEVELS=chunk.bit_length() - 1,
        KP=_power(dim),
        BK=min(config.exact.block, _power(dim)),
        WIDE=call.dtype == jnp.float16,
        FINE=fine,
        PRECISION=config.precision,
        **shared,
    )
    return qhat, khat, Gates(factor=factor, late=late, flag=flag, score=score)


def _unfold(
    launcher: Launcher, arrays: Any, gates: Gates, doutput: jax.Array, hats: Any, key_dtype: Any
) -> list[jax.Array]:
    """Gradients of query, key and key gates from those of the folded query and key."""
    kernels, call, config = _key_kernels(), launcher.call, launcher.plan.config
    query, key, value, log_decay = arrays[:4]
    qhat, khat, dqhat, dkhat, memory, dmemory = hats
    chunk, group = config.chunk, config.chunk * launcher.group
    shared: dict[str, Any] = {
        "H": call.heads,
        "K": call.key_dim,
        "V": call.value_dim,
        "C": chunk,
        "SCALE": float(call.scale),
        "FLIP": call.reverse,
    }
    hat = (call.batch, call.tokens, call.heads, call.key_dim)
    gradients = [_shape(*hat, dtype=call.dtype), _shape(*hat, dtype=key_dtype)]
    fine = call.dtype == F32
    programs = launcher.blocks(chunk) * call.heads // _heads_at_once(call.heads)
    width, block = _power(call.key_dim), config.exact.block
    summand, dquery, dkey, _ = launcher.launch(
        kernels.exact_gradients,
        *(query, key, value, log_decay, doutput, gates.flag, dqhat, dkhat),
        outputs=[_shape(*hat), *gradients, None if fine else _shape(programs, chunk, width)],
        programs=programs,
        tile=config.exact,
        length=chunk,
        HEADS=_heads_at_once(call.heads),
        aliases={6: 0},
        LEVELS=chunk.bit_length() - 1,
        HKV=call.kv_heads,
        KP=width,
        # three tiles are added up at once, where the scores are one
        BK=min(max(16, block // 2), width),
        BV=min(2 * block, _power(call.value_dim)),
        WIDE=call.dtype == jnp.float16,
        FINE=fine,
        PRECISION=config.precision,
        **shared,
    )
    return launcher.launch(
        kernels.unfold_gates,
        *(
            log_decay,
            qhat,
            khat,
            summand,
            dkhat,
            gates.late,
            gates.flag,
            gates.factor,
            memory,
            dmemory,
            dquery,
            dkey,
        ),
        outputs=[*gradients, _shape(*hat, dtype=log_decay.dtype)],
        programs=launcher.blocks(group) * call.heads,
        tile=Tile(width, max(1, width // 128), 1),
        length=group,
        aliases={10: 0, 11: 1},
        BK=width,
        G=launcher.group,
        **shared,
    )
