"""Assignments: every sequence once, within capacity, balanced, and the same on every rank."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.cost.micro_batch import MicroBatchCost, pipeline_s
from hotspa_plugin.data import BucketSpec, assign_batch, bucket_of_lengths

POOL = (
    BucketSpec(bound_tokens=64, num_replicas=8),
    BucketSpec(bound_tokens=256, num_replicas=2, num_stages=2, length_multiple=2),
    BucketSpec(bound_tokens=1024, num_replicas=1, num_stages=2, length_multiple=4, micro_batch_tokens=2048),
)
costs = st.builds(
    MicroBatchCost,
    a_s_per_token2=st.sampled_from([0.0, 1e-9, 1e-7]),
    b_s_per_token=st.sampled_from([0.0, 1e-5]),
    c_s=st.sampled_from([0.0, 1e-4, 1e-2]),
)


@st.composite
def pools(draw):
    bounds = sorted(draw(st.sets(st.integers(1, 500), min_size=1, max_size=4)))
    return tuple(
        BucketSpec(
            bound_tokens=bound,
            num_replicas=draw(st.integers(1, 9)),
            num_stages=draw(st.integers(1, 4)),
            length_multiple=draw(st.sampled_from([1, 2, 3, 8])),
            micro_batch_tokens=draw(st.sampled_from([None, bound, bound + 7, 3 * bound])),
        )
        for bound in bounds
    )


@settings(max_examples=300, deadline=None)
@given(data=st.data(), pool=pools(), packing=st.sampled_from(["packed", "padded"]), cost=costs)
def test_every_sequence_once_within_capacity(data, pool, packing, cost):
    lengths = data.draw(st.lists(st.integers(1, pool[-1].bound_tokens), max_size=40))
    assignment = assign_batch(lengths, buckets=pool, packing=packing, cost=cost)
    seen = []
    for bucket in assignment.buckets:
        spec = pool[bucket.bucket]
        lower = pool[bucket.bucket - 1].bound_tokens if bucket.bucket else 0
        assert len(bucket.replicas) == spec.num_replicas and bucket.num_micro_batches > 0
        for micro_batch in bucket.micro_batches:
            own = [lengths[i] for i in micro_batch.samples]
            assert own and all(lower < length <= spec.bound_tokens for length in own)
            assert micro_batch.num_tokens == sum(own)
            if packing == "packed":
                assert sum(own) <= spec.capacity_tokens
                assert micro_batch.num_padded_tokens - sum(own) < spec.length_multiple
            else:
                assert micro_batch.num_padded_tokens == len(own) * spec.padded(max(own))
                assert micro_batch.num_padded_tokens <= spec.padded(spec.capacity_tokens)
            assert micro_batch.num_padded_tokens % spec.length_multiple == 0
            seen += micro_batch.samples
    assert sorted(seen) == list(range(len(lengths)))
    assert assignment.num_sequences == len(lengths) and assignment.num_tokens == sum(lengths)
    assert assignment == assign_batch(np.array(lengths), buckets=list(pool), packing=packing, cost=cost)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_fewer_sequences_than_replicas(packing):
    assignment = assign_batch([10, 20, 30], buckets=POOL, packing=packing)
    (bucket,) = assignment.buckets
    assert sorted(len(replica) for replica in bucket.replicas) == [0] * 5 + [1] * 3
    assert bucket.num_sequences == 3


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_empty_buckets_are_absent(packing):
    assert assign_batch([], buckets=POOL, packing=packing).buckets == ()
    assignment = assign_batch([64, 257], buckets=POOL, packing=packing)
    assert [bucket.bucket for bucket in assignment.buckets] == [0, 2]


def test_bounds_belong_to_their_bucket():
    assert bucket_of_lengths([1, 64, 65, 256, 257, 1024, 1025], [64, 256, 1024]).tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_padding_to_the_multiple_keeps_the_true_length():
    pool = (BucketSpec(bound_tokens=7, num_replicas=1, length_multiple=4),)
    for packing in ("packed", "padded"):
        (micro_batch,) = assign_batch([7], buckets=pool, packing=packing).buckets[0].micro_batches
        assert (micro_batch.num_tokens, micro_batch.num_padded_tokens) == (7, 8)


def test_short_sequences_under_a_large_multiple():
    pool = (BucketSpec(bound_tokens=64, num_replicas=2, length_multiple=16),)
    for packing, length in itertools.product(("packed", "padded"), range(1, 17)):
        assert assign_batch([length] * 3, buckets=pool, packing=packing).num_tokens == 3 * length


def test_digest_tells_assignments_apart():
    lengths = [3, 60, 100, 200, 1000, 7]
    digests = {assign_batch(lengths, buckets=POOL, packing=packing).digest() for packing in ("packed", "padded")}
    digests.add(assign_batch(lengths[::-1], buckets=POOL).digest())
    assert len(digests) == 3
    assert assign_batch(lengths, buckets=POOL).digest() == assign_batch(lengths, buckets=POOL).digest()


@pytest.mark.parametrize(("packing", "start"), [("packed", "0d60497f13f6"), ("padded", "6b47c27bffe5")])
def test_assignment_is_the_same_on_every_version(packing, start):
    """Sums of floats differ between Python 3.11 and 3.12; an assignment must not."""
    lengths = np.random.RandomState(3).randint(1, 1024, 256)
    assert assign_batch(lengths, buckets=POOL, packing=packing).digest().startswith(start)


def test_quadratic_cost_gives_the_long_sequence_company_of_none():
    """By tokens 1000 = 10 * 100; by attention it is ten times the work, which the assignment must see."""
    pool = (BucketSpec(bound_tokens=1000, num_replicas=2),)
    cost = MicroBatchCost(a_s_per_token2=1.0, b_s_per_token=0.0, c_s=0.0)
    (bucket,) = assign_batch([1000] + [100] * 40, buckets=pool, cost=cost).buckets
    assert sorted(sum(len(m.samples) for m in replica) for replica in bucket.replicas) == [1, 40]
    linear = MicroBatchCost(a_s_per_token2=0.0, b_s_per_token=1.0, c_s=0.0)
    (bucket,) = assign_batch([1000] + [100] * 40, buckets=pool, cost=linear).buckets
    assert [sum(m.num_tokens for m in replica) for replica in bucket.replicas] == [2500, 2500]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_pipelines_are_filled_where_the_bucket_has_enough(packing):
    pool = (BucketSpec(bound_tokens=1024, num_replicas=2, num_stages=4),)
    cost = MicroBatchCost(a_s_per_token2=0.0, b_s_per_token=1e-5, c_s=1e-4)
    (bucket,) = assign_batch([100] * 16, buckets=pool, packing=packing, cost=cost).buckets
    assert [len(replica) for replica in bucket.replicas] == [8, 8]
    dear = MicroBatchCost(a_s_per_token2=0.0, b_s_per_token=1e-5, c_s=1.0)
    (bucket,) = assign_batch([100] * 16, buckets=pool, packing=packing, cost=dear).buckets
    assert [len(replica) for replica in bucket.replicas] == [1, 1]


def test_stated_costs_are_those_of_the_micro_batches():
    cost = MicroBatchCost(a_s_per_token2=1e-6, b_s_per_token=1e-5, c_s=1e-3)
    lengths = [100, 200, 50, 256, 128, 65, 70]
    for bucket in assign_batch(lengths, buckets=POOL, cost=cost).buckets:
        for replica, stated_s in zip(bucket.replicas, bucket.replica_costs_s, strict=True):
            times = [cost.packed_s([lengths[i] for i in m.samples]) for m in replica]
            assert stated_s == pytest.approx(pipeline_s(times, POOL[bucket.bucket].num_stages))


def test_costs_may_differ_by_bucket():
    lengths = [60, 30, 30, 200, 100, 100]
    separate = assign_batch(lengths, buckets=POOL, cost=[MicroBatchCost(b_s_per_token=k) for k in (1e-5, 2e-5, 3e-5)])
    assert separate.num_sequences == 6
    with pytest.raises(ValueError, match="2 costs for 3 buckets"):
        assign_batch(lengths, buckets=POOL, cost=[MicroBatchCost()] * 2)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="sample 1: 1025 tokens are over the last bound, 1024"):
        assign_batch([5, 1025, 3000], buckets=POOL)
    with pytest.raises(ValueError, match="sample 1: has no tokens"):
        assign_batch([5, 0], buckets=POOL)
    with pytest.raises(ValueError, match="in ascending order"):
        assign_batch([5], buckets=POOL[::-1])
    with pytest.raises(ValueError, match="in ascending order"):
        assign_batch([5], buckets=[])
    with pytest.raises(ValueError, match="packed or padded"):
        assign_batch([5], buckets=POOL, packing="ragged")
    with pytest.raises(ValueError, match="cannot hold its longest sequence"):
        BucketSpec(bound_tokens=64, num_replicas=1, micro_batch_tokens=63)
    with pytest.raises(ValueError, match="num_replicas 0"):
        BucketSpec(bound_tokens=64, num_replicas=0)
    with pytest.raises(ValueError, match="negative"):
        MicroBatchCost(c_s=-1.0)
