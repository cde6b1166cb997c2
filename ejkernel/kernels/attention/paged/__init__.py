"""Softmax attention over a cache of pages, for serving. Fastest first, on each device."""

from ejkernel._dispatch import Implementation, Later
from ejkernel.kernels._differentiable import splitting
from ejkernel.kernels.attention.paged import xla

_TRITON = "attention.paged.triton"
PAGED_ATTENTION = (
    Implementation("triton", ("cuda",), Later(_TRITON, "supports"), splitting(Later(_TRITON, "run"))),
    Implementation("xla", devices=None, supports=xla.supports, run=splitting(xla.run)),
)
