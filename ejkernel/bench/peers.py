"""What the ops are compared with: other ways to compute the same, where they are installed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from ejkernel.bench import fla
from ejkernel.bench.ops import Arrays, Op
from ejkernel.bench.programs import Program, compiled
from ejkernel.bench.scan import token_scan


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
    """In float32, with the decay that the op has built in."""

    def run(**x: jax.Array) -> jax.Array:
        wide = {name: each.astype(jnp.float32) for name, each in x.items()}
        if op.fixed_log_decay is not None:
            wide["g_gamma"] = jnp.asarray(op.fixed_log_decay(x["query"].shape[2]))
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
