"""When effects travel in a tree, by its arithmetic."""

import itertools

from ejkernel.parallel import _exchange


def test_a_tree_where_it_takes_less_time():
    for devices, size in itertools.product((1, 2, 3, 4, 5, 8, 16, 100, 256), (10_000, 100_000, 1_000_000, 10_000_000)):
        steps = _exchange.tree_steps(devices)
        # as far as effects of one slice, then of 1, 2, 4, … more reach back
        reach = 1 + sum(2**i for i in range(steps - 1))
        assert reach >= devices - 1 and (steps == 1 or reach // 2 < devices - 1)
        tree, gather = steps * (size + _exchange.BYTES_OF_A_STEP), (devices - 1) * size
        assert _exchange.by_tree(devices, size) == (tree < gather)
    assert not _exchange.by_tree(4, 10**9)
    assert _exchange.by_tree(8, 4 * 8 * 128 * 128)
