"""Predicts a step of a planned pool, or of a static strategy, on given batches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.cost import (
    BucketMemory,
    CommunicationModel,
    MemoryModel,
    Profile,
    StepTime,
    Transition,
    exposed_reduce_s,
    pipeline_s,
    shared_cores_s,
)
from hotspa_plugin.data.assignment import BatchAssignment, BucketSpec, assign_batch
from hotspa_plugin.search.batch_assignment import BatchAssigner, StrategyOption
from hotspa_plugin.search.bucket_estimate import Lane, estimate_s
from hotspa_plugin.strategy import ParallelStrategy, PoolEntry, StrategyPool

MAX_ASSIGNED_SEQUENCES = 4096  # larger batches are estimated: with so many sequences packing and balance are near ideal


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedPool:
    """A pool whose strategies have dp resolved, and the tokens that each one's micro-batches may hold."""

    entries: tuple[PoolEntry, ...]
    home: ParallelStrategy
    micro_batch_tokens: tuple[int, ...]

    def __str__(self) -> str:
        return " ".join(map(str, self.entries))

    @property
    def is_static(self) -> bool:
        return len(self.entries) == 1

    @property
    def strategy_pool(self) -> StrategyPool:
        return StrategyPool(entries=self.entries, home=self.home)


class StepModel:
    """Times and memory of one model on so many ranks, from its profile."""

    def __init__(
        self,
        profile: Profile,
        *,
        num_ranks: int,
        ranks_per_node: int | None = None,
        memory_limit_bytes: int | None = None,
        slab_gradients: str = "fp32",
    ) -> None:
        profile.check_ranks(num_ranks, min(num_ranks, ranks_per_node or profile.machine.ranks_per_node))
        self.profile, self.num_ranks = profile, num_ranks
        self.slab_gradients = slab_gradients
        self.memory = MemoryModel(profile, limit_bytes=memory_limit_bytes, slab_gradients=slab_gradients)
        self.communication = CommunicationModel(profile, num_ranks=num_ranks, ranks_per_node=ranks_per_node)

    def transition(self, home: ParallelStrategy, strategy: ParallelStrategy) -> Transition:
        return self.communication.transition(home, strategy, gradient_bytes=self.memory.slab_gradient_bytes)

    def static_pool(self, strategy: ParallelStrategy, longest_tokens: int) -> PlannedPool | None:
        """``strategy`` for all lengths, or None where the longest sequence does not fit in memory."""
        capacity = self.memory.capacity_tokens(strategy, strategy, hot=False)
        if capacity < longest_tokens:
            return None
        entry = PoolEntry(strategy=strategy, bound_tokens=longest_tokens)
        return PlannedPool(entries=(entry,), home=strategy, micro_batch_tokens=(capacity,))

    def hot_pool(self, entries: Sequence[PoolEntry], home: ParallelStrategy) -> PlannedPool:
        """A pool with micro-batches as large as memory allows. ValueError, with figures, where a bound does not fit."""
        capacities = []
        for entry in entries:
            capacity = self.memory.capacity_tokens(entry.strategy, home, hot=len(entries) > 1)
            if capacity < entry.bound_tokens:
                needed = self.memory.bucket(entry.strategy, home, micro_batch_tokens=entry.bound_tokens)
                raise ValueError(
                    f"{entry}: needs {needed.total_bytes / 1e9:.1f} GB beside home {home}, over the limit of "
                    f"{self.memory.limit_bytes / 1e9:.1f} GB; lower its bound to {capacity}"
                )
            capacities.append(capacity)
        return PlannedPool(entries=tuple(entries), home=home, micro_batch_tokens=tuple(capacities))

    def bucket_memory(self, pool: PlannedPool) -> list[BucketMemory]:
        """Each bucket's memory with full micro-batches of its bound (the least that it must be able to hold)."""
        return [
            self.memory.bucket(e.strategy, pool.home, micro_batch_tokens=e.bound_tokens, hot=not pool.is_static)
            for e in pool.entries
        ]

    def options(self, pool: PlannedPool) -> list[StrategyOption]:
        """What the per-batch assignment must know of ``pool``."""
        options = []
        for entry, tokens in zip(pool.entries, pool.micro_batch_tokens, strict=True):
            strategy = entry.strategy
            spec = BucketSpec(
                bound_tokens=entry.bound_tokens,
                num_replicas=strategy.dp,
                num_stages=strategy.pp,
                length_multiple=strategy.tp if strategy.sp else 1,
                micro_batch_tokens=tokens,
            )
            away_s = self.transition(pool.home, strategy).total_s
            options.append(
                StrategyOption(
                    spec=spec,
                    cost=self.profile.stage(strategy).cost,
                    transition_s=away_s,
                    ranks_per_core=self.profile.machine.ranks_per_core,
                )
            )
        return options

    @functools.cached_property
    def _reduce_s(self):
        return functools.cache(lambda home: self.communication.reduce_s(home, self.memory.num_parameters(home)))

    def home_time(self, home: ParallelStrategy, last_micro_batch_s: float) -> StepTime:
        """What a step costs at home beside its buckets: the gradient reduction left exposed, and the optimizer."""
        memory = self.profile.memory
        num_parameters = self.memory.num_parameters(home) / (home.dp if memory.distributed_optimizer else 1)
        return StepTime(
            reduce_s=exposed_reduce_s(
                self._reduce_s(home), overlaps=self.profile.reduce_overlaps, last_micro_batch_s=last_micro_batch_s
            ),
            optimizer_s=num_parameters * self.profile.optimizer_s_per_parameter,
        )

    def assign(self, pool: PlannedPool, lengths: np.ndarray, *, per_batch: bool = False) -> BatchAssignment:
        """The batch laid out by the pool's bounds, or with ``per_batch`` by its own."""
        options = self.options(pool)
        if per_batch and not pool.is_static:
            return BatchAssigner(options).assign(lengths)
        return assign_batch(lengths, buckets=[o.spec for o in options], cost=[o.cost for o in options])

    def step_time(self, pool: PlannedPool, lengths: np.ndarray, *, per_batch: bool = False) -> StepTime:
        """The predicted time of a step on a batch with these lengths in tokens."""
        if len(lengths) > MAX_ASSIGNED_SEQUENCES:
            return self._estimated(pool, np.asarray(lengths))
        return self.assigned_time(pool, lengths, self.assign(pool, lengths, per_batch=per_batch))

    def assigned_time(self, pool: PlannedPool, lengths: np.ndarray, assignment: BatchAssignment) -> StepTime:
        """The predicted time of a step laid out so."""
        total, last_s = StepTime(), 0.0
        for bucket in assignment.buckets:
            strategy = pool.entries[bucket.bucket].strategy
            cost = self.profile.stage(strategy).cost
            times = [[cost.packed_s(lengths[list(m.samples)]) for m in replica] for replica in bucket.replicas]
            slowest = max(times, key=lambda t: pipeline_s(t, strategy.pp))
            slowest_s, mean_work_s = pipeline_s(slowest, strategy.pp), sum(map(sum, times)) / len(times)
            share = shared_cores_s(slowest_s, mean_work_s, self.profile.machine.ranks_per_core) / slowest_s
            total += self._bucket_time(pool, strategy, share * sum(slowest), share * (strategy.pp - 1) * max(slowest))
            if strategy == pool.home:
                last_s = sum(slowest) / len(slowest)
        return total + self.home_time(pool.home, last_s)

    def _bucket_time(
        self, pool: PlannedPool, strategy: ParallelStrategy, compute_s: float, bubble_s: float
    ) -> StepTime:
        moved = self.transition(pool.home, strategy)
        return StepTime(compute_s=compute_s, bubble_s=bubble_s, switch_s=moved.switch_s, flush_s=moved.flush_s)

    def _estimated(self, pool: PlannedPool, lengths: np.ndarray) -> StepTime:
        total, last_s, low = StepTime(), 0.0, 0
        for entry, option in zip(pool.entries, self.options(pool), strict=True):
            inside = lengths[(lengths > low) & (lengths <= entry.bound_tokens)].astype(np.float64)
            low = entry.bound_tokens
            if len(inside) == 0:
                continue
            lane: Lane = option.lane
            num_big = int((inside > lane.capacity_tokens // 2).sum())
            compute_s, bubble_s = estimate_s(
                np.array(len(inside)), inside.sum(), (inside**2).sum(), inside.max(), np.array(num_big), lane
            )
            total += self._bucket_time(pool, entry.strategy, float(compute_s), float(bubble_s))
            if entry.strategy == pool.home:
                last_s = lane.cost.packed_s([min(lane.capacity_tokens, inside.sum() / lane.num_replicas)])
        return total + self.home_time(pool.home, last_s)
