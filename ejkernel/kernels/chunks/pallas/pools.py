"""Calls that start from slots of a pool of states and write slots, as one kernel on a TPU.

The kernel goes token by token, so what a sequence gets is the same to the bit wherever it is cut and whatever else is
in the call.

The pool is an output in place that stays in HBM, and the kernel itself moves the slots that are read or written. Blocks
that Pallas moves by an index map would not do: an output block is written back whether or not its sequence writes a
slot, and input blocks are read ahead, before or after a write to the same slot.

All reads come before all writes. The kernel reads and writes slots while it computes other sequences, so it first
copies each slot that one sequence reads and another one writes, to an array with room for a state of each sequence. In
plain decoding there are no such slots, and nothing is copied.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels import _mapping, _pallas, _varying
from ejkernel.kernels.chunks import pools
from ejkernel.kernels.chunks.call import Call
from ejkernel.kernels.chunks.pallas.plan import DTYPES, LANES, LARGEST_DIM
from ejkernel.kernels.chunks.pools import PooledCall, Results
from ejkernel.kernels.chunks.recurrence import Recurrence

DEVICE = "ejkernel.kernels.chunks.pallas.device.pooled"
F32 = np.dtype(np.float32)
FIELDS = "query", "key", "key_gate", "value", "value_gate", "beta"  # of a token, those that a call has
_STATES = 2**20  # bytes of float32 states that a program computes at once; about five times as many have to fit VMEM
_MOST_HEADS = 16  # a program, whose code has them one after the other
_MOST_NUMBERS = 2**16  # in scalar memory


@dataclass(frozen=True)
class PooledSizes:
    """Everything that the device code of a call is compiled for."""

    fields: tuple[str, ...]  # of `FIELDS`
    heads: int  # a program
    tokens: int
    sequences: int
    slots: int
    checkpoints: int
    inside: bool  # whether the call says after how many tokens states are written
    scale: float
    keys_last: bool  # whether states are `[V, K]`


def supports(pooled: PooledCall) -> str | None:
    """Why this kernel cannot serve the call, or `None` if it can."""
    call = pooled.call
    K, V = call.key_dim, call.value_dim
    if call.state_dtype != F32:
        return "float64 arrays"
    if any(jax.export.is_symbolic_dim(each) for each in (call.tokens, call.sequences)):
        return "tokens or sequences whose number is known only when the program runs"
    if 0 in (call.tokens, call.heads, K, V, call.sequences, pooled.checkpoints):
        return "an array without elements"
    if any(dim % 64 or dim > LARGEST_DIM for dim in (K, V)):
        return f"head dims K={K}, V={V}; it takes multiples of 64 up to {LARGEST_DIM}"
    if call.sequences * (3 + 3 * pooled.checkpoints) > _MOST_NUMBERS:
        return f"{call.sequences} sequences, whose slots do not fit the scalar memory"
    return None


def keys_last(call: Call) -> bool:
    """Whether XLA lays out the call's pool as `[slots, H, V, K]`, which has less padding; another layout is a copy."""

    def padded(dim: int) -> int:
        return -(-dim // LANES) * LANES

    return padded(call.key_dim) * call.value_dim < call.key_dim * padded(call.value_dim)


def run(recurrence: Recurrence, pooled: PooledCall, *arrays: jax.Array | None) -> Results:
    """Output and pool; arrays as `PooledCall` lists them. Mapped calls run one after the other."""

    def one(static: PooledCall, arrays: Any) -> Results:
        call, states = static.call, arrays[-4]
        if states.size == 0:
            return pools.run(recurrence, static, *arrays)
        shape = 1, call.tokens, call.heads, call.value_dim
        results = jax.ShapeDtypeStruct(shape, call.dtype), jax.ShapeDtypeStruct(states.shape, states.dtype)
        by_kernel, by_xla = (functools.partial(each, recurrence, static) for each in (_launch, pools.run))
        output, states = _pallas.launch(by_kernel, by_xla, results, *_varying.align(arrays))
        return output, states

    return _mapping.foldable(one, lambda *_: None, pooled)(arrays)


def _launch(recurrence: Recurrence, pooled: PooledCall, *arrays: Any) -> Results:
    # not at the top: `import ejkernel` must not import Pallas
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    call = pooled.call
    *inputs, cu_seqlens, pool, reads, writes, at = arrays
    N, T, H, K, V = call.sequences, call.tokens, call.heads, call.key_dim, call.value_dim
    heads, swap = _heads_per_program(call), keys_last(call)
    if swap:
        pool, K, V = pool.mT, V, K
    fields = _fields(call, heads, recurrence.arrays(call, recurrence.inputs(*inputs, None), cu_seqlens))
    scalars = {"borders": cu_seqlens, "reads": reads, "writes": writes} | ({} if at is None else {"at": at})
    scalars = {name: x.reshape(-1).astype(np.int32) for name, x in scalars.items()}
    scalars |= _conflicts(pool.shape[0], cu_seqlens, reads, writes, at)
    sizes = PooledSizes(
        tuple(fields), heads, T, N, pool.shape[0], pooled.checkpoints, at is not None, float(call.scale), swap
    )
    output_dtype = call.dtype if call.dtype in DTYPES else F32
    outputs = {
        "output": ((T, H // heads, heads, call.value_dim), output_dtype),
        "pool": (pool.shape, pool.dtype),
        "held": ((N, H, K, V), pool.dtype),
    }
    buffers: dict[str, tuple[Any, ...]] = {
        "start": (heads, K, V, pool.dtype),
        "state": (heads, K, V, F32),
        **({} if pool.dtype == F32 else {"written": (heads, K, V, pool.dtype)}),
        "row": (heads, call.value_dim, output_dtype),
        **{f"{name}_buffer": (*x.shape[2:], x.dtype) for name, x in fields.items()},
    }
    scratch: dict[str, Any] = {name: pltpu.VMEM((2, *shape), dtype) for name, (*shape, dtype) in buffers.items()}
    scratch |= {"pending": pltpu.SMEM((2,), jnp.int32), "semaphores": pltpu.SemaphoreType.DMA((4, 2))}
    names = (*scalars, *fields, "pool_before", *outputs, *scratch)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    output, pool, _ = pl.pallas_call(
        functools.partial(importlib.import_module(DEVICE).kernel, sizes, names),
        out_shape=[_varying.shape_like(*each, pool) for each in outputs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(H // heads,),
            in_specs=[whole] * (len(fields) + 1),
            out_specs=[whole] * len(outputs),
            scratch_shapes=[*scratch.values()],
        ),
        input_output_aliases={names.index("pool_before"): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=_pallas.INTERPRET or False,
        name="delta_pooled" if "beta" in fields else "recurrence_pooled",
    )(*scalars.values(), *fields.values(), pool)
    output = output.reshape(1, T, H, call.value_dim).astype(call.dtype)
    return output, pool.mT if swap else pool


def _heads_per_program(call: Call) -> int:
    most = min(_MOST_HEADS, max(1, _STATES // (call.key_dim * call.value_dim * F32.itemsize)))
    return max(each for each in range(1, most + 1) if call.heads % each == 0)


def _fields(call: Call, heads: int, arrays: Any) -> dict[str, jax.Array]:
    """What the kernel takes of each token, `[T, programs, heads, K or V]`; heads may be shared, in equal parts."""
    programs = call.heads // heads

    def by_program(x: jax.Array, dim: int) -> jax.Array:
        x = x[0] if x.dtype in DTYPES else x[0].astype(F32)
        if x.shape[1] % programs:
            x = jnp.repeat(x, call.heads // x.shape[1], axis=1)
        return jnp.broadcast_to(x, (*x.shape[:2], dim)).reshape(call.tokens, programs, -1, dim)

    key_gate, value_gate = arrays.log_decay, getattr(arrays, "value_log_decay", None)
    if key_gate is not None and call.decay != "key" and not keys_last(call):
        # a head's gate is one of all its value dims: a row multiplies a state's rows as it is, a column is spread first
        value_gate = key_gate if value_gate is None else value_gate.astype(F32) + key_gate.astype(F32)
        key_gate = None
    by_value = arrays.value, value_gate, getattr(arrays, "beta", None)
    fields = [(x, call.key_dim) for x in (arrays.query, arrays.key, key_gate)] + [(x, call.value_dim) for x in by_value]
    present = zip(FIELDS, fields, strict=True)
    return {name: by_program(x, dim) for name, (x, dim) in present if x is not None}


def _conflicts(
    slots: int, cu_seqlens: jax.Array, reads: jax.Array, writes: jax.Array, at: jax.Array | None
) -> dict[str, jax.Array]:
    """How many earlier writes have a write's slot, `repeated [N · C]`, and how many of others a read's, `shared [N]`.

    Two writes of a slot at once could leave parts of both. All are compared pair by pair, which takes TPUs one pass; a
    table of all slots would be filled number by number.
    """
    _, targets = pools.checkpoints(slots, cu_seqlens, writes, at)
    (N, C), targets = targets.shape, targets.reshape(-1)
    order, sequence = jnp.arange(N * C, dtype=np.int32), jnp.arange(N, dtype=np.int32)
    # what is no slot is not read or written either, whatever is said of it here
    repeated = (targets[:, None] == targets) & (order < order[:, None])
    shared = (reads[:, None] == targets) & (order // C != sequence[:, None])
    return {"repeated": repeated.sum(1, dtype=np.int32), "shared": shared.sum(1, dtype=np.int32)}
