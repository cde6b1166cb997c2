"""A recurrence compiled once, with its gradients or alone: calls that differ in numbers only are fed to one program."""

import functools

import jax
import numpy as np

from ejkernel.kernels.chunks import layout, scores, triangular


def with_gradients(op, arrays, options, seed=1):
    """Output, final state and gradients of `op` by `jax.vjp`, with the cotangents that were used."""
    return _compiled(op, tuple(sorted(options.items())), seed, _sizes())(*split(arrays))


def without_gradients(op, arrays, options):
    """Output and final state of `op`."""
    return _compiled_alone(op, tuple(sorted(options.items())), _sizes())(arrays)


def split(arrays):
    """Arrays that have a gradient, and borders."""
    rest = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    return {name: x for name, x in arrays.items() if name not in rest}, rest


def _sizes():
    """What is read while tracing: tests that change it get programs of their own."""
    return layout.LARGEST_CHUNK, scores.BASE, triangular.BASE


@functools.cache
def _compiled_alone(op, options, sizes):
    return jax.jit(lambda arrays: op(**arrays, **dict(options)))


@functools.cache
def _compiled(op, options, seed, sizes):

    @jax.jit
    def run(moving, rest):
        results, vjp = jax.vjp(lambda x: op(**x, **rest, **dict(options)), moving)
        random = np.random.default_rng(seed)
        cotangents = tuple(random.normal(size=x.shape).astype(x.dtype) for x in results)
        return results, vjp(cotangents)[0], cotangents

    return run
