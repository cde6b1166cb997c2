"""The one table of which op has which implementation on which device.

`ejkernel info` and the documentation are made from it; tests hold the README, the changelog and the fronts to it.
"""

from dataclasses import dataclass
from typing import Any

from ejkernel._dispatch import Implementation
from ejkernel.kernels.attention import ATTENTION, FLASH_ATTENTION
from ejkernel.kernels.delta_rule import IMPLEMENTATIONS as DELTA_RULE
from ejkernel.kernels.linear_recurrence import IMPLEMENTATIONS as LINEAR_RECURRENCE

# How people call the implementations and the devices they are for; `None` is every device.
NAMES = {"xla": "XLA", "triton": "Triton", "cudnn": "cuDNN", "pallas": "Pallas", "splash": "splash"}
DEVICES = {None: "anything", "cuda": "NVIDIA GPUs", "tpu": "TPUs"}


@dataclass(frozen=True)
class Op:
    """An op of the library.

    Attributes:
        name: What the library calls it.
        implementations: Fastest first.
        gates: The arrays beside query, key and value, each with its dims (`"BTH"`, `"BTHK"`).
        options: What else an ordinary call of it needs.
    """

    name: str
    implementations: tuple[Implementation, ...]
    gates: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def runs_on(self) -> str:
        """Where it runs and by what, for people: `anything (XLA), NVIDIA GPUs (Triton)`."""
        found: dict[str | None, list[str]] = {None: []}
        for each in reversed(self.implementations):
            for device in each.devices or (None,):
                found.setdefault(device, []).append(NAMES[each.name])
        return ", ".join(f"{DEVICES[device]} ({' or '.join(names[::-1])})" for device, names in found.items())

    def ordinary_call(self) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a call of ordinary size, as shapes."""
        import jax
        import jax.numpy as jnp

        sizes = {"B": 1, "T": 1024, "H": 8, "K": 64}
        x = jax.ShapeDtypeStruct(tuple(sizes.values()), jnp.bfloat16)
        options = dict(self.options)
        for name, dims in self.gates:
            options[name] = jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in dims), jnp.float32)
        return [x, x, x], options


PER_HEAD, PER_KEY, BETA = (("g", "BTH"),), (("g", "BTHK"),), (("beta", "BTH"),)
OPS = {
    op.name: op
    for op in (
        Op("linear_attention", LINEAR_RECURRENCE),
        Op("retention", LINEAR_RECURRENCE),
        Op("lightning_attn", LINEAR_RECURRENCE, options=(("layer_idx", 0), ("num_layers", 12))),
        Op("simple_gla", LINEAR_RECURRENCE, gates=PER_HEAD),
        Op("recurrent_gla", LINEAR_RECURRENCE, gates=PER_KEY),
        Op("recurrent", LINEAR_RECURRENCE, gates=PER_KEY),
        Op("delta_rule", DELTA_RULE, gates=BETA),
        Op("gated_delta_rule", DELTA_RULE, gates=PER_HEAD + BETA),
        Op("kda", DELTA_RULE, gates=PER_KEY + BETA),
        Op("flash_attention", FLASH_ATTENTION),
        Op("attention", ATTENTION),
    )
}


def platform_table() -> str:
    """Which implementations each op has on which device, fastest first, in Markdown."""
    rows = [["op", *DEVICES.values()], ["---"] * (len(DEVICES) + 1)]
    for name, op in OPS.items():
        served = (
            [each.name for each in op.implementations if device in (each.devices or (None,))] for device in DEVICES
        )
        rows.append([f"`{name}`", *(", ".join(f"`{each}`" for each in names) for names in served)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
