"""Silent damage, done on purpose on one rank: the checks name the tensor; without damage they find nothing."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch
from hotspa_plugin.runtime.damage_checks import SilentDamage

from .checks import NARROW, mostly_slow

CASE = VerifyCase(
    pool="tp1:32 tp2:64 tp2nosp:96 pp2:128", lengths=((5, 40, 70, 100, 17), (3, 9, 60, 80, 127)),
    model="tiny-gpt", model_changes={**NARROW, "qk_layernorm": True},
)  # fmt: skip


def train_checked(case, damage):
    """Two checked steps; returns the error of the step that the damage is done in."""
    trainer = build_trainer(case)
    trainer.schedule.is_checked = True
    trainer.train_step(make_batch(case, 0))
    trainer.schedule.check_copies("step 0, after the optimizer")
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == dist.get_world_size() - 1 and damage is not None:
            DAMAGES[damage](patch, trainer)
        try:
            trainer.train_step(make_batch(case, 1))
            trainer.schedule.check_copies("step 1, after the optimizer")
        except SilentDamage as error:
            return str(error)


def _after(patch, switcher, name, label, harm):
    """Does ``harm`` after the inner switcher has done ``name`` for ``label``."""
    original = getattr(switcher, name)

    def harmed(asked):
        result = original(asked)
        if asked == label:
            with torch.no_grad():
                harm()
        return result

    patch.setattr(switcher, name, harmed)


def _parameter(trainer, label, name):
    modules = next(runner.modules for runner in trainer.loop.runners if runner.label == label)
    return modules.parameters[f"0.{name}"]


def flip_a_bit_after_a_switch(patch, trainer):
    """In the lowest place: no norm or loss would show it."""
    data = _parameter(trainer, "tp2", "decoder.layers.0.mlp.linear_fc1.weight").data

    def flip():
        data.view(torch.int32)[0, 0] ^= 1

    _after(patch, trainer.loop.switcher, "enter", "tp2", flip)


def swap_two_elements_after_a_switch(patch, trainer):
    data = _parameter(trainer, "tp1", "decoder.layers.1.mlp.linear_fc2.weight").data

    def swap():
        first = data[0, 0].clone()
        data[0, 0] = data[1, 1]
        data[1, 1] = first

    _after(patch, trainer.loop.switcher, "enter", "tp1", swap)


def change_home_during_a_flush(patch, trainer):
    gradient = trainer.home.parameters["0.decoder.layers.0.self_attention.linear_proj.weight"].main_grad
    _after(patch, trainer.loop.switcher, "flush", "tp2nosp", lambda: gradient[3].mul_(1.5))


def nan_in_a_strategy(patch, trainer):
    parameter = _parameter(trainer, "tp2", "decoder.layers.0.mlp.linear_fc2.weight")

    def spoil():
        parameter.main_grad[0, 0] = float("nan")

    _after(patch, trainer.loop.switcher, "enter", "tp2", spoil)


def change_a_copy_at_home(patch, trainer):
    data = trainer.home.parameters["0.decoder.final_layernorm.weight"].data
    original = trainer.update

    def update():
        result = original()
        data.view(torch.int32)[0] ^= 1
        return result

    patch.setattr(trainer, "update", update)


DAMAGES = {
    damage.__name__: damage
    for damage in (
        flip_a_bit_after_a_switch,
        swap_two_elements_after_a_switch,
        change_home_during_a_flush,
        nan_in_a_strategy,
        change_a_copy_at_home,
    )
}
SAID = {
    "flip_a_bit_after_a_switch": ["step 1, after the switch to tp2: ", "decoder.layers.mlp.linear_fc1.weight"],
    "swap_two_elements_after_a_switch": ["step 1, after the switch to tp1: ", "decoder.layers.mlp.linear_fc2.weight"],
    "change_home_during_a_flush": ["step 1, after the flush from tp2nosp: ", "linear_proj.weight", "did not come home"],
    "nan_in_a_strategy": ["step 1, after the flush from tp2: ", "linear_fc2.weight", "of the strategy is not finite"],
    "change_a_copy_at_home": ["step 1, after the optimizer: copies differ", "final_layernorm.weight (ranks "],
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("damage", mostly_slow(*DAMAGES))
def test_damage_is_found_and_the_tensor_named(workers, damage):
    for told in workers.run(train_checked, case=CASE, damage=damage):
        assert told is not None
        for part in SAID[damage]:
            assert part in told, told


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "changes", mostly_slow({}, {"dtype": "bf16"}, {"frozen": ("embedding", "layers.0.")}, {"home": "tp2nosp"}), ids=str
)
def test_nothing_is_found_where_nothing_is_wrong(workers, changes):
    assert workers.run(train_checked, case=dataclasses.replace(CASE, **changes), damage=None) == [None] * 4
