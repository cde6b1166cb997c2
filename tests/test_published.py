"""What the pages of `docs/published` and their neighbours say other ops are here, against float64 loops over tokens.

The functions are those of the pages' own blocks, so what users copy is what is tested.
"""

import ast
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import assert_close

import ejkernel

DOCS = Path(__file__).parent.parent / "docs"


def run(name, *arguments, page="published/*.md", **options):
    """Calls the function that a Python block of a page defines, with arrays in float32."""
    text = "".join(path.read_text() for path in DOCS.glob(page))
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (block,) = (each for each in blocks if f"def {name}(" in each)
    tree, found = ast.parse(block), {}
    # without the lines that show it at work, which the tests of the pages run
    tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.FunctionDef)]
    exec(compile(tree, page, "exec"), found)
    arguments, options = jax.tree.map(lambda x: np.float32(x) if isinstance(x, np.ndarray) else x, (arguments, options))
    return found[name](*arguments, **options)


def rounded(x):
    """Float64 that float32 holds too, so that both compute with the same numbers."""
    return np.float64(np.float32(x))


def normal(*shape):
    return rounded(np.random.default_rng(sum(shape)).normal(size=shape))


def decays(*shape):
    """Log decays, some of them strong."""
    return rounded(-np.exp(2 * normal(*shape) - 1))


def over_tokens(step, state, *arrays):
    """Runs `step(state, *tokens)` along the second axis of arrays: what it returns, stacked, and its last state."""
    outputs = []
    for tokens in zip(*(np.moveaxis(x, 1, 0) for x in arrays), strict=True):
        output, state = step(state, *tokens)
        outputs.append(output)
    return np.stack(outputs, axis=1), state


def check(found, expected):
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), tuple(found), tuple(expected))


B, T, H, K, V = 2, 70, 2, 8, 6


def test_hgrn():
    i, log_f = normal(B, T, K), decays(B, T, K)

    def step(h, i, log_f):
        h = np.exp(log_f) * h + (1 - np.exp(log_f)) * i
        return h, h

    expected, state = over_tokens(step, np.zeros((B, K)), i, log_f)
    check(run("hgrn", i, log_f), (expected, state[:, None, None]))


def test_hgrn2():
    o, i, log_f = normal(B, T, H, K), normal(B, T, H, V), decays(B, T, H, K)

    def step(S, o, i, log_f):
        f = np.exp(log_f)
        S = f[..., None] * S + (1 - f)[..., None] * i[..., None, :]
        return np.einsum("bhkv,bhk->bhv", S, o), S

    expected = over_tokens(step, np.zeros((B, H, K, V)), o, i, log_f)
    check(run("hgrn2", o, i, log_f), expected)


def test_gsa():
    slots = 5
    q, k, v, log_a = normal(B, T, H, K), rounded(normal(B, T, H, K) + 1), normal(B, T, H, V), decays(B, T, H, slots)

    def step(state, q, k, v, log_a):
        keys, values = state
        a = np.exp(log_a)[..., None]
        keys = a * keys + (1 - a) * k[..., None, :]
        values = a * values + (1 - a) * v[..., None, :]
        scores = np.einsum("bhmk,bhk->bhm", keys, q) * K**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("bhmv,bhm->bhv", values, weights), (keys, values)

    start = np.zeros((B, H, slots, K)), np.zeros((B, H, slots, V))
    expected, _ = over_tokens(step, start, q, k, v, log_a)
    check([run("gsa", q, k, v, log_a)], [expected])


def test_rwkv6():
    r, k, v, log_w = normal(B, T, H, K), rounded(normal(B, T, H, K) + 1), normal(B, T, H, V), decays(B, T, H, K)
    u, start = normal(H, K), normal(B, H, K, V)

    def step(S, r, k, v, log_w):
        write = k[..., None] * v[..., None, :]
        output = np.einsum("bhkv,bhk->bhv", S + u[..., None] * write, r)
        return output, np.exp(log_w)[..., None] * S + write

    expected = over_tokens(step, start, r, k, v, log_w)
    check(run("rwkv6", r, k, v, log_w, u, initial_state=start), expected)


def test_mamba1():
    channels, states = 6, 4
    x, delta = normal(B, T, channels), rounded(np.exp(normal(B, T, channels) - 1))
    Bs, Cs = normal(B, T, states), rounded(normal(B, T, states) + 1)
    A, D = decays(channels, states), normal(channels)

    def step(h, x, delta, Bt, Ct):
        h = np.exp(delta[..., None] * A) * h + (delta * x)[..., None] * Bt[:, None]
        return np.einsum("bdn,bn->bd", h, Ct) + D * x, h

    expected, state = over_tokens(step, np.zeros((B, channels, states)), x, delta, Bs, Cs)
    check(run("mamba1", x, delta, A, Bs, Cs, D), (expected, state[..., None]))


def test_mamba2():
    heads, groups, states = 4, 2, 5
    x, delta = normal(B, T, heads, V), rounded(np.exp(normal(B, T, heads) - 1))
    Bs, Cs = normal(B, T, groups, states), rounded(normal(B, T, groups, states) + 1)
    A, D = decays(heads), normal(heads)

    def step(h, x, delta, Bt, Ct):
        Bt, Ct = (np.repeat(each, heads // groups, axis=1) for each in (Bt, Ct))
        h = np.exp(delta * A)[..., None, None] * h + (delta[..., None] * Bt)[..., None] * x[..., None, :]
        return np.einsum("bhnp,bhn->bhp", h, Ct) + D[:, None] * x, h

    expected = over_tokens(step, np.zeros((B, heads, states, V)), x, delta, Bs, Cs)
    check(run("mamba2", x, delta, A, Bs, Cs, D), expected)


def test_mlstm():
    q, k, v = normal(B, T, H, K), rounded(normal(B, T, H, K) + 1), normal(B, T, H, V)
    i, log_f = rounded(4 * normal(B, T, H)), decays(B, T, H)

    def step(state, q, k, v, i, log_f):
        C, n, m = state
        larger = np.maximum(log_f + m, i)
        forget, write = np.exp(log_f + m - larger)[..., None], np.exp(i - larger)[..., None] * k * K**-0.5
        C, n = forget[..., None] * C + write[..., None] * v[..., None, :], forget * n + write
        below = np.maximum(np.abs((n * q).sum(-1)), np.exp(-larger))
        return np.einsum("bhkv,bhk->bhv", C, q) / below[..., None], (C, n, larger)

    start = np.zeros((B, H, K, V)), np.zeros((B, H, K)), np.full((B, H), -np.inf)
    expected, _ = over_tokens(step, start, q, k, v, i, log_f)
    check([run("mlstm", q, k, v, i, log_f)], [expected])


def test_based():
    q, k, v = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V)
    scores = np.einsum("bshk,blhk->bhsl", q, k) * K**-0.5
    weights = np.where(np.tri(T, dtype=bool), 1 + scores + scores**2 / 2, 0)
    expected = np.einsum("bhsl,blhv->bshv", weights / weights.sum(-1, keepdims=True), v)
    check([run("based", q, k, v)[0]], [expected])


def test_fox():
    q, k, v, log_f = normal(B, T, H, K), normal(B, T, H, K), normal(B, T, H, V), rounded(-np.exp(normal(B, T, H) - 2))
    sums = np.moveaxis(np.cumsum(log_f, 1), 1, 2)
    scores = np.einsum("bshk,blhk->bhsl", q, k) * K**-0.5 + sums[..., None] - sums[:, :, None]
    weights = np.exp(np.where(np.tri(T, dtype=bool), scores, -np.inf))
    expected = np.einsum("bhsl,blhv->bshv", weights / weights.sum(-1, keepdims=True), v)
    check([run("fox", q, k, v, log_f)], [expected])


def test_minimax():
    heads, layer, layers = 4, 3, 10
    q, k, v = normal(B, T, heads, K), rounded(normal(B, T, heads, K) + 1), normal(B, T, heads, V)
    slopes = 2.0 ** (-8 * (np.arange(heads) + 1) / heads) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)

    def step(S, q, k, v):
        S = np.exp(-slopes)[:, None, None] * S + k[..., None] * v[..., None, :]
        return np.einsum("bhkv,bhk->bhv", S, q), S

    expected = over_tokens(step, np.zeros((B, heads, K, V)), q, k, v)
    check(run("minimax", q, k, v, layer, layers, page="ops/lightning_attn.md"), expected)


# what a query at row q of S sees of the keys k of L, in the words of each library, and the same here
WINDOWS = {
    "jax local_window_size=3": (lambda q, k, S, L: abs(q - k) <= 3, {"sliding_window": 3}),
    "transformers sliding_window=4": (
        lambda q, k, S, L: (k <= q) & (k > q - 4),
        {"causal": True, "sliding_window": (4 - 1, 0)},
    ),
    "flash-attn window_size=(2, 1)": (
        lambda q, k, S, L: (k >= q + L - S - 2) & (k <= q + L - S + 1),
        {"sliding_window": (2, 1), "query_offset": "L - S"},
    ),
    "flash-attn window_size=(-1, 0)": (
        lambda q, k, S, L: k <= q + L - S,
        {"sliding_window": (100, 0), "query_offset": "L - S"},
    ),
    "torch is_causal": (lambda q, k, S, L: k <= q, {"causal": True}),
    "torch causal_lower_right": (
        lambda q, k, S, L: k <= q + L - S,
        {"causal": True, "query_offset": "L - S"},
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_other_libraries(name):
    sees, options = WINDOWS[name]
    S, L = 5, 9
    if "query_offset" in options:
        options = {**options, "query_offset": L - S}
    q, k, v = normal(1, S, H, K), normal(1, L, H, K), normal(1, L, H, V)
    mask = sees(np.arange(S)[:, None], np.arange(L), S, L)
    weights = np.where(mask, np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) * K**-0.5), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    found = ejkernel.flash_attention(*map(np.float32, (q, k, v)), **options)
    assert_close(found, np.einsum("bhqk,bkhd->bqhd", weights, v), 1e-5)
