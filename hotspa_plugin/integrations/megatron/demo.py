"""``hotspa demo``: hot switching on real text, then the same batches under static strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from hotspa_plugin.config import TrainingConfig
from hotspa_plugin.integrations.megatron import training_plan, training_run
from hotspa_plugin.integrations.megatron.plan_summary import plan_summary
from hotspa_plugin.integrations.megatron.training_run import TrainerBuilder
from hotspa_plugin.report.console import print_comparison, print_run
from hotspa_plugin.report.reader import read_run
from hotspa_plugin.runtime.recorder import check_run_directory
from hotspa_plugin.runtime.run_record import COMPARISON_FILE, ComparedRun, Comparison, StepRecord, write_json
from hotspa_plugin.runtime.worker_pool import WorkerPool

_INITIAL_FILE = "initial-parameters.pt"
_WARM_UP_STEPS = 1  # allocators and connections settle in the first step: it is trained, but not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticChoice:
    """One static strategy, and why it is left out where it is."""

    strategy: str
    left_out: str | None = None


def choose_static(plan: training_plan.TrainingPlan, *, include_all: bool = False) -> list[StaticChoice]:
    """The pool's strategies that hold the longest sequence by their own bound; all of them with ``include_all``."""
    longest = int(plan.source.lengths.max())
    return [
        StaticChoice(
            strategy=str(entry.strategy),
            left_out=None
            if include_all or entry.bound_tokens >= longest
            else f"the pool bounds it at {entry.bound_tokens:,} tokens, the longest sequence has {longest:,}",
        )
        for entry in plan.pool.entries
    ]


def run_demo(
    config: TrainingConfig,
    *,
    num_ranks: int,
    include_all_static: bool = False,
    command: str = "",
    on_ranks: str = __name__,
) -> Comparison:
    """Trains ``config`` hot, then static; prints tables; leaves records and ``comparison.json`` in ``run.out``.

    ``on_ranks`` names the module whose ``run_hot`` and ``run_static`` the ranks call.
    Raises ValueError for what does not fit, before any process is started.
    """
    out = check_run_directory(config.run.out)
    config = config.model_copy(update={"run": config.run.model_copy(update={"save_every": 0})})  # is never resumed
    plan = training_plan.plan_training(config, num_ranks=num_ranks, command=command)
    print("\n".join(plan_summary(plan, num_ranks=num_ranks)))
    choices = choose_static(plan, include_all=include_all_static)
    with WorkerPool(
        num_ranks,
        device=config.run.device,
        collective_timeout_s=config.run.timeout_s,
        call_timeout_s=None,  # a run takes as long as it takes
    ) as workers:
        hot = workers.run(f"{on_ranks}:run_hot", config=config, command=command)[0]
        print_run(read_run(out))
        runs = [_compared("hot", "hot", hot)]
        for choice in choices:
            if choice.left_out:
                print(f"static {choice.strategy} is left out: {choice.left_out}")
                continue
            static = workers.run(
                f"{on_ranks}:run_static", config=static_config(config, plan, choice.strategy), hot_out=config.run.out
            )[0]
            runs.append(_compared(choice.strategy, "static", static))
    (out / _INITIAL_FILE).unlink(missing_ok=True)
    timed = hot[_WARM_UP_STEPS:] or hot
    comparison = Comparison(runs=tuple(runs), num_steps=len(timed), num_tokens=sum(record.tokens for record in timed))
    write_json(out / COMPARISON_FILE, comparison)
    print_comparison(comparison)
    return comparison


def static_config(config: TrainingConfig, plan: training_plan.TrainingPlan, strategy: str) -> TrainingConfig:
    """``config`` with ``strategy`` for every length, recorded beside the hot run."""
    run = config.run.model_copy(update={"out": str(Path(config.run.out) / f"static-{strategy}")})
    pool = f"{strategy}:{plan.pool.bounds_tokens[-1]}"
    return config.model_copy(update={"pool": pool, "home": None, "run": run})


def run_hot(
    config: TrainingConfig, command: str, build: TrainerBuilder = training_run.build_trainer
) -> list[StepRecord]:
    """On each rank: the hot run, its first parameters left for the static ones."""
    return training_run.train_rank(
        torch.distributed.get_rank(), torch.distributed.get_world_size(), config, command,
        description="hot switching", tells=False, save_initial=Path(config.run.out) / _INITIAL_FILE, build=build,
        keeps_records=True,
    )  # fmt: skip


def run_static(
    config: TrainingConfig, hot_out: str, build: TrainerBuilder = training_run.build_trainer
) -> list[StepRecord]:
    """On each rank: the same batches from the same parameters under one strategy."""
    return training_run.train_rank(
        torch.distributed.get_rank(), torch.distributed.get_world_size(), config,
        description=f"static {config.pool.partition(':')[0]}", tells=False,
        load_initial=Path(hot_out) / _INITIAL_FILE, build=build,
        keeps_records=True,
    )  # fmt: skip


def _compared(label: str, kind: str, records: Sequence[StepRecord]) -> ComparedRun:
    timed = records[_WARM_UP_STEPS:] or records
    return ComparedRun(
        label=label,
        kind=kind,
        tokens_per_s=sum(record.tokens for record in timed) / sum(record.seconds.total for record in timed),
        step_s=tuple(record.seconds.total for record in timed),
        loss=records[-1].loss,
        losses=tuple(record.loss for record in records),
        peak_memory_bytes=max(record.peak_memory_bytes or 0 for record in records),
    )
