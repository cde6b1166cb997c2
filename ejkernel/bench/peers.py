"""Peers: other ways to compute the same as an op, where they are installed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ejkernel._ops import Op
from ejkernel.bench.calls import Arrays
from ejkernel.bench.programs import Program, compiled
from ejkernel.bench.scan import token_scan


@dataclass(frozen=True)
class Peer:
    """Another way to compute some of the ops.

    Attributes:
        name: What `--peer` calls it.
        description: What it is, in words.
        missing: Why it cannot be used here and what to install, or `None`.
        computes: Whether it can compute an op, on a machine with everything installed.
        program: `program(op, inputs, cotangent)`; with `None` for the cotangent, the forward pass alone.
    """

    name: str
    description: str
    missing: Callable[[], str | None]
    computes: Callable[[Op], bool]
    program: Callable[[Op, Arrays, jax.Array | None], Program]


def _scan(op: Op, inputs: Arrays, cotangent: jax.Array | None) -> Program:
    """In float32, with the decay that the op has built in."""

    def run(**x: jax.Array) -> jax.Array:
        wide = {name: each.astype(jnp.float32) for name, each in x.items()}
        if op.log_decay is not None:
            wide["g_gamma"] = jnp.asarray(op.log_decay(x["query"].shape[2]), jnp.float32)
        return token_scan(**wide)[0].astype(x["query"].dtype)

    return compiled(run, inputs, cotangent)


def _jax_nn(implementation: Literal["xla", "cudnn"]) -> Callable[[Op, Arrays, jax.Array | None], Program]:
    def program(op: Op, inputs: Arrays, cotangent: jax.Array | None) -> Program:
        def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)

        return compiled(run, inputs, cotangent)

    return program


def _no_gpu() -> str | None:
    return None if jax.default_backend() == "gpu" else "needs an NVIDIA GPU"


def _is_softmax(op: Op) -> bool:
    return op.core == "softmax"


PEERS = {
    peer.name: peer
    for peer in (
        Peer("scan", "lax.scan over tokens", lambda: None, lambda op: op.core not in ("softmax", "convolution"), _scan),
        Peer("jax.nn", "jax.nn.dot_product_attention on XLA", lambda: None, _is_softmax, _jax_nn("xla")),
        Peer("cudnn", "jax.nn.dot_product_attention on cuDNN", _no_gpu, _is_softmax, _jax_nn("cudnn")),
    )
}
