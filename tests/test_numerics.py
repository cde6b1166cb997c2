"""What `make numerics` measures and writes."""

import json

import numpy as np
import pytest

from benchmarks import numerics


@pytest.mark.parametrize("op", ["recurrent_gla", "retention"])
def test_float32_is_no_worse_than_a_scan(op):
    errors = numerics.linear_errors(op, "mixed", np.float32)
    assert set(errors) == {"ours", "scan"}
    assert set(errors["ours"]) == {"output", "state", "query", "key", "value", numerics.LINEAR[op][0]}
    assert max(errors["ours"].values()) < 2e-6
    assert 0 < max(errors["scan"].values()) < 2e-5


def test_delta_rule_in_float32_is_as_exact_as_promised():
    errors = numerics.delta_errors("gated_delta_rule", np.float32, "mixed")
    assert set(errors) == {"ours", "scan"}
    assert set(errors["ours"]) == {"output", "state", "query", "key", "value", "beta", "g"}
    assert max(errors["ours"].values()) < 1e-5
    assert 0 < max(errors["scan"].values()) < 2e-5


def test_error_is_relative_to_the_largest_number():
    truth = np.array([[1.0, -4.0]])
    assert numerics.error(np.array([[1.0, -3.0]], np.float32), truth) == 0.25
    assert np.isnan(numerics.error(np.array([[1.0, np.nan]], np.float32), truth))
    assert np.isinf(numerics.error(np.array([[1.0]], np.float16), np.array([[1e6]])))


def test_error_of_each_piece_counts_for_itself():
    truth = np.concatenate([np.full((1, 64), 1e6), np.full((1, 64), 1.0)], 1)
    x = truth.astype(np.float32)
    x[0, 70] = 1.5
    assert numerics.error(x, truth) < 1e-6
    assert numerics.error(x, truth, pieces=True) == 0.5


def test_rows_say_what_was_measured(tmp_path):
    errors = {"ours": {"output": 1.26e-7, "query": np.inf, "g": 2.0e-7}}
    (row,) = numerics._rows("kda", "tiny", np.float32, errors)
    expected = {"output": 1e-7, "d query": None, "d gate": 2e-7}
    assert row == {"op": "kda", "kind": "tiny", "dtype": "float32", "by": "ours", "errors": expected}
    assert json.loads(numerics.dumps({"jax": "1", "rows": [row, row]})) == {"jax": "1", "rows": [row, row]}


def test_what_is_kept_has_every_op_and_dtype():
    rows = json.loads(numerics.RESULTS.read_text())["rows"]
    ops = {*numerics.LINEAR, *numerics.delta_rule.OPS, "Softmax attention"}
    dtypes = {np.dtype(dtype).name for dtype in numerics.DTYPES}
    assert {(row["op"], row["dtype"]) for row in rows} == {(op, dtype) for op in ops for dtype in dtypes}
