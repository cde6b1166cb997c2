"""One kernel on its way to a TPU: as the linear recurrence's, with betas beside the gates."""

import functools
import importlib
from typing import Any

import jax

from ejkernel.kernels import _pallas, _varying
from ejkernel.kernels.linear_recurrence.pallas import wiring
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32


class Wiring(wiring.Wiring):
    """Arrays are named as the device code names them."""

    def read_along(self, name: str, x: jax.Array) -> None:
        """`x [B, T, H]`, tokens along the lanes: one number a head and token is little to turn."""
        self.inputs[name] = x.swapaxes(1, 2).reshape(self._along)
        self.blocks[name] = self._head_gates()

    def write_along(self, name: str) -> None:
        self.outputs[name], self.blocks[name] = jax.ShapeDtypeStruct(self._along, F32), self._head_gates()

    @property
    def _along(self) -> tuple[int, ...]:
        return self.call.batch, self.programs, self.sizes.heads, self.call.tokens

    def run(self, kernel: str, scratch: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        """Launches a kernel of the device code; its outputs by name."""
        # not at the top: `import ejkernel` must not import Pallas
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        walk: Any = importlib.import_module("ejkernel.kernels.delta_rule.pallas.device.walk")
        like = self.inputs["query"]
        names = (*self.inputs, *self.outputs, *scratch)
        results = pl.pallas_call(
            functools.partial(getattr(walk, kernel), self.sizes, names),
            out_shape=[_varying.shape_like(x.shape, x.dtype, like) for x in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(self.call.batch, self.programs, self.table.shape[1]),
                in_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.inputs],
                out_specs=[pl.BlockSpec(*self.blocks[name]) for name in self.outputs],
                scratch_shapes=[pltpu.VMEM(shape, F32) for shape in scratch.values()],
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
            interpret=_pallas.INTERPRET or False,
            name=f"delta_{self.call.decay}_{kernel}",
        )(_varying.like(self.table, like), *self.inputs.values())
        return dict(zip(self.outputs, results, strict=True))
