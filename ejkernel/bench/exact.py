"""The ops in float64, to measure errors with: the scan over tokens, or softmax and convolution as they are defined."""

import contextlib
import functools
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
        if upstream is None:
            results = {"output": _definition(op.core, inputs, None, gamma)[0]}
        else:
            output, pull, _ = jax.vjp(lambda x: _definition(op.core, x, None, gamma), inputs, has_aux=True)
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
        cotangent = jnp.asarray(np.asarray(upstream), jnp.float64)
        results = _whole(op.core, inputs, cotangent, jnp.asarray(sequence), gamma)
        return {name: np.asarray(x) for name, x in results.items() if x is not None}


@functools.partial(jax.jit, static_argnums=0)
def _whole(
    core: str, inputs: dict[str, jax.Array], upstream: jax.Array, sequence: jax.Array, gamma: jax.Array | None
) -> dict[str, jax.Array | None]:
    output, pull, state = jax.vjp(lambda x: _definition(core, x, sequence, gamma), inputs, has_aux=True)
    return {"output": output, "final state": state, **pull(upstream)[0]}


def _definition(
    core: str, inputs: dict[str, jax.Array], sequence: jax.Array | None, gamma: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The output and the final state, if there is one, within each sequence if `sequence [T]` tells several apart."""
    if core == "softmax":
        return _softmax(**inputs, sequence=sequence), None
    if core == "convolution":
        return _convolution(**inputs, sequence=sequence)
    first = None if sequence is None else jnp.diff(sequence, prepend=0) > 0
    return token_scan(**inputs, first=first, g_gamma=gamma)


def _on_a_cpu() -> contextlib.AbstractContextManager[object]:
    """A context that computes on a CPU, where float64 is fast; without a CPU backend, on the default device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _softmax(query: jax.Array, key: jax.Array, value: jax.Array, sequence: jax.Array | None) -> jax.Array:
    """Causal attention."""
    scores = query.shape[-1] ** -0.5 * jnp.einsum("bshd,blhd->bhsl", query, key)
    seen = jnp.tri(query.shape[1], dtype=bool)
    if sequence is not None:
        seen &= sequence[:, None] == sequence
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhsl,blhd->bshd", weights, value)


def _convolution(x: jax.Array, weight: jax.Array, sequence: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The convolution with silu, and the row's last tokens."""
    taps, tokens = weight.shape[1], x.shape[1]
    longer = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0), (0, 0)))
    total = jnp.zeros_like(x)
    for lag in range(taps):
        same = jnp.ones(tokens, bool)
        if sequence is not None:
            same = sequence == jnp.pad(sequence, (lag, 0), constant_values=-1)[:tokens]
        tap = jnp.where(same[:, None, None], longer[:, taps - 1 - lag : taps - 1 - lag + tokens], 0)
        total += tap * weight[:, taps - 1 - lag][:, None]
    return jax.nn.silu(total), longer[:, tokens:]


def errors(results: Mapping[str, np.ndarray], expected: Results) -> dict[str, float]:
    """For each result the norm of its error over the norm of the expected result."""
    return {
        name: float(np.linalg.norm(results[name] - right) / max(float(np.linalg.norm(right)), 1e-300))
        for name, right in expected.items()
    }
