"""What a recurrence's three functions are to each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from ejkernel.kernels.delta_rule.call import Call as DeltaCall
from ejkernel.kernels.delta_rule.xla.recurrence import RECURRENCE as DELTA_RULE
from ejkernel.kernels.linear_recurrence.call import Call
from ejkernel.kernels.linear_recurrence.xla.recurrence import RECURRENCE as LINEAR

T, H, K, V = 20, 2, 4, 3
BORDERS = np.array([0, 7, 7, 18], np.int32)


def problem(recurrence, decay, packed):
    """A call of the recurrence, its inputs, borders and tangents of the inputs, in float64."""
    random = np.random.default_rng(0)
    rows, sequences = (1, 3) if packed else (2, 2)
    gates = {"constant": (sequences, H), "head": (rows, T, H), "key": (rows, T, H, K)}
    inputs = {"query": (rows, T, 1, K), "key": (rows, T, H, K), "value": (rows, T, H, V)}
    inputs |= {"log_decay": gates[decay], "initial_state": (sequences, H, K, V)}
    facts = {"batch": rows, "tokens": T, "heads": H, "key_dim": K, "value_dim": V, "sequences": sequences}
    facts |= {"packed": packed, "decay": decay, "scale": 0.5, "reverse": packed, "dtype": np.dtype(np.float64)}
    if recurrence is LINEAR:
        call, inputs = Call(**facts, value_decay=True), inputs | {"value_log_decay": (rows, T, H, V)}
    else:
        call, inputs = DeltaCall(**facts), inputs | {"beta": (rows, T, H)}
    drawn, tangents = ({name: random.normal(size=shape) / 2 for name, shape in inputs.items()} for _ in range(2))
    drawn |= {name: -np.abs(x) for name, x in drawn.items() if "decay" in name}
    drawn, tangents = (recurrence.inputs(**jax.tree.map(jnp.asarray, each)) for each in (drawn, tangents))
    return call, drawn, jnp.asarray(BORDERS) if packed else None, tangents


def inner(one, other):
    return sum((a * b).sum() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("recurrence, decay", [(LINEAR, "constant"), (LINEAR, "key"), (DELTA_RULE, "head")])
def test_backward_is_the_transpose_of_what_jax_makes_of_forward(recurrence, decay, packed, x64):
    call, inputs, borders, tangents = problem(recurrence, decay, packed)

    def forward(inputs):
        return recurrence.forward_by_chunks(call, inputs, borders)

    results, d_results = jax.jvp(forward, (inputs,), (tangents,))
    again, residuals = recurrence.forward_with_residuals(call, inputs, borders)
    for a, b in zip(results, again, strict=True):
        assert_close(a, b, 1e-13)
    cotangents = jax.tree.map(np.cos, results)
    d_inputs = recurrence.backward(call, inputs, borders, residuals, cotangents)
    assert_close(inner(cotangents, d_results), inner(d_inputs, tangents), 1e-12)
    by_jax = jax.vjp(forward, inputs)[1](cotangents)[0]
    for name in recurrence.inputs._fields:
        assert_close(getattr(d_inputs, name), getattr(by_jax, name), 1e-11, name)
