"""One kernel on its way to a TPU: as the linear recurrence's."""

from ejkernel.kernels.linear_recurrence.pallas import wiring

DEVICE = {
    "forward": "ejkernel.kernels.delta_rule.pallas.device.walk",
    "backward": "ejkernel.kernels.delta_rule.pallas.device.walk",
}


class Wiring(wiring.Wiring):
    """Arrays are named as the device code names them."""

    device = DEVICE
    family = "delta"
