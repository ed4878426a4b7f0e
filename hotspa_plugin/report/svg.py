"""Small charts as inline SVG.

Horizontal places are per cent of the width and curves stretch (their strokes do not), so that a chart
fills any width with its text at reading size. Every text and attribute is escaped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence

from markupsafe import Markup, escape

from hotspa_plugin.report.format import format_tick

MAX_POINTS = 1200


def tag(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """One element. ``class_`` gives ``class``, other underscores give hyphens; None leaves out."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children)
    return Markup(f"<{name}{said}>{inner}</{name}>" if inner else f"<{name}{said}/>")


def join(parts: Sequence[Markup]) -> Markup:
    return Markup("").join(parts)


def number(value: float) -> str:
    """A coordinate, short."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def percent(share: float) -> str:
    return f"{number(100 * share)}%"


def linear_ticks(low: float, high: float, target: int = 4) -> list[float]:
    """Round values from at most ``low`` to at least ``high``, about ``target`` steps apart."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / target
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around ``[low, high]``, both above 0."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stride = max(1, (last - first) // 5)
    return [10.0**i for i in range(first, max(last, first + 1) + stride, stride)]


def thin(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most about ``limit`` points, keeping the lowest and highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept.extend(sorted(ends))
    return kept


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Centred moving mean over ``window`` points, fewer at the ends."""
    half = window // 2
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smoothed = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        smoothed.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return smoothed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """Points by ascending x; those that are not finite are drawn as gaps. ``css`` is the line's class."""

    name: str
    points: Sequence[tuple[float, float]]
    css: str = "s1"
    smooth: bool = False  # draw the points faintly and a moving mean over them


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    format_y: Callable[[float], str],
    unit: tuple[float, str] = (1.0, ""),
    from_zero: bool = False,
    log_y: bool = False,
    height: int = 190,
) -> Markup:
    """Values over steps. ``unit`` is the y axis'."""
    size, unit_name = unit
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return tag("p", "No finite value was recorded.", class_="empty")
    ys = [y for _, y in finite]
    if log_y:
        ticks = log_ticks(min(ys), max(ys))
    else:
        ticks = [size * t for t in linear_ticks(0.0 if from_zero else min(ys) / size, max(ys) / size)]
    scale = math.log10 if log_y else float
    low, high = scale(ticks[0]), scale(ticks[-1])
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    width = (x_high - x_low) or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (point[0] - x_low) / width if x_high > x_low else 0.5
        return x, height * (1 - (scale(point[1]) - low) / (high - low))

    labels = [
        (height * (1 - (scale(t) - low) / (high - low)), f"{format_tick(t / size)} {unit_name}".strip()) for t in ticks
    ]
    grid = [tag("line", x1="0", x2="100%", y1=number(y), y2=number(y), class_="grid") for y, _ in labels]
    curves: list[Markup] = []
    marks: list[Markup] = []
    data = []
    for s in series:
        drawn = thin([p for p in s.points if math.isfinite(p[1])])
        places = [place(p) for p in drawn]
        smoothed = s.smooth and len(drawn) > 60
        curves.append(_path(places, f"line {s.css}" + (" faint" if smoothed else "")))
        if smoothed:
            full = [p for p in s.points if math.isfinite(p[1])]
            curves.append(_path([place(p) for p in thin(smooth(full, max(5, len(full) // 40)))], f"line {s.css}"))
        if len(drawn) <= 40:
            marks += [tag("circle", cx=percent(x), cy=number(y), r="2.6", class_=f"dot {s.css}") for x, y in places]
        for x, y in s.points:
            if not math.isfinite(y):
                at = percent((x - x_low) / width)
                marks.append(tag("text", "✕", tag("title", f"step {x:g}: {y}"), x=at, y="12", class_="bad"))
        data.append(
            {
                "name": s.name,
                "css": s.css,
                "at": [
                    [round(px, 5), round(py, 1), int(p[0]), format_y(p[1])]
                    for p, (px, py) in zip(drawn, places, strict=True)
                ],
            }
        )
    stretched = tag(
        "svg",
        *curves,
        viewBox=f"0 0 1000 {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
        x="0",
        y="0",
    )
    ticks_x = _step_ticks(x_low, x_high)
    axis = [
        tag(
            "text",
            f"{t:g}",
            x=percent((t - x_low) / width if x_high > x_low else 0.5),
            y=height + 18,
            text_anchor="middle" if x_high == x_low or x_low < t < x_high else "start" if t == x_low else "end",
            class_="tick",
        )
        for t in ticks_x
    ]
    plot = tag(
        "svg",
        *grid,
        stretched,
        *marks,
        *axis,
        width="100%",
        height=height + 24,
        class_="plot",
        role="img",
        aria_label=title,
        data_series=json.dumps(data),
        data_height=height,
    )
    return framed(labels, plot, height + 24)


def framed(labels: Sequence[tuple[float, str]], plot: Markup, height: int, css: str = "chart") -> Markup:
    """A plot with its y axis' labels, (y, text), in a column of their own."""
    texts = [tag("text", text, x="58", y=number(y + 4), text_anchor="end", class_="tick") for y, text in labels]
    axis = tag("svg", *texts, width=62, height=height, class_="y-axis", aria_hidden="true")
    return tag("div", axis, plot, class_=css)


def _path(places: Sequence[tuple[float, float]], css: str) -> Markup:
    moves = " ".join(f"{'L' if i else 'M'}{number(1000 * x)} {number(y)}" for i, (x, y) in enumerate(places))
    return tag("path", d=moves, class_=css)


def _step_ticks(low: float, high: float) -> list[float]:
    if high - low < 1:
        return [low]
    inner = [t for t in linear_ticks(low, high, 5) if t == int(t)]
    margin = 0.06 * (high - low)
    return [low, *(t for t in inner if low + margin < t < high - margin), high]
