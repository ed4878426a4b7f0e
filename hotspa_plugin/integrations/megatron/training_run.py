"""What each rank does for ``hotspa train``, and for each run of ``hotspa demo``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import TrainingConfig
from hotspa_plugin.data import GlobalBatchSampler
from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.integrations.megatron.training_plan import TrainingPlan, choose_strategies
from hotspa_plugin.resharding.plan_cache import PlanCache
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.agreement import check_agreement, flatten
from hotspa_plugin.runtime.mover import OVERLAPS
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.runtime.run_record import (
    DataInfo,
    LengthHistogram,
    MachineInfo,
    ModelInfo,
    PoolEntry,
    RunInfo,
    StepRecord,
    installed_versions,
)
from hotspa_plugin.runtime.trace import TraceSampling
from hotspa_plugin.search import AheadAssigner

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_trainer(plan: TrainingPlan, recorder: RunRecorder | NullRecorder):
    """The trainer of ``plan`` on this rank; collective over the world."""
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec
    from hotspa_plugin.integrations.megatron.home import OptimizerSettings
    from hotspa_plugin.integrations.megatron.session import SwitchOptions
    from hotspa_plugin.integrations.megatron.trainer import Trainer

    config, optimizer = plan.config, plan.config.optimizer
    spec = GPTSpec.from_config(
        config.model, padded_vocab_size=plan.padded_vocab_size, max_positions=plan.pool.bounds_tokens[-1]
    )
    return Trainer(
        spec,
        plan.pool,
        dtype=DTYPES[config.run.dtype],
        optimizer=OptimizerSettings(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_steps=optimizer.warmup_steps,
            decay_steps=optimizer.decay_steps or config.run.steps,
            decay_style=optimizer.decay_style,
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.betas[0],
            beta2=optimizer.betas[1],
            eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            distributed=optimizer.distributed,
        ),
        packing=config.data.packing,
        seed=config.run.seed,
        switch=SwitchOptions(
            policy=config.run.switch_policy,
            memory_budget_bytes=config.run.switch_memory_mb * 2**20,
            cards_per_node=config.run.cards_per_node,
            overlap=OVERLAPS[plan.overlap],
            plan_cache=None if config.run.plan_cache is None else PlanCache(config.run.plan_cache),
        ),
        recorder=recorder,
        micro_batch_tokens=plan.micro_batch_tokens,
        assigner=plan.assigner,
    )


# Returns a ``Trainer``, or what has its methods.
TrainerBuilder = Callable[[TrainingPlan, "RunRecorder | NullRecorder"], Any]


def make_sampler(plan: TrainingPlan) -> GlobalBatchSampler:
    data = plan.config.data
    return GlobalBatchSampler(
        plan.source.lengths,
        num_sequences=data.global_batch_sequences,
        num_tokens=data.global_batch_tokens,
        seed=plan.config.data_seed,
        shuffle=data.shuffle,
    )


def run_info(plan: TrainingPlan, world_size: int) -> RunInfo:
    """What ``run.json`` says of the run."""
    config, counts = plan.config, plan.source.counts
    num_changed = {"truncate": "num_truncated", "split": "num_split", "drop": "num_dropped"}.get(counts.policy)
    return RunInfo(
        command=plan.command,
        world_size=world_size,
        pool=tuple(PoolEntry(strategy=str(e.strategy), bound_tokens=e.bound_tokens) for e in plan.pool.entries),
        home=str(plan.pool.home),
        model=ModelInfo(
            name=config.model.name,
            num_parameters=plan.num_parameters,
            dtype=config.run.dtype,
            config=config.model.model_dump(mode="json"),
        ),
        data=DataInfo(
            source=config.data.path or config.data.source,
            num_sequences=len(plan.source.lengths),
            num_tokens=int(plan.source.lengths.sum()),
            longest_tokens=int(plan.source.lengths.max()),
            lengths=LengthHistogram.from_lengths(plan.source.lengths.tolist()),
            **({num_changed: counts.num_overlong} if num_changed else {}),
        ),
        machine=MachineInfo.here(device="cpu" if cpu.is_enabled() else torch.cuda.get_device_name()),
        versions=installed_versions(),
        seed=config.run.seed,
    )


def train_rank(
    rank: int,
    world_size: int,
    config: TrainingConfig,
    command: str = "",
    *,
    description: str = "training",
    tells: bool = True,
    save_initial: Path | None = None,
    load_initial: Path | None = None,
    build: TrainerBuilder = build_trainer,
    keeps_records: bool = False,
) -> list[StepRecord]:
    """Trains on this rank; rank 0 shows progress and writes the records.

    Returns the steps since this start with ``keeps_records``, which takes memory with every step, else nothing.

    With ``tells`` rank 0 also says what it is about to do, and at the end where the records lie.
    ``save_initial`` and ``load_initial`` name a file for the whole parameters before the first step, so that
    several runs can start alike.
    """
    set_activity("start")
    prepare_process()
    from hotspa_plugin.integrations.megatron.plan_summary import plan_summary
    from hotspa_plugin.integrations.megatron.train_loop import TrainLoop
    from hotspa_plugin.report.console import TrainingProgress

    tells = tells and rank == 0
    device = torch.device(torch.cuda.current_device())
    # Paths may be mounted elsewhere on another machine; what lies there is compared below.
    places = {"data": {"path", "tokenizer"}, "run": {"out", "profile", "plan_cache"}}
    said = config.model_dump(mode="json", exclude=places)
    check_agreement("the package versions", installed_versions(), device=device)
    check_agreement("the configuration", flatten(said), device=device)
    set_activity("start, reading the data")
    plan = choose_strategies(config, num_ranks=world_size, command=command)
    config = plan.config
    data = {
        "content": plan.source.fingerprint(),
        "sequences": len(plan.source.lengths),
        "tokens": int(plan.source.lengths.sum()),
        "padded vocabulary": plan.padded_vocab_size,
    }
    check_agreement("the data", data, device=device)
    set_activity("start, building the model")
    out, record = Path(config.run.out), config.run.record
    trainer = build(plan, NullRecorder())
    loop = TrainLoop(
        trainer=trainer,
        source=plan.source,
        sampler=make_sampler(plan),
        num_steps=config.run.steps,
        check_every=config.run.check_every,
        save_every=config.run.save_every,
        folder=out,
    )
    ahead = contextlib.nullcontext()
    if plan.assigner is not None:
        ahead = trainer.loop.assigner = AheadAssigner(plan.assigner)
        loop.prepare = ahead.prepare
    if config.run.resume:
        loop.resume()
    if load_initial:
        trainer.load_parameters(torch.load(load_initial, weights_only=True))
    recorder = RunRecorder(
        out,
        rank,
        world_size,
        info=run_info(plan, world_size) if rank == 0 else None,
        resume=config.run.resume,
        first_step=loop.first_step,
        sampling=TraceSampling(first=record.trace_first, every=record.trace_every, limit=record.trace_limit),
        synchronize=None if cpu.is_enabled() else torch.cuda.synchronize,
    )
    trainer.record_to(recorder)
    if save_initial:
        initial, _ = trainer.gather_parameters()
        if rank == 0:
            torch.save(initial, save_initial)
    if tells:
        print("\n".join(plan_summary(plan, num_ranks=world_size, first_step=loop.first_step)), flush=True)
    records = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(recorder)
        stack.enter_context(ahead)
        if rank == 0:
            loop.on_step = stack.enter_context(
                TrainingProgress(config.run.steps, first_step=loop.first_step, description=description)
            ).update
        for step_record in loop.run():
            if keeps_records:
                records.append(step_record)
        dist.barrier()  # all spans are written before rank 0 merges them
    if tells:
        print(f"records are in {out}; hotspa report {out} shows them", flush=True)
    return records
