"""Calls of the gated linear recurrence for the Triton kernels' tests, and their float64 answers, gradients included."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels.linear_recurrence._call import Call


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
    K: int = 16
    V: int = 16
    lengths: tuple[int, ...] | None = None
    state: bool = True
    reverse: bool = False
    scale: float = 0.3

    def __str__(self):
        return self.name

    @property
    def call(self):
        packed = self.lengths is not None
        return Call(
            batch=1 if packed else self.B,
            tokens=self.T,
            heads=self.H,
            kv_heads=self.Hkv,
            key_dim=self.K,
            value_dim=self.V,
            sequences=len(self.lengths) if packed else self.B,
            packed=packed,
            decay=self.decay,
            value_decay=False,
            scale=self.scale,
            reverse=self.reverse,
            dtype=np.dtype(jnp.dtype(self.dtype)),
        )


# name: (mean of |log decay|, spread)
GATES = {"mild": 0.06, "unscaled": 0.8, "strong": 9.0, "fierce": 60.0}


def gates(kind, shape, rng):
    """Log decays; `resets` puts -inf and -1e4 among mild ones, `mixed` lets some grow."""
    if kind in GATES:
        return -GATES[kind] * rng.exponential(size=shape)
    x = -GATES["mild"] * rng.exponential(size=shape)
    if kind == "resets":
        x = np.where(rng.random(shape) < 0.05, -np.inf, x)
        return np.where(rng.random(shape) < 0.05, -1e4, x)
    if kind == "mixed":
        return np.where(rng.random(shape) < 0.3, -x, x)
    raise ValueError(kind)


def make(case, seed=0):
    """The call's arrays in their dtypes (gates and states in float32), and cotangents of both outputs."""
    rng = np.random.default_rng(seed)
    call = case.call
    B, T, H, N = call.batch, call.tokens, call.heads, call.sequences

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), call.dtype)

    query, key = normal(B, T, H, case.K), normal(B, T, case.Hkv, case.K)
    value = normal(B, T, case.Hkv, case.V)
    shape = {"none": None, "constant": (N, H), "head": (B, T, H), "key": (B, T, H, case.K)}[case.decay]
    decay = None if shape is None else jnp.asarray(gates(case.gate, shape, rng), jnp.float32)
    state = jnp.asarray(rng.normal(size=(N, H, case.K, case.V)), jnp.float32) if case.state else None
    borders = None
    if case.lengths is not None:
        borders = jnp.asarray(np.cumsum([0, *case.lengths]), jnp.int32)
    # as large as what the outputs' cotangents bring a state
    dlast = jnp.asarray(case.scale * rng.normal(size=(N, H, case.K, case.V)), jnp.float32)
    return (query, key, value, decay, None, state, borders), (normal(B, T, H, case.V), dlast)


NAMES = ("output", "last", "query", "key", "value", "decay", "state")


def oracle(call, arrays, cotangents):
    """Output, final states and the gradients of query, key, value, log decay and initial state, token by token."""
    arrays = [None if x is None else np.asarray(x).astype(np.float64) for x in arrays[:6]] + [arrays[6]]
    query, key, value, decay, _, state, borders = arrays
    doutput, dlast = (np.asarray(x).astype(np.float64) for x in cotangents)
    groups = call.heads // call.kv_heads
    k_all, v_all = np.repeat(key, groups, 2), np.repeat(value, groups, 2)
    output = np.zeros(doutput.shape)
    last = np.zeros(dlast.shape)
    dquery, dkey, dvalue = np.zeros(query.shape), np.zeros(k_all.shape), np.zeros(v_all.shape)
    ddecay = None if decay is None else np.zeros(decay.shape)
    dstate = np.zeros(dlast.shape)
    for n in range(call.sequences):
        row, tokens = n, range(call.tokens)
        if call.packed:
            row, tokens = 0, range(int(borders[n]), int(borders[n + 1]))
        if call.reverse:
            tokens = tokens[::-1]

        def fade(t, n=n, row=row):
            if decay is None:
                return np.ones((call.heads, 1, 1))
            if call.decay == "constant":
                return np.exp(decay[n])[:, None, None]
            return np.exp(decay[row, t]).reshape(call.heads, -1, 1)

        S = np.zeros(last.shape[1:]) if state is None else state[n].copy()
        before = []
        for t in tokens:
            before.append(S)
            S = fade(t) * S + k_all[row, t][:, :, None] * v_all[row, t][:, None, :]
            output[row, t] = call.scale * np.einsum("hk,hkv->hv", query[row, t], S)
        last[n] = S
        dS = dlast[n].copy()
        for t in tokens[::-1]:
            old = fade(t) * before.pop()
            S = old + k_all[row, t][:, :, None] * v_all[row, t][:, None, :]
            dquery[row, t] = call.scale * np.einsum("hkv,hv->hk", S, doutput[row, t])
            dS = dS + call.scale * query[row, t][:, :, None] * doutput[row, t][:, None, :]
            dkey[row, t] = np.einsum("hkv,hv->hk", dS, v_all[row, t])
            dvalue[row, t] = np.einsum("hkv,hk->hv", dS, k_all[row, t])
            rows = (old * dS).sum(-1)
            if call.decay == "key":
                ddecay[row, t] = rows
            elif call.decay == "head":
                ddecay[row, t] = rows.sum(-1)
            elif call.decay == "constant":
                ddecay[n] += rows.sum(-1)
            dS = fade(t) * dS
        dstate[n] = dS

    def shared(x):
        return x.reshape(*x.shape[:2], call.kv_heads, groups, -1).sum(3)

    return output, last, dquery, shared(dkey), shared(dvalue), ddecay, dstate


def results(run, call, arrays, cotangents):
    """What `oracle` gives, by `run` and its own gradients."""
    inputs, borders = arrays[:6], arrays[6]
    (output, last), pull = jax.vjp(lambda *inputs: run(call, *inputs, borders), *inputs)
    dquery, dkey, dvalue, ddecay, _, dstate = pull((cotangents[0], cotangents[1]))
    return output, last, dquery, dkey, dvalue, ddecay, dstate


def assert_matches(actual, expected, tolerance):
    """Bounds relative RMS errors, all values finite; `tolerance` is one number, or one by name and `other`."""
    for name, got, want in zip(NAMES, actual, expected, strict=True):
        if got is None:
            continue
        got = np.asarray(got).astype(np.float64)
        assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
        assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} values are not finite"
        bound = tolerance if isinstance(tolerance, float) else tolerance.get(name, tolerance["other"])
        error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)
        assert error <= bound, f"{name}: error {error:.2e}, allowed {bound:.2e}"
