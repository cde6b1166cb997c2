"""Every validation of user input and its wording: the argument, what it got, what would fit.

Wrong shapes and values raise `ValueError`, wrong kinds of array `TypeError`. Code below the fronts trusts what passed.
"""

from ejkernel._checks.arrays import AnyArray, array, factor, floating, grouped_heads, scalar, time_series, unbatched
from ejkernel._checks.delta_rule import DeltaRule, delta_rule
from ejkernel._checks.meshes import bound_axis, divisible_time, even_slices, mesh_axis, ring_slices
from ejkernel._checks.packing import Borders, cu_seqlens, one_row, packed_borders, segment_ids, static_total, token_mask
from ejkernel._checks.recurrence import (
    LinearAttention,
    carried,
    gate_per_head,
    heads,
    layer_input,
    layer_number,
    linear_attention,
    position,
    state_dtype,
)
from ejkernel._checks.softmax import (
    attention_bias,
    attention_inputs,
    attention_mask,
    block_sizes,
    dropout,
    query_offset,
    sinks,
    sliding_window,
)
from ejkernel._checks.values import (
    axis,
    flag,
    floating_dtype,
    integer_dtype,
    known_size,
    positive,
    positive_int,
    power_of_two,
    real,
)
from ejkernel._checks.wording import Dims, fail, is_concrete, warn

__all__ = [
    "AnyArray",
    "Borders",
    "DeltaRule",
    "Dims",
    "LinearAttention",
    "array",
    "attention_bias",
    "attention_inputs",
    "attention_mask",
    "axis",
    "block_sizes",
    "bound_axis",
    "carried",
    "cu_seqlens",
    "delta_rule",
    "divisible_time",
    "dropout",
    "even_slices",
    "factor",
    "fail",
    "flag",
    "floating",
    "floating_dtype",
    "gate_per_head",
    "grouped_heads",
    "heads",
    "integer_dtype",
    "is_concrete",
    "known_size",
    "layer_input",
    "layer_number",
    "linear_attention",
    "mesh_axis",
    "one_row",
    "packed_borders",
    "position",
    "positive",
    "positive_int",
    "power_of_two",
    "query_offset",
    "real",
    "ring_slices",
    "scalar",
    "segment_ids",
    "sinks",
    "sliding_window",
    "state_dtype",
    "static_total",
    "time_series",
    "token_mask",
    "unbatched",
    "warn",
]
