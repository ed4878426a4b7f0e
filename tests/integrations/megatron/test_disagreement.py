"""A rank that was started with something else is noticed before anything is sent, and the difference is named."""

import dataclasses
import pathlib

import pytest
import torch.distributed as dist

from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, build_trainer, make_batch

from .checks import NARROW

CASE = VerifyCase(pool="tp1:32 tp2:64 pp2:128", lengths=((5, 40, 100, 17), (3, 9)), model_changes=NARROW)
ODD_RANK = 2


def build_unlike(case, changes):
    """Builds a trainer, on one rank of another case; returns the error."""
    if dist.get_rank() == ODD_RANK:
        case = dataclasses.replace(case, **changes)
    try:
        build_trainer(case)
    except RuntimeError as error:
        return str(error)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pool": "tp1:32 tp2:48 pp2:128"}, ["the pool", '"tp1:32 tp2:48 pp2:128" on rank 2']),
        ({"home": "tp1"}, ["the pool", 'home is "pp2" on ranks 0, 1, 3, "tp1" on rank 2']),
        ({"policy": "fcfs"}, ["how to switch", 'policy is "balanced" on ranks 0, 1, 3, "fcfs" on rank 2']),
        ({"switch_memory_bytes": 10**6}, ["memory_budget_bytes is null on ranks 0, 1, 3, 1000000 on rank 2"]),
        ({"packing": "padded"}, ["how to switch", 'packing is "packed"']),
    ],
    ids=["pool", "home", "policy", "memory", "packing"],
)
def test_another_pool_or_way_of_switching(workers, changes, said):
    for told in workers.run(build_unlike, case=CASE, changes=changes):
        assert told.startswith("ranks disagree about"), told
        for part in said:
            assert part in told, told


def plan_unlike(case):
    """One rank's plans lack a piece, as if it had planned by other rules."""
    from hotspa_plugin.runtime import hot_switcher

    prepare_process()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == ODD_RANK:
            original = hot_switcher.build_switch_plan

            def build(home, other, **options):
                plan = original(home, other, **options)
                return dataclasses.replace(plan, routes=plan.routes.select(plan.routes.start != 0))

            patch.setattr(hot_switcher, "build_switch_plan", build)
        try:
            build_trainer(case)
        except RuntimeError as error:
            return str(error)


@pytest.mark.ranks(4)
def test_another_plan(workers):
    for told in workers.run(plan_unlike, case=CASE):
        assert "ranks disagree about" in told and "switch to tp1" in told, told


def train_unlike(case):
    """One rank's batch has the same lengths in another order, or another length."""
    trainer, told = build_trainer(case), []
    for lengths in ((100, 40, 5, 17), (5, 40, 100, 18)):
        odd = dataclasses.replace(case, lengths=(lengths,)) if dist.get_rank() == ODD_RANK else case
        try:
            trainer.accumulate(make_batch(odd, 0))
        except RuntimeError as error:
            told.append(str(error))
    return told


@pytest.mark.ranks(4)
def test_another_batch(workers):
    for told in workers.run(train_unlike, case=CASE):
        assert len(told) == 2
        assert all("ranks disagree about the assignment of step 0: rank(s) [2]" in one for one in told), told


def config_of(folder, **changes):
    from hotspa_plugin.config import read_config

    text = f"""
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 32}}
pool: tp1:32 tp2:64
data: {{source: folder, path: {folder}, global_batch_sequences: 4, overlong: truncate}}
run: {{steps: 1, out: {folder}/out{dist.get_rank()}, save_every: 0}}
"""
    path = pathlib.Path(folder) / f"rank{dist.get_rank()}.yaml"
    path.write_text(text)
    return read_config(path, changes)


def start_unlike(folder, what):
    """``hotspa train`` on every rank, of which one has another configuration, data, data order or package version."""
    from hotspa_plugin.integrations.megatron import train_loop, training_run

    odd = dist.get_rank() == ODD_RANK
    config = config_of(folder, **({"optimizer.lr": 0.5} if odd and what == "configuration" else {}))
    with pytest.MonkeyPatch.context() as patch:
        if odd and what == "versions":
            versions = training_run.installed_versions() | {"megatron-core": "0.0.1"}
            patch.setattr(training_run, "installed_versions", lambda: versions)
        if odd and what == "data":
            config = config_of(folder + "/other")
        if what == "order":
            prepare_process()
            if odd:
                original = train_loop.SequenceBatch

                def reversed_batch(*, step, source, indices):
                    return original(step=step, source=source, indices=indices[::-1])

                patch.setattr(train_loop, "SequenceBatch", reversed_batch)
        try:
            training_run.train_rank(dist.get_rank(), dist.get_world_size(), config)
        except RuntimeError as error:
            return str(error)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("configuration", "the configuration: rank(s) [2] differ from rank 0: optimizer.lr is 0.0003 on ranks 0, 1, 3"),
        ("versions", '"0.0.1" on rank 2'),
        ("data", "the data: rank(s) [2] differ from rank 0: content is"),
        ("order", "the sequences of step 0: rank(s) [2] differ from rank 0: first sequences is"),
    ],
)
def test_another_start(workers, tmp_path, what, said):
    (tmp_path / "data" / "other").mkdir(parents=True)
    folder = tmp_path / "data"
    for index in range(8):
        (folder / f"{index}.txt").write_text("same length" * (1 + index % 2))
        (folder / "other" / f"{index}.txt").write_text("more or less"[:11] * (1 + index % 2))
    for told in workers.run(start_unlike, folder=str(folder), what=what):
        assert told is not None and told.startswith("ranks disagree about"), told
        assert said in told, told
        assert told.endswith("Start all ranks with the same configuration, data and package versions")
