"""What `make numerics` measures and writes."""

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


def test_puts_tables_between_the_marks_of_the_page():
    page = f"before\n{numerics.START}\nold\n{numerics.END}\nafter\n"
    assert numerics.put_in(page, "new") == f"before\n{numerics.START}\n\nnew\n\n{numerics.END}\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        numerics.put_in("no marks", "new")
