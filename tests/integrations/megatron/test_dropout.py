"""Dropout: repeatable to the bit, the same where ranks compute the same, different everywhere else."""

import hashlib

import pytest
import torch

from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch

from .checks import mostly_slow

# Under dp 2 one replica gets more micro-batches than the other, in every bucket.
LENGTHS = ((30, 31, 32, 60, 61, 62, 120, 121, 122), (25, 100))


def settings(pool, **changes):
    model = {"dropout": 0.1, **changes.pop("model_changes", {})}
    return VerifyCase(**{"pool": pool, "model": "tiny-gpt", "lengths": LENGTHS, "model_changes": model, **changes})


def train(case):
    """(losses, final parameters on rank 0, whether copies agree) of one run."""
    trainer = build_trainer(case)
    losses = [trainer.train_step(make_batch(case, step)).batch.loss for step in range(len(case.lengths))]
    final, differing = trainer.gather_parameters()
    return losses, final, differing


def same_bits(left, right):
    return all(torch.equal(left[name], right[name]) for name in left | right)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "pool", mostly_slow("pp2:32 tp2nosp:64 tp2:128", "tp1:32 tp2:64 tp2pp2:128", "tp1rc:32 tp2rcs:64 tp2nosprc:128")
)
def test_two_runs_are_identical(workers, pool):
    first = workers.run(train, case=settings(pool))[0]
    second = workers.run(train, case=settings(pool))[0]
    assert first[0] == second[0]
    assert same_bits(first[1], second[1])
    assert first[2] == []
    other = workers.run(train, case=settings(pool, seed=4321))[0]
    assert other[0] != first[0]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pool", mostly_slow("pp2{}:64 tp2nosp{}:128", "tp1{}:64 tp2{}:128", "tp2{}:64 pp4{}:128"))
@pytest.mark.parametrize("recompute", mostly_slow("rc", "rcs"))
def test_recomputation_draws_the_same_masks(workers, pool, recompute):
    """The second forward pass repeats the first, so that nothing changes, to the bit."""
    plain = workers.run(train, case=settings(pool.format("", "")))[0]
    recomputed = workers.run(train, case=settings(pool.format(recompute, recompute)))[0]
    assert plain[0] == recomputed[0]
    assert same_bits(plain[1], recomputed[1])


def draw_masks(case):
    """This rank's place under the last strategy, and what it drew there: hidden and attention masks per micro-batch."""
    prepare_process()
    hidden, attention = [], []
    dropout, attend = torch.nn.functional.dropout, torch.nn.functional.scaled_dot_product_attention

    def recording_dropout(input, p=0.5, training=True, inplace=False):
        if p and training:
            # A mask over ones, from the state that the true call starts from.
            state = torch.get_rng_state()
            hidden.append(_digest(dropout(torch.ones(64), p) == 0))
            torch.set_rng_state(state)
        return dropout(input, p, training, inplace)

    def recording_attention(*args, **kwargs):
        if kwargs.get("dropout_p"):
            attention.append(_digest(torch.get_rng_state()))
        return attend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", recording_dropout)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording_attention)
        trainer = build_trainer(case)
        drawn = []
        for step in range(len(case.lengths)):
            hidden.clear(), attention.clear()
            trainer.accumulate(make_batch(case, step))
            drawn.append((tuple(hidden), tuple(attention)))
    return trainer.home.coordinate, drawn


def _digest(tensor):
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", ["tp2", "tp2nosp", "tp4nosp", "tp2pp2nosp", "tp2pp2", "tp1", "pp2"])
def test_who_draws_the_same_masks(workers, strategy):
    # Two steps; one micro-batch for each replica, and one more for the first ones.
    case = settings(f"{strategy}:64", lengths=((60, 61, 62, 63, 59), (60, 61, 62, 63, 59)), packing="padded")
    ranks = workers.run(draw_masks, case=case)
    with_sp = strategy in ("tp2", "tp2pp2")
    assert all(hidden and attention for _, drawn in ranks for hidden, attention in drawn)
    for index, (place, drawn) in enumerate(ranks):
        for hidden, attention in drawn:
            # Within a rank no two layers or micro-batches share a mask.
            assert len(set(hidden)) == len(hidden) and len(set(attention)) == len(attention)
        assert not set(drawn[0][0]) & set(drawn[1][0]), "two steps drew the same"
        for other_place, other in ranks[:index]:
            for (hidden, attention), (other_hidden, other_attention) in zip(drawn, other, strict=True):
                peers = (place.dp, place.pp) == (other_place.dp, other_place.pp)
                assert not set(attention) & set(other_attention), "heads of two ranks drew the same"
                if peers and not with_sp:
                    assert hidden == other_hidden, "tensor-parallel peers hold the same tokens but drew apart"
                else:
                    assert not set(hidden) & set(other_hidden), "ranks with different tokens drew the same"


@pytest.mark.ranks(4)
def test_dropout_is_on(workers):
    """Otherwise the tests above would say nothing."""
    with_dropout = workers.run(train, case=settings("tp1:32 tp2:128"))[0]
    without = workers.run(train, case=settings("tp1:32 tp2:128", model_changes={"dropout": 0.0}))[0]
    assert with_dropout[0] != without[0]
