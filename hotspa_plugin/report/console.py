"""Tables and progress for the terminal."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hotspa_plugin.report.comparison import compare, verdict
from hotspa_plugin.report.format import (
    format_bytes,
    format_count,
    format_difference,
    format_seconds,
    format_share,
    format_value,
)
from hotspa_plugin.report.reader import Run
from hotspa_plugin.report.summary import summarize, summarize_buckets
from hotspa_plugin.runtime.run_record import Comparison, StepRecord


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True, style="bold" if i == 0 else "")
    return table


def bucket_table(run: Run) -> Table:
    """One row per bucket, within 80 columns; seconds and bytes between ranks are means per step in which it ran."""
    table = _table(
        "Buckets", "strategy", "up to", "seqs", "tokens", "padding", "compute", "switch", "flush", "sent", "peak"
    )
    table.padding = (0, 1, 0, 0)
    for b in summarize_buckets(run):
        sent = b.switch_bytes_remote + b.flush_bytes_remote
        table.add_row(
            Text(b.strategy),
            f"{b.bound_tokens:,}",
            format_share(b.sequence_share),
            format_share(b.token_share),
            format_share(b.padding_share),
            format_seconds(b.compute_s),
            format_seconds(b.switch_s),
            format_seconds(b.flush_s),
            format_bytes(sent) if sent else "–",
            format_bytes(b.peak_memory_bytes),
        )
    return table


def comparison_table(comparison: Comparison) -> Table:
    """Hot switching above each static strategy, fastest first."""
    hot = comparison.hot
    table = _table(
        f"The same {format_count(comparison.num_tokens)} tokens in {format_count(comparison.num_steps)} steps",
        "run",
        "tokens/s",
        "hot is",
        "spread",
        "loss",
        "differs by",
        "peak memory",
    )
    table.add_row(
        "hot switching",
        format_count(hot.tokens_per_s),
        "",
        "",
        format_value(hot.loss),
        "",
        format_bytes(hot.peak_memory_bytes),
    )
    for result in compare(comparison):
        static = result.run
        name = Text(f"static {static.label}")
        if static.tokens_per_s is None:
            # A reason is longer than any figure: print_comparison says it below the table.
            table.add_row(name, "–", "", "", "", "", "")
            continue
        spread = "–" if result.spread is None else f"±{format_share(result.spread)}"
        table.add_row(
            name,
            format_count(static.tokens_per_s),
            f"{result.ratio:.2f}x" if result.ratio else "–",
            spread,
            format_value(static.loss),
            format_difference(result.loss_difference),
            format_bytes(static.peak_memory_bytes),
        )
    return table


def print_run(run: Run, console: Console | None = None) -> None:
    """The table of buckets and one line of totals."""
    console = console or Console()
    console.print(bucket_table(run))
    summary = summarize(run)
    console.print(
        Text(
            f"{format_count(summary.num_steps)} steps, {format_count(summary.num_tokens)} tokens: "
            f"{format_count(summary.tokens_per_s)} tokens/s, loss {format_value(summary.last_loss)}, "
            f"{format_share(summary.switching_share)} of the time spent on switching, "
            f"peak memory {format_bytes(summary.peak_memory_bytes)}"
        ),
        soft_wrap=True,
    )
    for note in run.notes:
        console.print(Text(note), style="yellow", soft_wrap=True)


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """The comparison, why runs are missing, and the verdict."""
    console = console or Console()
    console.print(comparison_table(comparison))
    for static in comparison.static:
        if static.tokens_per_s is None:
            console.print(Text(f"static {static.label}: {static.error or 'no figures'}"), style="dim", soft_wrap=True)
    console.print(Text(verdict(comparison)), style="bold", soft_wrap=True)


class TrainingProgress:
    """Progress over steps: a bar on a terminal, else a line every ``interval_s`` seconds.

    Use it as a context manager and give every step's record to ``update``.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        description: str = "training",
        console: Console | None = None,
        interval_s: float = 5.0,
    ) -> None:
        self._console = console or Console()
        self._num_steps, self._done, self._description = num_steps, first_step, description
        self._interval_s, self._last_line_s = interval_s, float("-inf")
        self._progress: Progress | None = None
        self._task: Any = None
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(compact=True),
                console=self._console,
            )

    def __enter__(self) -> TrainingProgress:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task(
                self._description, total=self._num_steps, completed=self._done, figures=""
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, record: StepRecord) -> None:
        """Shows a finished step."""
        self._done += 1
        figures = f"{format_count(record.tokens_per_s)} tokens/s, loss {format_value(record.loss)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, figures=figures)
            return
        now = time.monotonic()
        if now - self._last_line_s >= self._interval_s or self._done >= self._num_steps:
            self._last_line_s = now
            line = Text(f"{self._description}: step {self._done}/{self._num_steps}, {figures}")
            self._console.print(line, soft_wrap=True)
