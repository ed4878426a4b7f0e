"""The loop around the trainer: batches in, records out, checkpoints on the way."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.data import GlobalBatchSampler, SequenceBatch, SequenceSource
from hotspa_plugin.integrations.megatron import checkpoint
from hotspa_plugin.integrations.megatron.trainer import StepResult, Trainer
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.memory import PeakMemory, resident_bytes
from hotspa_plugin.runtime.run_record import StepRecord

CHECKPOINT_FOLDER = "checkpoints"


@dataclasses.dataclass(kw_only=True)
class TrainLoop:
    """Trains ``trainer`` on ``source`` from ``first_step`` up to (not including) ``num_steps``.

    ``on_step`` is called on rank 0 with each step's record.
    """

    trainer: Trainer
    source: SequenceSource
    sampler: GlobalBatchSampler
    num_steps: int
    first_step: int = 0
    check_every: int = 0  # steps between checks for silent damage; 0: never
    save_every: int = 0  # steps; 0: never; else the last step is saved too
    folder: Path | None = None  # where checkpoints go
    on_step: Callable[[StepRecord], None] | None = None
    prepare: Callable[[np.ndarray], None] | None = None  # is told the lengths of the next batch before each step

    def resume(self) -> None:
        """Goes on from the latest checkpoint in ``folder``. ValueError where there is none or it does not fit."""
        assert self.folder is not None
        latest = checkpoint.latest(self.folder / CHECKPOINT_FOLDER)
        if latest is None:
            raise ValueError(
                f"{self.folder} holds no checkpoint to resume from: run with save_every first, "
                "or start a new run with --out"
            )
        about = checkpoint.read_about(latest)
        if about["data"] != self.source.fingerprint():
            raise ValueError(
                f"checkpoint {latest} was written while training on other data: give the same data, "
                "or start a new run with --out"
            )
        checkpoint.load(latest, self.trainer)
        self.sampler.load_state_dict(about["sampler"])
        self.first_step = about["step"]

    def run(self) -> Iterator[StepRecord]:
        """Trains a step for each record asked for (the same loss on all ranks; times and memory are this rank's)."""
        recorder, device = self.trainer.recorder, torch.device(torch.cuda.current_device())
        memory = PeakMemory(device)
        for step in range(self.first_step, self.num_steps):
            memory.restart()
            recorder.start_step()
            started_s = time.perf_counter()
            with recorder.span("plan", step=step, part="sample"):
                batch = SequenceBatch(step=step, source=self.source, indices=self.sampler.next_batch())
                _check_order(batch, device)
                if self.prepare is not None and step + 1 < self.num_steps:
                    self.prepare(self.source.lengths[self.sampler.peek()])
            is_checked = self.check_every > 0 and (step + 1) % self.check_every == 0
            if self.check_every:
                self.trainer.schedule.is_checked = is_checked
            result = self.trainer.train_step(batch)
            if is_checked:
                self.trainer.schedule.check_copies(f"step {step}, after the optimizer")
            record = self._record(step, batch, result, memory, time.perf_counter() - started_s)
            recorder.finish_step(record)
            if self.on_step and self.trainer.rank == 0:
                self.on_step(record)
            if not math.isfinite(record.loss):
                raise RuntimeError(
                    f"step {step}: the loss is {record.loss}. Lower the learning rate or look at the data; the last "
                    "checkpoint is from before"
                )
            last = step + 1 == self.num_steps
            if self.folder and self.save_every and (last or (step + 1) % self.save_every == 0):
                set_activity(f"step {step}, checkpoint")
                about = {"data": self.source.fingerprint(), "sampler": self.sampler.state_dict()}
                checkpoint.save(self.folder / CHECKPOINT_FOLDER, step + 1, self.trainer, about)
            yield record

    def _record(
        self, step: int, batch: SequenceBatch, result: StepResult, memory: PeakMemory, elapsed_s: float
    ) -> StepRecord:
        recorder = self.trainer.recorder
        seconds = recorder.seconds()
        most = torch.tensor([memory.peak_bytes(), resident_bytes()], dtype=torch.int64)
        most = most.to(torch.cuda.current_device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        num_tokens = int(batch.lengths.sum())
        return StepRecord(
            step=step,
            loss=result.batch.loss,
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=num_tokens,
            target_tokens=result.batch.num_target_tokens,
            sequences=len(batch.indices),
            tokens_per_s=num_tokens / elapsed_s,
            seconds=seconds,
            hidden_s=recorder.hidden_s(),
            peak_memory_bytes=int(most[0]),
            resident_memory_bytes=int(most[1]),
            buckets=result.batch.buckets,
        )


def _check_order(batch: SequenceBatch, device: torch.device) -> None:
    """Compares which sequences make up the batch: equal lengths alone would hide that ranks read different ones."""
    said = {
        "number of sequences": len(batch.indices),
        "first sequences": batch.indices[:8].tolist(),
        "order": hashlib.sha256(batch.indices.astype("<i8").tobytes()).hexdigest()[:16],
        "lengths": hashlib.sha256(batch.lengths.astype("<i8").tobytes()).hexdigest()[:16],
    }
    check_agreement(f"the sequences of step {batch.step}", said, device=device)
