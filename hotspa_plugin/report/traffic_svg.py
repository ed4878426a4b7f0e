"""Drawing who sends how much to whom: one square of ranks by ranks per plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from markupsafe import Markup

from hotspa_plugin.report.format import format_bytes
from hotspa_plugin.report.svg import join, number, tag

_SIDE = 340  # pixels of a square
_WITHIN, _ACROSS = "#2f6fb3", "#d6336c"  # within a node, across nodes


def traffic_svg(title: str, squares: Sequence[tuple[str, np.ndarray]], node_of_rank: np.ndarray) -> str:
    """A picture that stands alone. Each square is (name, bytes of shape ``[sending rank, receiving rank]``).

    Darker is more, on one scale for all squares; lines part the nodes.
    """
    most = max(float(sent.max()) for _, sent in squares) or 1.0
    width, height = 50 + len(squares) * (_SIDE + 50), _SIDE + 150
    parts = [
        tag("text", title, x=50, y=26, font_size=15, font_weight=600),
        tag("text", f"rows send, columns receive; darkest: {format_bytes(most)}", x=50, y=46, fill="#66717f"),
        tag("rect", x=50, y=56, width=10, height=10, fill=_WITHIN),
        tag("text", "within a node", x=65, y=65),
        tag("rect", x=160, y=56, width=10, height=10, fill=_ACROSS),
        tag("text", "across nodes", x=175, y=65),
    ]
    for index, (name, sent) in enumerate(squares):
        at = f"translate({50 + index * (_SIDE + 50)} 100)"
        parts.append(tag("g", _square(name, sent, node_of_rank, most), transform=at))
    style = "text{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#3d4652}"
    return str(
        tag(
            "svg", tag("title", title), tag("style", Markup(style)),
            tag("rect", width=width, height=height, fill="#fff"), *parts,
            xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=f"0 0 {width} {height}", role="img",
        )
    ) + "\n"  # fmt: skip


def _square(name: str, sent: np.ndarray, node_of_rank: np.ndarray, most: float) -> Markup:
    num_ranks = len(sent)
    cell = _SIDE / num_ranks
    crossing = node_of_rank[:, None] != node_of_rank[None, :]
    totals = f"{format_bytes(sent.sum())} moved, {format_bytes(sent[crossing].sum())} across nodes"
    parts = [
        tag("text", f"{name}: {totals}", x=0, y=-10),
        tag("rect", width=_SIDE, height=_SIDE, fill="#eef0f4"),
    ]
    for source, destination in zip(*np.nonzero(sent), strict=True):
        amount = float(sent[source, destination])
        parts.append(
            tag(
                "rect",
                tag("title", f"rank {source} to rank {destination}: {format_bytes(amount)}"),
                x=number(destination * cell), y=number(source * cell), width=number(cell), height=number(cell),
                fill=_ACROSS if crossing[source, destination] else _WITHIN,
                fill_opacity=number(0.15 + 0.85 * amount / most),
            )
        )  # fmt: skip
    for edge in np.flatnonzero(np.diff(node_of_rank)) + 1:
        place = number(edge * cell)
        parts.append(tag("line", x1=place, x2=place, y1=0, y2=_SIDE, stroke="#3d4652", stroke_width=0.7))
        parts.append(tag("line", y1=place, y2=place, x1=0, x2=_SIDE, stroke="#3d4652", stroke_width=0.7))
    for rank in {0, num_ranks - 1}:
        middle = number((rank + 0.5) * cell)
        parts.append(tag("text", str(rank), x=middle, y=_SIDE + 15, text_anchor="middle"))
        parts.append(tag("text", str(rank), x=-6, y=number((rank + 0.5) * cell + 4), text_anchor="end"))
    return join(parts)
