"""NaN and inf in one of a row's sequences: that no bit of another changes, forward and backward."""

import jax
import numpy as np
from attention_cases import QUICK

POISON = [np.nan, np.inf]
NAMES = ("query", "key", "value", "bias", "d_output")


def tensors(rows=2, tokens=12, heads=4, kv_heads=2, dim=4, dtype=np.float32):
    """Arrays by name, those of `NAMES`."""
    random = np.random.default_rng(0)
    shapes = [(tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim), (1, tokens, tokens)]
    shapes.append((tokens, heads, dim))
    return {name: random.normal(size=(rows, *each)).astype(dtype) for name, each in zip(NAMES, shapes, strict=True)}


def poisoned(arrays, name, ids, which, value):
    """`arrays` with this value in the array `name` of the tokens that have this id, and in all padding."""
    arrays = {each: x.copy() for each, x in arrays.items()}
    mine = (ids == which) | (ids < 0)
    if name == "bias":  # of pairs that may not attend to each other too
        arrays["bias"][mine[:, None, :, None] & np.ones_like(ids, bool)[:, None, None]] = value
        arrays["bias"][mine[:, None, None, :] & np.ones_like(ids, bool)[:, None, :, None]] = value
    else:
        arrays[name][mine] = value
    return arrays


def check_leaks(run, arrays, ids, values=POISON, spoilt=None):
    """Output and gradients of `run` keep their bits in every sequence but the one that a value was put into.

    Those are one of the ids `spoilt` at a time, or of all.
    """
    clean = jax.tree.map(np.asarray, run(**arrays))
    for name, which, value in ((n, i, v) for n in arrays for i in spoilt or np.unique(ids[ids >= 0]) for v in values):
        found = run(**poisoned(arrays, name, ids, which, value))
        others = (ids != which) & (ids >= 0)
        for each, before, after in zip(("output", *NAMES), clean, found, strict=False):
            after = np.asarray(after)
            if each == "bias":
                pairs = others[:, None, :, None] & others[:, None, None, :]
                before, after = np.where(pairs, before, 0), np.where(pairs, after, 0)
            else:
                before, after = before[others], after[others]
            np.testing.assert_array_equal(after, before, f"{value} in {name} of {which} reached {each}")
        for each, after in zip(("output", "query", "key", "value"), found, strict=False):
            assert (np.asarray(after)[ids < 0] == 0).all(), f"padding has {each}"
        if name in ("key", "value") and np.isnan(value):
            assert np.isnan(np.asarray(found[0])[ids == which]).any()


def gradients_of(function):
    """Output and gradients of `function` of the first four arrays, from the last as the cotangent."""

    def run(d_output, **arrays):
        output, pull = jax.vjp(lambda x: function(**x), arrays)
        return output, *(pull(d_output)[0][name] for name in NAMES[:4] if name in arrays)

    return jax.jit(run, compiler_options=QUICK)
