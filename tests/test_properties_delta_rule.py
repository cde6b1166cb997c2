"""The delta rule and its gated forms, drawn by Hypothesis, against the float64 loop."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_close
from delta_rule_cases import BETAS, KEYS, Case
from hypothesis import assume, given
from hypothesis import strategies as st
from linear_attention_cases import GATES
from properties import DTYPES, SEEDS, THOROUGH, cotangents_of, examples, lengths, roundings, run, split


@dataclass(frozen=True)
class Shape:
    """All that a call is compiled for."""

    case: Case
    dtype: str = "float64"

    def __str__(self):
        return f"{self.case.op}-{self.dtype}-{self.case.name}".replace(" ", "-")


STREAM = {"lengths": (0,) * 5, "padding": 70, "unbatched": True}
SHAPES = [
    Shape(Case("rows", tokens=37, heads=4, own_heads=(4, 1, 2), state="each")),
    Shape(Case("rows in reverse", gate="", tokens=66, state="all", options={"reverse": True}), "float32"),
    Shape(Case("stream", gate="", per_key=True, **STREAM, state="each")),
]


@st.composite
def shapes(draw):
    heads = draw(st.sampled_from([1, 2, 4]))
    divisors = st.sampled_from([each for each in (1, 2, 4) if heads % each == 0])
    packed, tokens = draw(st.booleans()), draw(st.integers(0, 150))
    case = Case(
        "drawn",
        batch=draw(st.integers(1, 3)),
        tokens=tokens,
        heads=heads,
        # cotangents have the query's heads
        own_heads=(heads, draw(divisors), draw(divisors)),
        key_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(0, 9)),
        gate=draw(st.sampled_from([None, ""])),
        per_key=draw(st.booleans()),
        lengths=(0,) * draw(st.integers(1, 6)) if packed else None,
        padding=tokens if packed else 0,
        unbatched=packed and draw(st.booleans()),
        state=draw(st.sampled_from([None, "each", "all"])),
        options={"reverse": draw(st.booleans()), "softmax_scale": draw(st.sampled_from([0.3, -2.0, None]))},
    )
    return Shape(case, draw(st.sampled_from(DTYPES)))


@st.composite
def values(draw, shape):
    """`shape` with gates and `beta` of any strength, keys of any kind and other borders, and a seed."""
    case, dtype = shape.case, shape.dtype
    if case.gate is not None:
        case = replace(case, gate=draw(st.sampled_from(sorted(GATES))))
    # reflections forget nothing, so that roundings grow with the tokens
    betas = sorted(BETAS) if dtype == "float64" else ["ordinary", "replaces", "writes nothing"]
    case = replace(case, beta=draw(st.sampled_from(betas)), keys=draw(st.sampled_from(sorted(KEYS))))
    if case.lengths is not None:
        total = sum(case.lengths) + case.padding
        cut = draw(lengths(total, len(case.lengths)))
        case = replace(case, lengths=cut, padding=total - sum(cut))
    return replace(shape, case=case), draw(SEEDS)


def check(shape, seed, which):
    """A call against the oracle; errors are relative to the largest value of each result."""
    case, dtype = shape.case, jnp.dtype(shape.dtype)
    arrays, borders = split(case.arrays(dtype, seed))
    cotangents = tuple(x.astype(dtype) for x in cotangents_of(case, arrays, seed, which))
    more = {"d_output": cotangents[0], "d_final_state": cotangents[1], **case.options}
    output, final, gradients = oracle.delta_rule(**arrays, **borders, **more)
    wanted = {"output": output, "final state": final} | gradients
    # strong gates may take an exact answer below what states hold, and growing ones beyond what half precision does
    least = np.finfo(np.float64 if dtype == np.float64 else np.float32).tiny
    wanted = {name: np.where(np.abs(x) < least, 0, x) for name, x in wanted.items()}
    largest = float(jnp.finfo(dtype).max) / 2
    assume(all(np.abs(x).max(initial=0) < largest for x in wanted.values()))
    # equal keys that replace everything leave nothing of earlier tokens in the final state but the rounding of 1 - k·k,
    # and gates' gradients are made of that alone: no digit of theirs is known
    assume((which, case.keys, case.beta) != ("state", "equal", "replaces"))
    with jax.enable_x64(dtype == np.float64):
        results, gradients = run(arrays, borders, cotangents, front=case.op, **case.options)
    found = dict(zip(("output", "final state"), results, strict=True)) | gradients
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        # the contract's, in roundings: 1e-5 and 1e-4 for float32; half precision is rounded at the end
        bound = roundings(x.dtype, 2, 80 if name in ("output", "final state") else 800)
        assert_close(x, wanted[name], bound, name)
    if "g" in arrays:
        forgets = np.asarray(arrays["g"], np.float64) == -np.inf
        assert not np.asarray(gradients["g"])[forgets].any(), "g forgets everything"


@pytest.mark.parametrize("shape", [None] if THOROUGH else SHAPES, ids=str)
def test_matches_oracle(shape):
    drawn = (shapes() if shape is None else st.just(shape)).flatmap(values)

    @examples(ci=12, thorough=300)
    @given(drawn, st.sampled_from(["both", "output", "state"]))
    def matches(drawn, which):
        check(*drawn, which)

    matches()
