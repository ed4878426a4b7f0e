"""One batch through all its buckets: which strategy, in which order, switched how."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.data import BatchAssignment, BucketAssignment, BucketSpec, assign_batch
from hotspa_plugin.data.global_batch import GlobalBatch, ScatteredBatch
from hotspa_plugin.data.micro_batch import PackedMicroBatch, PaddedMicroBatch, pack_micro_batch, pad_micro_batch
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.hot_switcher import NOTHING_MOVED, BytesMoved, HotSwitcher
from hotspa_plugin.runtime.mover import Interval
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.runtime.run_record import BucketRecord

MicroBatch = PackedMicroBatch | PaddedMicroBatch


class BucketRunner(Protocol):
    """Runs one strategy's micro-batches on this rank; an integration provides it."""

    label: str
    dp_rank: int

    def run(self, step: int, bucket: int, micro_batches: Sequence[MicroBatch], *, forward_only: bool) -> torch.Tensor:
        """Forward and backward over at least one micro-batch.

        Returns a float64 tensor ``[loss sum, target tokens]`` of shape ``[2]``: this rank's part, such that
        the sum over all ranks counts every target token once.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What one pass over a global batch gave, the same on all ranks."""

    loss_sum: float
    num_target_tokens: int
    buckets: tuple[BucketRecord, ...]
    assignment: BatchAssignment

    @property
    def loss(self) -> float:
        """Mean over the target tokens of the global batch; 0 where there are none."""
        return self.loss_sum / max(self.num_target_tokens, 1)


class BatchAssigner(Protocol):
    """Lays a batch out over the strategies of a loop, in place of the pool's fixed bounds."""

    def assign(self, lengths: np.ndarray) -> BatchAssignment:
        """The assignment of a batch with these lengths, the same on all ranks; bucket i runs under strategy i."""
        ...


@dataclasses.dataclass(kw_only=True)
class _BucketRun:
    """One bucket of the batch at hand, and what it has taken so far."""

    assigned: BucketAssignment
    spec: BucketSpec
    runner: BucketRunner
    at_home: bool
    moved_there: BytesMoved = NOTHING_MOVED
    moved_back: BytesMoved = NOTHING_MOVED
    switch_s: float = 0.0
    compute_s: float = 0.0
    flush_s: float = 0.0
    switch_hidden_s: float = 0.0
    flush_hidden_s: float = 0.0

    @property
    def about(self) -> dict[str, object]:
        return {"bucket": self.spec.bound_tokens, "strategy": self.runner.label}

    def record(self) -> BucketRecord:
        return BucketRecord(
            bound_tokens=self.spec.bound_tokens,
            strategy=self.runner.label,
            sequences=self.assigned.num_sequences,
            tokens=self.assigned.num_tokens,
            padding_tokens=self.assigned.num_padding_tokens,
            num_micro_batches=max(map(len, self.assigned.replicas)),
            switch_s=self.switch_s,
            compute_s=self.compute_s,
            flush_s=self.flush_s,
            switch_hidden_s=self.switch_hidden_s,
            flush_hidden_s=self.flush_hidden_s,
            switch_bytes_local=self.moved_there.local,
            switch_bytes_remote=self.moved_there.remote,
            flush_bytes_local=self.moved_back.local,
            flush_bytes_remote=self.moved_back.remote,
        )


class BucketLoop:
    """Runs every non-empty bucket of a batch under its strategy, the others in the switcher's order and home last."""

    def __init__(
        self,
        *,
        buckets: Sequence[BucketSpec],
        runners: Sequence[BucketRunner],
        home_index: int,
        switcher: HotSwitcher,
        packing: str,
        assigner: BatchAssigner | None = None,
        recorder: RunRecorder | NullRecorder | None = None,
        device: torch.device | None = None,
        adds_after_home: bool = True,
    ) -> None:
        """``assigner`` lays batches out in place of the pool's fixed bounds, where it is given.

        ``adds_after_home`` says that home's gradients may still be added to when its bucket has run: nothing reduces
        them before that.
        """
        self._adds_after_home = adds_after_home
        self.assigner = assigner
        self._buckets = tuple(buckets)
        self._runners = tuple(runners)
        self._home_index = home_index
        self.switcher = switcher
        self._packing = packing
        self.recorder = recorder or NullRecorder()
        self._device = device or torch.device("cpu")
        self._dp_ranks: list[list[int]] | None = None  # by rank and strategy

    @property
    def runners(self) -> tuple[BucketRunner, ...]:
        return self._runners

    def only_home(self) -> BucketLoop:
        """The same loop with home as the only strategy, up to the last bound: what a static run would do."""
        return BucketLoop(
            buckets=[dataclasses.replace(self._buckets[self._home_index], bound_tokens=self._buckets[-1].bound_tokens)],
            runners=[self._runners[self._home_index]],
            home_index=0,
            switcher=self.switcher,
            packing=self._packing,
            recorder=self.recorder,
            device=self._device,
            adds_after_home=self._adds_after_home,
        )

    def run(self, batch: GlobalBatch, *, forward_only: bool = False) -> BatchResult:
        """Trains (or with ``forward_only`` evaluates) one batch.

        Gradients end up, unreduced, in home's accumulators.
        """
        with self._phase("plan", batch.step):
            if self.assigner is not None:
                assignment = self.assigner.assign(batch.lengths)
            else:
                assignment = assign_batch(batch.lengths, buckets=self._buckets, packing=self._packing)
            check_agreement(f"the assignment of step {batch.step}", assignment.digest(), device=self._device)
        if hasattr(batch, "fetch"):
            with self._phase("data", batch.step):
                self._fetch(batch, assignment)
        ordered = [self._begin(bucket) for bucket in self._in_order(assignment)]
        runs = {run.runner.label: run for run in ordered}
        total = torch.zeros(2, dtype=torch.float64)
        for run, following in zip(ordered, [*ordered[1:], None], strict=True):
            total += self._run_bucket(batch, run, following, runs, forward_only)
        self._finish_flushes(batch.step, runs, self.switcher.flushing)
        self.switcher.release()
        with self._phase("wait", batch.step):
            total = total.to(self._device)
            dist.all_reduce(total)
            loss_sum, num_targets = total.tolist()
        return BatchResult(
            loss_sum=loss_sum,
            num_target_tokens=round(num_targets),
            buckets=tuple(sorted((run.record() for run in ordered), key=lambda record: record.bound_tokens)),
            assignment=assignment,
        )

    def _in_order(self, assignment: BatchAssignment) -> list[BucketAssignment]:
        place = {label: index for index, label in enumerate(self.switcher.running_order)}
        return sorted(assignment.buckets, key=lambda b: place.get(self._runners[b.bucket].label, len(place)))

    def _fetch(self, batch: ScatteredBatch, assignment: BatchAssignment) -> None:
        if self._dp_ranks is None:
            own = torch.tensor([runner.dp_rank for runner in self._runners], device=self._device)
            ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
            dist.all_gather(ranks, own)
            self._dp_ranks = [of_rank.tolist() for of_rank in ranks]
        batch.fetch([assignment.positions(dp_ranks) for dp_ranks in self._dp_ranks])

    def _begin(self, assigned: BucketAssignment) -> _BucketRun:
        index = assigned.bucket
        return _BucketRun(
            assigned=assigned, spec=self._buckets[index], runner=self._runners[index],
            at_home=index == self._home_index,
        )  # fmt: skip

    def _run_bucket(
        self,
        batch: GlobalBatch,
        run: _BucketRun,
        following: _BucketRun | None,
        runs: Mapping[str, _BucketRun],
        forward_only: bool,
    ) -> torch.Tensor:
        """This rank's part of one bucket; its gradients may still be on their way home afterwards."""
        step, label = batch.step, run.runner.label
        with self._phase("data", step, **run.about):
            micro_batches = self._build(batch, run.assigned.replicas[run.runner.dp_rank], run.spec)
        if run.at_home:
            flushing = self.switcher.flushing
            # Only the last flush may go on beside home's bucket, whose activations need the memory.
            self._finish_flushes(step, runs, flushing[:-1] if self._adds_after_home else flushing)
            self.switcher.make_room_for_home()
        else:
            self._finish_flushes(step, runs, filter(None, [self.switcher.flush_in_the_way(label)]))
            waited_from_ns = time.perf_counter_ns()
            with self._phase("switch", step, **run.about) as span:
                busy = self.switcher.enter(label)
            run.switch_s, run.moved_there = span.seconds, self.switcher.switch_bytes(label)
            run.switch_hidden_s = self._record_hidden("switch", run, busy, waited_from_ns)
            if following is not None and not following.at_home:
                self.switcher.prefetch(following.runner.label)
        with self._phase("compute", step, **run.about) as span:
            part = torch.zeros(2, dtype=torch.float64)
            if micro_batches:
                part = run.runner.run(step, run.assigned.bucket, micro_batches, forward_only=forward_only)
        run.compute_s = span.seconds
        if not run.at_home and not forward_only:
            with self._phase("flush", step, **run.about) as span:
                goes_on = self._adds_after_home and following is not None and following.at_home
                self.switcher.start_flush(label, beside_home=goes_on)
            run.flush_s, run.moved_back = span.seconds, self.switcher.flush_bytes(label)
        return part

    def _finish_flushes(self, step: int, runs: Mapping[str, _BucketRun], labels: Iterable[str]) -> None:
        for label in list(labels):
            run = runs[label]
            waited_from_ns = time.perf_counter_ns()
            with self._phase("flush", step, **run.about) as span:
                busy = self.switcher.finish_flush(label)
            run.flush_s += span.seconds
            run.flush_hidden_s = self._record_hidden("flush", run, busy, waited_from_ns)

    def _record_hidden(self, name: str, run: _BucketRun, busy: Sequence[Interval], waited_from_ns: int) -> float:
        """Notes what ran beside other work before this rank began to wait for it; returns the seconds."""
        hidden_ns = 0
        for start_ns, end_ns in busy:
            end_ns = min(end_ns, waited_from_ns)
            if end_ns > start_ns:
                self.recorder.add_hidden(name, start_ns, end_ns, **run.about)
                hidden_ns += end_ns - start_ns
        return hidden_ns * 1e-9

    def _build(self, batch: GlobalBatch, assigned: Sequence, spec: BucketSpec) -> list[MicroBatch]:
        packed = self._packing == "packed"
        build: Callable[..., MicroBatch] = pack_micro_batch if packed else pad_micro_batch
        return [
            build(
                [batch.sample(position) for position in micro_batch.samples],
                length_multiple=spec.length_multiple,
                num_tokens=micro_batch.num_padded_tokens // (1 if packed else len(micro_batch.samples)),
            )
            for micro_batch in assigned
        ]

    def _phase(self, name: str, step: int, **about: object):
        set_activity(" ".join([f"step {step}, {name}", *(f"{key} {value}" for key, value in about.items())]))
        return self.recorder.span(name, step=step, **about)


def bucket_specs(pool, *, micro_batch_tokens: Mapping[str, int] | None = None) -> list[BucketSpec]:
    """What the assignment must know of each entry of a checked pool."""
    micro_batch_tokens = micro_batch_tokens or {}
    return [
        BucketSpec(
            bound_tokens=entry.bound_tokens,
            num_replicas=entry.strategy.dp,
            num_stages=entry.strategy.pp,
            length_multiple=entry.strategy.tp if entry.strategy.sp else 1,
            micro_batch_tokens=micro_batch_tokens.get(str(entry.strategy)),
        )
        for entry in pool.entries
    ]
