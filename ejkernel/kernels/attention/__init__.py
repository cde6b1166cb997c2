"""Softmax attention, with its weights (`ATTENTION`) and in blocks without them (`FLASH_ATTENTION`).

Fastest first, on each device, as `benchmarks/results` has it.
"""

from ejkernel._dispatch import Implementation
from ejkernel.kernels.attention import cudnn, splash, triton, xla
from ejkernel.kernels.attention.xla import reference

ATTENTION = (Implementation("xla", devices=None, supports=xla.supports, run=reference.run),)
FLASH_ATTENTION = (
    Implementation(
        "splash", devices=("tpu",), supports=splash.supports, run=splash.run, splits=False, tracks_axes=False
    ),
    Implementation("cudnn", devices=("cuda",), supports=cudnn.supports, run=cudnn.run, slower=cudnn.slower),
    Implementation("triton", devices=("cuda",), supports=triton.supports, run=triton.run, slowest=triton.slowest),
    Implementation("xla", devices=None, supports=xla.supports, run=xla.run),
)
