"""What the property tests draw and how they judge it.

In the `ci` profile shapes, dtypes and options come from tables, so that each is compiled once, and what else there is
(values, gates, borders, masks, offsets) is drawn; in `thorough` everything is drawn. What they find is shrunk and
becomes a named row of the tables in `linear_attention_cases.py`, `attention_cases.py` or `bad_calls.py`.
"""

import functools
from dataclasses import replace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from conftest import PROFILE
from hypothesis import strategies as st
from linear_attention_cases import GATES
from linear_attention_cases import Case as LinearCase

import ejkernel

THOROUGH = PROFILE == "thorough"
DTYPES = ("float64", "float32", "bfloat16", "float16")
LONGEST = 300
# arguments of `lightning_attn`
LAYER = {"layer_idx": 2, "num_layers": 7}
SEEDS = st.integers(0, 2**32 - 1)


def examples(ci, thorough):
    """How many examples a property draws in each profile."""
    return hypothesis.settings(max_examples=thorough if THOROUGH else ci)


def roundings(dtype, half, full):
    """That many times the distance between 1 and the next number; half precision is computed in float32."""
    return (half if jnp.dtype(dtype).itemsize == 2 else full) * float(jnp.finfo(dtype).eps)


def lengths(total, count):
    """`count` lengths of at most `total` tokens together, often 0 or 1."""

    @st.composite
    def draw_them(draw):
        left, found = total, []
        for _ in range(count):
            found.append(draw(st.one_of(st.just(0), st.just(min(1, left)), st.integers(0, left))))
            left -= found[-1]
        return tuple(draw(st.permutations(found)))

    return draw_them()


def linear_values(case):
    """`case` with gates of any strength and, where it is packed, other borders in as many tokens; and a seed."""
    gates = st.fixed_dictionaries({name: st.sampled_from(sorted(GATES)) for name in case.gates})
    drawn = gates.map(lambda gates: replace(case, gates=gates))
    if case.lengths is not None:
        total = sum(case.lengths) + case.padding
        borders = lengths(total, len(case.lengths))
        drawn = st.builds(
            lambda case, lengths: replace(case, lengths=lengths, padding=total - sum(lengths)), drawn, borders
        )
    return st.tuples(drawn, SEEDS)


@st.composite
def linear_shapes(draw, gates=("g", "g_gamma", "gk", "gv"), packed=None):
    """A `Case` of any shape, with any of `gates`, packed or not."""
    dims = st.integers(0, 9)
    kv_heads = draw(st.integers(1, 3))
    wide = draw(st.lists(st.sampled_from(gates), unique=True)) if gates else []
    packed = draw(st.booleans()) if packed is None else packed
    tokens = draw(st.integers(0, LONGEST))
    key_dim = draw(dims)
    # the usual scale has a meaning only where there are key dims
    scale = draw(st.sampled_from([0.3, -2.0, None] if key_dim else [0.3, -2.0]))
    return LinearCase(
        "drawn",
        batch=draw(st.integers(1, 3)),
        tokens=tokens,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=draw(dims),
        gates=dict.fromkeys(wide, "none"),
        gamma_shape=draw(st.sampled_from(["H", "1H", "BH"])),
        narrow=tuple(name for name in wide if name != "g_gamma" and draw(st.booleans())),
        lengths=(0,) * draw(st.integers(1, 6)) if packed else None,
        padding=tokens if packed else 0,
        unbatched=packed and draw(st.booleans()),
        state=draw(st.sampled_from([None, "each", "all"])),
        options={"reverse": draw(st.booleans()), "softmax_scale": scale},
    )


def split(arrays):
    """Arrays with a gradient, and the rest."""
    rest = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    return {name: x for name, x in arrays.items() if name not in rest}, rest


@functools.partial(jax.jit, static_argnames=("front", "reverse", "softmax_scale"))
def run(arrays, borders, cotangents, front="recurrent", reverse=False, softmax_scale=None):
    """Both results and all gradients."""
    options = {"reverse": reverse, "softmax_scale": softmax_scale} | (LAYER if front == "lightning_attn" else {})

    def call(arrays):
        given = dict(arrays)
        if front == "simple_gla":
            given["g"] = given["g"][..., 0]
        return getattr(ejkernel, front)(**given, **borders, **options)

    results, pull = jax.vjp(call, arrays)
    return results, pull(tuple(c.astype(x.dtype) for c, x in zip(cotangents, results, strict=True)))[0]


def cotangents_of(case, arrays, seed, which):
    """Of the output and the final state, one of them 0 unless both are asked for."""
    random = np.random.default_rng(seed + 1)
    sequences = len(arrays["query"]) if case.lengths is None else len(case.lengths)
    output = random.normal(size=(*arrays["query"].shape[:-1], case.value_dim)) * (which != "state")
    return output, random.normal(size=(sequences, case.heads, case.key_dim, case.value_dim)) * (which != "output")
