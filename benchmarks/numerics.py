"""`make numerics`: errors of values and gradients against float64, kept as JSON; `docs/numerics.md` shows the worst."""

import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from benchmarks import delta_rule
from ejkernel.bench.scan import token_scan

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "numerics.json"

# the oracle is not part of the package: it must not share a line with what it judges
sys.path.insert(0, str(ROOT / "tests"))
import oracle  # noqa: E402
from delta_rule_cases import Case as DeltaCase  # noqa: E402
from linear_attention_cases import GATES  # noqa: E402

TOKENS, HEADS, DIM = 400, 2, 32
REGIMES = {
    "tiny": "down to -1e-4",
    "ordinary": "around -1",
    "shipped": "Kimi-K3's gates, -5 · sigmoid(N(0, 1))",
    "strong": "down to -30",
    "resets": "a tenth -inf",
    "mixed": "0 to -1e4, and -inf",
    "positive": "up to 0.05",
}
DTYPES = (np.float32, jnp.bfloat16, np.float16)
# what is drawn for a gate of each op, and under which name it goes in; other ops draw none
LINEAR = {
    "recurrent_gla": ("g", (1, TOKENS, HEADS, DIM)),
    "simple_gla": ("g", (1, TOKENS, HEADS)),
    "recurrent, value gates": ("gv", (1, TOKENS, HEADS, DIM)),
    "retention": ("g_gamma", (HEADS,)),
}

# of the delta rule: which `beta` and keys, and of its gated forms which gates too
CORRECTIONS = {
    "ordinary": "0 to 1, any keys",
    "replaces": "1, nearly equal keys",
    "reflects": "2, nearly equal keys",
}

Arrays = dict[str, Any]


def linear_inputs(gate: str, shape: tuple[int, ...], regime: str, dtype: Any) -> Arrays:
    """Query, key and value in `dtype`; gates in float32, as models keep them."""
    random = np.random.default_rng(0)
    found = {name: random.normal(size=(1, TOKENS, HEADS, DIM)).astype(dtype) for name in ("query", "key", "value")}
    drawn = GATES[regime](random, shape)
    return found | {gate: (drawn / 16 if gate == "g_gamma" else drawn).astype(np.float32)}


def as_recurrent(gate: str, inputs: Arrays) -> Arrays:
    """The same call in `recurrent`'s words: one gate a head is a gate of one dim."""
    return {name: x[..., None] if name == gate == "g" and x.ndim == 3 else x for name, x in inputs.items()}


def scan(gate: str, inputs: Arrays) -> tuple[jax.Array, jax.Array]:
    """What everybody writes first, in float32 throughout."""
    call = {name: jnp.asarray(x, jnp.float32) for name, x in as_recurrent(gate, inputs).items()}
    if gate == "g_gamma":
        call["g"] = jnp.broadcast_to(call.pop("g_gamma")[:, None], (1, TOKENS, HEADS, 1))
    output, state = token_scan(**call)
    return output.astype(inputs["query"].dtype), state


def linear_errors(op: str, regime: str, dtype: Any) -> dict[str, dict[str, float]]:
    """Of ours and, where there is one, of a float32 scan: each result's largest error over its largest number."""
    gate, shape = LINEAR[op]
    inputs = linear_inputs(gate, shape, regime, dtype)
    random = np.random.default_rng(1)
    d_output = random.normal(size=(1, TOKENS, HEADS, DIM)).astype(dtype)
    d_state = random.normal(size=(1, HEADS, DIM, DIM)).astype(np.float32)
    output, state, grads = oracle.recurrent(**as_recurrent(gate, inputs), d_output=d_output, d_final_state=d_state)
    truth = {"output": output, "state": state}
    truth |= {name: grads[name].reshape(x.shape) for name, x in inputs.items()}
    errors = {}
    for who in ("ours",) if gate == "gv" else ("ours", "scan"):
        found = results(who, gate)(inputs, d_output, d_state)
        # a gate's gradient is judged 64 tokens at a time, by their own largest number: strong gates make small ones
        errors[who] = {name: error(x, truth[name], pieces=name == gate and x.ndim > 1) for name, x in found.items()}
    return errors


@functools.cache
def results(who: str, gate: str) -> Callable[..., Arrays]:
    """Output, state and the gradients, under the names of the arguments."""

    def ours(x: Arrays) -> tuple[jax.Array, jax.Array]:
        return ejkernel.recurrent(**as_recurrent(gate, x))

    @jax.jit
    def found(inputs: Arrays, d_output: jax.Array, d_state: jax.Array) -> Arrays:
        (output, state), pull = jax.vjp(ours if who == "ours" else functools.partial(scan, gate), inputs)
        return {"output": output, "state": state} | pull((d_output, d_state))[0]

    return found


def delta_errors(op: str, dtype: Any, regime: str = "", beta: str = "ordinary") -> dict[str, dict[str, float]]:
    """The same of the delta rule: gates of `regime` if it has any; `beta` and keys as in `CORRECTIONS`."""
    case = DeltaCase(
        op,
        batch=1,
        tokens=TOKENS,
        heads=HEADS,
        own_heads=(HEADS,) * 3,
        key_dim=DIM,
        value_dim=DIM,
        gate=regime or None,
        per_key=op == "kda",
        beta=beta,
        keys="ordinary" if beta == "ordinary" else "nearly equal",
    )
    drawn = case.arrays(np.float32)
    inputs = {name: x.astype(dtype if name in ("query", "key", "value") else np.float32) for name, x in drawn.items()}
    random = np.random.default_rng(1)
    d_output = random.normal(size=(1, TOKENS, HEADS, DIM)).astype(dtype)
    d_state = random.normal(size=(1, HEADS, DIM, DIM)).astype(np.float32)
    output, state, grads = oracle.delta_rule(**inputs, d_output=d_output, d_final_state=d_state)
    truth = {"output": output, "state": state} | grads
    found = {who: delta_results(who, op)(inputs, d_output, d_state) for who in ("ours", "scan")}
    return {
        who: {name: error(x, truth[name], pieces=name == "g") for name, x in each.items()}
        for who, each in found.items()
    }


@functools.cache
def delta_results(who: str, op: str) -> Callable[..., Arrays]:
    """Output, state and the gradients of `op`, or of a float32 scan."""

    def scan(x: Arrays) -> tuple[jax.Array, jax.Array]:
        output, state = token_scan(**{name: each.astype(np.float32) for name, each in x.items()})
        return output.astype(x["query"].dtype), state

    @jax.jit
    def found(inputs: Arrays, d_output: jax.Array, d_state: jax.Array) -> Arrays:
        ours = delta_rule.OPS[op]
        (output, state), pull = jax.vjp(lambda x: ours(**x) if who == "ours" else scan(x), inputs)
        return {"output": output, "state": state} | pull((d_output, d_state))[0]

    return found


def error(x: Any, truth: np.ndarray, pieces: bool = False) -> float:
    """The largest error over the largest number; with `pieces` the worst of that over pieces of 64 tokens.

    Infinite where the truth is beyond the dtype's range.
    """
    if np.abs(truth).max() > jnp.finfo(x.dtype).max:
        return np.inf
    x = np.asarray(x, np.float64)
    starts = range(0, truth.shape[1], 64) if pieces else ()
    parts = [(x[:, start : start + 64], truth[:, start : start + 64]) for start in starts] or [(x, truth)]
    # below 1e-30 float32 runs out of digits, and an error is as good as none
    return float(max(np.abs(part - true).max() / max(np.abs(true).max(), 1e-30) for part, true in parts))


def softmax_inputs(dtype: Any, spread: float) -> Arrays:
    random = np.random.default_rng(0)
    query, key, value = random.normal(size=(3, 1, 200, HEADS, DIM))
    return {"query": (spread * query).astype(dtype), "key": key.astype(dtype), "value": value.astype(dtype)}


def softmax_truth(inputs: Arrays, d_output: np.ndarray, causal: bool) -> dict[str, np.ndarray]:
    """Softmax attention and its gradients in float64, all pairs at once."""
    q, k, v, do = (np.moveaxis(np.asarray(x, np.float64)[0], 1, 0) for x in (*inputs.values(), d_output))
    scale = DIM**-0.5
    logits = scale * q @ k.swapaxes(1, 2)
    if causal:
        logits = np.where(np.tril(np.ones(logits.shape[1:])) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = do @ v.swapaxes(1, 2)
    d_logits = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    found = {
        "output": weights @ v,
        "d query": d_logits @ k,
        "d key": d_logits.swapaxes(1, 2) @ q,
        "d value": weights.swapaxes(1, 2) @ do,
    }
    return {name: np.moveaxis(x, 0, 1)[None] for name, x in found.items()}


def softmax_errors(dtype: Any, causal: bool, spread: float) -> dict[str, dict[str, float]]:
    """Of both ops, and of `jax.nn.dot_product_attention` as the peer."""
    inputs = softmax_inputs(dtype, spread)
    d_output = np.random.default_rng(1).normal(size=inputs["query"].shape).astype(dtype)
    truth = softmax_truth(inputs, d_output, causal)
    functions: dict[str, Callable[..., jax.Array]] = {
        "flash_attention": lambda query, key, value: ejkernel.flash_attention(
            query, key, value, causal=causal, dtype=None
        ),
        "attention": lambda query, key, value: ejkernel.attention(query, key, value, causal=causal, dtype=None)[0],
        "jax.nn": lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=causal),
    }
    found = {}
    for name, function in functions.items():
        output, pull = jax.vjp(function, *map(jnp.asarray, inputs.values()))
        results = dict(
            zip(("output", "d query", "d key", "d value"), (output, *pull(jnp.asarray(d_output))), strict=True)
        )
        found[name] = {which: error(x, truth[which]) for which, x in results.items()}
    return found


SOFTMAX = {
    "ordinary": (False, 1.0),
    "ordinary, causal": (True, 1.0),
    "up to 100, causal": (True, 30.0),
}


def rows() -> Iterator[dict[str, Any]]:
    """A row for each op, kind of input, dtype and who computed it."""
    kinds = {regime: f"{regime}: {about}" for regime, about in REGIMES.items()}
    for op, regime, dtype in itertools.product(LINEAR, REGIMES, DTYPES):
        yield from _rows(op, kinds[regime], dtype, linear_errors(op, regime, dtype))
    for op, dtype in itertools.product(delta_rule.OPS, DTYPES):
        if op == "delta_rule":
            for beta, about in CORRECTIONS.items():
                yield from _rows(op, about, dtype, delta_errors(op, dtype, beta=beta))
        else:
            for regime in REGIMES:
                yield from _rows(op, kinds[regime], dtype, delta_errors(op, dtype, regime))
    for (kind, (causal, spread)), dtype in itertools.product(SOFTMAX.items(), DTYPES):
        yield from _rows("Softmax attention", kind, dtype, softmax_errors(dtype, causal, spread))


def _rows(op: str, kind: str, dtype: Any, measured: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    """Errors to one digit; `null` where the exact result is beyond the dtype's range."""
    for by, errors in measured.items():
        named = {_column(name): None if np.isinf(x) else float(f"{x:.0e}") for name, x in errors.items()}
        yield {"op": op, "kind": kind, "dtype": np.dtype(dtype).name, "by": by, "errors": named}


def _column(name: str) -> str:
    """`output`, `state`, or `d` and the argument that it is the gradient of; all gates are one."""
    if name in ("output", "state") or name.startswith("d "):
        return name
    return "d gate" if name in ("g", "gv", "g_gamma") else f"d {name}"


def dumps(report: dict[str, Any]) -> str:
    """JSON with a row a line."""
    head = json.dumps({name: value for name, value in report.items() if name != "rows"}, indent=2)
    lines = ",\n    ".join(map(json.dumps, report["rows"]))
    return head.removesuffix("\n}") + f',\n  "rows": [\n    {lines}\n  ]\n}}\n'


if __name__ == "__main__":
    sizes = {"tokens": TOKENS, "heads": HEADS, "dim": DIM}
    report = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, **sizes, "rows": list(rows())}
    RESULTS.write_text(dumps(report))
    print(f"wrote {RESULTS.relative_to(ROOT)}")
