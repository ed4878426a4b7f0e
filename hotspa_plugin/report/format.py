"""Figures as a person reads them."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float | None) -> str:
    """Such as ``1.4 GiB``; an en dash where there is no figure."""
    if num_bytes is None:
        return "–"
    value, unit = float(num_bytes), 0
    while abs(value) >= 1023.5 and unit < len(_BYTE_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_digits(value) if unit else f'{value:.0f}'} {_BYTE_UNITS[unit]}"


def format_seconds(seconds: float | None) -> str:
    """Such as ``1.93 s``, ``412 ms``, ``85 µs`` or ``3 min 20 s``."""
    if seconds is None:
        return "–"
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 0.9995 or (seconds > 0 and unit == "µs"):
            return f"{_digits(seconds * factor)} {unit}"
    return "0 s"


def format_count(count: float | None) -> str:
    """Such as ``9,876``, ``12.3k`` or ``1.25M``; whole below ten thousand."""
    if count is None:
        return "–"
    if not math.isfinite(count):
        return str(count)
    if abs(count) < 10_000:
        return f"{count:,.0f}" if abs(count) >= 100 or count == int(count) else _digits(count)
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= factor * 0.9995:
            return f"{_digits(count / factor)}{unit}"
    raise AssertionError(count)


def format_share(share: float | None) -> str:
    """A fraction as per cent."""
    if share is None or not math.isfinite(share):
        return "–"
    percent = 100 * share
    return (
        f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %" if percent >= 0.05 else "<0.1 %"
    )


def format_value(value: float | None) -> str:
    """Four significant digits, such as a loss."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.2e}"


def format_difference(difference: float | None) -> str:
    """A relative difference, such as ``2.3e-07``."""
    if difference is None:
        return "–"
    return f"{difference:.1e}" if math.isfinite(difference) and difference else "0" if difference == 0 else "infinite"


def format_tick(value: float) -> str:
    """A round number on an axis: ``25k``, ``0.5``."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or (factor > 1e3 and abs(value) >= factor):
            return f"{value / factor:g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def bytes_unit(largest_bytes: float) -> tuple[float, str]:
    """(bytes, name) of the unit in which values up to ``largest_bytes`` read well."""
    for power in range(len(_BYTE_UNITS) - 1, 0, -1):
        if largest_bytes >= 1024**power:
            return float(1024**power), _BYTE_UNITS[power]
    return 1.0, "B"


def seconds_unit(longest_s: float) -> tuple[float, str]:
    """(seconds, name) of the unit in which times up to ``longest_s`` read well."""
    return (
        (60.0, "min")
        if longest_s >= 300
        else (1.0, "s")
        if longest_s >= 1
        else ((1e-3, "ms") if longest_s >= 1e-3 else (1e-6, "µs"))
    )


def _digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"
