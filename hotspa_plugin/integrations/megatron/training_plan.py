"""What ``hotspa train`` is going to do: data, pool, memory and overlap, checked before anything is built."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from hotspa_plugin.config import TrainingConfig, open_data
from hotspa_plugin.config.sizes import model_sizes
from hotspa_plugin.cost.resident import ResidentMemory, describe_shortage, num_parameters, resident_memory
from hotspa_plugin.data import LimitedSource
from hotspa_plugin.layout import GPTSizes
from hotspa_plugin.runtime.memory import rank_memory_bytes
from hotspa_plugin.runtime.mover import OVERLAPS
from hotspa_plugin.runtime.recorder import check_run_directory
from hotspa_plugin.search import BatchAssigner, StepModel, assigner_for, choose_pool, draw_from
from hotspa_plugin.strategy import StrategyPool, padded_vocab_size

PROFILE_FILE = "profile.json"  # in a planned run's folder
NO_BOUND = 2**62


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What all ranks must agree on before anything is built."""

    config: TrainingConfig
    pool: StrategyPool
    source: LimitedSource
    padded_vocab_size: int
    num_parameters: int
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
    sizes = model_sizes(config.model, num_ranks=num_ranks, max_positions=pool.bounds_tokens[-1], dtype=config.run.dtype)
    sizes = sizes.model_copy(update={"vocab_size": rows}).gpt_sizes()
    overlap, memory = _choose_overlap(config, sizes, pool, num_ranks)
    return TrainingPlan(
        config=config, pool=pool, source=source, padded_vocab_size=rows, num_parameters=num_parameters(sizes),
        memory=memory, overlap=overlap, command=command, micro_batch_tokens=micro_batch_tokens or {}, assigner=assigner,
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
    raise ValueError(
        describe_shortage(memory, available)
        + ", optimizer.distributed: true, or less run.switch_memory_mb"
        + ("" if overlap == "none" else ", or run.overlap_switch: none")
    )


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
        assigner = assigner_for(profile, pool, num_ranks=num_ranks, memory_limit_bytes=limit, packing=data.packing)
        plan = plan_training(config, num_ranks=num_ranks, command=command, source=source, assigner=assigner)
    else:
        chosen = choose_pool(
            StepModel(profile, num_ranks=num_ranks, memory_limit_bytes=limit),
            draw_from(source.lengths, num_sequences=data.global_batch_sequences, num_tokens=data.global_batch_tokens),
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
