"""Calls of the gated linear recurrence for the Triton kernels' tests, and their float64 answers, gradients included."""

import itertools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import linear_attention_cases
import numpy as np
import oracle as reference

from ejkernel.kernels.linear_recurrence.call import Call


@dataclass(frozen=True)
class Case:
    name: str
    decay: str = "key"
    gate: str = "mild"
    dtype: str = "float32"
    B: int = 2
    T: int = 37
    H: int = 2
    Hkv: int = 2
    shared: tuple[int, int, int] | None = None  # heads of query, key and value, instead of `H` and `Hkv`
    K: int = 16
    V: int = 16
    lengths: tuple[int, ...] | None = None
    state: bool = True
    reverse: bool = False
    scale: float = 0.3
    value_gate: str | None = None  # of the value dims, as `gate`
    # of query, key, value, gates and initial state, where they differ; `dtype` is then the output's
    dtypes: tuple[str, ...] | None = None

    def __str__(self):
        return self.name

    @property
    def call(self):
        packed = self.lengths is not None
        return Call(
            batch=1 if packed else self.B,
            tokens=self.T,
            heads=self.H,
            key_dim=self.K,
            value_dim=self.V,
            sequences=len(self.lengths) if packed else self.B,
            packed=packed,
            decay=self.decay,
            value_decay=self.value_gate is not None,
            scale=self.scale,
            reverse=self.reverse,
            dtype=np.dtype(jnp.dtype(self.dtype)),
        )


# name: (mean of |log decay|, spread)
GATES = {"mild": 0.06, "unscaled": 0.8, "strong": 9.0, "fierce": 60.0}
SHIPPED = {name: linear_attention_cases.GATES[name] for name in ("shipped", "all -6", "in turn")}


def gates(kind, shape, rng):
    """Log decays; `resets` puts -inf and -1e4 among mild ones, `once` at one token, `mixed` lets some grow."""
    if kind in GATES:
        return -GATES[kind] * rng.exponential(size=shape)
    if kind in SHIPPED:
        return SHIPPED[kind](rng, shape)
    x = -GATES["mild"] * rng.exponential(size=shape)
    if kind == "resets":
        x = np.where(rng.random(shape) < 0.05, -np.inf, x)
        return np.where(rng.random(shape) < 0.05, -1e4, x)
    if kind == "once":
        x[:, 20:21] = np.where(rng.random(x[:, :1].shape) < 0.5, -np.inf, -1e4)
        return x
    if kind == "mixed":
        return np.where(rng.random(shape) < 0.3, -x, x)
    raise ValueError(kind)


def make(case, seed=0):
    """The call's arrays in their dtypes (gates and states in float32), and cotangents of both outputs."""
    rng = np.random.default_rng(seed)
    call = case.call
    dtypes = case.dtypes or (*[case.dtype] * 3, "float32", "float32")
    B, T, H, N = call.batch, call.tokens, call.heads, call.sequences

    def normal(*shape, dtype=case.dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    heads, dims = case.shared or (H, case.Hkv, case.Hkv), (case.K, case.K, case.V)
    query, key, value = (normal(B, T, *each[:2], dtype=each[2]) for each in zip(heads, dims, dtypes[:3], strict=True))
    shape = {"none": None, "constant": (N, H), "head": (B, T, H), "key": (B, T, H, case.K)}[case.decay]
    decay = None if shape is None else jnp.asarray(gates(case.gate, shape, rng), dtypes[3])
    value_decay = None
    if case.value_gate:
        value_decay = jnp.asarray(gates(case.value_gate, (B, T, H, case.V), rng), dtypes[3])
    state = normal(N, H, case.K, case.V, dtype=dtypes[4]) if case.state else None
    borders = None
    if case.lengths is not None:
        borders = jnp.asarray(np.cumsum([0, *case.lengths]), jnp.int32)
    dlast = jnp.asarray(rng.normal(size=(N, H, case.K, case.V)), jnp.float32)
    return (query, key, value, decay, value_decay, state, borders), (normal(B, T, H, case.V), dlast)


# factors of query, key and value with which scores, or states, leave float16's range and the answer does not
BEYOND_FLOAT16 = [(1024, 1024, 2.0**-16), (2.0**-12, 256, 256)]


def make_beyond_float16(case, factors):
    """Arrays of a call, with gates and without states, that only an intermediate result of `case` can overflow."""
    (*tokens, decay, _, _, borders), _ = make(case)
    tokens = [(x * factor).astype(x.dtype) for x, factor in zip(tokens, factors, strict=True)]
    return *tokens, decay, None, None, borders


# Query, key, value, gates and initial state, and the output: which is the query's dtype, unless its scale was an array
# and the query comes in float32.
MIXES = [
    (("float32", "bfloat16", "bfloat16", "float32", "float32"), "bfloat16"),
    (("float32", "float16", "float16", "float32", "float32"), "float16"),
    (("bfloat16", "float32", "bfloat16", "bfloat16", "float32"), "bfloat16"),
    (("bfloat16", "bfloat16", "float32", "float16", "bfloat16"), "bfloat16"),
    (("float16", "bfloat16", "float16", "float32", "float16"), "float16"),
    (("float32", "bfloat16", "float16", "bfloat16", "float32"), "float32"),
    (("float32", "float32", "float32", "float16", "bfloat16"), "float32"),
]


def assert_dtypes(case, arrays, actual):
    """Results have the call's dtypes, and gradients those of what they are the gradients of."""
    call, inputs = case.call, (*arrays[:4], arrays[5])
    dtypes = [call.dtype, call.state_dtype, *(None if x is None else x.dtype for x in inputs)]
    for name, got, wanted in zip(NAMES[: len(actual)], actual, dtypes, strict=True):
        assert wanted is None or got.dtype == wanted, f"{name}: {got.dtype}, expected {wanted}"


def burst(case):
    """Arrays and cotangents of a call without initial states whose first gates would make infinitely much of one."""
    arrays, cotangents = make(replace(case, state=False))
    borders = np.cumsum([0, *(case.lengths or [case.T])])
    spans = [(start, end) for start, end in itertools.pairwise(borders) if start < end]
    first = np.array([end - 1 if case.reverse else start for start, end in spans])
    return (*arrays[:3], arrays[3].at[:, first].set(100.0), *arrays[4:]), cotangents


def unseen(case):
    """Arrays and cotangents whose first query would overflow with the second key, which it must not see."""
    arrays, cotangents = make(case)
    query, key, value = arrays[:3]
    return (query.at[:, 0].set(1e20), key.at[:, 1].set(1e20), value * 1e-5, *arrays[3:]), cotangents


NAMES = ("output", "last", "query", "key", "value", "decay", "state", "value decay")


def oracle(call, arrays, cotangents):
    """Output, final states and the gradients of query, key, value, log decay and initial state, in float64."""
    query, key, value, decay, value_decay, state, borders = arrays
    gate = {} if decay is None else {"g_gamma" if call.decay == "constant" else "g": np.asarray(decay)}
    if call.decay == "head":
        gate["g"] = gate["g"][..., None]
    if value_decay is not None:
        gate["gv"] = np.asarray(value_decay)
    output, last, grads = reference.recurrent(
        query,
        key,
        value,
        **gate,
        initial_state=state,
        cu_seqlens=borders,
        reverse=call.reverse,
        softmax_scale=call.scale,
        d_output=cotangents[0],
        d_final_state=cotangents[1],
    )
    d_decay = None if decay is None else grads["g_gamma" if "g_gamma" in gate else "g"].reshape(decay.shape)
    d_state = np.zeros(last.shape) if state is None else grads["initial_state"]
    found = output, last, grads["query"], grads["key"], grads["value"], d_decay, d_state
    return found if value_decay is None else (*found, grads["gv"])


def results(run, call, arrays, cotangents):
    """What `oracle` gives, by `run` and its own gradients."""
    inputs, borders = arrays[:6], arrays[6]
    (output, last), pull = jax.vjp(lambda *inputs: run(call, *inputs, borders), *inputs)
    dquery, dkey, dvalue, ddecay, dvalue_decay, dstate = pull((cotangents[0], cotangents[1]))
    found = output, last, dquery, dkey, dvalue, ddecay, dstate
    return found if dvalue_decay is None else (*found, dvalue_decay)


def assert_matches(actual, expected, tolerance):
    """Bounds relative RMS errors, all values finite; `tolerance` is one number, or one by name and `other`."""
    for name, got, want in zip(NAMES[: len(actual)], actual, expected, strict=True):
        if got is None:
            continue
        got = np.asarray(got).astype(np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
        bound = tolerance if isinstance(tolerance, float) else tolerance.get(name, tolerance["other"])
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"
