"""Launches that fold gates for the walks, and those that compute the gates' gradient from what the walks return."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._launch import Tile, padded, shape
from ejkernel.kernels.chunks.triton.launching import F32
from ejkernel.kernels.linear_recurrence.triton.launcher import Inputs, Launcher, device
from ejkernel.xla_utils.utils import cdiv

# Heads that a program of bounded gates visits where there are many programs. Fewer heads fill the chip more evenly,
# more heads make fewer programs that have nothing to do.
HEADS_OF_BOUNDED = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """The decays as the walks read them; which are there depends on the kind of decay."""

    within: jax.Array | None = None  # constant: gates [N, H]; head: weights [chunks, H, C, 4]; key: scores [.., C, C]
    factors: jax.Array | None = None  # decays of a state through each chunk [chunks, H, 2], or both ways [.., 4, K]
    flag: jax.Array | None = None  # whether a chunk's gates are too strong for one reference [chunks, H]
    any_flag: jax.Array | None = None  # whether any listed chunk is flagged that begins in a chunk's size [chunks, H]
    late: jax.Array | None = None  # key: bits of decay in each chunk's later half [chunks, H, K]


class Hats(NamedTuple):
    """Queries and keys with their gates folded in, their gradients, and ⟨S, dS⟩ of key dims at the ends of groups."""

    query: jax.Array
    key: jax.Array
    d_query: jax.Array
    d_key: jax.Array
    product: jax.Array


def fold_head_gates(launcher: Launcher, log_decay: jax.Array) -> Gates:
    """One gate a head, as the walks read it."""
    config, heads = launcher.config, launcher.call.heads
    chunk, chunks = config.chunk, launcher.blocks(config.chunk)
    block = _head_block(heads)
    folded = launcher.launch(
        device("head_gates").fold_head_gates,
        {"gate": log_decay},
        {
            "weights": launcher.kept(4),
            "factors": shape(chunks, heads, 2),
            "flag": launcher.flags(),
            "any_flag": launcher.any_flags(),
        },
        programs=chunks * cdiv(heads, block),
        tile=Tile(block, warps=1),
        length=chunk,
        head_block=block,
        limit=config.limit,
    )
    return Gates(folded.weights, folded.factors, folded.flag, any_flag=folded.any_flag)


def head_gate_gradient(
    launcher: Launcher,
    log_decay: jax.Array,
    query_dots: jax.Array,
    key_dots: jax.Array,
    product: jax.Array,
    first: jax.Array | None,
) -> jax.Array:
    """The gradient of one gate a head and token, from row dots and ⟨S, dS⟩ at groups' ends and at the `first` state."""
    call, length = launcher.call, launcher.config.chunk * launcher.plan.group
    block = _head_block(call.heads)
    dtype = log_decay.dtype if call.decay == "head" else F32
    (d_gate,) = launcher.launch(
        device("head_gates").sum_head_gates,
        {"gate": log_decay, "query_dots": query_dots, "key_dots": key_dots, "product": product, "first": first},
        {"d_gate": shape(call.batch, call.tokens, call.heads, dtype=dtype)},
        programs=launcher.blocks(length) * cdiv(call.heads, block),
        tile=Tile(block, warps=8),
        length=length,
        head_block=block,
        parts=query_dots.shape[2],
        fine=call.decay == "constant" and call.dtype == F32,
        start=first is not None,
    )
    return d_gate


def _head_block(heads: int) -> int:
    """Heads that a program of head gates takes at once."""
    return min(4, 1 << (heads - 1).bit_length())


def _columns(dim: int, most: int = 128) -> tuple[int, int]:
    """Dims that a program of one warp streams, and how many such programs a head has."""
    width = min(most, padded(dim))
    return width, cdiv(dim, width)


def _of_exact(launcher: Launcher, tile: Tile, dims: int) -> dict[str, Any]:
    """Programs and constants of a kernel of the exact path, a thread of which has `dims` dims of each row."""
    call, config = launcher.call, launcher.config
    heads, width = math.gcd(call.heads, 8), min(tile.rows, padded(call.key_dim))
    rows = max(1, config.chunk * width // (32 * tile.warps * dims))
    programs = launcher.blocks(config.chunk) * call.heads // heads
    cut = {"key_block": width, "log_rows": rows.bit_length() - 1, "heads_at_once": heads}
    return {"programs": programs, "tile": tile, "length": config.chunk, **cut}


def _of_bounded(launcher: Launcher, tile: Tile, length: int, parts: bool = False) -> dict[str, Any]:
    """The same of a kernel of bounded gates over blocks of `length` tokens; `parts` programs share a head's dims."""
    call, config = launcher.call, launcher.config
    width = min(tile.rows, padded(call.key_dim))
    programs = launcher.blocks(length) * call.heads * (cdiv(call.key_dim, width) if parts else 1)
    many = programs >= 4 * HEADS_OF_BOUNDED * config.fill and not launcher.constants.pooled
    heads = math.gcd(call.heads, HEADS_OF_BOUNDED) if many else 1
    # of each row a thread has two dims at least, as Triton would give threads tokens first
    dims = max(2, config.chunk * width // (32 * tile.warps * 8))
    cut = {"key_block": width, "dims": dims, "log_rows": 3, "heads_at_once": heads}
    return {"programs": programs // heads, "tile": tile, "length": length, **cut}


def fold_key_gates(
    launcher: Launcher,
    query: jax.Array,
    key: jax.Array,
    log_decay: jax.Array | None,
    start: bool,
    limit: float | None = None,
) -> tuple[jax.Array, jax.Array, Gates]:
    """Queries and keys with their gates folded in, and the gates as walks read them; `start` if there are first states.

    With a `limit`, chunks whose gates are stronger are flagged, but have no scores: these walks leave the call to XLA.
    """
    call, config = launcher.call, launcher.config
    chunk, chunks, heads, dim = config.chunk, launcher.blocks(config.chunk), call.heads, call.key_dim
    # float16 has too small a range for folded gates
    dtype = F32 if call.dtype == jnp.float16 else call.dtype
    hats = {"q_hat": launcher.rows(dim, dtype), "k_hat": launcher.rows(dim, dtype)}
    inputs = {"query": query, "key": key, "gate": log_decay}
    common: dict[str, Any] = {"start": start, "query_heads": query.shape[2], "key_heads": key.shape[2]}
    mild = launcher.launch(
        device("key_gates").fold_gates,
        inputs,
        {
            **hats,
            # the fifth is 1, for listed chunks that pass a state on as it is
            "factors": shape(chunks, heads, 4 + call.segmented, dim),
            # not of listed chunks, which may be more than there are places
            "late": None if call.segmented else shape(chunks, heads, dim),
            "flag": launcher.flags(),
            "any_flag": launcher.any_flags(),
        },
        programs=chunks * heads,
        tile=Tile(padded(dim), warps=max(1, padded(dim) // 128)),
        length=chunk,
        key_block=padded(dim),
        limit=limit or config.limit,
        **common,
    )
    gates = Gates(factors=mild.factors, late=mild.late, flag=mild.flag, any_flag=mild.any_flag)
    if limit:
        return mild.q_hat, mild.k_hat, gates
    scores = {**hats, "score": launcher.kept(chunk, dtype=dtype)}
    bounded = launcher.launch(
        device("bounded_key_gates").bounded_scores,
        inputs | {"any_flag": mild.any_flag},
        {**scores, "factors": shape(*mild.factors.shape), "flag": launcher.flags()},
        in_place={name: getattr(mild, name) for name in ("q_hat", "k_hat", "factors", "flag")},
        **_of_bounded(launcher, config.bounded, chunk),
        **common,
    )
    exact = launcher.launch(
        device("strong_key_gates").exact_scores,
        inputs | {"flag": bounded.flag, "any_flag": mild.any_flag},
        scores,
        in_place={name: getattr(bounded, name) for name in scores},
        bounded=True,
        **_of_exact(launcher, config.exact, 4),
        **common,
    )
    gates = replace(gates, within=exact.score, factors=bounded.factors, flag=bounded.flag)
    return exact.q_hat, exact.k_hat, gates


def _flagged_gradients(
    launcher: Launcher,
    x: Inputs,
    gates: Gates,
    d_output: jax.Array,
    hats: Hats,
    outputs: dict[str, jax.ShapeDtypeStruct],
    has_bounded: bool,
) -> dict[str, jax.Array]:
    """Of flagged chunks the gradients of query and key, and the summands of the gates' gradient in the place of dq̂.

    With `has_bounded` bounded chunks have their own kernel, which also gives the gates' gradient, as `d_gate`, of the
    groups that have no other chunks; without, they take the exact path.
    """
    call, config = launcher.call, launcher.config
    inputs: dict[str, Any] = {
        **{"query": x.query, "key": x.key, "value": x.value, "gate": x.log_decay, "d_output": d_output},
        **{"flag": gates.flag, "any_flag": gates.any_flag, "dq_hat": hats.d_query, "dk_hat": hats.d_key},
    }
    common: dict[str, Any] = {
        "parts": hats.d_query.shape[-1] // call.key_dim,
        "query_heads": x.query.shape[2],
        "key_heads": x.key.shape[2],
        "value_heads": x.value.shape[2],
        "output_heads": d_output.shape[2],
        "start": x.initial_state is not None,
        "value_block": min(2 * config.exact.rows, padded(call.value_dim)),
    }
    results = {"summand": hats.d_query}
    if has_bounded:
        assert x.log_decay is not None
        bounded = launcher.launch(
            device("bounded_key_gates").bounded_gradients,
            inputs | {"product": hats.product},
            outputs | {"d_gate": shape(*x.log_decay.shape, dtype=x.log_decay.dtype)},
            in_place=results,
            product_parts=hats.product.shape[2],
            **_of_bounded(launcher, config.bounded_gradients, config.chunk * launcher.plan.group, parts=True),
            **common,
        )
        results = {name: getattr(bounded, name) for name in (*outputs, "d_gate")}
        inputs["dq_hat"] = bounded.summand
    # three tiles are added up at once, where the scores are one
    cut = _of_exact(launcher, Tile(config.exact.rows, warps=2 * config.exact.warps), 2)
    exact = launcher.launch(
        device("strong_key_gates").exact_gradients,
        inputs,
        # `d_score` is where each program keeps the gradients of a chunk's scores
        outputs | {"d_score": shape(cut["programs"], config.chunk, config.chunk)},
        in_place={name: each for name, each in results.items() if name != "d_gate"},
        bounded=has_bounded,
        **cut,
        **common,
    )
    return results | {name: getattr(exact, name) for name in outputs}


def unfold_queries(
    launcher: Launcher, x: Inputs, gates: Gates, d_output: jax.Array, dq_hat: jax.Array, k_hat: jax.Array
) -> jax.Array:
    """The gradient of the query alone, from that of the folded query; it does not depend on the query."""
    result = shape(*dq_hat.shape, dtype=launcher.call.dtype)
    outputs = {"summand": shape(*dq_hat.shape), "d_query": result, "d_key": result}
    # any array may stand for what only the key's gradient needs
    hats = Hats(k_hat, k_hat, dq_hat, k_hat, k_hat)
    flagged = _flagged_gradients(launcher, x, gates, d_output, hats, outputs, has_bounded=False)
    return unfold_rows(launcher, x.log_decay, gates, flagged["summand"], flagged["d_query"])


def unfold_rows(
    launcher: Launcher, log_decay: jax.Array | None, gates: Gates, dq_hat: jax.Array, d_query: jax.Array | None = None
) -> jax.Array:
    """The gradient of the query from that of the folded query; `d_query` has flagged chunks' already."""
    call, chunk = launcher.call, launcher.config.chunk
    width, parts = _columns(call.key_dim)
    (d_query,) = launcher.launch(
        device("key_gates").unfold_rows,
        {"gate": log_decay, "hat": dq_hat, "late": gates.late, "flag": gates.flag},
        {"d_query": shape(*dq_hat.shape, dtype=call.dtype)},
        programs=launcher.blocks(chunk) * call.heads * parts,
        tile=Tile(width, warps=1),
        length=chunk,
        in_place=None if d_query is None else {"d_query": d_query},
        key_block=width,
    )
    assert d_query is not None
    return d_query


def unfold_key_gates(launcher: Launcher, x: Inputs, gates: Gates, d_output: jax.Array, hats: Hats, dtype: Any) -> Any:
    """Gradients of query, key and key gates from those of the folded query and key."""
    d_query = d_key = launcher.rows(launcher.call.key_dim, dtype)
    outputs = {"summand": shape(*hats.d_query.shape), "d_query": d_query, "d_key": d_key}
    flagged = _flagged_gradients(launcher, x, gates, d_output, hats, outputs, has_bounded=True)
    hats = hats._replace(d_query=flagged.pop("summand"))
    return unfold_all(launcher, x.log_decay, gates, hats, d_query, d_key, flagged)


def unfold_all(
    launcher: Launcher,
    log_decay: jax.Array | None,
    gates: Gates,
    hats: Hats,
    d_query: jax.ShapeDtypeStruct,
    d_key: jax.ShapeDtypeStruct,
    flagged: dict[str, jax.Array] | None = None,
) -> Any:
    """Gradients of query, key and gates; `flagged` has those of flagged chunks, if there may be any."""
    call, config = launcher.call, launcher.config
    assert log_decay is not None
    group = config.chunk * launcher.plan.group
    groups = launcher.blocks(group) * call.heads
    # few programs would have too few loads in flight
    width, parts = _columns(call.key_dim, config.unfold if groups * cdiv(call.key_dim, 128) < 8 * config.fill else 128)
    return launcher.launch(
        device("key_gates").unfold_gates,
        {
            **{"gate": log_decay, "late": gates.late, "flag": gates.flag, "factors": gates.factors},
            **{"q_hat": hats.query, "k_hat": hats.key, "dq_hat": hats.d_query, "dk_hat": hats.d_key},
            "product": hats.product,
        },
        {"d_query": d_query, "d_key": d_key, "d_gate": shape(*d_query.shape, dtype=log_decay.dtype)},
        programs=groups * parts,
        tile=Tile(width, warps=1),
        length=group,
        in_place=flagged,
        key_block=width,
        parts=hats.d_query.shape[-1] // call.key_dim,
        product_parts=hats.product.shape[2],
        bounded=flagged is not None,
    )
