"""Forward passes only: the same loss, nothing added to any gradient, nothing left in the slabs."""

import pytest
import torch

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch


def evaluate_between_steps(case):
    """(losses evaluated, losses trained on the same batches and parameters, what was left behind)."""
    trainer = build_trainer(case)
    evaluated, trained, left = [], [], []
    for step in range(len(case.lengths)):
        batch = make_batch(case, step)
        before = {name: p.main_grad.clone() for name, p in trainer.home.parameters.items()}
        trainer.schedule(data_iterator=iter([batch]), forward_only=True)
        evaluated.append(trainer.schedule.last_result.loss)
        left += [name for name, p in trainer.home.parameters.items() if not torch.equal(before[name], p.main_grad)]
        left += ["slab"] * (trainer.loop.switcher.slab_bytes != 0)
        trained.append(trainer.train_step(batch).batch.loss)
    return evaluated, trained, left


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("pool", "overlap"), [("tp1:32 tp2:64 tp2pp2:128", "both"), ("pp4:32 tp1rc:64 tp4nosp:128", "none")]
)
def test_evaluation_changes_nothing(workers, pool, overlap):
    case = VerifyCase(pool=pool, overlap=overlap, lengths=((7, 40, 1, 100, 120), (33, 5), (128,)))
    for evaluated, trained, left in workers.run(evaluate_between_steps, case=case):
        assert evaluated == trained
        assert not left
