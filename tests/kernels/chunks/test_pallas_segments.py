"""Rows of several sequences (`segment_ids`) on the Pallas kernels of both recurrences, in Pallas' interpreter."""

import functools

import jax
import numpy as np
import pallas_interpreter
import pytest
from segment_cases import IDS, Case, arrays_of, assert_matches, check_leaks, one_by_one, results

from ejkernel import _bind
from ejkernel.kernels.delta_rule import pallas as delta_rule
from ejkernel.kernels.linear_recurrence import pallas as linear_recurrence


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    def dispatch(implementations, call, *arrays, platform=None):
        kernels = delta_rule if "beta" in call.dims() else linear_recurrence
        assert kernels.supports(call) is None, kernels.supports(call)
        return kernels.run(call, *arrays)

    monkeypatch.setattr(_bind, "dispatch", dispatch)
    with pallas_interpreter.interpreted(monkeypatch):
        yield


CASES = [
    Case("linear_attention", dim=64, state=False),
    Case("recurrent", dim=64, reverse=True, poison=np.inf),
    Case("simple_gla", "resets", "bfloat16", reverse=True, state=False, dim=64, poison=np.inf),
    Case("recurrent_gla", dim=64, poison=-np.inf),
    Case("delta_rule", dtype="bfloat16", dim=64),
    Case("gated_delta_rule", dim=64, reverse=True, poison=np.inf),
    Case("kda", dim=64),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_one_by_one_without_leaks(case):
    arrays, cotangents = arrays_of(case, IDS)
    run = jax.jit(functools.partial(results, case, ids=IDS))
    found = run(arrays, cotangents=cotangents)
    assert_matches(case, found, one_by_one(case, arrays, IDS, cotangents))
    check_leaks(case, arrays, IDS, cotangents, found, run)
