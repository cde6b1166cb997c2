"""The ops in float64, one row and head, to measure errors with: the scan over tokens, or softmax as it is defined."""

import contextlib
from collections.abc import Mapping

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
            return _softmax(**inputs) if op.core == "softmax" else token_scan(**inputs, g_gamma=gamma)[0]

        if upstream is None:
            results = {"output": run(inputs)}
        else:
            output, pull = jax.vjp(run, inputs)
            results = {"output": output, **pull(jnp.asarray(upstream, jnp.float64)[None, :, None])[0]}
        return {name: np.asarray(x)[0, :, 0] for name, x in results.items()}


def _on_a_cpu() -> contextlib.AbstractContextManager[object]:
    """Where float64 is at home; without a CPU backend, on the device that there is."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()


def _softmax(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    scores = query.shape[-1] ** -0.5 * jnp.einsum("bshd,blhd->bhsl", query, key)
    weights = jax.nn.softmax(jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhsl,blhd->bshd", weights, value)


def errors(results: Mapping[str, np.ndarray], expected: Results) -> dict[str, float]:
    """For each result the norm of its error over its own."""
    return {
        name: float(np.linalg.norm(results[name] - right) / max(float(np.linalg.norm(right)), 1e-300))
        for name, right in expected.items()
    }
