"""Pictures of benchmarks: well-formed, to scale, and safe against odd labels."""

import xml.etree.ElementTree as ElementTree

import pytest

from hotspa_plugin.report.benchmark_svg import bar_chart, length_histogram

SVG = "{http://www.w3.org/2000/svg}"


def test_bars_are_to_scale_and_labels_are_escaped():
    rows = [("a <b> & c", {"compute": 2.0, "switch": 1.0}), ("static", {"compute": 6.0})]
    root = ElementTree.fromstring(bar_chart("seconds", rows, unit="s"))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    widths = [float(bar.get("width")) for bar in bars]
    assert widths[0] == pytest.approx(2 * widths[1], rel=1e-3) and widths[2] == pytest.approx(3 * widths[0], rel=1e-3)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a <b> & c" in texts and "3 s" in texts and "6 s" in texts


def test_a_histogram_has_all_sequences_and_the_bounds_in_place():
    root = ElementTree.fromstring(length_histogram("lengths", [1, 2, 3, 64, 4096], {"tp1": 64, "tp4": 4096}))
    shares = [r.find(f"{SVG}title").text for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert sum(float(s.rpartition(": ")[2].partition("%")[0]) for s in shares) == pytest.approx(100)
    first, last = (float(line.get("x1")) for line in root.iter(f"{SVG}line"))
    bars = [r for r in root.iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
    assert first < last <= float(bars[-1].get("x")) + float(bars[-1].get("width")) + 2
