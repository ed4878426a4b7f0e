"""Pictures of benchmarks as SVG files that stand alone: stacked bars, and a histogram of lengths with bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from hotspa_plugin.report.svg import number, tag

_WIDTH, _LABELS, _ROW, _TOP = 780, 230, 24, 56
_COLOURS = ("#3b76b8", "#d9822b", "#5a9e5f", "#b5495b", "#7d6bb0", "#8c8c8c")
_STYLE = "text{font:12px sans-serif;fill:#333} .title{font-size:14px;font-weight:600} .note{fill:#666}"


def bar_chart(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], *, unit: str) -> str:
    """One bar for each (label, values by part), its parts side by side from the left; the sum is written behind it."""
    parts = list(dict.fromkeys(name for _, values in rows for name in values))
    most = max((sum(values.values()) for _, values in rows), default=0.0) or 1.0
    room = _WIDTH - _LABELS - 90
    drawn = [_text(title, 10, 20, class_="title")]
    x = 10.0
    for colour, part in zip(_COLOURS, parts if len(parts) > 1 else [], strict=False):
        drawn += [tag("rect", x=number(x), y=32, width=12, height=12, fill=colour), _text(part, x + 16, 42)]
        x += 30 + 7 * len(part)
    for index, (label, values) in enumerate(rows):
        y, x = _TOP + index * _ROW, float(_LABELS)
        drawn.append(_text(label, _LABELS - 8, y + 14, text_anchor="end"))
        for colour, part in zip(_COLOURS, parts, strict=False):
            width = room * values.get(part, 0.0) / most
            about = tag("title", f"{label}, {part}: {values.get(part, 0.0):.4g} {unit}")
            drawn.append(tag("rect", about, x=number(x), y=y, width=number(width), height=_ROW - 6, fill=colour))
            x += width
        drawn.append(_text(f"{sum(values.values()):,.4g} {unit}", x + 6, y + 14))
    return _document(title, drawn, _TOP + len(rows) * _ROW + 10)


def length_histogram(title: str, lengths: Sequence[int], bounds: Mapping[str, int]) -> str:
    """Share of sequences by length in tokens (two bins an octave), and ``bounds`` by strategy as lines across."""
    longest = max(max(lengths), *bounds.values())
    num_bins = max(1, math.ceil(2 * math.log2(longest)))
    counts = [0] * (num_bins + 1)
    for length in lengths:
        counts[math.ceil(2 * math.log2(length)) if length > 1 else 0] += 1
    left, height, bottom = 50, 190, _TOP + 190
    width = (_WIDTH - left - 20) / len(counts)
    drawn = [_text(title, 10, 20, class_="title")]
    for index, count in enumerate(counts):
        tall = height * count / max(counts)
        about = tag("title", f"up to {2 ** (index / 2):,.0f} tokens: {count / len(lengths):.1%} of the sequences")
        place = {"x": number(left + index * width), "y": number(bottom - tall)}
        drawn.append(tag("rect", about, **place, width=number(width - 1), height=number(tall), fill=_COLOURS[0]))
        if index % 4 == 0:
            drawn.append(_text(f"{2 ** (index // 2):,}", left + (index + 1) * width, bottom + 16, text_anchor="end"))
    drawn.append(_text(f"{max(counts) / len(lengths):.0%}", left - 6, _TOP + 10, text_anchor="end"))
    for index, (strategy, bound) in enumerate(bounds.items()):
        x = left + (2 * math.log2(bound) + 1) * width
        drawn.append(tag("line", x1=number(x), x2=number(x), y1=34, y2=bottom, stroke=_COLOURS[1], stroke_width=2))
        drawn.append(_text(f"{strategy} up to {bound:,}", x - 5, 40 + 14 * (index % 2), text_anchor="end"))
    return _document(title, drawn, bottom + 26)


def _text(content: str, x: float, y: float, **attributes: object) -> Markup:
    return tag("text", content, x=number(x), y=number(y), **attributes)


def _document(title: str, drawn: Sequence[Markup], height: int) -> str:
    background = tag("rect", width="100%", height="100%", fill="#fff")
    return str(
        tag("svg", tag("style", _STYLE), background, *drawn, xmlns="http://www.w3.org/2000/svg", role="img",
            viewBox=f"0 0 {_WIDTH} {height}", width=_WIDTH, height=height, aria_label=title)
    )  # fmt: skip
