"""What hot switching did in each step: one more log line, scalars for Megatron's writers, and run records."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.runtime.bucket_loop import BatchResult
from hotspa_plugin.runtime.memory import PeakMemory, resident_bytes
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder
from hotspa_plugin.runtime.run_record import (
    BucketRecord,
    MachineInfo,
    ModelInfo,
    PoolEntry,
    RunInfo,
    StepRecord,
    installed_versions,
)
from hotspa_plugin.runtime.trace import Span
from hotspa_plugin.strategy import StrategyPool


class BucketTotals:
    """Sums of one bucket's records over the steps since the last log line."""

    def __init__(self, first: BucketRecord) -> None:
        self.name = f"{first.strategy}:{first.bound_tokens}"
        self.sequences = self.tokens = self.bytes = 0
        self.compute_s = self.switch_s = 0.0

    def add(self, record: BucketRecord) -> None:
        self.sequences += record.sequences
        self.tokens += record.tokens
        self.compute_s += record.compute_s
        self.switch_s += record.switch_s + record.flush_s
        self.bytes += record.switch_bytes_remote + record.flush_bytes_remote


class StepLog:
    """Collects what the schedule reports, and tells it at Megatron's own log intervals.

    Seconds are this rank's; bytes are those sent between ranks, over all of them.
    """

    def __init__(self) -> None:
        self._totals: dict[str, BucketTotals] = {}
        self._num_steps = 0

    def add(self, result: BatchResult) -> None:
        self._num_steps += 1
        for record in result.buckets:
            name = f"{record.strategy}:{record.bound_tokens}"
            self._totals.setdefault(name, BucketTotals(record)).add(record)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Names and means per step since the last :meth:`restart`."""
        steps = max(self._num_steps, 1)
        for total in self._totals.values():
            yield f"hotspa/{total.name} sequences", total.sequences / steps
            yield f"hotspa/{total.name} tokens", total.tokens / steps
            yield f"hotspa/{total.name} seconds", total.compute_s / steps
        yield "hotspa/switch seconds", sum(t.switch_s for t in self._totals.values()) / steps
        yield "hotspa/switch bytes", sum(t.bytes for t in self._totals.values()) / steps

    def line(self) -> str:
        """Means per step in one line: each bucket's strategy, sequences, tokens and seconds, then the switches."""
        steps = max(self._num_steps, 1)
        parts = [
            f"{t.name}: {t.sequences / steps:g} sequences {t.tokens / steps:g} tokens {t.compute_s / steps:.3f} s"
            for t in sorted(self._totals.values(), key=lambda t: int(t.name.rpartition(":")[2]))
        ]
        values = dict(self.scalars())
        parts.append(f"switches: {values['hotspa/switch seconds']:.3f} s {_binary(values['hotspa/switch bytes'])}")
        return " hotspa | " + " | ".join(parts) + " |"

    def restart(self) -> None:
        self._totals.clear()
        self._num_steps = 0


def _binary(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


class SpanClock(NullRecorder):
    """Records nothing, but times what the log line tells: computing and the switches, the device waited for."""

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[Span]:
        told = name in ("switch", "compute", "flush")
        if told and not cpu.is_enabled():
            torch.cuda.synchronize()
        span = Span(name=name, args=args, start_ns=time.perf_counter_ns())
        try:
            yield span
        finally:
            if told and not cpu.is_enabled():
                torch.cuda.synchronize()
            span.end_ns = time.perf_counter_ns()


class StepRecords:
    """Writes the records of ``--hotspa-report-dir``; nothing where it is not given."""

    def __init__(self, args: argparse.Namespace, pool: StrategyPool) -> None:
        self.recorder: RunRecorder | NullRecorder = SpanClock()
        if args.hotspa_report_dir is None:
            return
        self._memory = PeakMemory(torch.device(torch.cuda.current_device()))
        self._started_s = time.perf_counter()
        self.recorder = RunRecorder(
            args.hotspa_report_dir,
            dist.get_rank(),
            dist.get_world_size(),
            info=_run_info(args, pool) if dist.get_rank() == 0 else None,
            resume=args.iteration > 0,
            first_step=args.iteration,
            synchronize=None if cpu.is_enabled() else torch.cuda.synchronize,
        )

    def finish_step(self, step: int, result: BatchResult, grad_norm: float | None, learning_rate: float | None) -> None:
        """Ends a step; collective where records are written."""
        if not self.recorder.enabled:
            return
        most = torch.tensor([self._memory.peak_bytes(), resident_bytes()], dtype=torch.int64)
        most = most.to(torch.cuda.current_device())
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        elapsed_s = time.perf_counter() - self._started_s
        num_tokens = sum(bucket.tokens for bucket in result.buckets)
        self.recorder.finish_step(
            StepRecord(
                step=step,
                loss=result.loss,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                tokens=num_tokens,
                target_tokens=result.num_target_tokens,
                sequences=sum(bucket.sequences for bucket in result.buckets),
                tokens_per_s=num_tokens / max(elapsed_s, 1e-9),
                seconds=self.recorder.seconds(),
                hidden_s=self.recorder.hidden_s(),
                peak_memory_bytes=int(most[0]),
                resident_memory_bytes=int(most[1]),
                buckets=result.buckets,
            )
        )

    def start_step(self) -> None:
        """Starts the step's clock and peak anew, leaving out evaluation and saving."""
        if self.recorder.enabled:
            self._memory.restart()
            self.recorder.start_step()
            self._started_s = time.perf_counter()

    def close(self) -> None:
        """Ends recording; collective where records are written."""
        if self.recorder.enabled:
            dist.barrier()  # all spans are written before rank 0 merges them
            self.recorder.close()


def write_scalars(log: StepLog, iteration: int, writers: Sequence[Any]) -> None:
    """Gives the scalars to Megatron's TensorBoard and Weights & Biases writers, those that are there."""
    tensorboard, wandb = writers
    for name, value in log.scalars():
        if tensorboard:
            tensorboard.add_scalar(name, value, iteration)
        if wandb:
            wandb.log({name: value}, iteration)


def _run_info(args: argparse.Namespace, pool: StrategyPool) -> RunInfo:
    dtype = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    sizes = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "padded_vocab_size",
    )
    return RunInfo(
        world_size=dist.get_world_size(),
        pool=tuple(PoolEntry(strategy=str(e.strategy), bound_tokens=e.bound_tokens) for e in pool.entries),
        home=str(pool.home),
        model=ModelInfo(name="megatron", dtype=dtype, config={name: getattr(args, name) for name in sizes}),
        machine=MachineInfo.here(device="cpu" if cpu.is_enabled() else torch.cuda.get_device_name()),
        versions=installed_versions(),
        seed=args.seed,
    )
