"""TPU kernels in Pallas' interpreter: what was never written is NaN, and races are found."""

import contextlib

from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels import _pallas
from ejkernel.kernels.chunks.pallas import plan
from ejkernel.kernels.chunks.pallas.device import products


@contextlib.contextmanager
def interpreted(monkeypatch):
    # small chunks, or compiling what the interpreter makes of them takes minutes
    monkeypatch.setattr(plan, "CHUNK", 16)
    monkeypatch.setattr(plan, "BLOCK", 32)
    # so that a chunk has blocks of several sizes
    monkeypatch.setattr(products, "TILE", 4)
    monkeypatch.setattr(_pallas, "INTERPRET", pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True))
    yield
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    races = interpreter.races
    assert races is None or not races.races_found
