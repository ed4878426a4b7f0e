"""What must not grow: process groups, memory and open files, over many switches and many strategies."""

import gc
import os
import weakref

import pytest

from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch

from . import long_run
from .checks import NARROW, mostly_slow


def count_open_files():
    return len(os.listdir("/proc/self/fd"))


def finish(switcher):
    for label in switcher.flushing:
        switcher.finish_flush(label)
    switcher.release()


def switch_often(case, num_switches, warm_up):
    """After warm-up and at the end: process groups, open files, resident memory in bytes; and memory of one model."""
    from hotspa_plugin.process_groups.registry import num_live_groups
    from hotspa_plugin.runtime.memory import resident_bytes

    trainer = build_trainer(case)
    switcher = trainer.loop.switcher
    labels = [runner.label for runner in trainer.loop.runners if runner.label != trainer.home.label]
    trainer.accumulate(make_batch(case, 0))
    model_bytes = sum(p.numel() * p.element_size() for p in trainer.home.parameters.values())
    figures = []
    for count in range(warm_up + num_switches):
        if count in (warm_up, warm_up + num_switches // 2):
            figures.append((num_live_groups(), count_open_files(), resident_bytes()))
        label = labels[count % len(labels)]
        if (busy := switcher.flush_in_the_way(label)) is not None:
            switcher.finish_flush(busy)
        switcher.enter(label)
        switcher.prefetch(labels[(count + 1) % len(labels)])
        switcher.start_flush(label)
        if count % 3 == 2:
            finish(switcher)
    finish(switcher)
    figures.append((num_live_groups(), count_open_files(), resident_bytes()))
    return figures, model_bytes


@pytest.mark.ranks(4)
@pytest.mark.parametrize("budget", mostly_slow(None, 100_000), ids=["at_once", "rounds"])
@pytest.mark.parametrize("overlap", mostly_slow("both", "none"))
def test_a_thousand_switches(workers, budget, overlap):
    case = VerifyCase(pool="tp1:32 tp2:64 pp2:96 tp2pp2:128", lengths=((5, 40, 70, 100),),
                      model_changes={"num_layers": 2, "hidden_size": 64}, switch_memory_bytes=budget,
                      overlap=overlap)  # fmt: skip
    for figures, model_bytes in workers.run(switch_often, case=case, num_switches=1000, warm_up=100):
        groups, files, resident = zip(*figures, strict=True)
        assert len(set(groups)) == 1
        assert len(set(files)) == 1
        # A leak of one tensor in each switch would be hundreds of models.
        assert max(resident) - resident[0] < max(8 * model_bytes, 8 << 20)


def build_often(case, num_rounds):
    """Per round: process groups, and how many of the trainers so far are still there; resident memory."""
    from hotspa_plugin.process_groups.registry import num_live_groups
    from hotspa_plugin.runtime.memory import resident_bytes

    figures, built = [], []
    for round_ in range(num_rounds):
        trainer = build_trainer(case)
        if round_ % 10 == 0:
            trainer.train_step(make_batch(case, 0))
        built.append(weakref.ref(trainer.loop.switcher))
        del trainer
        if round_ % 10 == 9:
            gc.collect()
            alive = sum(reference() is not None for reference in built)
            figures.append((num_live_groups(), alive, count_open_files(), resident_bytes()))
    return figures


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_a_hundred_rounds_of_building_and_dropping_strategies(workers):
    case = VerifyCase(
        pool="tp1:32 tp2:64 tp2pp2:128", lengths=((5, 40, 100),), model_changes={**NARROW, "num_layers": 2}
    )
    for figures in workers.run(build_often, case=case, num_rounds=100):
        groups, alive, files, resident = zip(*figures, strict=True)
        assert len(set(groups)) == 1, groups
        assert set(alive) == {0}, alive
        assert len(set(files)) == 1, files
        assert max(resident[1:]) - resident[1] < 16 << 20, resident


@pytest.mark.slow
@pytest.mark.gloo
def test_two_thousand_steps(tmp_path):
    samples, sizes = long_run.run(tmp_path, 2000, 2)
    long_run.check(samples, sizes, 2000)
