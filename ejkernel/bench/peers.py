"""What the ops are compared with: other ways to compute the same, where they are installed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ejkernel.bench import fla
from ejkernel.bench.ops import Arrays, Op
from ejkernel.bench.programs import Program, compiled


@dataclass(frozen=True)
class Peer:
    """Another way to compute some of the ops.

    Attributes:
        name: What `--peer` calls it.
        what: In words.
        missing: Why it cannot be used here and what to install, or `None`.
        serves: Whether it computes an op, apart from what is missing here.
        program: From the op, its inputs and perhaps the cotangent.
    """

    name: str
    what: str
    missing: Callable[[], str | None]
    serves: Callable[[Op], bool]
    program: Callable[[Op, Arrays, jax.Array | None], Program]


def _scan(op: Op, inputs: Arrays, cotangent: jax.Array | None) -> Program:
    return compiled(lambda **x: token_scan(op, x), inputs, cotangent)


def token_scan(op: Op, inputs: Arrays) -> jax.Array:
    """The recurrence as everybody writes it first: a step a token, differentiated by JAX."""
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    heads, dim = query.shape[2:]
    key_decay, value_decay = inputs.get("g", inputs.get("gk")), inputs.get("gv")
    if key_decay is not None:
        key_decay = jnp.exp(key_decay if key_decay.ndim == 4 else key_decay[..., None])
    fixed = None if op.fixed_log_decay is None else jnp.exp(op.fixed_log_decay(heads))[:, None, None]

    def step(state: jax.Array, x: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b, beta = x
        state = state if fixed is None else fixed * state
        state = state if a is None else a[..., None] * state
        state = state if b is None else jnp.exp(b)[..., None, :] * state
        v = v if beta is None else beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * v[..., None, :]
        return state, dim**-0.5 * jnp.einsum("bhk,bhkv->bhv", q, state)

    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    state = jnp.zeros((query.shape[0], heads, dim, value.shape[-1]))
    tokens = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (*wide, key_decay, value_decay, inputs.get("beta"))]
    _, output = jax.lax.scan(step, state, tuple(tokens))
    return jnp.moveaxis(output, 0, 1).astype(query.dtype)


def _jax_nn(implementation: Literal["xla", "cudnn"]) -> Callable[[Op, Arrays, jax.Array | None], Program]:
    def program(op: Op, inputs: Arrays, cotangent: jax.Array | None) -> Program:
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

        return compiled(run, inputs, cotangent)

    return program


def _no_gpu() -> str | None:
    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("scan", "lax.scan over tokens", lambda: None, lambda op: not op.softmax, _scan),
        Peer(
            "jax.nn",
            "jax.nn.dot_product_attention on XLA",
            lambda: None,
            lambda op: op.softmax,
            _jax_nn("xla"),
        ),
        Peer("cudnn", "jax.nn.dot_product_attention on cuDNN", _no_gpu, lambda op: op.softmax, _jax_nn("cudnn")),
        Peer("fla", "flash-linear-attention, on PyTorch", fla.missing, lambda op: not op.softmax, fla.program),
    )
}
