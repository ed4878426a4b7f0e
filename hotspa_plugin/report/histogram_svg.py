"""Sequence lengths on a log scale: sequences upwards, the tokens in them downwards, the pool's bounds across."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from hotspa_plugin.report.format import format_count, format_share
from hotspa_plugin.report.svg import framed, join, linear_ticks, number, percent, tag
from hotspa_plugin.runtime.run_record import LengthHistogram, PoolEntry

_TOP, _UP, _DOWN, _AXIS = 34, 130, 100, 24


def length_chart(lengths: LengthHistogram, pool: Sequence[PoolEntry]) -> Markup:
    """``pool`` by ascending bound. Bars take the colour of the bucket in which their bin ends."""
    total = sum(lengths.counts)
    if not total:
        return tag("p", "No sequence length was recorded.", class_="empty")
    edges = lengths.edges_tokens
    # A bin's tokens are counted at its geometric middle: half a bin's width off at most.
    tokens = [n * math.sqrt(a * b) for n, a, b in zip(lengths.counts, edges[:-1], edges[1:], strict=True)]
    all_tokens = sum(tokens)
    low = math.log2(edges[0])
    high = max(math.log2(edges[-1]), math.log2(max(1, pool[-1].bound_tokens)) if pool else 0.0) + 0.12
    span = max(high - low, 1.0)

    def x(length: float) -> float:
        return (math.log2(length) - low) / span

    up = linear_ticks(0, max(lengths.counts) / total, 3)
    down = linear_ticks(0, max(tokens) / all_tokens, 2)
    middle = _TOP + _UP
    bars: list[Markup] = []
    for i, (count, bin_tokens) in enumerate(zip(lengths.counts, tokens, strict=True)):
        if not count:
            continue
        bucket = next((b for b, entry in enumerate(pool) if edges[i + 1] <= entry.bound_tokens * 1.0001), None)
        css = f"b{bucket}" if bucket is not None else "other"
        title = tag(
            "title",
            f"{edges[i]:,.0f} to {edges[i + 1]:,.0f} tokens: {format_count(count)} sequences "
            f"({format_share(count / total)}), about {format_share(bin_tokens / all_tokens)} of all tokens",
        )
        left, width = x(edges[i]), max(x(edges[i + 1]) - x(edges[i]) - 0.0015, 0.001)
        upward, downward = _UP * count / total / up[-1], _DOWN * bin_tokens / all_tokens / down[-1]
        bars.append(
            tag(
                "rect",
                title,
                x=percent(left),
                width=percent(width),
                y=number(middle - upward),
                height=number(max(upward, 0.7)),
                class_=f"bar {css}",
            )
        )
        bars.append(
            tag(
                "rect",
                title,
                x=percent(left),
                width=percent(width),
                y=number(middle + 1),
                height=number(max(downward, 0.7)),
                class_=f"bar soft {css}",
            )
        )
    labels = [(middle - _UP * t / up[-1], f"{100 * t:g} %") for t in up]
    labels += [(middle + _DOWN * t / down[-1], f"{100 * t:g} %") for t in down[1:]]
    grid = [tag("line", x1="0", x2="100%", y1=number(y), y2=number(y), class_="grid") for y, _ in labels]
    bottom = middle + _DOWN
    bounds: list[Markup] = []
    last_end = -1.0
    row = 0
    for i, entry in enumerate(pool):
        at = x(entry.bound_tokens)
        name = f"{entry.strategy} ≤ {entry.bound_tokens:,}"
        # Names end at their line; one that would run into its left neighbour goes a row up or down.
        row = (row + 1) % 2 if at - 0.011 * len(name) < last_end else 0
        last_end = at
        bounds.append(tag("line", x1=percent(at), x2=percent(at), y1=14 + 14 * row, y2=bottom, class_=f"bound s-b{i}"))
        bounds.append(
            tag(
                "text",
                name,
                x=percent(at),
                dx=-5,
                y=11 + 14 * row,
                text_anchor="end" if at > 0.12 else "start",
                class_="bound-name",
            )
        )
    ticks = [2.0**e for e in range(math.ceil(low), math.floor(high) + 1)]
    ticks = ticks[:: max(1, math.ceil(len(ticks) / 9))]
    axis = [
        tag(
            "text",
            f"{t:,.0f}" if t < 10_000 else f"{t / 1024:,.0f}k",
            x=percent(x(t)),
            y=bottom + 18,
            text_anchor="start" if x(t) < 0.03 else "end" if x(t) > 0.97 else "middle",
            class_="tick",
        )
        for t in ticks
    ]
    plot = tag(
        "svg",
        join(grid),
        join(bars),
        tag("line", x1="0", x2="100%", y1=middle, y2=middle, class_="zero"),
        join(bounds),
        join(axis),
        width="100%",
        height=bottom + _AXIS,
        class_="plot",
        role="img",
        aria_label="Histogram of sequence lengths",
    )
    return framed(labels, tag("div", plot, class_="scroll"), bottom + _AXIS, css="chart lengths")
