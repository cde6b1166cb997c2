"""The most that this machine reaches: bytes a second of a copy, operations a second of a large matrix product."""

import functools
import time

import jax
import jax.numpy as jnp

COPY_BYTES = {"cpu": 1 << 28, "gpu": 1 << 31}
MATRIX = {"cpu": 2048, "gpu": 8192}
ROUNDS = 10


def copy_rate(*, quick: bool = False) -> float:
    """Bytes read and written a second."""
    size = COPY_BYTES.get(jax.default_backend(), COPY_BYTES["gpu"]) // (8 if quick else 1)
    x = jnp.arange(size // 4, dtype=jnp.float32)
    # in place, so that no time goes to getting fresh memory from the system
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        x = jax.block_until_ready(step(x))
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def matmul_rate(dtype: str, *, quick: bool = False) -> float:
    """Operations a second in `dtype`, where float32 keeps all of its bits."""
    size = 512 if quick else MATRIX.get(jax.default_backend(), MATRIX["gpu"])
    x = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
    product = jax.jit(functools.partial(jnp.matmul, precision="highest"))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(product(x, x))
        # the fastest: a ceiling is what the machine does when nothing disturbs it
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
