"""Batches divided by their own lengths: exact, prepared a step ahead, and every sequence where it fits."""

import dataclasses

import numpy as np
import pytest

from hotspa_plugin.cost import MicroBatchCost
from hotspa_plugin.data import BucketSpec, assign_batch
from hotspa_plugin.integrations.megatron.verify_worker import make_batch
from hotspa_plugin.search import BatchAssigner, StrategyOption
from hotspa_plugin.strategy import StrategyPool

from .checks import check, mostly_slow

POOL = "tp1:32 tp2pp2:128 tp4:256"
LENGTHS = ((7, 100, 1, 64, 250, 33, 30, 31, 12, 13), (5, 90), (256, 3, 200, 128))


def options_of(pool):
    """Shorter strategies are faster and hold more than their bounds; switches cost about a short sequence."""
    entries = StrategyPool.parse(pool).check(world_size=4).entries
    return tuple(
        StrategyOption(
            spec=BucketSpec(
                bound_tokens=entry.bound_tokens,
                num_replicas=entry.strategy.dp,
                num_stages=entry.strategy.pp,
                length_multiple=entry.strategy.tp,
                micro_batch_tokens=256 if number else 130,
            ),
            cost=MicroBatchCost(a_s_per_token2=1e-8, b_s_per_token=1e-5 * (1 + number), c_s=1e-4),
            transition_s=2e-4 * (2 - number),
        )
        for number, entry in enumerate(entries)
    )


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_cases_below_differ_from_the_bounds(packing):
    options = options_of(POOL)
    assigner = BatchAssigner(options, packing=packing)
    promoted = 0
    for lengths in LENGTHS:
        own = assigner.assign(lengths)
        fixed = assign_batch(lengths, buckets=[o.spec for o in options], packing=packing)
        assert own.num_sequences == len(lengths)
        promoted += own.digest() != fixed.digest()
        for bucket in own.buckets:
            longest = max(lengths[s] for m in bucket.micro_batches for s in m.samples)
            assert longest <= options[bucket.bucket].spec.capacity_tokens
    assert promoted >= 2


@pytest.mark.ranks(4)
@pytest.mark.parametrize("packing", mostly_slow("packed", "padded"))
@pytest.mark.parametrize("home", mostly_slow("tp4", "tp1"))
def test_gradients_are_exact(workers, packing, home):
    report = check(workers, POOL, home=home, lengths=LENGTHS, packing=packing, options=options_of(POOL))
    assert report["target_tokens"] == sum(np.subtract(sum(LENGTHS, ()), 1))


def train_apart(case):
    """Ranks whose figures differ: what each of them raised."""
    import torch.distributed as dist

    from hotspa_plugin.integrations.megatron.verify_worker import build_trainer

    trainer = build_trainer(case)
    if dist.get_rank() == 1:
        fast = dataclasses.replace(case.options[1], cost=MicroBatchCost(a_s_per_token2=0, b_s_per_token=1e-9, c_s=0))
        trainer.loop.assigner = BatchAssigner([case.options[0], fast])
    try:
        trainer.accumulate(make_batch(case, 0))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.ranks(4)
def test_ranks_that_assign_differently_are_stopped(workers):
    from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase

    options = options_of("tp1:128 tp2:256")
    case = VerifyCase(pool="tp1:128 tp2:256", lengths=((7, 100, 250, 250, 30),), options=options)
    for said in workers.run(train_apart, case=case):
        assert "ranks disagree about the assignment of step 0: rank(s) [1] differ from rank 0" in said
