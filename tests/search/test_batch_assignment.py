import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import assign_batch
from hotspa_plugin.search import BatchAssigner
from tests.search.exact import least_seconds
from tests.search.options import option, skewed_lengths

POOLS = {
    "two": [option("tp1", 4, 4096, 0.1), option("tp4", 4, 32768)],
    "three": [option("tp1", 4, 4096, 0.05), option("tp2pp2", 4, 16384, 0.05), option("tp4", 4, 32768)],
    "pipeline at home": [option("tp2", 4, 8192, 0.3), option("tp2pp2", 4, 32768)],
    "pipeline for short": [option("pp2", 4, 8192, 0.1), option("tp4", 4, 32768)],
}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_within_three_percent_of_the_exact_optimum(pool, seed):
    options = POOLS[pool]
    lengths = skewed_lengths(seed * 17 + len(pool), 4 + 2 * seed)
    assigner = BatchAssigner(options)
    ours = assigner.predicted_s(assigner.assign(lengths))
    best, bound = least_seconds(options, lengths.tolist(), num_slots=3)
    assert bound <= best <= ours * (1 + 1e-6)
    assert ours <= 1.03 * best


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 32768), min_size=1, max_size=80),
    pool=st.sampled_from(sorted(POOLS)),
)
def test_every_sequence_once_and_only_where_it_fits(lengths, pool):
    options = POOLS[pool]
    assigner = BatchAssigner(options)
    assignment = assigner.assign(lengths)
    seen = []
    for bucket in assignment.buckets:
        spec = options[bucket.bucket].spec
        assert len(bucket.replicas) == spec.num_replicas
        for micro_batch in bucket.micro_batches:
            assert sum(lengths[s] for s in micro_batch.samples) <= spec.capacity_tokens
            seen += micro_batch.samples
    assert sorted(seen) == list(range(len(lengths)))
    assert assignment.digest() == BatchAssigner(options).assign(lengths).digest()


@pytest.mark.parametrize("pool", POOLS)
def test_not_slower_than_the_pools_bounds(pool):
    options = POOLS[pool]
    assigner = BatchAssigner(options)
    for seed in range(3):
        lengths = skewed_lengths(seed, 200)
        fixed = assign_batch(lengths, buckets=[o.spec for o in options], cost=[o.cost for o in options])
        assert assigner.predicted_s(assigner.assign(lengths)) <= assigner.predicted_s(fixed) * 1.001


def test_a_dear_switch_is_not_taken():
    options = [option("tp1", 4, 4096, 100.0), option("tp4", 4, 32768)]
    (only,) = BatchAssigner(options).assign(skewed_lengths(0, 50)).buckets
    assert only.bucket == 1


def test_a_free_switch_is_taken():
    options = [option("tp1", 4, 4096, 0.0), option("tp4", 4, 32768)]
    lengths = np.concatenate([np.full(64, 1024), [30000]])
    buckets = BatchAssigner(options).assign(lengths).buckets
    assert [bucket.bucket for bucket in buckets] == [0, 1]
    assert buckets[0].num_sequences > 32


def test_a_shorter_strategy_may_hold_more_than_its_bound():
    # home's bucket is empty when the switch is free and the other strategy holds all
    options = [option("tp1", 4, 4096, 0.0), option("tp4", 4, 32768)]
    buckets = BatchAssigner(options).assign(np.full(64, 4000)).buckets
    assert buckets[0].bucket == 0 and buckets[0].num_sequences >= 48


def test_what_no_strategy_holds_is_named():
    assigner = BatchAssigner(POOLS["two"])
    with pytest.raises(ValueError, match="sample 1: 40000 tokens are over the pool's last bound, 32768"):
        assigner.assign([5, 40000])
    with pytest.raises(ValueError, match="sample 0: has no tokens"):
        assigner.assign([0, 5])
    assert assigner.assign([]).buckets == ()
    with pytest.raises(ValueError, match="at least one"):
        BatchAssigner([])


def test_bubbles_and_uneven_replicas_cost_nothing_where_cores_are_shared():
    lengths = [3000] * 5
    alone, shared = (option("tp2pp2", 8, 4096, ranks_per_core=n) for n in (1.0, 2.0))  # two replicas
    (bucket,) = BatchAssigner([alone]).assign(lengths).buckets
    micro_batches_s = [[alone.cost.packed_s([lengths[s] for s in m.samples]) for m in r] for r in bucket.replicas]
    slowest_s = max(sum(times) + max(times) for times in micro_batches_s)
    work_s = sum(map(sum, micro_batches_s)) / 2
    assert alone.bucket_s(bucket) == pytest.approx(slowest_s)
    assert slowest_s / 2 < work_s < slowest_s
    assert shared.bucket_s(bucket) == pytest.approx(work_s)
    # One sequence keeps one replica busy, at the pace of cores that nothing else uses.
    (bucket,) = BatchAssigner([shared]).assign([4000]).buckets
    assert shared.bucket_s(bucket) == pytest.approx(2 * shared.cost.packed_s([4000]) / 2)
