import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.search.stock_assignment import StockAssigner
from hotspa_plugin.search.workloads import WORKLOADS, workload_batches


def rows(assignment):
    (bucket,) = assignment.buckets
    return [[m.samples for m in replica] for replica in bucket.replicas]


def test_padded_rows_are_dealt_in_order():
    assignment = StockAssigner(num_replicas=2, context_tokens=100, packing="padded").assign([10, 100, 30])
    assert rows(assignment) == [[(0,), (2,)], [(1,)]]
    assert assignment.num_padding_tokens == 90 + 0 + 70


def test_packed_rows_are_filled_in_order_and_not_sorted():
    assignment = StockAssigner(num_replicas=2, context_tokens=100, packing="packed").assign([60, 30, 20, 80, 20])
    assert rows(assignment) == [[(0, 1), (4,)], [(2, 3)]]
    assert assignment.num_padding_tokens == 10 + 0 + 80


def test_what_is_over_the_context_is_refused():
    with pytest.raises(ValueError, match="sample 1: 101 tokens are over the context, 100"):
        StockAssigner(num_replicas=1, context_tokens=100, packing="padded").assign([5, 101])


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=40),
    num_replicas=st.integers(1, 5),
    packing=st.sampled_from(["padded", "packed"]),
)
def test_every_sequence_once_in_rows_of_the_context(lengths, num_replicas, packing):
    assignment = StockAssigner(num_replicas=num_replicas, context_tokens=64, packing=packing).assign(lengths)
    (bucket,) = assignment.buckets
    assert sorted(s for m in bucket.micro_batches for s in m.samples) == list(range(len(lengths)))
    assert all(m.num_padded_tokens == 64 >= m.num_tokens for m in bucket.micro_batches)


@pytest.mark.parametrize("name", [w for w in WORKLOADS if w != "stdlib"])
def test_workloads_repeat_and_hold_about_the_tokens_asked_for(name):
    batches = workload_batches(name, 5, batch_tokens=8000, longest_tokens=4096, seed=3)
    again = workload_batches(name, 5, batch_tokens=8000, longest_tokens=4096, seed=3)
    assert all(np.array_equal(a, b) for a, b in zip(batches, again, strict=True))
    for lengths in batches:
        assert 1 <= lengths.min() and lengths.max() <= 4096
        assert 8000 - 512 <= lengths.sum() <= 8000 + 4096
    assert name == "uniform" or not np.array_equal(batches[0], batches[1])


def test_workloads_have_the_shape_that_their_names_say():
    (huge,) = workload_batches("one-huge", 1, batch_tokens=8000, longest_tokens=4096)
    assert np.sum(huge == 4096) == 1 and np.sort(huge)[-2] <= 256
    dynamic = np.concatenate(workload_batches("dynamic-context", 200, batch_tokens=8000, longest_tokens=8192))
    assert dynamic.min() == 128 and dynamic.max() == 8192
    assert 600 < dynamic.mean() < 1200
    with pytest.raises(ValueError, match="unknown; choose among wikipedia"):
        workload_batches("nothing", 1, batch_tokens=1, longest_tokens=1)
