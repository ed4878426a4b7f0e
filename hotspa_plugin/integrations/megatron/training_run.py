"""What each rank does for ``hotspa train``, and for each run of ``hotspa demo``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import TrainingConfig, open_data
from hotspa_plugin.cost.resident import ResidentMemory, resident_memory
from hotspa_plugin.data import GlobalBatchSampler, LimitedSource
from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.layout.analytic import GPTSizes
from hotspa_plugin.resharding.plan_cache import PlanCache
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.agreement import check_agreement, flatten
from hotspa_plugin.runtime.memory import rank_memory_bytes
from hotspa_plugin.runtime.mover import OVERLAPS
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder, check_run_directory
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
from hotspa_plugin.strategy import StrategyPool, padded_vocab_size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What all ranks must agree on before anything is built."""

    config: TrainingConfig
    pool: StrategyPool
    source: LimitedSource
    padded_vocab_size: int
    memory: tuple[ResidentMemory, ...]  # of a rank, for each strategy, activations not included
    overlap: str  # what moves while another bucket computes, a key of OVERLAPS
    command: str = ""


def plan_training(config: TrainingConfig, *, num_ranks: int, command: str = "") -> TrainingPlan:
    """Reads the data's lengths and checks pool, model and output folder; writes nothing.

    Raises ValueError with one clear line for whatever does not fit.
    """
    check_run_directory(config.run.out, resume=config.run.resume)
    unchecked = config.strategy_pool
    unchecked.check(world_size=num_ranks)  # before reading data, which can take long
    source = open_data(config.data, bound_tokens=unchecked.bounds_tokens[-1], vocab_size=config.model.vocab_size)
    pool = config.model.check_pool(unchecked, num_ranks=num_ranks, vocab_size=source.vocab_size)
    rows = padded_vocab_size(
        config.model.vocab_size or source.vocab_size, config.model.make_vocab_size_divisible_by, pool.strategies
    )
    overlap, memory = _choose_overlap(config, _sizes(config, rows, pool.bounds_tokens[-1]), pool, num_ranks)
    return TrainingPlan(
        config=config, pool=pool, source=source, padded_vocab_size=rows, memory=memory, overlap=overlap, command=command
    )


def _choose_overlap(
    config: TrainingConfig, sizes: GPTSizes, pool: StrategyPool, num_ranks: int
) -> tuple[str, tuple[ResidentMemory, ...]]:
    """What overlaps, and each strategy's memory with it; ValueError where a rank has not as much.

    ``auto`` takes the most that fits; on CUDA nothing, where overlap has not been tried beside a pipeline's own
    messages.
    """
    choices = [config.run.overlap_switch]
    if choices == ["auto"]:
        on_cuda = config.run.device != "cpu" and torch.cuda.is_available()
        choices = ["none"] if on_cuda else ["both", "flush", "none"]
    available = rank_memory_bytes(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    for overlap in choices:
        memory = resident_memory(
            sizes,
            pool,
            distributed_optimizer=config.optimizer.distributed,
            staging_bytes=config.run.switch_memory_mb * 2**20,
            overlap_flush=OVERLAPS[overlap].flush,
            overlap_prefetch=OVERLAPS[overlap].prefetch,
        )
        if available is None or max(entry.total_bytes for entry in memory) <= available:
            return overlap, memory
    raise _too_large(memory, available, overlap)


def _sizes(config: TrainingConfig, padded_vocab_size: int, max_positions: int) -> GPTSizes:
    model = config.model
    return GPTSizes(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        vocab_size=padded_vocab_size,
        gated_mlp=model.activation == "swiglu",
        tied_embeddings=model.tied_embeddings,
        num_learned_positions=(model.max_positions or max_positions) if model.positions == "learned" else 0,
        biases=model.linear_bias,
        qk_norm=model.qk_layernorm,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[config.run.dtype],
    )


def _too_large(memory: tuple[ResidentMemory, ...], available: int, overlap: str) -> ValueError:
    """For a pool whose parameters, gradients and optimizer state alone do not fit on a rank."""
    fullest = max(memory, key=lambda entry: entry.total_bytes)
    gib = 2**30
    return ValueError(
        f"strategy {fullest.strategy} needs {fullest.total_bytes / gib:.2f} GiB a rank before any activation (home "
        f"{fullest.home_bytes / gib:.2f}, slab {fullest.slab_bytes / gib:.2f}, "
        f"switch {fullest.staging_bytes / gib:.2f}), "
        f"but a rank has {available / gib:.2f} GiB here: take a home or strategy with more tensor or pipeline "
        "parallel, optimizer.distributed: true, or less run.switch_memory_mb"
        + ("" if overlap == "none" else ", or run.overlap_switch: none")
    )


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
    )


# Returns a ``Trainer``, or what has its methods.
TrainerBuilder = Callable[["TrainingPlan", "RunRecorder | NullRecorder"], Any]


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
        model=ModelInfo(name=config.model.name, dtype=config.run.dtype, config=config.model.model_dump(mode="json")),
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
    save_initial: Path | None = None,
    load_initial: Path | None = None,
    build: TrainerBuilder = build_trainer,
) -> list[StepRecord]:
    """Trains on this rank; rank 0 shows progress and writes the records. Returns this session's steps.

    ``save_initial`` and ``load_initial`` name a file for the whole parameters before the first step, so that
    several runs can start alike.
    """
    set_activity("start")
    prepare_process()
    from hotspa_plugin.integrations.megatron.train_loop import TrainLoop
    from hotspa_plugin.report.console import TrainingProgress

    device = torch.device(torch.cuda.current_device())
    # Paths may be mounted elsewhere on another machine; what lies there is compared below.
    said = config.model_dump(mode="json", exclude={"data": {"path", "tokenizer"}, "run": {"out"}})
    check_agreement("the package versions", installed_versions(), device=device)
    check_agreement("the configuration", flatten(said), device=device)
    set_activity("start, reading the data")
    plan = plan_training(config, num_ranks=world_size, command=command)
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
    with recorder:
        if rank == 0:
            with TrainingProgress(config.run.steps, first_step=loop.first_step, description=description) as progress:
                loop.on_step = progress.update
                records = loop.run()
        else:
            records = loop.run()
        dist.barrier()  # all spans are written before rank 0 merges them
    return records
