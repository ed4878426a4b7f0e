import threading

import pytest

from hotspa_plugin.search import AheadAssigner, BatchAssigner
from tests.search.options import option, skewed_lengths


class Counting:
    def __init__(self, assigner):
        self.assigner, self.threads = assigner, []

    def assign(self, lengths):
        self.threads.append(threading.current_thread().name)
        return self.assigner.assign(lengths)


@pytest.fixture
def counting():
    return Counting(BatchAssigner([option("tp1", 4, 4096, 0.1), option("tp4", 4, 32768)]))


def test_what_was_prepared_is_computed_once_and_elsewhere(counting):
    lengths = skewed_lengths(0, 40)
    with AheadAssigner(counting) as ahead:
        ahead.prepare(lengths)
        assert ahead.assign(lengths).digest() == counting.assigner.assign(lengths).digest()
        assert len(counting.threads) == 1 and counting.threads[0].startswith("assign-ahead")


def test_other_lengths_are_computed_at_once(counting):
    with AheadAssigner(counting) as ahead:
        ahead.prepare(skewed_lengths(0, 40))
        other = skewed_lengths(1, 40)
        assert ahead.assign(other).digest() == counting.assigner.assign(other).digest()
        assert ahead.assign(other).digest() == counting.assigner.assign(other).digest()
    assert sum(not name.startswith("assign-ahead") for name in counting.threads) == 2


def test_changing_the_callers_lengths_changes_nothing(counting):
    lengths = skewed_lengths(0, 40)
    kept = lengths.copy()
    with AheadAssigner(counting) as ahead:
        ahead.prepare(lengths)
        lengths[:] = 1
        assert ahead.assign(kept).num_tokens == kept.sum()


def test_errors_come_out_where_the_assignment_is_wanted(counting):
    with AheadAssigner(counting) as ahead:
        ahead.prepare([10**6])
        with pytest.raises(ValueError, match="over the pool's last bound"):
            ahead.assign([10**6])
        assert ahead.assign([5]).num_tokens == 5
