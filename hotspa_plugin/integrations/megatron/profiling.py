"""Measures a model on the machine at hand, through the real trainer: stages, memory, optimizer and links."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.config import ModelConfig
from hotspa_plugin.cost.fitting import fit_memory, fit_time, measured_lengths, memory_error, time_error
from hotspa_plugin.cost.memory import MemoryModel
from hotspa_plugin.cost.micro_batch import shared_cores_s
from hotspa_plugin.cost.profile import LinkFigures, MachineFigures, MemoryFigures, ModelSizes, Profile, StageFigures
from hotspa_plugin.data import AssignedMicroBatch, BatchAssignment, BucketAssignment, RandomTokenSource, SequenceBatch
from hotspa_plugin.integrations.megatron.link_profiling import largest_of_ranks, measure_links
from hotspa_plugin.integrations.megatron.process import prepare_planned_memory, prepare_process
from hotspa_plugin.runtime.memory import PeakMemory, give_back_memory, rank_memory_bytes, resident_bytes
from hotspa_plugin.runtime.stopwatch import Stopwatch
from hotspa_plugin.search import possible_strategies
from hotspa_plugin.strategy import ParallelStrategy, PoolEntry, StrategyPool

LEAST_LONGEST = 256  # tokens: shorter ones are all overhead
# Micro-batches per stage: so many that filling and draining the pipeline is a small part. Where ranks share cores, a
# stage that waits leaves its share to others, and few micro-batches would make a stage look faster than it is in a long
# step.
MICRO_BATCHES_PER_STAGE = 4
ENOUGH_S = 2.0  # of measuring one length under one strategy
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """What to measure. Lengths in tokens: those that are fitted, and those that the fit is tried on."""

    model: ModelConfig
    sizes: ModelSizes
    strategies: tuple[ParallelStrategy, ...]
    fitted_lengths: tuple[int, ...]
    unseen_lengths: tuple[int, ...]
    num_repeats: int = 5
    distributed_optimizer: bool = False
    seed: int = 1234

    @classmethod
    def for_planning(
        cls, sizes: ModelSizes, model: ModelConfig, *, num_ranks: int, longest_tokens: int
    ) -> ProfileRequest:
        """All strategies that fit, up to this length."""
        fitted, unseen = measured_lengths(max(longest_tokens, LEAST_LONGEST))
        return cls(
            model=model,
            sizes=sizes,
            strategies=tuple(possible_strategies(sizes.shape(), num_ranks)),
            fitted_lengths=fitted,
            unseen_lengths=unseen,
            num_repeats=3,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageMeasurement:
    """One strategy: seconds of a micro-batch on a stage, and activation bytes of the fullest rank, by length."""

    strategy: ParallelStrategy
    seconds: dict[int, float]
    activation_bytes: dict[int, int]
    optimizer_s: float
    num_rank_parameters: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSequenceEach:
    """Assigns as many sequences as fill every replica's pipeline, one sequence to a micro-batch."""

    num_replicas: int
    num_micro_batches: int
    length_multiple: int

    def assign(self, lengths: np.ndarray) -> BatchAssignment:
        assert len(lengths) == self.num_replicas * self.num_micro_batches
        multiple = self.length_multiple
        micro_batches = [
            AssignedMicroBatch(
                samples=(i,), num_tokens=int(length), num_padded_tokens=-(-int(length) // multiple) * multiple
            )
            for i, length in enumerate(lengths)
        ]
        replicas = tuple(tuple(micro_batches[r :: self.num_replicas]) for r in range(self.num_replicas))
        bucket = BucketAssignment(bucket=0, replicas=replicas, replica_costs_s=(0.0,) * self.num_replicas)
        return BatchAssignment(packing="packed", buckets=(bucket,))


def measure_profile(request: ProfileRequest, *, progress: Callable[[str], None] | None = None) -> Profile:
    """Measures on every rank of an initialised world; all return the same profile. Collective.

    ``progress`` is told on rank 0 what is being measured.
    """
    prepare_process()
    prepare_planned_memory()
    tell = progress if progress is not None and dist.get_rank() == 0 else lambda said: None
    device = torch.device(torch.cuda.current_device())
    reserved = int(largest_of_ranks(resident_bytes())) if cpu.is_enabled() else 0
    tell("links")
    links = measure_links(device)
    sharing = largest_of_ranks(ranks_per_core())
    measured = []
    for strategy in request.strategies:
        tell(str(strategy))
        measured.append(_measure_strategy(request, strategy, device, sharing))
    return _build_profile(request, measured, links, reserved, sharing)


def _measure_strategy(
    request: ProfileRequest, strategy: ParallelStrategy, device: torch.device, sharing: float
) -> StageMeasurement:
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec
    from hotspa_plugin.integrations.megatron.home import OptimizerSettings
    from hotspa_plugin.integrations.megatron.trainer import Trainer

    lengths = sorted({*request.fitted_lengths, *request.unseen_lengths})
    longest = -(-lengths[-1] // strategy.tp) * strategy.tp
    pool = StrategyPool(entries=(PoolEntry(strategy=strategy, bound_tokens=longest),))
    spec = GPTSpec.from_config(
        request.model,
        padded_vocab_size=request.sizes.vocab_size,
        max_positions=request.sizes.num_learned_positions or longest,
    )
    trainer = Trainer(
        spec,
        pool.check(world_size=dist.get_world_size(), model=spec.shape),
        dtype=DTYPES[request.sizes.dtype],
        optimizer=OptimizerSettings(distributed=request.distributed_optimizer),
        seed=request.seed,
        recorder=Stopwatch(None if cpu.is_enabled() else torch.cuda.synchronize),
    )
    num_micro_batches = strategy.pp * MICRO_BATCHES_PER_STAGE if strategy.pp > 1 else 1
    trainer.loop.assigner = OneSequenceEach(
        num_replicas=strategy.dp,
        num_micro_batches=num_micro_batches,
        length_multiple=strategy.tp if strategy.sp else 1,
    )
    num_sequences = strategy.dp * num_micro_batches
    # What the pipeline takes, in micro-batches on a stage.
    num_passes = shared_cores_s(num_micro_batches + strategy.pp - 1, num_micro_batches, sharing)
    memory = PeakMemory(device)

    def run(length: int, step: int) -> tuple[float, int]:
        source = RandomTokenSource([length] * num_sequences, vocab_size=256, seed=step)
        batch = SequenceBatch(step=step, source=source, indices=np.arange(num_sequences))
        give_back_memory()
        memory.restart()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
        result = trainer.accumulate(batch)
        return result.buckets[0].compute_s, memory.peak_bytes() - before

    run(lengths[0], 0)  # connections, kernels and the optimizer's state settle
    trainer.update()
    started_s = time.perf_counter()
    trainer.update()
    optimizer_s = float(largest_of_ranks(time.perf_counter() - started_s))
    # What lives on is not looked through again by every collection of garbage.
    gc.collect()
    gc.freeze()
    # All lengths in each round, and the fastest round of each: what disturbs a measurement makes it slower.
    # Long ones average over disturbances by themselves.
    seconds, activation = dict.fromkeys(lengths, math.inf), dict.fromkeys(lengths, 0)
    spent_s = dict.fromkeys(lengths, 0.0)
    for turn in range(request.num_repeats):
        for length in [n for n in lengths if spent_s[n] < ENOUGH_S]:
            taken_s, peak_bytes = run(length, 1 + turn)
            slowest_s = largest_of_ranks(taken_s)
            spent_s[length] += slowest_s
            seconds[length] = min(seconds[length], slowest_s / num_passes)
            activation[length] = max(activation[length], int(largest_of_ranks(peak_bytes)))
    gc.unfreeze()
    num_parameters = int(largest_of_ranks(sum(p.numel() for p in trainer.home.parameters.values())))
    return StageMeasurement(
        strategy=strategy,
        seconds=seconds,
        activation_bytes=activation,
        optimizer_s=optimizer_s,
        num_rank_parameters=num_parameters,
    )


def _build_profile(
    request: ProfileRequest,
    measured: Sequence[StageMeasurement],
    links: LinkFigures,
    reserved_bytes: int,
    sharing: float,
) -> Profile:
    num_ranks = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    item_bytes = {"float32": 4, "bfloat16": 2}[request.sizes.dtype]
    memory = MemoryFigures(
        device_bytes=rank_memory_bytes(num_ranks),
        reserved_bytes=reserved_bytes,
        parameter_bytes=item_bytes,
        optimizer_bytes=8 if item_bytes == 4 else 12,
        distributed_optimizer=request.distributed_optimizer,
    )
    # Errors of memory are relative to what a model takes, which follows from its sizes; imports would flatter them.
    profile = Profile(
        source="measured by hotspa profile",
        model=request.sizes,
        machine=MachineFigures(
            name=machine_name(), ranks_per_node=per_node, num_ranks=num_ranks, ranks_per_core=sharing
        ),
        stages=tuple(_fit_stage(request, m, 1.0) for m in measured),
        memory=memory,
        links=links,
        optimizer_s_per_parameter=statistics.median(
            m.optimizer_s / (m.num_rank_parameters / (m.strategy.dp if request.distributed_optimizer else 1))
            for m in measured
        ),
    )
    model = MemoryModel(profile)
    stages = [_fit_stage(request, m, model.home_bytes(m.strategy)) for m in measured]
    return profile.model_copy(update={"stages": tuple(stages)})


def _fit_stage(request: ProfileRequest, measured: StageMeasurement, resident: float) -> StageFigures:
    seen, unseen = request.fitted_lengths, request.unseen_lengths
    cost = fit_time(seen, [measured.seconds[n] for n in seen])
    line = fit_memory(seen, [measured.activation_bytes[n] for n in seen])
    return StageFigures(
        tp=measured.strategy.tp,
        pp=measured.strategy.pp,
        recompute=measured.strategy.recompute,
        a_s_per_token2=cost.a_s_per_token2,
        b_s_per_token=cost.b_s_per_token,
        c_s=cost.c_s,
        activation_bytes_per_token=line.bytes_per_token,
        activation_fixed_bytes=line.fixed_bytes,
        origin="measured",
        time_error=time_error(cost, unseen, [measured.seconds[n] for n in unseen]) if unseen else None,
        memory_error=memory_error(
            line, unseen, [measured.activation_bytes[n] for n in unseen], resident_bytes=resident
        ) if unseen else None,
    )  # fmt: skip


def ranks_per_core() -> float:
    """Busy ranks that share a core, at least 1; 1 where each has a GPU. Collective.

    Counted by machine: the nodes of ``hotspa profile --nodes`` are on one.
    """
    if not cpu.is_enabled():
        return 1.0
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, platform.node())
    return max(1.0, machines.count(platform.node()) / _num_cores())


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_name() -> str:
    """The GPU, or the processor and how many of its cores this process may use."""
    if not cpu.is_enabled():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = "CPU"
    return f"{model}, {_num_cores()} cores"


def profile_rank(request: ProfileRequest) -> dict:
    """On each rank of a pool of workers: the profile as JSON data."""
    profile = measure_profile(request, progress=lambda said: print(f"measuring {said}", flush=True))
    return profile.model_dump(mode="json")


def profile_launched(rank: int, world_size: int, request: ProfileRequest) -> dict:
    """The same as a rank that ``launch`` has started."""
    return profile_rank(request)
