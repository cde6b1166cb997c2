"""The ops in float64, one row and head, to measure errors with.

The tests have an oracle of their own for every option of every op. It is not part of the package, and a package cannot
lean on its tests; these few lines are all that the benchmarked calls need.
"""

from collections.abc import Mapping

import numpy as np

from ejkernel.bench.ops import Op

Results = dict[str, np.ndarray]
MAX_TOKENS = 4096  # what follows keeps a state a token, or every pair of tokens


def of_head(op: Op, arrays: Mapping[str, np.ndarray], head: int, heads: int, upstream: np.ndarray | None) -> Results:
    """The output of one head, and with its cotangent the gradients by name; arrays are `[T]` or `[T, dim]`."""
    wide = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    query, key, value = (wide[name] for name in ("query", "key", "value"))
    if upstream is not None:
        upstream = np.asarray(upstream, np.float64)
    if op.softmax:
        return _softmax(query, key, value, upstream)
    fixed = np.zeros(1) if op.fixed_log_decay is None else op.fixed_log_decay(heads)[head]
    gates = [wide.get("g", wide.get("gk", fixed)), wide.get("gv", np.zeros(1))]
    a, b = (np.broadcast_to(each[:, None] if each.ndim == 1 else each, query.shape) for each in gates)
    if op.corrects:
        results = _delta_rule(query, key, value, a, wide["beta"], upstream)
    else:
        results = _recurrence(query, key, value, a, b, upstream)
    return {name: _like(wide.get(name), x) for name, x in results.items() if name == "output" or name in wide}


def _like(gate: np.ndarray | None, gradient: np.ndarray) -> np.ndarray:
    """One number a head and token has one gradient: the sum over dims."""
    return gradient.sum(-1) if gate is not None and gate.ndim == 1 else gradient


def _recurrence(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, a: np.ndarray, b: np.ndarray, upstream: np.ndarray | None
) -> Results:
    tokens, dim = query.shape
    scale, decay = dim**-0.5, (np.exp(a), np.exp(b))
    states = np.zeros((tokens + 1, dim, value.shape[1]))
    for t in range(tokens):
        states[t + 1] = decay[0][t][:, None] * decay[1][t] * states[t] + np.outer(key[t], value[t])
    read = states[1:]
    results = {"output": scale * np.matmul(query[:, None], read)[:, 0]}
    if upstream is None:
        return results
    d_query = scale * np.matmul(read, upstream[:, :, None])[..., 0]
    d_key, d_value, d_a, d_b = (np.zeros_like(x) for x in (key, value, a, b))
    flow = np.zeros(states.shape[1:])  # the cotangent of the state
    for t in reversed(range(tokens)):
        flow += scale * np.outer(query[t], upstream[t])
        d_key[t], d_value[t] = flow @ value[t], key[t] @ flow
        flow *= decay[0][t][:, None] * decay[1][t]
        crossing = flow * states[t]
        d_a[t], d_b[t] = crossing.sum(1), crossing.sum(0)
    return results | {"query": d_query, "key": d_key, "value": d_value, "g": d_a, "gk": d_a, "gv": d_b}


def _delta_rule(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, a: np.ndarray, beta: np.ndarray, upstream: np.ndarray | None
) -> Results:
    tokens, dim = query.shape
    scale, decay = dim**-0.5, np.exp(a)[..., None]
    states = np.zeros((tokens + 1, dim, value.shape[1]))
    wanted = np.zeros_like(value)  # what is to be written less what is recalled
    for t in range(tokens):
        state = decay[t] * states[t]
        wanted[t] = value[t] - key[t] @ state
        states[t + 1] = state + beta[t] * np.outer(key[t], wanted[t])
    read = states[1:]
    results = {"output": scale * np.matmul(query[:, None], read)[:, 0]}
    if upstream is None:
        return results
    d_query = scale * np.matmul(read, upstream[:, :, None])[..., 0]
    d_key, d_value, d_a, d_beta = (np.zeros_like(x) for x in (key, value, a, beta))
    flow = np.zeros(states.shape[1:])  # the cotangent of the state
    for t in reversed(range(tokens)):
        flow += scale * np.outer(query[t], upstream[t])
        arriving = key[t] @ flow
        d_value[t], d_beta[t] = beta[t] * arriving, arriving @ wanted[t]
        d_key[t] = beta[t] * (flow @ wanted[t]) - (decay[t] * states[t]) @ d_value[t]
        flow = decay[t] * (flow - np.outer(key[t], d_value[t]))
        d_a[t] = (flow * states[t]).sum(1)
    return results | {"query": d_query, "key": d_key, "value": d_value, "g": d_a, "beta": d_beta[:, None]}


def _softmax(query: np.ndarray, key: np.ndarray, value: np.ndarray, upstream: np.ndarray | None) -> Results:
    scale = query.shape[1] ** -0.5
    scores = np.where(np.tri(len(query), dtype=bool), scale * query @ key.T, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    output = weights @ value
    if upstream is None:
        return {"output": output}
    d_scores = weights * (upstream @ value.T - (upstream * output).sum(-1, keepdims=True))
    gradients = {"query": scale * d_scores @ key, "key": scale * d_scores.T @ query, "value": weights.T @ upstream}
    return {"output": output} | gradients


def errors(results: Mapping[str, np.ndarray], expected: Results) -> dict[str, float]:
    """For each result the norm of its error over its own."""
    return {
        name: float(np.linalg.norm(results[name] - right) / max(float(np.linalg.norm(right)), 1e-300))
        for name, right in expected.items()
    }
