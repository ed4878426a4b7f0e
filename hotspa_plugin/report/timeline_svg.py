"""Drawing the timeline of one step as SVG, for a page or as a picture of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup

from hotspa_plugin.report.format import format_seconds, seconds_unit
from hotspa_plugin.report.palette import PHASE_COLORS, strategy_colors, text_on
from hotspa_plugin.report.reader import Run
from hotspa_plugin.report.summary import pool_in_order
from hotspa_plugin.report.svg import join, linear_ticks, number, percent, tag
from hotspa_plugin.report.timeline import Timeline, build_timeline, typical_step

AXIS_HEIGHT = 24


def lane_height(num_rows: int) -> int:
    return 24 if num_rows <= 8 else 18 if num_rows <= 16 else 12 if num_rows <= 40 else 9


def draw_rows(timeline: Timeline, x: Callable[[float], str], lane: int, gap: int = 4) -> Markup:
    """Blocks of all rows; ``x`` turns a share of the step into a coordinate. Needs ``lane`` pixels a row."""
    parts: list[Markup] = []
    for row, (_, blocks) in enumerate(timeline.rows):
        y = AXIS_HEIGHT + row * (lane + gap)
        parts.append(tag("rect", x=x(0), width=x(1), y=y, height=lane, class_="lane"))
        for block in blocks:
            top, height = (y + lane - max(3, lane // 4), max(3, lane // 4)) if block.hidden else (y, lane)
            width = max(block.width, 0.0004)
            # Touching neighbours stay apart by the lane's colour, drawn as a stroke.
            rect = tag(
                "rect",
                tag("title", block.title),
                x=x(block.start),
                width=x(width),
                y=top,
                height=height,
                class_=f"k {block.css}",
            )
            parts.append(rect)
            if width > 0.035 and not block.hidden and lane >= 16:
                text = tag("text", block.label, x=5, y=number(lane / 2 + 4), class_=f"in {block.css}")
                parts.append(tag("svg", text, x=x(block.start), width=x(width), y=y, height=lane, class_="clip"))
    return join(parts)


def draw_axis(timeline: Timeline, x: Callable[[float], str], height: int) -> Markup:
    size, unit = seconds_unit(timeline.seconds)
    length = timeline.seconds / size
    parts = []
    for i, t in enumerate(t for t in linear_ticks(0.0, length, 6) if t <= length):
        at = t / length
        parts.append(tag("line", x1=x(at), x2=x(at), y1=AXIS_HEIGHT - 6, y2=height, class_="grid"))
        anchor = "start" if i == 0 else "end" if at > 0.97 else "middle"
        parts.append(tag("text", f"{t:g} {unit}", x=x(at), y=12, text_anchor=anchor, class_="tick"))
    return join(parts)


def page_timeline(timeline: Timeline) -> Markup:
    """The timeline for the page: a column of rank names and a stretching drawing."""
    lane, gap = lane_height(len(timeline.rows)), 4 if len(timeline.rows) <= 16 else 2
    height = AXIS_HEIGHT + len(timeline.rows) * (lane + gap)
    every = 1 if lane >= 12 else 2
    names = [
        tag(
            "text",
            f"rank {rank}",
            x=58,
            y=number(AXIS_HEIGHT + row * (lane + gap) + lane / 2 + 4),
            text_anchor="end",
            class_="tick",
        )
        for row, (rank, _) in enumerate(timeline.rows)
        if row % every == 0
    ]
    axis = tag("svg", *names, width=62, height=height, class_="y-axis", aria_hidden="true")
    drawing = tag(
        "svg",
        draw_axis(timeline, percent, height),
        draw_rows(timeline, percent, lane, gap),
        width="100%",
        height=height,
        class_="spans",
        role="img",
        aria_label=f"Timeline of step {timeline.step}",
    )
    return tag("div", axis, tag("div", drawing, class_="scroll"), class_="chart timeline")


def timeline_svg(run: Run, step: int | None = None, *, width: int = 960, max_ranks: int = 16) -> str:
    """A picture of one step that stands alone (``width`` pixels wide, on its own light ground).

    Without ``step`` it is that of ``typical_step``. Raises ValueError where there are no spans.
    """
    if step is None:
        step = typical_step(run)
        if step is None:
            raise ValueError(f"no spans in {run.directory}: the run was recorded without a trace")
    timeline = build_timeline(run, step, max_ranks)
    pool = pool_in_order(run.info.pool)
    left, right, top = 74, 20, 78
    lane, gap = lane_height(len(timeline.rows)), 4
    inner = width - left - right

    def x(share: float) -> str:
        return number(share * inner)

    body_height = AXIS_HEIGHT + len(timeline.rows) * (lane + gap)
    height = top + body_height + 14
    used = {block.css for _, blocks in timeline.rows for block in blocks}
    colors = strategy_colors([entry.strategy for entry in pool])
    names = [(f"b{i}", f"{e.strategy} ≤ {e.bound_tokens:,}", colors[e.strategy][0]) for i, e in enumerate(pool)]
    names += [(phase, phase, pair[0]) for phase, pair in PHASE_COLORS.items()]
    style = "".join(f".{css}{{fill:{color}}}.in.{css}{{fill:{text_on(color)}}}" for css, _, color in names)
    style += (
        "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#3d4652}"
        ".title{font-size:15px;font-weight:600;fill:#151a21}.tick{fill:#66717f}.in{font-size:11px;font-weight:600}"
        ".lane{fill:#eef0f4}.grid{stroke:#dde1e7}.k{stroke:#fff;stroke-width:.6}"
    )
    legend, at = [], float(left)
    for css, name, _ in names:
        if css not in used:
            continue
        legend.append(tag("rect", x=number(at), y=44, width=11, height=11, rx=2, class_=css))
        legend.append(tag("text", name, x=number(at + 16), y=54))
        at += 34 + 6.6 * len(name)
    labels = [
        tag(
            "text",
            f"rank {rank}",
            x=left - 10,
            y=number(top + AXIS_HEIGHT + row * (lane + gap) + lane / 2 + 4),
            text_anchor="end",
            class_="tick",
        )
        for row, (rank, _) in enumerate(timeline.rows)
    ]
    title = f"One optimizer step under {len(pool)} strategies: step {timeline.step}, {format_seconds(timeline.seconds)}"
    body = tag(
        "g",
        draw_axis(timeline, x, body_height),
        draw_rows(timeline, x, lane, gap),
        transform=f"translate({left} {top})",
    )
    return (
        str(
            tag(
                "svg",
                tag("title", title),
                tag("style", Markup(style)),
                tag("rect", width=width, height=height, rx=8, fill="#fff"),
                tag("text", title, x=left, y=27, class_="title"),
                *legend,
                *labels,
                body,
                xmlns="http://www.w3.org/2000/svg",
                width=width,
                height=height,
                viewBox=f"0 0 {width} {height}",
                role="img",
            )
        )
        + "\n"
    )


def write_timeline_svg(run: Run, path: str | os.PathLike[str], step: int | None = None, **options: int) -> Path:
    """Writes ``timeline_svg`` to ``path``."""
    path = Path(path)
    path.write_text(timeline_svg(run, step, **options), encoding="utf-8")
    return path
