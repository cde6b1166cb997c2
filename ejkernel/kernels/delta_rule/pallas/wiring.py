"""One kernel on its way to a TPU: as the linear recurrence's, with betas beside the gates."""

import jax

from ejkernel.kernels.linear_recurrence.pallas import wiring
from ejkernel.kernels.linear_recurrence.pallas.wiring import F32

DEVICE = {
    "forward": "ejkernel.kernels.delta_rule.pallas.device.walk",
    "backward": "ejkernel.kernels.delta_rule.pallas.device.walk",
}


class Wiring(wiring.Wiring):
    """Arrays are named as the device code names them."""

    device = DEVICE
    family = "delta"

    def read_along(self, name: str, x: jax.Array) -> None:
        """`x [B, T, H]`, tokens along the lanes: one number a head and token is little to turn."""
        self.inputs[name] = x.swapaxes(1, 2).reshape(self._along)
        self.blocks[name] = self._head_gates()

    def write_along(self, name: str) -> None:
        self.outputs[name], self.blocks[name] = jax.ShapeDtypeStruct(self._along, F32), self._head_gates()

    @property
    def _along(self) -> tuple[int, ...]:
        return self.call.batch, self.programs, self.sizes.heads, self.call.tokens
