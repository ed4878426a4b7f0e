"""Hot switching against static strategies over the same batches: ratios, spread, and who wins."""

from __future__ import annotations

import dataclasses
import math
import statistics

from hotspa_plugin.report.format import format_count, format_difference, format_share
from hotspa_plugin.runtime.run_record import ComparedRun, Comparison

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table 2 is close enough.
_T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09}
_SPREAD_UNKNOWN = 0.03  # relative difference under which runs without enough steps count as equal


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticResult:
    """Hot switching against one static strategy over the same batches.

    ``ratio`` is hot's tokens/s over the static run's. ``spread`` is half the 95 % interval of that ratio,
    relative, from the step by step ratios of the same batch; None with fewer than three common steps.
    ``loss_difference`` is the largest relative one over the common steps.
    """

    run: ComparedRun
    ratio: float | None
    spread: float | None
    loss_difference: float | None

    @property
    def outcome(self) -> str:
        """``hot``, ``static``, ``tie`` or ``none`` (no figures)."""
        if self.ratio is None or self.ratio <= 0:
            return "none"
        if abs(math.log(self.ratio)) <= (self.spread if self.spread is not None else _SPREAD_UNKNOWN):
            return "tie"
        return "hot" if self.ratio > 1 else "static"


def compare(comparison: Comparison) -> tuple[StaticResult, ...]:
    """One result per static run, fastest first; those without figures last."""
    results = [_against(comparison.hot, static) for static in comparison.static]
    return tuple(sorted(results, key=lambda r: -(r.run.tokens_per_s or 0.0)))


def _against(hot: ComparedRun, static: ComparedRun) -> StaticResult:
    ratio = hot.tokens_per_s / static.tokens_per_s if hot.tokens_per_s and static.tokens_per_s else None
    pairs = [(h, s) for h, s in zip(hot.step_s, static.step_s, strict=False) if h > 0 and s > 0]
    spread = None
    if len(pairs) >= 3:
        logs = [math.log(s / h) for h, s in pairs]
        degrees = len(logs) - 1
        quantile = next((t for d, t in sorted(_T95.items(), reverse=True) if d <= degrees), 12.7)
        spread = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    losses = list(zip(hot.losses, static.losses, strict=False))
    if not losses and hot.loss is not None and static.loss is not None:
        losses = [(hot.loss, static.loss)]
    # A loss that is NaN on one side differs without bound; max() would hide it behind the others.
    differences = [
        math.inf
        if math.isnan(h) != math.isnan(s)
        else 0.0
        if h == s or math.isnan(h)
        else abs(h - s) / max(abs(s), 1e-12)
        for h, s in losses
    ]
    return StaticResult(run=static, ratio=ratio, spread=spread, loss_difference=max(differences, default=None))


def verdict(comparison: Comparison) -> str:
    """One or two sentences that say plainly who wins, and whether the losses agree."""
    results = compare(comparison)
    best = next((r for r in results if r.ratio is not None), None)
    hot = comparison.hot
    if hot.tokens_per_s is None:
        sentence = f"Hot switching has no figures ({hot.error or 'it did not run'})."
    elif best is None:
        sentence = "No static strategy has figures to compare with."
    else:
        figures = f"{format_count(hot.tokens_per_s)} against {format_count(best.run.tokens_per_s)} tokens/s"
        if best.outcome == "tie":
            within = best.spread if best.spread is not None else _SPREAD_UNKNOWN
            sentence = (
                f"A tie: hot switching and static {best.run.label} differ by {format_share(abs(best.ratio - 1))}, "
                f"inside the spread of {format_share(within)} between steps ({figures})."
            )
        elif best.outcome == "hot":
            sentence = (
                f"Hot switching wins: {best.ratio:.2f} times the best static strategy, {best.run.label} ({figures})."
            )
        else:
            sentence = (
                f"Static {best.run.label} wins: hot switching reaches {best.ratio:.2f} times its speed ({figures})."
            )
    worst = max((r for r in results if r.loss_difference is not None), key=lambda r: r.loss_difference, default=None)
    if worst is None:
        return sentence
    if worst.loss_difference <= comparison.loss_tolerance:
        return f"{sentence} The losses agree within {format_difference(worst.loss_difference)}."
    return (
        f"{sentence} The losses do not agree: {worst.run.label} differs by {format_difference(worst.loss_difference)}, "
        f"more than {format_difference(comparison.loss_tolerance)}."
    )
