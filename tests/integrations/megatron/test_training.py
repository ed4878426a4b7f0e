"""Steps of clipped AdamW under hot switching against the same training in plain torch, in fp64, on one process."""

import math

import pytest
import torch
import torch.distributed as dist

from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch, make_spec

from . import plain_torch
from .checks import mostly_slow

# Adam turns the rounding of elements with hardly any gradient into whole steps: at ten times this rate plain
# torch in fp32 is 7e-5 away from itself in fp64.
LR = 1e-4
LENGTHS = ((7, 40, 1, 64, 100), (5, 33, 90, 12), (30, 31, 120, 2))


def train(case):
    """(initial parameters, losses, gradient norms, learning rates, final parameters) on rank 0."""
    trainer = build_trainer(case)
    initial, _ = trainer.gather_parameters()
    if initial is not None:
        # Norms away from one and biases away from zero, so that they matter, and errors are measured against something.
        generator = torch.Generator().manual_seed(case.seed)
        noise = {n: 0.1 * torch.randn(v.shape, generator=generator) for n, v in initial.items() if v.dim() == 1}
        initial = {n: v + noise.get(n, 0) for n, v in initial.items()}
    sent = [initial]
    dist.broadcast_object_list(sent, src=0)
    trainer.load_parameters(sent[0])
    steps = [trainer.train_step(make_batch(case, step)) for step in range(len(case.lengths))]
    final, differing = trainer.gather_parameters()
    assert not differing, differing
    return (
        initial, [s.batch.loss for s in steps], [s.grad_norm for s in steps], [s.learning_rate for s in steps], final
    )  # fmt: skip


def train_plainly(case, initial, learning_rates):
    prepare_process(on_cpu=True)
    from hotspa_plugin.integrations.megatron.home import OptimizerSettings

    _, spec = make_spec(case, 4)
    settings = OptimizerSettings()
    sizes = plain_torch.PlainSizes.of(spec)
    batches = [make_batch(case, step) for step in range(len(case.lengths))]
    losses, norms, final = plain_torch.train(
        {name: value.double() for name, value in initial.items()},
        sizes,
        [[batch.sample(i) for i in range(len(batch.indices))] for batch in batches],
        learning_rates=learning_rates,
        clip_grad=case.clip_grad,
        weight_decay=settings.weight_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    # The key part of linear_qkv.bias has no gradient without rotary positions: it adds the same to all scores of a
    # query, which softmax does not see. Adam divides rounding noise by its own size, so it moves at random anywhere.
    left_out = {}
    if not sizes.rope:
        left_out = {name: plain_torch.key_bias_rows(sizes) for name in final if "linear_qkv.bias" in name}
    return losses, norms, final, left_out


@pytest.mark.ranks(4)
@pytest.mark.parametrize("clip_grad", mostly_slow(0.3, 1000.0), ids=["clipped", "unclipped"])
@pytest.mark.parametrize("distributed_optimizer", mostly_slow(True, False), ids=["distributed", "adam"])
@pytest.mark.parametrize(
    ("pool", "home", "model"),
    [
        ("tp1:32 tp2:64 tp2pp2:128", None, "tiny-llama"),
        ("tp1:32 tp2:64 tp2pp2:128", "tp1", "tiny-gpt"),
        ("tp1:32 pp2:64 tp4:128", "pp2", "tiny-gpt"),
        ("pp4:64 tp2nosp:128", "tp2nosp", "tiny-llama"),
    ],
)
def test_three_steps_of_clipped_adamw(workers, pool, home, model, distributed_optimizer, clip_grad):
    case = VerifyCase(pool=pool, home=home, model=model, lengths=LENGTHS, lr=LR, clip_grad=clip_grad,
                      distributed_optimizer=distributed_optimizer)  # fmt: skip
    initial, losses, norms, learning_rates, final = workers.run(train, case=case)[0]
    expected = workers.run_reference(train_plainly, case=case, initial=initial, learning_rates=learning_rates)
    expected_losses, expected_norms, expected_final, left_out = expected
    assert (min(expected_norms) > clip_grad) if clip_grad < 1 else (max(expected_norms) < clip_grad)
    # Half a cosine down over 1000 steps.
    assert learning_rates == pytest.approx([LR * 0.5 * (1 + math.cos(math.pi * step / 1000)) for step in range(3)])
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert final.keys() == expected_final.keys()
    worst = {}
    for name, value in expected_final.items():
        kept = ~left_out[name] if name in left_out else torch.ones(value.shape[0], dtype=torch.bool)
        difference = (final[name].double() - value)[kept]
        worst[name] = float(difference.norm() / value[kept].norm())
    name = max(worst, key=worst.get)
    assert worst[name] <= 1e-5, (name, worst[name])
    assert all(not torch.equal(final[name], initial[name]) for name in final)
