"""The ops in float64, to measure errors with: the scan over tokens, or softmax and convolution as they are defined."""

import contextlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._ops import Op
from ejkernel.bench.scan import token_scan

Results = dict[str, np.ndarray]
MAX_TOKENS = 4096  # the gradient keeps a state a token, or every pair of tokens


def of_head(op: Op, arrays: Mapping[str, np.ndarray], head: int, heads: int, upstream: np.ndarray | None) -> Results:
    """The output of one head, and with its cotangent the gradients by name; arrays are `[T]` or `[T, dim]`."""
    with jax.enable_x64(True), _on_a_cpu():
        inputs = {name: jnp.asarray(x, jnp.float64)[None, :, None] for name, x in arrays.items()}
        gamma = None if op.log_decay is None else jnp.asarray(op.log_decay(heads)[head : head + 1], jnp.float64)

        def run(inputs: dict[str, jax.Array]) -> jax.Array:
            if op.core == "convolution":
                return _convolution(inputs["x"], inputs["weight"])[0]
            return (
                _softmax(inputs["query"], inputs["key"], inputs["value"])
                if op.core == "softmax"
                else token_scan(**inputs, g_gamma=gamma)[0]
            )

        if upstream is None:
            results = {"output": run(inputs)}
        else:
            output, pull = jax.vjp(run, inputs)
            results = {"output": output, **pull(jnp.asarray(upstream, jnp.float64)[None, :, None])[0]}
        # the weight is one for all rows, and its gradient a sum over them
        return {name: np.asarray(x)[0, :, 0] for name, x in results.items() if name != "weight"}


def of_call(
    op: Op, arrays: Mapping[str, jax.Array], upstream: jax.Array, borders: Sequence[int] | None = None
) -> Results:
    """The output of a whole small call, its final state if it has one, and its gradients, by name."""
    with jax.enable_x64(True), _on_a_cpu():
        inputs = {name: jnp.asarray(np.asarray(x), jnp.float64) for name, x in arrays.items()}
        _, tokens, heads, _ = next(iter(inputs.values())).shape
        # which sequence each token is in
        sequence = np.searchsorted(np.asarray([0] if borders is None else borders), np.arange(tokens), "right")
        gamma = None if op.log_decay is None else jnp.asarray(op.log_decay(heads), jnp.float64)
        run = {"softmax": _whole_softmax, "convolution": _whole_convolution}.get(op.core, _whole_scan)
        results = run(inputs, jnp.asarray(np.asarray(upstream), jnp.float64), jnp.asarray(sequence), gamma)
        return {name: np.asarray(x) for name, x in results.items()}


@jax.jit
def _whole_scan(
    inputs: dict[str, jax.Array], upstream: jax.Array, sequence: jax.Array, gamma: jax.Array | None
) -> dict[str, jax.Array]:
    first = jnp.diff(sequence, prepend=0) > 0
    output, pull, state = jax.vjp(lambda x: token_scan(**x, first=first, g_gamma=gamma), inputs, has_aux=True)
    return {"output": output, "final state": state, **pull(upstream)[0]}


@jax.jit
def _whole_softmax(
    inputs: dict[str, jax.Array], upstream: jax.Array, sequence: jax.Array, gamma: None
) -> dict[str, jax.Array]:
    output, pull = jax.vjp(lambda x: _softmax(x["query"], x["key"], x["value"], sequence), inputs)
    return {"output": output, **pull(upstream)[0]}


@jax.jit
def _whole_convolution(
    inputs: dict[str, jax.Array], upstream: jax.Array, sequence: jax.Array, gamma: None
) -> dict[str, jax.Array]:
    output, pull, state = jax.vjp(lambda x: _convolution(x["x"], x["weight"], sequence), inputs, has_aux=True)
    return {"output": output, "final state": state, **pull(upstream)[0]}


def _on_a_cpu() -> contextlib.AbstractContextManager[object]:
    """Where float64 is at home; without a CPU backend, on the device that there is."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _softmax(query: jax.Array, key: jax.Array, value: jax.Array, sequence: jax.Array | None = None) -> jax.Array:
    """Causal, and within each sequence if `sequence [T]` tells several apart."""
    scores = query.shape[-1] ** -0.5 * jnp.einsum("bshd,blhd->bhsl", query, key)
    seen = jnp.tri(query.shape[1], dtype=bool)
    if sequence is not None:
        seen &= sequence[:, None] == sequence
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhsl,blhd->bshd", weights, value)


def _convolution(x: jax.Array, weight: jax.Array, sequence: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """With silu, within each sequence if `sequence [T]` tells several apart; and the row's last tokens."""
    taps, tokens = weight.shape[1], x.shape[1]
    longer = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    total = jnp.zeros_like(x)
    for lag in range(taps):
        own = jnp.ones(tokens, bool)
        if sequence is not None:
            own = sequence == jnp.pad(sequence, (lag, 0), constant_values=-1)[:tokens]
        tap = jnp.where(own[:, None, None], longer[:, taps - 1 - lag : taps - 1 - lag + tokens], 0)
        total += tap * weight[:, taps - 1 - lag][:, None]
    return jax.nn.silu(total), longer[:, tokens:]


def errors(results: Mapping[str, np.ndarray], expected: Results) -> dict[str, float]:
    """For each result the norm of its error over its own."""
    return {
        name: float(np.linalg.norm(results[name] - right) / max(float(np.linalg.norm(right)), 1e-300))
        for name, right in expected.items()
    }
