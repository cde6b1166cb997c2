"""Rows of several sequences (`segment_ids`) for the kernels' tests, beside their float64 answers."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import ejkernel

# runs of one token, of a chunk and one more; ids that come back; padding before, between, behind and alone
IDS = np.stack(
    [
        np.repeat([3, -1, 3, 5, -2, -1, 8], [17, 2, 1, 1, 12, 1, 16]),
        np.repeat([-1, 0, 7, 0, 2, -1], [3, 16, 1, 9, 18, 3]),
        np.full(50, -1),
    ]
).astype(np.int32)
INSIDE = (1, slice(20, 29))  # a sequence that is neither the first nor the last of its row
H = 2
HEADS = {"query": 1, "key": 2, "value": 2}
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1e-2}
DELTAS = ("delta_rule", "gated_delta_rule", "kda")
SINGLE = ("simple_gla", "gated_delta_rule")  # whose gates are of heads


@dataclass(frozen=True)
class Case:
    op: str
    gate: str = "mild"
    dtype: str = "float32"
    reverse: bool = False
    state: bool = True
    value_gates: bool = False
    poison: float = np.nan
    dim: int = 16

    def __str__(self):
        told = [self.op, self.gate, self.dtype]
        told += [name for name in ("reverse", "state", "value_gates") if getattr(self, name)]
        told += [str(self.dim)] * (self.dim != 16)
        return "-".join(told)


def gates(kind, random, shape):
    mild = -0.06 * random.exponential(size=shape)
    if kind == "resets":
        mild = np.where(random.random(shape) < 0.05, -np.inf, mild)
        return np.where(random.random(shape) < 0.05, -1e4, mild)
    if kind == "growing":
        return np.where(random.random(shape) < 0.3, -mild, mild)
    if kind == "shipped":  # as Kimi-K3's
        return -5 / (1 + np.exp(-random.normal(size=shape)))
    return {"mild": 1, "strong": 150, "tiny": 1e-3}[kind] * mild


def arrays_of(case, ids):
    """The call's arrays, whose queries two heads share, and its cotangents."""
    random, D = np.random.default_rng(0), case.dim
    lead = ids.shape
    found: dict[str, Any] = {name: random.normal(size=(*lead, heads, D)) for name, heads in HEADS.items()}
    if case.op in DELTAS:
        found["key"] /= np.linalg.norm(found["key"], axis=-1, keepdims=True)
        found["beta"] = random.random((*lead, H))
    shape = {"recurrent": (lead[0], H), "linear_attention": None, "delta_rule": None}.get(case.op, (*lead, H, D))
    if shape is not None:
        name = "g_gamma" if case.op == "recurrent" else "g"
        found[name] = gates(case.gate, random, shape[:3] if case.op in SINGLE else shape)
    if case.value_gates:
        found["gv"] = gates(case.gate, random, (*lead, H, D))
    if case.state:
        found["initial_state"] = random.normal(size=(lead[0], H, D, D))
    found = {n: jnp.asarray(x, case.dtype if n in HEADS else "float32") for n, x in found.items()}
    d_output = jnp.asarray(random.normal(size=(*lead, H, D)), case.dtype)
    return found, (d_output, jnp.asarray(random.normal(size=(lead[0], H, D, D)), jnp.float32))


def results(case, arrays, ids, cotangents):
    op = getattr(ejkernel, case.op)
    found, pull = jax.vjp(lambda x: op(**x, segment_ids=ids, reverse=case.reverse), arrays)
    return {"output": found[0], "final state": found[1], **pull(cotangents)[0]}


def one_by_one(case, arrays, ids, cotangents):
    def per_head(query, key, value, g, **others):
        output, final, grads = oracle.recurrent(query, key, value, g=g[..., None], **others)
        return output, final, grads | ({"g": grads["g"][..., 0]} if grads else {})

    truth = oracle.delta_rule if case.op in DELTAS else per_head if case.op == "simple_gla" else oracle.recurrent
    d_output, d_final = (np.asarray(x, np.float64) for x in cotangents)
    output, final, grads = oracle.one_by_one(truth, arrays, ids, d_output, d_final, case.reverse)
    return {"output": output, "final state": final, **grads}


def assert_matches(case, found, expected):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = np.asarray(found[name]).astype(np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-6)
        # one number a head is a sum over tokens of either sign, of which strong gates leave little
        times = 10 if name == "g_gamma" and case.gate == "strong" else 3 if name.startswith("g") else 1
        bound = TOLERANCE[case.dtype] * times
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"


def with_tokens(x, where, by):
    """`x` with this number for these tokens, if it has tokens."""
    return jnp.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), by, x) if x.shape[:2] == where.shape else x


def check_leaks(case, arrays, ids, cotangents, clean, run=None):
    """Neither what padding holds nor what another sequence does changes a bit; `ids` are `IDS`, repeated or not."""
    padding, inside = ids < 0, np.zeros(IDS.shape, bool)
    inside[INSIDE] = True
    inside = np.repeat(inside, ids.shape[1] // IDS.shape[1], 1)

    def spoilt(x):
        return with_tokens(with_tokens(x, padding, jnp.nan), inside, case.poison)

    run = run or functools.partial(results, case, ids=ids)
    spoilt_arrays = {n: spoilt(x) for n, x in arrays.items()}
    dirty = run(spoilt_arrays, cotangents=(spoilt(cotangents[0]), cotangents[1]))
    for name, x in clean.items():
        x, y = np.asarray(x), np.asarray(dirty[name])
        if x.shape[:2] == ids.shape:
            np.testing.assert_array_equal(y[~inside], x[~inside], err_msg=name)
            assert not y[padding].any(), name
        else:
            others = slice(None) if name in ("final state", "initial_state") else np.r_[0, 2]
            np.testing.assert_array_equal(y[others], x[others], err_msg=name)
