"""Fills in what pages take from the code: who serves which call, and the examples.

A page asks for the table of all ops by `<!-- platforms -->`, and for that of one op by
`<!-- support: OP -->`. Each row of the latter is what `ejkernel.explain` says of a
call, less what only depends on the machine that builds the pages. A script of
`examples/` comes by `<!-- example: FILE -->`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import ejkernel
from ejkernel._ops import OPS, Op, platform_table
from ejkernel.kernels import _launch
from ejkernel.kernels.attention import cudnn

MARKER = re.compile(r"^<!-- support: (\w+) -->$", re.MULTILINE)
PLATFORMS = "<!-- platforms -->"
EXAMPLE = re.compile(r"^<!-- example: (\w+\.py) -->$", re.MULTILINE)
EXAMPLES = Path(__file__).parent.parent / "examples"
B, T, H, D = 1, 1024, 8, 128

Row = tuple[str, list[Any], dict[str, Any]]


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _float32(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(*shape, dtype=jnp.float32)


def _qkv(
    *, T: int = T, Hkv: int = H, K: int = D, V: int = 0, dtype: Any = None
) -> list[Any]:
    shapes = (B, T, H, K), (B, T, Hkv, K), (B, T, Hkv, V or K)
    return [_array(*shape, dtype=dtype or jnp.bfloat16) for shape in shapes]


def _call(what: str, arrays: list[Any] | None = None, **options: Any) -> Row:
    return what, arrays or _qkv(), options


BORDERS = _array(4, dtype=jnp.int32)
SEGMENTS = _array(B, T, dtype=jnp.int32)


def _recurrence(gate: tuple[int, ...] | None = None, **options: Any) -> Iterator[Row]:
    """Calls that the linear family shares; `gate` is the shape of `g` after heads."""
    one_token = dict(options)
    if gate is not None:
        options["g"], one_token["g"] = (
            _float32(B, T, H, *gate),
            _float32(B, 1, H, *gate),
        )
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        yield _call(jnp.dtype(dtype).name, _qkv(dtype=dtype), **options)
    yield _call("packed: `cu_seqlens`", cu_seqlens=BORDERS, **options)
    yield _call("rows of sequences: `segment_ids`", segment_ids=SEGMENTS, **options)
    yield _call("`reverse`", reverse=True, **options)
    yield _call("`initial_state`", initial_state=_float32(H, D, D), **options)
    yield _call("shared keys and values", _qkv(Hkv=2), **options)
    yield _call(
        "shared queries and keys", [*_qkv(Hkv=2)[1:2] * 2, _qkv()[2]], **options
    )
    yield _call("`K ≠ V`", _qkv(V=64), **options)
    yield _call("`V` above 256", _qkv(V=512), **options)
    yield _call("one token (decoding)", _qkv(T=1), **one_token)


def _recurrent() -> Iterator[Row]:
    per_key = _float32(B, T, H, D)
    yield _call("no gates")
    yield _call("`g_gamma`", g_gamma=_float32(H))
    yield _call("`g` per head: `[B, T, H, 1]`", g=_float32(B, T, H, 1))
    yield _call("`g`, `gk` per key dim", g=per_key, gk=per_key)
    yield _call("`gv`", gv=per_key)
    yield _call("`gk` and `gv`", gk=per_key, gv=per_key)
    yield from _recurrence((D,))


def _delta_rule(gate: tuple[int, ...] | None) -> Iterator[Row]:
    """Calls that the delta rule's ops share; `gate` is the shape of `g` after heads."""
    options = {"beta": _float32(B, T, H)}
    one_token = {"beta": _float32(B, 1, H)}
    if gate is not None:
        options["g"] = _float32(B, T, H, *gate)
        one_token["g"] = _float32(B, 1, H, *gate)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        yield _call(jnp.dtype(dtype).name, _qkv(dtype=dtype), **options)
    yield _call("packed: `cu_seqlens`", cu_seqlens=BORDERS, **options)
    yield _call("rows of sequences: `segment_ids`", segment_ids=SEGMENTS, **options)
    yield _call("`reverse`", reverse=True, **options)
    yield _call("`initial_state`", initial_state=_float32(H, D, D), **options)
    yield _call("`normalize`", normalize=True, **options)
    yield _call("shared heads", [*_qkv(Hkv=2)[1:2] * 2, _qkv()[2]], **options)
    yield _call("`K ≠ V`", _qkv(V=64), **options)
    yield _call("one token (decoding)", _qkv(T=1), **one_token)


def _flash_attention() -> Iterator[Row]:
    dropout = {"deterministic": False, "dropout_prob": 0.1}
    yield _call("bfloat16")
    yield _call("float16", _qkv(dtype=jnp.float16))
    yield _call("float32", _qkv(dtype=jnp.float32))
    yield _call("float64", _qkv(dtype=jnp.float64))
    yield _call("half precision arrays, `dtype=float32`", dtype=jnp.float32)
    yield _call("`causal`", causal=True)
    yield _call("`causal` and `sliding_window`", causal=True, sliding_window=256)
    yield _call("`sliding_window` alone", sliding_window=256)
    yield _call("packed: `cu_seqlens`", cu_seqlens=BORDERS)
    yield _call("rows of sequences: `segment_ids`", segment_ids=SEGMENTS)
    yield _call("grouped heads", _qkv(Hkv=2))
    yield _call("`D` above 128", _qkv(K=192))
    yield _call("`D` above 256", _qkv(K=320))
    yield _call("`D` above 512", _qkv(K=520))
    yield _call("`D ≠ Dv`", _qkv(V=64))
    yield _call("an odd length", _qkv(T=1023))
    yield _call("`causal`, fewer queries", _qkv(T=2)[:1] + _qkv()[1:], causal=True)
    for shape, size in {"B, 1, S, L": (B, 1, T, T), "B, 1, 1, L": (B, 1, 1, T)}.items():
        mask = _array(*size, dtype=bool)
        yield _call(f"`attention_mask [{shape}]`", attention_mask=mask)
    for shape, size in {"1, H, S, L": (1, H, T, T), "1, 1, S, L": (1, 1, T, T)}.items():
        yield _call(f"`bias [{shape}]`", bias=_array(*size))
    yield _call("`softmax_aux`", softmax_aux=_array(H, 1))
    yield _call("`logits_soft_cap`", logits_soft_cap=30.0)
    yield _call("`query_offset`", query_offset=3)
    yield _call("`return_lse`", return_lse=True)
    yield _call("`softmax_dtype=bfloat16`", softmax_dtype=jnp.bfloat16)
    yield _call("dropout", dropout_rng=jax.random.key(0), **dropout)


def _convolution() -> Iterator[Row]:
    weight = _float32(4, H * D)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        yield _call(jnp.dtype(dtype).name, [_array(B, T, H * D, dtype=dtype), weight])
    x = _array(B, T, H * D)
    ids = _array(B, T, dtype=jnp.int32)
    state = _array(B, 3, H * D)
    yield _call("`bias`, `activation`", [x, weight, _float32(H * D), "silu"])
    yield _call("`initial_state`", [x, weight], initial_state=state)
    yield _call("packed: `cu_seqlens`", [x, weight], cu_seqlens=BORDERS)
    yield _call("`segment_ids`", [x, weight], segment_ids=ids)
    yield _call("`W` above 8", [x, _float32(9, H * D)])
    one = _array(B, 1, H * D)
    yield _call("one token (decoding)", [one, weight], initial_state=state)


def _calls(op: Op) -> Iterator[Row]:
    """The calls of an op's table: those that its core's ops share, with its gates."""
    gate = {"BTH": (), "BTHK": (D,)}.get(op.gates.get("g", ""))
    if op.name in CALLS:
        return CALLS[op.name]()
    if op.core == "delta rule":
        return _delta_rule(gate)
    return _recurrence(gate, **op.options)


def _paged_attention() -> Iterator[Row]:
    _, _, _, pages, table, lengths, borders = OPS["paged_attention"].own_call or ()

    def call(
        what: str, key_dim: int = D, value_dim: int | None = None, **options: Any
    ) -> Row:
        latent = value_dim is not None
        cached = _array(*pages.key.shape[:2], 1 if latent else 8, key_dim)
        new = _array(64, cached.shape[2], key_dim)
        cache = ejkernel.PagedCache(cached, None if latent else cached)
        query = _array(64, H, key_dim)
        options |= {"value_dim": value_dim} if latent else {}
        return _call(
            what,
            [query, new, None if latent else new, cache, table, lengths, borders],
            **options,
        )

    yield call("bfloat16")
    yield call("`sliding_window`", sliding_window=1024)
    yield call(
        "`softmax_aux`, `logits_soft_cap`",
        softmax_aux=_array(H, 1),
        logits_soft_cap=30.0,
    )
    yield call("latent pages, 576 and 512 dims", 576, 512)


# ops whose tables have calls of their own
CALLS = {
    "recurrent": _recurrent,
    "causal_conv1d": _convolution,
    "attention": lambda: iter([_call("every call")]),
    "flash_attention": _flash_attention,
    "paged_attention": _paged_attention,
}


@contextmanager
def _installed() -> Iterator[None]:
    """As on an NVIDIA GPU below compute capability 9.0, with all that it needs."""
    with (
        mock.patch.object(_launch, "unavailable", lambda: None),
        mock.patch.object(cudnn, "_installed", lambda: None),
        mock.patch.object(cudnn, "_hopper", lambda: False),
        jax.enable_x64(True),
    ):
        yield


def support_table(op: str) -> str:
    """Which implementations of an op serve which calls, fastest first, in Markdown."""
    names = [each.name for each in OPS[op].implementations]
    table = [["call", *(f"`{name}`" for name in names)], ["---"] * (len(names) + 1)]
    with _installed():
        for what, arrays, options in _calls(OPS[op]):
            explanation = ejkernel.explain(getattr(ejkernel, op), *arrays, **options)
            cells = {name: f"no: {why}" for name, why in explanation.refused.items()}
            cells |= dict.fromkeys(explanation.slower, "slower")
            table.append([what, *(cells.get(name, "yes") for name in names)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def example(name: str) -> str:
    """A whole script, as a block of Markdown under its name."""
    return f'```python title="examples/{name}"\n{(EXAMPLES / name).read_text()}```'


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What MkDocs makes a page of, given the text that the page's file holds."""
    markdown = markdown.replace(PLATFORMS, platform_table())
    markdown = EXAMPLE.sub(lambda found: example(found[1]), markdown)
    return MARKER.sub(lambda found: support_table(found[1]), markdown)
