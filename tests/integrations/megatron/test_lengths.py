"""Batches as they come: few sequences, none in a bucket, single tokens, lengths that vary."""

import pytest

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, make_spec

from .checks import NARROW, check, mostly_slow

PACKINGS = pytest.mark.parametrize("packing", mostly_slow("packed", "padded"))
OPTIMIZERS = pytest.mark.parametrize("distributed_optimizer", mostly_slow(True, False), ids=["distributed", "adam"])


@pytest.mark.ranks(4)
@OPTIMIZERS
@pytest.mark.parametrize("pool", mostly_slow("tp2:64 tp1:128", "tp1:64 tp2:128", "tp1:64 pp4:128"))
def test_all_targets_on_one_replica(workers, pool, distributed_optimizer):
    """Valid targets 1, 0, 0, 0 on four replicas, and the other way round: divided once, by the global count."""
    lengths = ((2, 1, 1, 1), (1, 1, 1, 2), (1, 3), (100, 1, 1, 1))
    report = check(workers, pool, lengths=lengths, distributed_optimizer=distributed_optimizer)
    assert report["target_tokens"] == 1 + 1 + 2 + 99


@pytest.mark.ranks(4)
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_targets_are_counted_over_the_whole_batch(workers, packing):
    report = check(workers, "tp1:16 tp2:64 tp2pp2:256", lengths=((7, 129, 1, 64),), packing=packing)
    assert report["target_tokens"] == 197
    assert report["sequences_trained"] == 4


@pytest.mark.ranks(4)
@OPTIMIZERS
def test_steps_without_any_target(workers, distributed_optimizer):
    report = check(
        workers, "tp1:16 tp2:64", lengths=((1, 1, 1), (1,), (9, 40)), distributed_optimizer=distributed_optimizer
    )
    assert report["target_tokens"] == 8 + 39


@pytest.mark.ranks(4)
@pytest.mark.parametrize("home", mostly_slow("tp2", "tp1"))
@PACKINGS
def test_fewer_sequences_than_replicas(workers, home, packing):
    lengths = ((5, 6, 7), (3,), (70, 80, 11), (16, 100))
    check(workers, "tp1:64 tp2:128", home=home, lengths=lengths, packing=packing, distributed_optimizer=True)


@pytest.mark.slow
@pytest.mark.ranks(8)
def test_3_sequences_on_8_replicas(workers):
    check(workers, "tp1:64 tp2pp2:128 tp1rc:256", lengths=((5, 6, 7), (3, 200, 100), (130, 140, 9)))


@pytest.mark.ranks(4)
@OPTIMIZERS
@pytest.mark.parametrize("home", mostly_slow("tp2", "tp1", "tp4"))
def test_empty_buckets(workers, home, distributed_optimizer):
    """Every bucket is empty in some step, home's included, and alone in another."""
    lengths = ((5,), (20,), (40,), (5, 20), (20, 40), (5, 40))
    check(workers, "tp1:16 tp2:32 tp4:64", home=home, lengths=lengths, distributed_optimizer=distributed_optimizer)


@pytest.mark.ranks(4)
@PACKINGS
@pytest.mark.parametrize("pool", mostly_slow("tp2pp2:64 tp4:128", "tp4:64 tp1:128", "tp2:64 tp4:128"))
def test_lengths_that_sequence_parallelism_does_not_divide(workers, pool, packing):
    """Padded up to a multiple of tp with the true length kept: no target more or less."""
    report = check(workers, pool, lengths=((7,), (1, 2, 3, 5), (65, 127, 3)), packing=packing)
    assert report["target_tokens"] == 6 + (0 + 1 + 2 + 4) + (64 + 126 + 2)


@pytest.mark.ranks(4)
@PACKINGS
@pytest.mark.parametrize("home", mostly_slow("pp4", "tp1"))
def test_lengths_that_vary_through_a_pipeline(workers, home, packing):
    """More micro-batches than stages, no two of one shape."""
    lengths = ((33, 64, 40, 47, 52, 61, 35, 34), (100, 70, 110, 64, 128, 2))
    check(workers, "pp4:64 tp1:128", home=home, lengths=lengths, packing=packing)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("lengths", [(12,), (3, 20, 7), (30, 31, 32, 2, 9)])
def test_a_tiny_model_at_its_bounds(workers, lengths):
    """Lengths equal to a bound belong to its bucket."""
    check(workers, "tp1:12 tp2:20 tp4:32", lengths=(lengths,), model_changes=NARROW)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pool", mostly_slow("tp2pp2:16 tp4nosp:32", "tp4:16 pp4:32"))
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt"])
def test_documents_that_share_a_row(workers, pool, model):
    """With one replica both are packed together, and are trained as if each were alone."""
    check(workers, pool, model=model, lengths=((3, 5), (5, 3), (1, 4, 1, 8), (17, 8, 7)))


@pytest.mark.parametrize("strategy", ["tp2cp2", "tp2cp8"])
def test_context_parallelism_is_refused_before_anything_starts(strategy):
    with pytest.raises(ValueError, match=r"context parallelism \(cp\d\) is not supported yet; leave cp out"):
        make_spec(VerifyCase(pool=f"tp1:16 {strategy}:128"), 16)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("packing", mostly_slow("padded", "packed"))
def test_a_few_tokens_under_strategies_that_split_sequences(workers, packing):
    """Down to fewer tokens than tensor-parallel ranks: padded to the multiple, nothing crashes, nothing is lost."""
    few = (2, 3, 4, 5, 7, 11, 16)
    check(workers, "tp4:8 tp2pp2:16 tp2:64", packing=packing, lengths=(few, (1,), (2, 2, 2, 2, 2)))
