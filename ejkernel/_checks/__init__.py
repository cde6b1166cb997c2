"""Every validation of user input and its wording: the argument, what it got, what would fit.

Wrong shapes and values raise `ValueError`, wrong kinds of array `TypeError`. Code below the fronts trusts what passed.
"""

from ejkernel._checks.arrays import AnyArray, array, factor, floating, scalar, time_series, unbatched
from ejkernel._checks.convolution import activation, convolution
from ejkernel._checks.meshes import bound_axis, divisible_time, even_slices, mesh_axis, ring_slices
from ejkernel._checks.packing import (
    Borders,
    cu_seqlens,
    one_row,
    packed_borders,
    segment_ids,
    static_total,
    token_mask,
)
from ejkernel._checks.paged import PagedAttention, PagedCache, page_values, paged_attention
from ejkernel._checks.pools import Pool, slot_values, start
from ejkernel._checks.recurrence import (
    RecurrenceArrays,
    carried,
    delta_rule,
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
    attention_segments,
    block_sizes,
    dropout,
    no_segments,
    query_offset,
    sinks,
    sliding_window,
    soft_cap,
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
from ejkernel._checks.wording import Dims, fail, warn
