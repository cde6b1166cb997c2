"""The gated linear recurrence and its family, drawn by Hypothesis, against the float64 loop."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from hypothesis import assume, given
from hypothesis import strategies as st
from linear_attention_cases import Case
from properties import (
    DTYPES,
    LAYER,
    THOROUGH,
    cotangents_of,
    examples,
    linear_shapes,
    linear_values,
    roundings,
    run,
    split,
)

GATES_OF = {
    "recurrent": ("g", "g_gamma", "gk", "gv"),
    "recurrent_gla": ("g", "g_gamma"),
    "simple_gla": ("g",),
    "retention": (),
    "lightning_attn": (),
    "linear_attention": (),
}
GROUPED = {"heads": 4, "kv_heads": 2}
STREAM = {"lengths": (0,) * 6, "padding": 300, "heads": 2, "kv_heads": 1}


@dataclass(frozen=True)
class Shape:
    """All that a call is compiled for."""

    case: Case
    front: str = "recurrent"
    dtype: str = "float64"

    def __str__(self):
        return f"{self.front}-{self.dtype}-{self.case.name}".replace(" ", "-")


ALL = dict.fromkeys(("g", "gk", "gv", "g_gamma"), "none")
SHAPES = [
    Shape(Case("rows", **GROUPED, tokens=37, gates={"g": "", "g_gamma": ""}, state="each")),
    Shape(Case("all gates", batch=1, tokens=66, gates=ALL, narrow=("gk",), state="all", key_dim=1, value_dim=7)),
    Shape(Case("no token", tokens=0, gates=ALL, state="each")),
    Shape(Case("one token", tokens=1, gates=ALL, **GROUPED, state="each")),
    Shape(
        Case("stream", **STREAM, gates={"g": "", "g_gamma": ""}, unbatched=True, state="each"),
        dtype="float32",
    ),
    Shape(Case("stream of values", lengths=(0,) * 4, padding=70, gates={"gv": "", "g_gamma": ""}, gamma_shape="1H")),
    Shape(
        Case("stream in reverse", **STREAM, gates={"gk": ""}, state="all", options={"reverse": True}),
        "recurrent",
        "float32",
    ),
    Shape(Case("stream", **STREAM, gates={"g": ""}, narrow=("g",), unbatched=True), "simple_gla"),
    Shape(Case("rows in reverse", tokens=129, gates={"g": ""}, options={"reverse": True}), "recurrent_gla", "bfloat16"),
    Shape(Case("stream", **STREAM, state="each", key_dim=3), "retention", "float16"),
    Shape(Case("rows", tokens=65, **GROUPED, options={"reverse": True, "softmax_scale": -2.0}), "lightning_attn"),
    Shape(Case("stream", **STREAM, unbatched=True, state="each"), "linear_attention", "float32"),
]


@st.composite
def shapes(draw):
    front = draw(st.sampled_from(sorted(GATES_OF)))
    case = draw(linear_shapes(GATES_OF[front]))
    if front == "simple_gla":
        case = replace(case, gates={"g": ""}, narrow=("g",))
    return Shape(case, front, draw(st.sampled_from(DTYPES)))


def with_seed(shape):
    return st.tuples(st.just(shape), linear_values(shape.case))


def gates_written_out(front, heads):
    """The gates that a front sets by itself."""
    head = np.arange(heads)
    if front == "retention":
        return {"g_gamma": np.log(1 - 2.0 ** (-5 - head))}
    if front == "lightning_attn":
        return {"g_gamma": -(8 / heads) * (1 - LAYER["layer_idx"] / LAYER["num_layers"]) * head}
    return {}


def gamma_terms(case, arrays, borders, **more):
    """The largest sum of magnitudes that a gradient of `g_gamma` adds up, from gates written out for every token."""
    gamma = np.asarray(arrays["g_gamma"], np.float64)
    spans = [case.tokens] * case.batch if case.lengths is None else case.lengths
    gamma = np.broadcast_to(gamma, (len(spans), case.heads))
    by_token = [np.broadcast_to(each, (tokens, case.heads)) for each, tokens in zip(gamma, spans, strict=True)]
    if case.lengths is not None:
        by_token = [np.concatenate([*by_token, np.zeros((case.padding, case.heads))])]
    by_token = np.stack(by_token)[..., None]
    by_token = by_token[0] if case.unbatched else by_token
    rest = {name: x for name, x in arrays.items() if name != "g_gamma"}
    terms = oracle.recurrent(**rest | {"g": by_token + arrays.get("g", 0)}, **borders, **more)[2]["g"]
    return np.abs(terms).sum(-1).reshape(-1, case.heads).sum(0).max(initial=0)


def check(shape, case, seed, which="both"):
    """A call against the oracle; errors are relative to the largest value of each result."""
    dtype = jnp.dtype(shape.dtype)
    arrays, borders = split(case.arrays(dtype, seed))
    cotangents = tuple(x.astype(dtype) for x in cotangents_of(case, arrays, seed, which))
    more = {"d_output": cotangents[0], "d_final_state": cotangents[1], **case.options}
    right = oracle.recurrent(**arrays, **borders, **gates_written_out(shape.front, case.heads), **more)
    wanted = {"output": right[0], "final state": right[1]} | {n: x for n, x in right[2].items() if n in arrays}
    # growing gates may take an exact answer beyond what half precision holds
    largest = float(jnp.finfo(dtype).max) / 2
    assume(all(np.abs(x).max(initial=0) < largest for x in wanted.values()))
    with jax.enable_x64(dtype == np.float64):
        (output, final), gradients = run(arrays, borders, cotangents, front=shape.front, **case.options)
    assert output.dtype == dtype and final.dtype == (np.float64 if dtype == np.float64 else np.float32)
    found = {"output": output, "final state": final} | gradients
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        # some dozen sums one after the other, twice as many in a gradient; half precision is rounded at the end
        bound = roundings(x.dtype, 1, 32 if name in ("output", "final state") else 64)
        # a sum of gates is rounded before it is an exponent: of `exp(-660)`, 660 roundings
        size = np.abs(wanted[name]).max(initial=0)
        bound += abs(np.log(size)) * float(jnp.finfo(final.dtype).eps) if size > 0 else 0.0
        scale = gamma_terms(case, arrays, borders, **more) if name == "g_gamma" else None
        assert_close(x, wanted[name], bound, name, scale)
        if name.startswith("g"):
            assert not np.asarray(x)[np.asarray(arrays[name], np.float64) == -np.inf].any(), (
                f"{name} forgets everything"
            )


@pytest.mark.parametrize("shape", [None] if THOROUGH else SHAPES, ids=str)
def test_matches_oracle(shape):
    drawn = (shapes() if shape is None else st.just(shape)).flatmap(with_seed)

    @examples(ci=12, thorough=500)
    @given(drawn, st.sampled_from(["both", "output", "state"]))
    def matches(drawn, which):
        shape, (case, seed) = drawn
        check(shape, case, seed, which)

    matches()
