"""What every kernel of a call is told of it."""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ejkernel.kernels import _launch
from ejkernel.kernels.attention import dropout
from ejkernel.kernels.attention.call import Call
from ejkernel.kernels.attention.inputs import Inputs
from ejkernel.kernels.attention.triton.plan import Plan, Tile, power
from ejkernel.xla_utils.utils import cdiv

LOG2E = math.log2(math.e)  # logs are to base 2 in the kernels
_FAR = (1 << 31) - 1  # as far as int32 goes
# as in `tiles`
_WAYS = 64
_ALIGNED = 16
_PRESENT, _ROWS, _QUERIES, _KEYS = 1, 2, 4, 8

# Modules of device code, not imported at the top of any other, since `import ejkernel` must not import Triton.
DEVICE = {
    "forward": "ejkernel.kernels.attention.triton.forward_kernels",
    "backward": "ejkernel.kernels.attention.triton.backward_kernels",
    "bias": "ejkernel.kernels.attention.triton.bias_kernels",
    "decoding": "ejkernel.kernels.attention.triton.decoding_kernels",
}


def device(name: str) -> Any:
    """A module of device code."""
    return importlib.import_module(DEVICE[name])


def _aligned(pairs: Array | None) -> Array | None:
    """A mask or a bias whose rows begin where wide loads can: byte by byte, they would take most of the time."""
    if pairs is None or pairs.shape[3] == 1:
        return pairs
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, 0), (0, -pairs.shape[3] % _ALIGNED)))


@dataclass(frozen=True)
class Launcher:
    """One call on its way to the device."""

    call: Call
    plan: Plan
    inputs: Inputs
    borders: tuple[Array | None, Array | None]  # of queries and keys

    @staticmethod
    def of(call: Call, plan: Plan, inputs: Inputs) -> "Launcher":
        cu, cu_kv = (None if each is None else each.astype(jnp.int32) for each in inputs[7:9])
        inputs = inputs._replace(mask=_aligned(inputs.mask), bias=_aligned(inputs.bias))
        return Launcher(call, plan, inputs, (cu, cu_kv))

    @property
    def tokens(self) -> tuple[Any, ...]:
        """Query, key, value, and what belongs to pairs of them."""
        return *self.inputs[:5], self.inputs.dropout_key

    @property
    def places(self) -> tuple[Any, ...]:
        """What says where queries and keys stand."""
        return *self.borders, self.inputs.query_offset

    @property
    def sizes(self) -> tuple[int, ...]:
        """Queries, keys, sequences, how far apart those are that are looked at first, and bounds to both sides."""
        count = self.call.sequences or 0
        return self.call.queries, self.call.keys, count, cdiv(count + 1, _WAYS), *self.bounds

    @property
    def bounds(self) -> tuple[int, int]:
        left, right = (_FAR if each is None else min(each, _FAR) for each in (self.call.left, self.call.right))
        return left, right

    def blocks(self, size: int, of_keys: bool = False) -> int:
        """Blocks of `size` tokens of queries or keys; of packed sequences, as many as there may be."""
        count = self.call.keys if of_keys else self.call.queries
        if self.call.sequences is not None:
            return count // size + self.call.sequences + 1
        return self.call.batch * cdiv(count, size)

    def launch(self, kernel: Any, *arguments: Any, outputs: Any, programs: int, tile: Tile, **constants: Any) -> Any:
        """Runs `kernel`; the query stands in for arrays that are not there, and constants it does not know are left."""
        given = [self.inputs.query if each is None else each for each in arguments]
        names = set(kernel.arg_names)
        known = {name: each for name, each in (self._constants(tile) | constants).items() if name in names}
        return _launch.launch(
            kernel,
            *given,
            outputs=outputs,
            programs=programs,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **known,
        )

    def _constants(self, tile: Tile) -> dict[str, Any]:
        call, inputs = self.call, self.inputs
        offset, sinks = inputs.query_offset, inputs.sinks
        mask, bias = (self._layout(each) for each in (inputs.mask, inputs.bias))
        return {
            "H": call.heads,
            "HKV": call.kv_heads,
            "D": call.key_dim,
            "DV": call.value_dim,
            "BD": power(call.key_dim),
            "BDV": power(call.value_dim),
            "BM": tile.queries,
            "BN": tile.keys,
            "PACKED": call.sequences is not None,
            "OFFSETS": 0 if offset is None else min(offset.shape[0], 2),
            "JOINED": tile.joined,
            "LEFT": call.left is not None,
            "RIGHT": call.right is not None,
            "MASK": mask,
            "MASK_HEADS": 1 if inputs.mask is None else inputs.mask.shape[1],
            "BIAS": bias,
            "BIAS_HEADS": 1 if inputs.bias is None else inputs.bias.shape[1],
            "SINKS": 0 if sinks is None else sinks.shape[1],
            "SINK_HEADS": 1 if sinks is None else sinks.shape[0],
            "BSINKS": 1 if sinks is None else power(sinks.shape[1], 1),
            "SCALE": float(call.scale),
            "CAP": float(call.soft_cap or 0.0),
            "LINEAR": call.soft_cap is None and inputs.bias is None and call.scale > 0,
            "FAST": self.plan.fast_tanh,
            "LEAST": dropout.least(call),
            "SHARE": 1 / (1 - call.dropout),
            "PRECISION": "tf32x3" if inputs.query.dtype == np.float32 else "ieee",
        }

    def _layout(self, pairs: Array | None) -> int:
        if pairs is None:
            return 0
        rows, _, queries, keys = pairs.shape
        return _PRESENT | (_ROWS if rows > 1 else 0) | (_QUERIES if queries > 1 else 0) | (_KEYS if keys > 1 else 0)

    def like(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)
