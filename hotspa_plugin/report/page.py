"""One self-contained HTML page from a run's records."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from hotspa_plugin.report import format as formats
from hotspa_plugin.report.comparison import compare, verdict
from hotspa_plugin.report.histogram_svg import length_chart
from hotspa_plugin.report.palette import PHASE_COLORS, strategy_colors, text_on
from hotspa_plugin.report.reader import Run, read_run
from hotspa_plugin.report.summary import RunSummary, pool_in_order, summarize, summarize_buckets
from hotspa_plugin.report.svg import Series, line_chart
from hotspa_plugin.report.timeline import build_timeline, typical_step
from hotspa_plugin.report.timeline_svg import page_timeline
from hotspa_plugin.runtime.run_record import PHASES, TRACE_FILE, StepRecord
from hotspa_plugin.runtime.trace import merge_trace

PAGE_FILE = "report.html"
MAX_BLOCKS = 16_000  # spans drawn over all timelines of one page: about 4 MB
MAX_TIMELINES = 60


def write_report(directory: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> Path:
    """Writes the page of the run in ``directory`` to ``output`` (default: ``report.html`` in that folder).

    The page needs no other file and no network. ``trace.json`` is made where a run ended before it could
    make its own. Raises ValueError as ``read_run`` does.
    """
    run = read_run(directory)
    if run.ranks and not (run.directory / TRACE_FILE).exists():
        merge_trace(run.directory)
    path = Path(output) if output is not None else run.directory / PAGE_FILE
    if not path.parent.is_dir():
        raise ValueError(f"no folder {path.parent} for the report; make it, or choose another output")
    path.write_text(render(run), encoding="utf-8")
    return path


def render(run: Run) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hotspa_plugin.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=formats.format_bytes,
        seconds=formats.format_seconds,
        count=formats.format_count,
        share=formats.format_share,
        value=formats.format_value,
        difference=formats.format_difference,
    )
    pool = pool_in_order(run.info.pool)
    summary, buckets = summarize(run), summarize_buckets(run)
    lengths = run.info.data.lengths if run.info.data else None
    index_of = {entry.strategy: i for i, entry in enumerate(pool)}
    asset = environment.loader.get_source  # type: ignore[union-attr]
    return environment.get_template("report.html.j2").render(
        run=run,
        info=run.info,
        pool=pool,
        index_of=index_of,
        summary=summary,
        parts=_parts_of_step(summary, index_of),
        buckets=buckets,
        most_moved_bytes=max(
            (
                max(b.switch_bytes_local + b.switch_bytes_remote, b.flush_bytes_local + b.flush_bytes_remote)
                for b in buckets
            ),
            default=0,
        ),
        charts=_charts(run, summary),
        length_chart=length_chart(lengths, pool) if lengths else None,
        timelines=_timelines(run),
        comparison=_comparison(run),
        style=Markup(asset(environment, "report.css")[0] + color_rules([e.strategy for e in pool])),
        script=Markup(asset(environment, "report.js")[0]),
    )


def color_rules(strategies: Sequence[str]) -> str:
    """CSS for each phase's and each strategy's colour, in both themes."""
    colors = dict(PHASE_COLORS)
    colors.update((f"b{i}", pair) for i, pair in enumerate(strategy_colors(strategies).values()))
    light = "".join(f"--c-{name}:{pair[0]};--t-{name}:{text_on(pair[0])};" for name, pair in colors.items())
    dark = "".join(f"--c-{name}:{pair[1]};--t-{name}:{text_on(pair[1])};" for name, pair in colors.items())
    rules = "".join(
        f".{name}{{fill:var(--c-{name});background-color:var(--c-{name})}}"
        f".in.{name}{{fill:var(--t-{name});background:none}}"
        f".s-{name}{{stroke:var(--c-{name})}}"
        for name in colors
    )
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{rules}"


def _parts_of_step(summary: RunSummary, index_of: dict[str, int]) -> list[dict[str, Any]]:
    """What a mean step is made of, in order; compute is split by strategy as far as buckets recorded it."""
    total = sum(summary.phase_s.values())
    parts: list[dict[str, Any]] = []
    for phase in (*PHASES, "other"):
        rest = summary.phase_s[phase]
        if phase == "compute":
            for strategy, seconds in summary.compute_s.items():
                rest -= seconds
                css = f"b{index_of[strategy]}" if strategy in index_of else "compute"
                parts.append({"css": css, "name": f"compute {strategy}", "seconds": seconds, "hidden_s": 0.0})
            rest = rest if rest > 0.001 * total else 0.0
        parts.append({"css": phase, "name": phase, "seconds": rest, "hidden_s": summary.hidden_s.get(phase, 0.0)})
    total = max(total, sum(part["seconds"] for part in parts))
    return [
        {**part, "share": part["seconds"] / total if total else 0.0}
        for part in parts
        if part["seconds"] > 0 or part["hidden_s"] > 0
    ]


def _points(steps: Sequence[StepRecord], field: str) -> list[tuple[float, float]]:
    return [(step.step, value) for step in steps if (value := getattr(step, field)) is not None]


def _charts(run: Run, summary: RunSummary) -> list[dict[str, Any]]:
    """Charts over the steps; those of which nothing was recorded are left out."""
    steps = run.steps
    if len(steps) < 2:
        return []  # one point is no curve, and the tiles say it
    charts: list[dict[str, Any]] = []

    def add(title: str, subtitle: str, series: list[Series], **options: Any) -> None:
        series = [s for s in series if s.points]
        if series:
            charts.append(
                {
                    "title": title,
                    "subtitle": subtitle,
                    "series": series,
                    "svg": line_chart(series, title=f"{title} over steps", **options),
                }
            )

    add(
        "Loss",
        "mean per target token",
        [Series(name="loss", points=_points(steps, "loss"), smooth=True)],
        format_y=formats.format_value,
    )
    add(
        "Throughput",
        "tokens/s",
        [Series(name="tokens/s", points=_points(steps, "tokens_per_s"), smooth=True)],
        format_y=formats.format_count,
        from_zero=True,
    )
    add(
        "Memory of the fullest rank",
        "",
        [
            Series(name="peak", points=_points(steps, "peak_memory_bytes")),
            Series(name="resident", points=_points(steps, "resident_memory_bytes"), css="s2"),
        ],
        format_y=formats.format_bytes,
        from_zero=True,
        unit=formats.bytes_unit(summary.peak_memory_bytes or 0),
    )
    norms = _points(steps, "grad_norm")
    finite = [n for _, n in norms if math.isfinite(n)]
    wide = bool(finite) and min(finite) > 0 and max(finite) > 50 * min(finite)
    add(
        "Gradient norm",
        "log scale" if wide else "before clipping",
        [Series(name="norm", points=norms, smooth=True)],
        format_y=formats.format_value,
        from_zero=not wide,
        log_y=wide,
    )
    rates = _points(steps, "learning_rate")
    # A constant rate is no news; nor is one that a schedule has hardly moved yet.
    if rates and max(r for _, r in rates) > 1.05 * min(r for _, r in rates):
        add("Learning rate", "", [Series(name="rate", points=rates)], format_y=formats.format_value, from_zero=True)
    return charts


def _timelines(run: Run) -> list[dict[str, Any]]:
    """Drawn timelines by step, ``chosen`` the one shown first; as many as the page can carry, evenly spread."""
    first = typical_step(run)
    if first is None:
        return []
    chosen = build_timeline(run, first)
    budget = max(1, min(MAX_TIMELINES, MAX_BLOCKS // max(1, chosen.num_blocks)))
    steps = list(run.traced_steps)
    if len(steps) > budget:
        steps = sorted({first, *(steps[i * (len(steps) - 1) // max(1, budget - 1)] for i in range(budget))})
    timelines = []
    for step in steps:
        timeline = chosen if step == first else build_timeline(run, step)
        timelines.append(
            {
                "step": step,
                "seconds": timeline.seconds,
                "num_ranks": timeline.num_ranks,
                "num_shown": len(timeline.rows),
                "chosen": step == first,
                "svg": page_timeline(timeline),
                "finished": any(record.step == step for record in run.steps),
            }
        )
    return timelines


def _comparison(run: Run) -> dict[str, Any] | None:
    if run.comparison is None:
        return None
    comparison = run.comparison
    results = compare(comparison)
    fastest = max((r.tokens_per_s or 0.0 for r in comparison.runs), default=0.0)
    return {
        "hot": comparison.hot,
        "results": results,
        "fastest": fastest or 1.0,
        "verdict": verdict(comparison),
        "num_steps": comparison.num_steps,
        "num_tokens": comparison.num_tokens,
    }
