"""What each rank does for ``hotspa train``, and for each run of ``hotspa demo``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import TrainingConfig, open_data
from hotspa_plugin.config.sizes import model_sizes
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
from hotspa_plugin.search import AheadAssigner, BatchAssigner, StepModel, assigner_for, choose_pool, draw_from
from hotspa_plugin.strategy import StrategyPool, padded_vocab_size

PROFILE_FILE = "profile.json"  # in a planned run's folder
NO_BOUND = 2**62
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
    micro_batch_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    assigner: BatchAssigner | None = None  # None: the pool's bounds


def open_training_data(config: TrainingConfig, *, num_ranks: int) -> LimitedSource:
    """Reads the data's lengths and checks the output folder and, unless it is auto, the pool; writes nothing.

    Raises ValueError with one clear line for whatever does not fit.
    """
    check_run_directory(config.run.out, resume=config.run.resume)
    if config.is_auto:
        bound_tokens = config.data.longest_tokens or NO_BOUND
    else:
        config.strategy_pool.check(world_size=num_ranks)  # before reading data, which can take long
        bound_tokens = config.strategy_pool.bounds_tokens[-1]
    return open_data(config.data, bound_tokens=bound_tokens, vocab_size=config.model.vocab_size)


def plan_training(
    config: TrainingConfig,
    *,
    num_ranks: int,
    command: str = "",
    source: LimitedSource | None = None,
    micro_batch_tokens: Mapping[str, int] | None = None,
    assigner: BatchAssigner | None = None,
) -> TrainingPlan:
    """Checks pool, model and output folder against the data (``source``, else what the configuration names).

    Raises ValueError with one clear line for whatever does not fit; writes nothing.
    """
    if source is None:
        source = open_training_data(config, num_ranks=num_ranks)
    unchecked = config.strategy_pool
    pool = config.model.check_pool(unchecked, num_ranks=num_ranks, vocab_size=source.vocab_size)
    rows = padded_vocab_size(
        config.model.vocab_size or source.vocab_size, config.model.make_vocab_size_divisible_by, pool.strategies
    )
    overlap, memory = _choose_overlap(config, _sizes(config, rows, pool.bounds_tokens[-1]), pool, num_ranks)
    return TrainingPlan(
        config=config, pool=pool, source=source, padded_vocab_size=rows, memory=memory, overlap=overlap, command=command,
        micro_batch_tokens=micro_batch_tokens or {}, assigner=assigner,
    )  # fmt: skip


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


def choose_strategies(config: TrainingConfig, *, num_ranks: int, command: str = "") -> TrainingPlan:
    """``plan_training`` after what ``pool: auto`` and ``assignment: batch`` ask for has been planned. Collective."""
    from hotspa_plugin.integrations.megatron.profile_cache import obtain_profile
    from hotspa_plugin.integrations.megatron.profiling import ProfileRequest

    source = open_training_data(config, num_ranks=num_ranks)
    if not config.is_planned:
        return plan_training(config, num_ranks=num_ranks, command=command, source=source)
    longest = int(source.lengths.max()) if config.is_auto else config.strategy_pool.bounds_tokens[-1]
    sizes = model_sizes(
        config.model, num_ranks=num_ranks, max_positions=longest, dtype=config.run.dtype, vocab_size=source.vocab_size
    )
    kept = Path(config.run.out) / PROFILE_FILE  # a resumed run must plan as it did
    profile = obtain_profile(
        kept if config.run.resume and kept.exists() else config.run.profile,
        ProfileRequest.for_planning(sizes, config.model, num_ranks=num_ranks, longest_tokens=longest),
        tell=lambda said: print(said, flush=True),
    ).with_distributed_optimizer(config.optimizer.distributed)
    limit = None if config.run.memory_limit_gb is None else round(config.run.memory_limit_gb * 1e9)
    data = config.data
    if not config.is_auto:
        pool = config.strategy_pool
        assigner = assigner_for(
            profile, pool, num_ranks=num_ranks, memory_limit_bytes=limit, packing=data.packing
        )
        plan = plan_training(config, num_ranks=num_ranks, command=command, source=source, assigner=assigner)
    else:
        chosen = choose_pool(
            StepModel(profile, num_ranks=num_ranks, memory_limit_bytes=limit),
            draw_from(
                source.lengths, num_sequences=data.global_batch_sequences, num_tokens=data.global_batch_tokens
            ),
            longest_tokens=longest,
            per_batch=config.assigns_per_batch,
            packing=data.packing,
        )
        if dist.get_rank() == 0:
            print(f"pool auto: {chosen.pool}, home {chosen.pool.home}: {chosen.why}", flush=True)
        plan = plan_training(
            config.model_copy(update={"pool": str(chosen.pool), "home": str(chosen.pool.home)}),
            num_ranks=num_ranks,
            command=command,
            source=source,
            micro_batch_tokens=chosen.micro_batch_tokens,
            assigner=chosen.assigner if config.assigns_per_batch else None,
        )
    if dist.get_rank() == 0 and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(profile.to_json(), encoding="utf-8")
    return plan


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
        micro_batch_tokens=plan.micro_batch_tokens,
        assigner=plan.assigner,
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
    tells: bool = True,
    save_initial: Path | None = None,
    load_initial: Path | None = None,
    build: TrainerBuilder = build_trainer,
) -> list[StepRecord]:
    """Trains on this rank; rank 0 shows progress and writes the records. Returns this session's steps.

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
    with recorder, ahead:
        if rank == 0:
            with TrainingProgress(config.run.steps, first_step=loop.first_step, description=description) as progress:
                loop.on_step = progress.update
                records = loop.run()
        else:
            records = loop.run()
        dist.barrier()  # all spans are written before rank 0 merges them
    if tells:
        print(f"records are in {out}; hotspa report {out} shows them", flush=True)
    return records
