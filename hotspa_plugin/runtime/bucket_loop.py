"""One batch through all its buckets: which strategy, in which order, switched how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.data import BatchAssignment, BucketAssignment, BucketSpec, Sample, assign_batch
from hotspa_plugin.data.micro_batch import PackedMicroBatch, PaddedMicroBatch, pack_micro_batch, pad_micro_batch
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.hot_switcher import NOTHING_MOVED, HotSwitcher
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.runtime.run_record import BucketRecord

MicroBatch = PackedMicroBatch | PaddedMicroBatch



class GlobalBatch(Protocol):
    """The sequences of one optimizer step, whose lengths are known before any of them is read."""

    step: int
    lengths: np.ndarray  # tokens, int64, shape [num_sequences]

    def sample(self, position: int) -> Sample: ...


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


class BucketLoop:
    """Runs every non-empty bucket of a batch under its strategy, the others first and home last."""

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
        descending: bool = False,
    ) -> None:
        """``descending`` runs the other strategies' buckets from the longest bound to the shortest.

        ``assigner`` lays batches out in place of the pool's fixed bounds, where it is given.
        """
        self.assigner = assigner
        self._descending = descending
        self._buckets = tuple(buckets)
        self._runners = tuple(runners)
        self._home_index = home_index
        self.switcher = switcher
        self._packing = packing
        self.recorder = recorder or NullRecorder()
        self._device = device or torch.device("cpu")
        # Read by error handlers: what this rank was doing when it stopped.
        self.phase = "idle"

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
            descending=self._descending,
        )

    def run(self, batch: GlobalBatch, *, forward_only: bool = False) -> BatchResult:
        """Trains (or with ``forward_only`` evaluates) one batch. Gradients end up, unreduced, in home's accumulators."""
        with self._phase("plan", batch.step):
            if self.assigner is not None:
                assignment = self.assigner.assign(batch.lengths)
            else:
                assignment = assign_batch(batch.lengths, buckets=self._buckets, packing=self._packing)
            check_agreement(f"the assignment of step {batch.step}", assignment.digest(), device=self._device)
        total = torch.zeros(2, dtype=torch.float64)
        records = []
        sign = -1 if self._descending else 1
        by_home_last = sorted(assignment.buckets, key=lambda b: (b.bucket == self._home_index, sign * b.bucket))
        for bucket in by_home_last:
            if bucket.bucket == self._home_index:
                self.switcher.release()
            part, record = self._run_bucket(batch, bucket, forward_only)
            total += part
            records.append(record)
        self.switcher.release()
        with self._phase("wait", batch.step):
            total = total.to(self._device)
            dist.all_reduce(total)
            loss_sum, num_targets = total.tolist()
        return BatchResult(
            loss_sum=loss_sum,
            num_target_tokens=round(num_targets),
            buckets=tuple(sorted(records, key=lambda record: record.bound_tokens)),
            assignment=assignment,
        )

    def _run_bucket(
        self, batch: GlobalBatch, assigned: BucketAssignment, forward_only: bool
    ) -> tuple[torch.Tensor, BucketRecord]:
        index, step = assigned.bucket, batch.step
        runner, spec = self._runners[index], self._buckets[index]
        at_home = index == self._home_index
        about = {"bucket": spec.bound_tokens, "strategy": runner.label}
        with self._phase("data", step, **about):
            micro_batches = self._build(batch, assigned.replicas[runner.dp_rank], spec)
        moved_there, switch_s = NOTHING_MOVED, 0.0
        if not at_home:
            with self._phase("switch", step, **about) as span:
                moved_there = self.switcher.enter(runner.label)
            switch_s = span.seconds
        with self._phase("compute", step, **about) as span:
            part = torch.zeros(2, dtype=torch.float64)
            if micro_batches:
                part = runner.run(step, index, micro_batches, forward_only=forward_only)
        compute_s = span.seconds
        moved_back, flush_s = NOTHING_MOVED, 0.0
        if not at_home and not forward_only:
            with self._phase("flush", step, **about) as span:
                moved_back = self.switcher.flush(runner.label)
            flush_s = span.seconds
        record = BucketRecord(
            bound_tokens=spec.bound_tokens,
            strategy=runner.label,
            sequences=assigned.num_sequences,
            tokens=assigned.num_tokens,
            padding_tokens=assigned.num_padding_tokens,
            num_micro_batches=max(map(len, assigned.replicas)),
            switch_s=switch_s,
            compute_s=compute_s,
            flush_s=flush_s,
            switch_bytes_local=moved_there.local,
            switch_bytes_remote=moved_there.remote,
            flush_bytes_local=moved_back.local,
            flush_bytes_remote=moved_back.remote,
        )
        return part, record

    def _build(self, batch: GlobalBatch, assigned: Sequence, spec: BucketSpec) -> list[MicroBatch]:
        build: Callable[..., MicroBatch] = pack_micro_batch if self._packing == "packed" else pad_micro_batch
        return [
            build(
                [batch.sample(position) for position in micro_batch.samples],
                length_multiple=spec.length_multiple,
                num_tokens=micro_batch.num_padded_tokens // (1 if self._packing == "packed" else len(micro_batch.samples)),
            )
            for micro_batch in assigned
        ]

    def _phase(self, name: str, step: int, **about: object):
        self.phase = " ".join([f"step {step}, {name}", *(f"{key} {value}" for key, value in about.items())])
        set_activity(self.phase)
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
