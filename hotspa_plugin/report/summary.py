"""The figures that page and terminal both show, taken from run records."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from hotspa_plugin.report.reader import Run
from hotspa_plugin.runtime.run_record import PHASES, PoolEntry, StepRecord


def pool_in_order(pool: Sequence[PoolEntry]) -> tuple[PoolEntry, ...]:
    return tuple(sorted(pool, key=lambda entry: entry.bound_tokens))


def steady_steps(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """All steps but the first, which pays for warm-up; the first alone where there is no other."""
    return steps[1:] if len(steps) > 1 else steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Over the steady steps unless said otherwise; None where the records do not say."""

    num_steps: int
    tokens_per_s: float | None
    slowest_tokens_per_s: float | None
    fastest_tokens_per_s: float | None
    num_tokens: int  # over all steps
    num_sequences: int  # over all steps
    first_loss: float | None
    last_loss: float | None
    phase_s: dict[str, float]  # mean per step, exposed, with "other"
    compute_s: dict[str, float]  # mean per step, by strategy; what its buckets recorded of phase_s["compute"]
    hidden_s: dict[str, float]  # mean per step
    step_s: float | None
    switching_share: float | None  # exposed switch and flush over the step
    peak_memory_bytes: int | None  # over all steps


def summarize(run: Run) -> RunSummary:
    steps, steady = run.steps, steady_steps(run.steps)
    total_s = sum(step.seconds.total for step in steady)
    num = max(1, len(steady))
    phase_s = {phase: sum(getattr(step.seconds, phase) for step in steady) / num for phase in (*PHASES, "other")}
    hidden_s = dict.fromkeys(PHASES, 0.0)
    for step in steady:
        for phase, seconds in step.hidden_s.items():
            hidden_s[phase] += seconds / num
    compute_s: dict[str, float] = {entry.strategy: 0.0 for entry in pool_in_order(run.info.pool)}
    for step in steady:
        for bucket in step.buckets:
            compute_s[bucket.strategy] = compute_s.get(bucket.strategy, 0.0) + bucket.compute_s / num
    rates = [step.tokens_per_s for step in steady if math.isfinite(step.tokens_per_s)]
    peaks = [step.peak_memory_bytes for step in steps if step.peak_memory_bytes is not None]
    return RunSummary(
        num_steps=len(steps),
        tokens_per_s=sum(step.tokens for step in steady) / total_s if total_s else None,
        slowest_tokens_per_s=min(rates, default=None),
        fastest_tokens_per_s=max(rates, default=None),
        num_tokens=sum(step.tokens for step in steps),
        num_sequences=sum(step.sequences for step in steps),
        first_loss=steps[0].loss if steps else None,
        last_loss=steps[-1].loss if steps else None,
        phase_s=phase_s,
        compute_s=compute_s,
        hidden_s=hidden_s,
        step_s=total_s / num if steady else None,
        switching_share=(phase_s["switch"] + phase_s["flush"]) * num / total_s if total_s else None,
        peak_memory_bytes=max(peaks, default=None),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketSummary:
    """One bucket over the whole run; seconds and bytes are means over the steps in which it ran."""

    bound_tokens: int
    strategy: str
    num_steps: int
    num_sequences: int
    num_tokens: int
    sequence_share: float
    token_share: float
    padding_share: float  # of all positions computed
    num_micro_batches: float
    switch_s: float
    compute_s: float
    flush_s: float
    switch_bytes_local: float
    switch_bytes_remote: float
    flush_bytes_local: float
    flush_bytes_remote: float
    peak_memory_bytes: int | None

    @property
    def tokens_per_compute_s(self) -> float | None:
        return self.num_tokens / (self.compute_s * self.num_steps) if self.compute_s else None


def summarize_buckets(run: Run) -> tuple[BucketSummary, ...]:
    """By ascending bound; only buckets that held a sequence in some step."""
    groups: dict[tuple[int, str], list] = {}
    for step in run.steps:
        for bucket in step.buckets:
            groups.setdefault((bucket.bound_tokens, bucket.strategy), []).append(bucket)
    all_sequences = sum(b.sequences for rows in groups.values() for b in rows)
    all_tokens = sum(b.tokens for rows in groups.values() for b in rows)
    summaries = []
    for (bound, strategy), rows in sorted(groups.items()):
        tokens, sequences = sum(b.tokens for b in rows), sum(b.sequences for b in rows)
        padding = sum(b.padding_tokens for b in rows)
        summaries.append(
            BucketSummary(
                bound_tokens=bound,
                strategy=strategy,
                num_steps=len(rows),
                num_sequences=sequences,
                num_tokens=tokens,
                sequence_share=sequences / max(1, all_sequences),
                token_share=tokens / max(1, all_tokens),
                padding_share=padding / max(1, tokens + padding),
                num_micro_batches=statistics.fmean(b.num_micro_batches for b in rows),
                **{
                    field: statistics.fmean(getattr(b, field) for b in rows)
                    for field in (
                        "switch_s",
                        "compute_s",
                        "flush_s",
                        "switch_bytes_local",
                        "switch_bytes_remote",
                        "flush_bytes_local",
                        "flush_bytes_remote",
                    )
                },
                peak_memory_bytes=max(
                    (b.peak_memory_bytes for b in rows if b.peak_memory_bytes is not None), default=None
                ),
            )
        )
    return tuple(summaries)
