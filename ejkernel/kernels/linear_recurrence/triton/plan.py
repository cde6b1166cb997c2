"""How a call is cut for the chip it runs on."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._launch import padded
from ejkernel.kernels.chunks.triton.launching import capability
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.triton import configs
from ejkernel.kernels.linear_recurrence.triton.configs import Config
from ejkernel.xla_utils.utils import cdiv


@dataclass(frozen=True)
class Plan:
    """How a call is cut: its configuration, tokens of a time segment, and chunks of a group.

    Time is cut in segments where a call has too few programs to fill the chip. States are stored at the ends of groups
    only, from which gates' gradients are summed. `vmap`, folded into the batch, keeps the plan. Unless `keeps_starts`,
    the backward computes the states at the starts of segments again.
    """

    config: Config
    segment: int
    group: int
    keeps_starts: bool = True

    @staticmethod
    def of(call: Call) -> "Plan":
        wide = call.dtype == np.float32 or Plan.carried(call)
        config, by_key, by_value = (
            configs.configure(capability(), wide, dim)
            for dim in (max(call.key_dim, call.value_dim), call.key_dim, call.value_dim)
        )
        # a walk's tile has to fit the columns of the state that it carries: key dims, or in gradients value dims
        config = replace(
            config, output=by_key.output, segments=by_key.segments, stages_if_half_full=by_key.stages_if_half_full
        )
        config = replace(config, gradient=by_value.gradient, head_gate_gradient=by_value.head_gate_gradient)
        config = replace(config, key_gate_query_gradient=by_value.key_gate_query_gradient)
        rows = 1 if call.packed else call.batch
        programs = rows * call.heads * cdiv(call.value_dim, min(config.output.rows, padded(call.value_dim)))
        programs *= cdiv(call.key_dim, config.output.columns)
        # with one gate a head, states at the ends of groups are most of what is stored, so groups are longer; but not
        # where that would leave too few segments, which are whole groups
        longer = {"head": (2, 4), "constant": (1, 4) if call.dtype == jnp.bfloat16 else (1,)}
        for times in longer.get(call.decay, (1,)):
            unit = config.chunk * config.group * times
            segments = max(1, min(config.fill // programs, call.tokens // unit))
            if segments > 1:
                break
        return Plan(config, unit * cdiv(call.tokens, unit * segments), config.group * times)

    def of_part(self, call: Call) -> "Plan":
        """The plan of one device's rows and heads, with no more residuals than this plan has."""
        if call.value_decay or self.segmented(call):
            return self
        return replace(Plan.of(call), keeps_starts=False)

    @staticmethod
    def carried(call: Call) -> bool:
        """Whether operands are carried as float32: float16 has too small a range for states and gates."""
        return call.dtype == jnp.float16

    def segmented(self, call: Call) -> bool:
        return self.segment < call.tokens
