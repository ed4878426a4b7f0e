"""The timeline of one step: what every rank did when, laid out but not drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hotspa_plugin.report.format import format_bytes, format_count, format_seconds
from hotspa_plugin.report.reader import Run
from hotspa_plugin.report.summary import pool_in_order
from hotspa_plugin.runtime.run_record import PHASES, PoolEntry
from hotspa_plugin.runtime.trace import RankSpans, Span

_DENSE_BLOCKS = 400  # per rank: beyond it, equal neighbours closer than a pixel are drawn as one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """One span to draw: ``start`` and ``width`` are shares of the step, ``css`` names its colour."""

    css: str
    label: str
    title: str
    start: float
    width: float
    hidden: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step over the ranks that are shown. Rows are (rank, its blocks in painting order)."""

    step: int
    seconds: float
    rows: tuple[tuple[int, tuple[Block, ...]], ...]
    num_ranks: int  # that have spans of this step, shown or not

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for _, blocks in self.rows)


def build_timeline(run: Run, step: int, max_ranks: int = 64) -> Timeline:
    """The spans of ``step``; of more than ``max_ranks`` ranks, as many evenly spread ones.

    Raises ValueError, naming the steps there are, where no rank kept spans of that step.
    """
    ranks = [r for r in run.ranks if r.steps.get(step)]
    if not ranks:
        kept = ", ".join(map(str, run.traced_steps[:10])) or "none"
        raise ValueError(f"no spans of step {step} in {run.directory}; steps with spans: {kept}")
    shown = ranks
    if len(ranks) > max_ranks:
        shown = [ranks[i * (len(ranks) - 1) // max(1, max_ranks - 1)] for i in range(max_ranks)]
    start_ns = min(s.start_ns for r in ranks for s in r.steps[step])
    end_ns = max(s.end_ns for r in ranks for s in r.steps[step])
    length_ns = max(1, end_ns - start_ns)
    pool = pool_in_order(run.info.pool)
    rows = tuple((r.rank, _blocks(r, step, start_ns, length_ns, pool)) for r in shown)
    return Timeline(step=step, seconds=length_ns * 1e-9, rows=rows, num_ranks=len(ranks))


def typical_step(run: Run) -> int | None:
    """A traced step to show first: of those in which most buckets ran, the one of median length.

    The first step, which pays for warm-up, is left out where there are others. None without spans.
    """
    steps = run.traced_steps[1:] or run.traced_steps
    num_buckets = {record.step: len(record.buckets) for record in run.steps}
    most = max((num_buckets.get(step, 0) for step in steps), default=0)
    lengths = {}
    for step in (step for step in steps if num_buckets.get(step, 0) == most):
        spans = [s for r in run.ranks for s in r.steps.get(step, ())]
        lengths[step] = max(s.end_ns for s in spans) - min(s.start_ns for s in spans)
    ordered = sorted(lengths, key=lambda step: (lengths[step], step))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def _blocks(rank: RankSpans, step: int, start_ns: int, length_ns: int, pool: Sequence[PoolEntry]) -> tuple[Block, ...]:
    spans, strategies = rank.steps[step], [entry.strategy for entry in pool]
    phases = [s for s in spans if s.name in PHASES]
    # What is no phase only groups or details phases; alone (saving, evaluation) it is drawn as other.
    others = [
        s
        for s in spans
        if s.name not in PHASES and not any(p.start_ns < s.end_ns and s.start_ns < p.end_ns for p in phases)
    ]
    blocks: list[Block] = []
    # Painting a span after those that enclose it leaves the innermost phase on top.
    for span in sorted((*phases, *others), key=lambda s: (s.hidden, s.depth, s.start_ns)):
        strategy = _strategy(span, pool)
        css = span.name if span.name in PHASES else "other"
        label = span.name
        if strategy is not None and span.name == "compute":
            label = strategy
            css = f"b{strategies.index(strategy)}" if strategy in strategies else css
        block = Block(
            css=css,
            label=label,
            title=_title(rank.rank, span, strategy, start_ns),
            start=(span.start_ns - start_ns) / length_ns,
            width=max(0, span.end_ns - span.start_ns) / length_ns,
            hidden=span.hidden,
        )
        blocks.append(block)
    return tuple(_merged(blocks) if len(blocks) > _DENSE_BLOCKS else blocks)


def _merged(blocks: Sequence[Block]) -> list[Block]:
    merged: list[Block] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if (
            last
            and (last.css, last.hidden) == (block.css, block.hidden)
            and (0 <= block.start - (last.start + last.width) < 0.0015)
        ):
            title = last.title if last.title.endswith(" and more") else f"{last.title} and more"
            merged[-1] = dataclasses.replace(last, width=block.start + block.width - last.start, title=title)
        else:
            merged.append(block)
    return merged


def _strategy(span: Span, pool: Sequence[PoolEntry]) -> str | None:
    """The strategy a span ran under: its ``strategy``, else that whose bound its ``bucket`` is."""
    if "strategy" in span.args:
        return str(span.args["strategy"])
    return next((e.strategy for e in pool if e.bound_tokens == span.args.get("bucket")), None)


def _title(rank: int, span: Span, strategy: str | None, start_ns: int) -> str:
    said = [
        f"rank {rank}: {span.name}" + (f" {strategy}" if strategy else "") + (" (overlapped)" if span.hidden else "")
    ]
    said.append(f"{format_seconds(span.seconds)}, from {format_seconds((span.start_ns - start_ns) * 1e-9)}")
    for name, value in span.args.items():
        if name in ("strategy", "bucket", "step"):
            continue
        name = name.replace("_", " ")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            said.append(
                f"{name} {format_bytes(value)}".replace("bytes ", "")
                if "bytes" in name.split()
                else f"{name} {format_count(value)}"
            )
        else:
            said.append(f"{name} {value}")
    return " · ".join(said)
