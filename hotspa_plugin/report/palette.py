"""Colours that mean the same thing in every chart: one per phase, a ramp of blues over the pool."""

from __future__ import annotations

from collections.abc import Sequence

# name -> (light theme, dark theme); told apart by hue and by lightness, for eyes that see fewer hues.
PHASE_COLORS = {
    "plan": ("#8a94a3", "#7f8a9b"),
    "data": ("#2f9e78", "#3fbf92"),
    "switch": ("#f08c1d", "#ffa53d"),
    "compute": ("#4c8fe0", "#62a5f5"),
    "flush": ("#d6336c", "#f0608f"),
    "optimizer": ("#7a4fc9", "#a481ee"),
    "other": ("#c9ced6", "#4a5361"),
}
_RAMP_ENDS = (("#8ad8ee", "#24409c"), ("#aee9f7", "#3c62dc"))  # (first, last) per theme


def strategy_colors(strategies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(light, dark) colour of each strategy, in the pool's order."""
    last = max(1, len(strategies) - 1)
    return {
        strategy: tuple(_between(first, second, i / last) for first, second in _RAMP_ENDS)  # type: ignore[misc]
        for i, strategy in enumerate(strategies)
    }


def text_on(color: str) -> str:
    """Black or white, whichever reads better on ``color`` (WCAG relative luminance)."""
    channels = [c / 255 for c in _rgb(color)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#10151c" if luminance > 0.2 else "#ffffff"


def _rgb(color: str) -> tuple[int, ...]:
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def _between(first: str, last: str, at: float) -> str:
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(_rgb(first), _rgb(last), strict=True))
