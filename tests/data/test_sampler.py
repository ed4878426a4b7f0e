"""Global batches: every sequence once an epoch, and a resumed run draws what the unbroken one would have."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import GlobalBatchSampler

sizes = st.one_of(
    st.builds(lambda n: {"num_sequences": n}, st.integers(1, 40)),
    st.builds(lambda n: {"num_tokens": n}, st.integers(1, 400)),
)
lengths_lists = st.lists(st.integers(1, 100), min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, size=sizes, seed=st.integers(0, 2**70))
def test_every_sequence_once_an_epoch(lengths, size, seed):
    sampler = GlobalBatchSampler(np.array(lengths), seed=seed, **size)
    drawn = []
    while len(drawn) < 3 * len(lengths):
        batch = sampler.next_batch()
        num_tokens = sum(lengths[i] for i in batch)
        if "num_sequences" in size:
            assert len(batch) == size["num_sequences"]
        else:
            assert len(batch) == 1 or num_tokens <= size["num_tokens"]
        drawn += batch.tolist()
    for epoch in range(3):
        assert sorted(drawn[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    if "num_tokens" in size:  # a batch ends only where the next sequence would not fit
        following = sampler.next_batch()[0]
        assert num_tokens + lengths[following] > size["num_tokens"]


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_lists, size=sizes, seed=st.integers(0, 2**32), before=st.integers(0, 20))
def test_resume_is_exact(lengths, size, seed, before):
    unbroken = GlobalBatchSampler(np.array(lengths), seed=seed, **size)
    for _ in range(before):
        unbroken.next_batch()
    resumed = GlobalBatchSampler(np.array(lengths), seed=seed, **size)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
    assert (resumed.epoch, resumed.num_consumed) == (unbroken.epoch, unbroken.num_consumed)
    for _ in range(5):
        assert np.array_equal(resumed.next_batch(), unbroken.next_batch())


def test_resume_with_another_batch_size_continues_at_the_next_sequence():
    lengths = np.arange(1, 11)
    first = GlobalBatchSampler(lengths, num_sequences=4, seed=3)
    head = first.next_batch().tolist()
    second = GlobalBatchSampler(lengths, num_sequences=6, seed=3)
    second.load_state_dict(first.state_dict())
    assert sorted(head + second.next_batch().tolist()) == list(range(10))


def test_order_is_frozen():
    """The draw must not change with NumPy or Python: a saved run continues after an upgrade."""
    sampler = GlobalBatchSampler(np.ones(8, dtype=int), num_sequences=8, seed=1234)
    assert [sampler.next_batch().tolist() for _ in range(2)] == [
        [4, 5, 3, 1, 2, 0, 6, 7],
        [5, 7, 1, 3, 4, 2, 0, 6],
    ]


def test_epochs_and_seeds_differ_and_shuffle_can_be_off():
    lengths = np.ones(50, dtype=int)
    first, second = (GlobalBatchSampler(lengths, num_sequences=50, seed=seed) for seed in (0, 1))
    batches = [first.next_batch().tolist(), first.next_batch().tolist(), second.next_batch().tolist()]
    assert len({tuple(batch) for batch in batches}) == 3
    plain = GlobalBatchSampler(lengths, num_sequences=50, shuffle=False)
    assert plain.next_batch().tolist() == list(range(50))


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="either in sequences or in tokens"):
        GlobalBatchSampler(np.ones(3))
    with pytest.raises(ValueError, match="either in sequences or in tokens"):
        GlobalBatchSampler(np.ones(3), num_sequences=1, num_tokens=1)
    with pytest.raises(ValueError, match="at least 1"):
        GlobalBatchSampler(np.ones(3), num_sequences=0)
    with pytest.raises(ValueError, match="no sequences"):
        GlobalBatchSampler(np.ones(0), num_sequences=1)
    sampler = GlobalBatchSampler(np.ones(3), num_sequences=1, seed=1)
    with pytest.raises(ValueError, match="saved with seed 2, this run has 1"):
        sampler.load_state_dict(GlobalBatchSampler(np.ones(3), num_sequences=1, seed=2).state_dict())
    with pytest.raises(ValueError, match="num_sequences_in_epoch 4"):
        sampler.load_state_dict(GlobalBatchSampler(np.ones(4), num_sequences=1, seed=1).state_dict())
