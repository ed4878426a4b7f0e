"""Parameters that are not trained: never flushed, never changed, and no gradient of others is lost."""

import pytest
import torch
import torch.distributed as dist

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch

from .checks import check, mostly_slow

LENGTHS = ((7, 40, 1, 64, 100), (5, 33))
FIRST = ("embedding.", "decoder.layers.0.")


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("pool", "home"),
    [
        ("tp1:32 tp2pp2:128", None),
        ("pp4:32 tp2:128", "pp4"),  # a stage with nothing to train
        ("pp4:32 tp2:128", "tp2"),
        ("tp1rc:16 pp2rc:32 tp2rc:64 tp2rcs:128", "pp2rc"),  # recomputed layers behind a frozen embedding
    ],
)
@pytest.mark.parametrize("model", mostly_slow("tiny-gpt", "tiny-llama"))
@pytest.mark.parametrize("distributed_optimizer", mostly_slow(True, False), ids=["distributed", "adam"])
def test_frozen_first_layers(workers, pool, home, model, distributed_optimizer):
    check(workers, pool, home=home, model=model, frozen=FIRST, lengths=LENGTHS,
          distributed_optimizer=distributed_optimizer)  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "frozen", mostly_slow(("embedding.",), ("decoder.",), ("norm", "bias"), ("embedding.", "decoder.layers.3."))
)
def test_other_choices(workers, frozen):
    check(workers, "tp1:32 tp2nosp:64 pp2rc:128", model="tiny-gpt", frozen=frozen, lengths=LENGTHS)


def train_frozen(case):
    """(names without gradient after two steps, those changed, those moved by flushes) on rank 0."""
    trainer = build_trainer(case)
    before, _ = trainer.gather_parameters()
    for step in range(len(case.lengths)):
        trainer.train_step(make_batch(case, step))
    after, _ = trainer.gather_parameters()
    gradients, _ = trainer.gather_gradients()
    flushed = set()
    for runner in trainer.loop.runners:
        if runner.label != trainer.home.label:
            flush = trainer.loop.switcher.plans(runner.label)[1]
            flushed |= {flush.source.tensors[tensor].name for hop in flush.hops for tensor in hop.tensor.tolist()}
    if dist.get_rank() == 0:
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        return set(before), set(before) - set(gradients), changed, flushed
    return None


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pool", ["pp4:32 tp2pp2:64 tp1:128", "tp1:32 tp2nosp:64 pp2:128"])
def test_frozen_parameters_have_no_gradient_and_do_not_change(workers, pool):
    case = VerifyCase(pool=pool, model="tiny-gpt", frozen=FIRST, lengths=LENGTHS, lr=1e-2)
    everything, without_gradient, changed, flushed = workers.run(train_frozen, case=case)[0]
    frozen = {name for name in everything if name.startswith("embedding.") or name.endswith("[0]")}
    assert len(frozen) == 2 + 12
    assert without_gradient == frozen
    assert flushed == everything - frozen
    # A key's bias adds the same to every score of a query: its gradient is zero, but the bias of queries is not.
    assert changed == everything - frozen
